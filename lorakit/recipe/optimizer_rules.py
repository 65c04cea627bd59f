"""Which optimizer and which schedule reads which keys of `train`, and which optimizer goes with which backend.

Invariant: a key that the chosen optimizer or schedule does not read is an error, unless it has its default value.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from lorakit.backends import BACKENDS, backends_with

if TYPE_CHECKING:
    from lorakit.recipe.schema import TrainSection

OPTIMIZER_KEYS: Final = ("beta1", "beta2", "epsilon")
KEYS_READ_BY: Final[Mapping[str, tuple[str, ...]]] = {
    "lion": ("beta1", "beta2"), "sgd": ("beta1",), "muon": ("beta1",), "adafactor": (),
}  # fmt: skip
"""optimizer -> those of OPTIMIZER_KEYS that it reads; one that is not here reads all"""
DEFAULTS: Final[Mapping[str, Mapping[str, float]]] = {"lion": {"beta2": 0.99}, "muon": {"beta1": 0.95}}
"""optimizer -> its own defaults, from the papers; of all others they are those of the schema"""
FULL_TENSORS: Final = ("adafactor", "muon", "adamw8bit", "paged_adamw", "paged_adamw8bit")
"""optimizers that do not update a part of a tensor as they would in the full one: their state or their updates are of
full rows, matrices or blocks; pages of state have not been tried with parts"""
SCHEDULE_KEYS: Final = {
    "schedule_power": ("polynomial",), "schedule_cycles": ("cosine",), "decay_ratio": ("wsd",),
    "min_learning_rate": ("cosine", "linear", "polynomial", "wsd"),
}  # fmt: skip
"""key -> schedules that read it"""


def update_problems(train: "TrainSection") -> Iterator[str]:
    """Yield what contradicts each other among the keys that decide an update."""
    defaults = {key: field.default for key, field in type(train).model_fields.items()}
    unread = [key for key in OPTIMIZER_KEYS if key not in KEYS_READ_BY.get(train.optimizer, OPTIMIZER_KEYS)]
    for key in unread:
        if getattr(train, key) != defaults[key]:
            yield f"{key}: {train.optimizer} does not read it; leave it out"
    for key, schedules in SCHEDULE_KEYS.items():
        if getattr(train, key) != defaults[key] and train.schedule not in schedules:
            yield f"{key}: goes with schedule {' or '.join(schedules)}, got {train.schedule}"
    if train.min_learning_rate >= train.learning_rate:
        yield f"min_learning_rate: {train.min_learning_rate:g} is not below learning_rate {train.learning_rate:g}"
    if train.warmup_ratio is not None and train.warmup_steps is not None:
        yield "give `warmup_steps` or `warmup_ratio`, not both"


def backend_problem(optimizer: str, backend: str) -> str | None:
    """Return why an optimizer does not go with a backend; None if it does."""
    optimizers = BACKENDS[backend].optimizers if backend in BACKENDS else None
    if optimizers is None or optimizer in optimizers:
        return None
    names = backends_with(lambda other: other.optimizers is None or optimizer in other.optimizers)
    return f"train.optimizer: {optimizer} goes with backend {names}, got {backend}; adamw goes with every backend"


def endless_warmup(warmup_steps: int, steps: int) -> str:
    """Return the error message for a warm-up as long as the full run."""
    return f"warmup_steps: {warmup_steps} of {steps} steps, so the learning rate would never be reached; lower it"
