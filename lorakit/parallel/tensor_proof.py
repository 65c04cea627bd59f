"""Compare layers of a cut model with the full layers, before a run takes its first step.

Invariant: at most one full layer is in memory, and it is freed before the run starts.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from lorakit.base.layers import repeated_layers
from lorakit.base.lazy import LazyBase
from lorakit.base.tensor_plan import REMEDY
from lorakit.errors import RunError
from lorakit.launch.watchdog import is_collective_error
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.group import Group

NUM_TOKENS: Final = 16
TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 1e-2}
"""relative; other dtypes 3e-2"""
Call = tuple[tuple[Any, ...], dict[str, Any], Tensor]
"""arguments and output of a layer"""


def copy_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return a copy of one layer of each kind, by name, before the model is cut. Weights on meta stay there."""
    layers = {id(layer) for layer in repeated_layers(model)}
    by_kind: dict[Any, str] = {}
    for name, module in model.named_modules():
        if id(module) in layers:
            kind = type(module), getattr(module, "attention_type", None), tuple(map(str, module.state_dict()))
            by_kind.setdefault(kind, name)
    # a config is not copied, because a run sets the attention function there, also of the copies
    memo = {id(config): config for config in (getattr(m, "config", None) for m in model.modules()) if config}
    return {name: copy.deepcopy(model.get_submodule(name), dict(memo)) for name in by_kind.values()}


def check_layers(
    loss_model: LossModel, full: dict[str, nn.Module], weights: LazyBase, device: torch.device, world: Group
) -> None:
    """Return if the cut layers compute what the full ones do, on some tokens. Collective. Empties ``full``.

    full: of `copy_layers`. weights: of the full model.

    Raises:
        RunError: they do not, so parts of this model meet elsewhere than its plan says.
    """
    model = loss_model.model
    count = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    ids = torch.arange(NUM_TOKENS, device=device)[None] * (count // NUM_TOKENS)
    was_training = loss_model.training
    loss_model.eval()
    try:
        with torch.no_grad(), _recorded(model, full) as calls:
            loss_model(input_ids=ids)
            worst = max(_difference(name, full.pop(name), calls.pop(name), weights, device) for name in list(full))
    except RuntimeError as problem:  # a view of heads that are not all here, for one
        if is_collective_error(problem):
            raise
        text = str(problem).splitlines()[0]
        raise RunError(f"parallel.tensor: {type(model).__name__} does not run on parts ({text}); {REMEDY}") from None
    finally:
        loss_model.train(was_training)
    if world.any(not worst <= 1):  # `not <=`, so that NaN is refused
        raise RunError(
            f"parallel.tensor: {type(model).__name__} gives other outputs where ranks share its weights, off by"
            f" {worst:.1f} times what rounding allows; {REMEDY}"
        )


@contextmanager
def _recorded(model: nn.Module, names: Any) -> Iterator[dict[str, Call]]:
    """Record the calls of some layers inside the block."""
    calls: dict[str, Call] = {}

    def recorder(name: str) -> Any:
        def record(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls[name] = args, kwargs, output[0] if isinstance(output, tuple) else output

        return record

    handles = [model.get_submodule(name).register_forward_hook(recorder(name), with_kwargs=True) for name in names]
    yield calls
    for handle in handles:
        handle.remove()


def _difference(name: str, layer: nn.Module, call: Call, weights: LazyBase, device: torch.device) -> float:
    """Return how far a call's output is from the full layer's, in units of the tolerance."""
    args, kwargs, output = call
    tensors = {}
    for key, parameter in layer.named_parameters():
        value = parameter.detach()
        if value.is_meta:
            value = torch.empty(parameter.shape, dtype=parameter.dtype)
            weights.fill(f"{name}.{key}", 0, value)
        tensors[key] = nn.Parameter(value.to(device), requires_grad=False)  # of which a layer reads its tensors
    buffers = {key: buffer.to(device) for key, buffer in layer.named_buffers()}
    expected = torch.func.functional_call(layer.eval(), tensors | buffers, args, kwargs)
    expected = expected[0] if isinstance(expected, tuple) else expected
    difference = (output - expected).abs().max() / expected.abs().max().clamp_min(1e-6)
    return float(difference) / TOLERANCE.get(expected.dtype, 3e-2)
