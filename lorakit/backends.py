"""The facts of each backend. Recipe, engines, plan and `lorakit doctor` derive from them which settings go together.

Adding a backend takes its record here and the file with its engine in `lorakit/parallel`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

BackendName = Literal["auto", "single", "ddp", "zero1", "zero2", "zero3", "fsdp2"]
Memory = Literal["cpu", "nvme", "stream"]


@dataclass(frozen=True)
class Backend:
    """How a backend spreads training over processes.

    engine: `<file in lorakit/parallel>.<class>`. axes: those of the mesh, besides `data`, that it goes with.
    optimizers: names that it goes with; None means all. optimizer_memory, base_memory: where it can store optimizer
    state and the base besides the computing device. package: optional package that it needs.
    """

    engine: str
    is_distributed: bool = True
    """False: one process, whatever the recipe requests"""
    shards_base: bool = False
    shards_gradients: bool = False
    shards_optimizer: bool = False
    sums_every_micro_batch: bool = False
    """DeepSpeed stores no full gradient, so it sums those of each micro-batch; others sum those of a step"""
    axes: tuple[str, ...] = ()
    optimizers: tuple[str, ...] | None = None
    optimizer_memory: tuple[Memory, ...] = ()
    base_memory: tuple[Memory, ...] = ()
    offloads_together: bool = False
    """True: base and optimizer are offloaded both or not at all"""
    generates: bool = False
    """True if every process can generate with the model as it is between steps"""
    compiles: bool = False
    """True if torch.compile can compile the layers"""
    zero_stage: int | None = None
    """DeepSpeed's stage; None: DeepSpeed does not run"""

    @property
    def package(self) -> str | None:
        """Optional package that the backend imports."""
        return None if self.zero_stage is None else "deepspeed"


BACKENDS: Final[Mapping[str, Backend]] = {
    "single": Backend(
        "single.SingleEngine", is_distributed=False, base_memory=("stream",), generates=True, compiles=True,
    ),
    "ddp": Backend("ddp.DdpEngine", axes=("sequence", "pipeline", "tensor"), generates=True),
    "zero1": Backend(
        "zero.ZeroEngine", shards_optimizer=True, axes=("sequence",), optimizers=("adamw",), optimizer_memory=("cpu",),
        zero_stage=1,
    ),
    "zero2": Backend(
        "zero.ZeroEngine", shards_gradients=True, shards_optimizer=True, sums_every_micro_batch=True,
        axes=("sequence",), optimizers=("adamw",), optimizer_memory=("cpu",), zero_stage=2,
    ),
    "zero3": Backend(
        "zero.ZeroEngine", shards_base=True, shards_gradients=True, shards_optimizer=True, sums_every_micro_batch=True,
        axes=("sequence",), optimizers=("adamw",), optimizer_memory=("cpu", "nvme"), base_memory=("cpu", "nvme"),
        zero_stage=3,
    ),
    "fsdp2": Backend(
        "fsdp2.Fsdp2Engine", shards_base=True, shards_gradients=True, shards_optimizer=True,
        axes=("sequence", "pipeline", "tensor"), optimizers=("adamw", "sgd"), optimizer_memory=("cpu",),
        base_memory=("cpu",), offloads_together=True,
    ),
}  # fmt: skip
"""name in a recipe -> its facts"""


def backends_with(has: Callable[[Backend], bool]) -> str:
    """Return the names of the backends for which `has` is True, as text: `single, ddp or fsdp2`."""
    return in_words(name for name, backend in BACKENDS.items() if has(backend))


def in_words(names: Iterable[str]) -> str:
    """Return names as text: `single, ddp or fsdp2`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
