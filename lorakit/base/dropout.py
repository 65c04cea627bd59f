"""Switch off the dropout of a base, so that `adapter.dropout` is the only dropout of a run.

A base's own dropout (GPT-2's is 0.1) belongs to its pretraining, and its masks would depend on how rows are packed and
cut into micro-batches. So would noise on the choice of experts.
"""

from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any, Final

from torch import nn

DROP: Final = "drop"  # part of the names of such settings in transformers' configs and modules
JITTER: Final = "jitter"  # and of the noise of routers
OTHER_HEADS: Final = ("classifier", "summary")
"""beginnings of the names of settings that a causal language model does not read"""


def disable_dropout(model: nn.Module) -> dict[str, float]:
    """Set all dropout of a model and its config to 0, before an adapter. Returns name -> highest rate."""
    rates: dict[str, float] = {}
    # the config too, because some layers read it in forward
    for owner in [*_configs(model.config), *map(vars, model.modules())]:
        for name, value in owner.items():
            is_rate = isinstance(value, float) and 0 < value <= 1 and (DROP in name or JITTER in name)
            if is_rate and not name.startswith(OTHER_HEADS):
                rates[name] = max(value, rates.get(name, 0.0))
                owner[name] = 0.0 if DROP in name else value
    hard_coded: dict[str, float] = {}
    for module in model.modules():
        if any(JITTER in name for name in vars(module)):  # not 0, because PhiMoE reads its jitter in evaluation too
            module.training = False
            module.__dict__["train"] = MethodType(_train_the_layers_in, module)
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            hard_coded["Dropout"] = max(module.p, hard_coded.get("Dropout", 0.0))
            module.p = 0.0
    return rates or hard_coded


def _train_the_layers_in(module: nn.Module, mode: bool = True) -> nn.Module:
    """Set the mode of the layers in a module, which stays in evaluation mode itself: its method ``train``."""
    nn.Module.train(module, mode)
    module.training = False
    return module


def dropout_notes(rates: Mapping[str, float]) -> tuple[str, ...]:
    """Return what to tell the user about the result of ``disable_dropout``: at most one sentence."""
    if not rates:
        return ()
    listed = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    return (f"the base's own dropout is off while it trains ({listed}); adapter.dropout is the only one",)


def _configs(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the attributes of a config, and those of the configs and dicts in it."""
    attributes = config if isinstance(config, dict) else vars(config)
    yield attributes
    for value in attributes.values():
        if isinstance(value, dict) or hasattr(value, "to_dict"):
            yield from _configs(value)
