"""Compare an untrained adapter with its base: every adapted layer must compute what the base's own layer does.

A base may have layers of its own classes, so each run and each `inject` compares them once, on four tokens.
"""

import math
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lorakit.errors import TargetError
from lorakit.lora.linear import AdapterModule
from lorakit.lora.modules_to_save import TokenHead

NUM_TOKENS: Final = 4
ROUNDINGS: Final = 8
"""largest difference, in roundings of the layer's dtype: a kernel may add the bias, or a product, in another order"""
TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 1e-2}  # relative; other dtypes 3e-2


@torch.no_grad()
def check_untrained(model: nn.Module) -> bool:
    """Compare each adapted layer with the base's own on a few tokens. Raises TargetError for the first that differs.

    Returns False for a model that was not compared: one on the meta device, or not called with token ids alone.
    """
    config = getattr(model, "config", None)
    is_causal = getattr(model, "main_input_name", None) == "input_ids"
    is_causal = is_causal and not getattr(config, "is_encoder_decoder", False)
    takes_tokens = is_causal and getattr(config, "vocab_size", 0) >= NUM_TOKENS
    if not takes_tokens or any(parameter.is_meta for parameter in model.parameters()):
        return False
    names = {module: name for name, module in model.named_modules() if isinstance(module, AdapterModule)}

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        assert isinstance(module, AdapterModule)
        own = module.original()(*args, **kwargs)
        for actual, expected in zip(tree_leaves(output), tree_leaves(own), strict=True):
            if not isinstance(expected, Tensor):
                continue
            if isinstance(module, TokenHead):  # rows of new tokens start at a mean of their own
                known = torch.ones(expected.shape[-1], dtype=torch.bool, device=expected.device)
                known[module.get_buffer("base_tokens")] = False
                expected = expected[..., known]
                actual = actual[..., : len(known)][..., known]
            if not expected.isfinite().all():
                raise TargetError(explain_not_numbers(model.named_parameters(), expected.dtype))
            if not _alike(actual, expected):
                error = (actual.float() - expected.float()).abs().max()
                layer = f"{names[module]} is a {type(module.original()).__name__}, whose forward is its own"
                problem = f"an untrained adapter changes its output by {float(error):.2g}"
                raise TargetError(f"{layer}: {problem}; leave it out with adapter.exclude")

    device = next(model.parameters()).device
    with ExitStack() as undo:
        for each in model.modules():
            undo.callback(setattr, each, "training", each.training)
        for adapted in names:
            undo.enter_context(adapted.register_forward_hook(compare, with_kwargs=True))
        model.eval()
        model(input_ids=torch.arange(NUM_TOKENS, device=device)[None])
    return True


def explain_not_numbers(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> str:
    """Return why a base computes nan or inf in a dtype: weights that hold some, or float16's range. Reads them all."""
    wrong = [
        f"{name} ({number:,} of {weight.numel():,})"
        for name, weight in weights
        if weight.is_floating_point() and not weight.is_meta and (number := int((~weight.float().isfinite()).sum()))
    ]
    text = f"the base computes nan or inf in {str(dtype).removeprefix('torch.')}: "
    text += f"these of its weights hold some: {', '.join(wrong[:4])}" if wrong else "its weights are numbers"
    if dtype is torch.float16:
        return f"{text}. float16 ends at 65,504, which this base passes: set base.dtype to bfloat16 or float32"
    return f"{text}. " + ("Take another copy of it" if wrong else "Take another dtype (base.dtype), or another base")


def _alike(actual: Tensor, expected: Tensor) -> bool:
    """True if two outputs are equal, or differ by the rounding of the layer's dtype."""
    if torch.equal(actual, expected):
        return True
    if actual.shape != expected.shape or not expected.is_floating_point():
        return False
    # float32 products of a GPU may be computed in tf32, with the 10 bits of float16
    on_gpu = expected.device.type != "cpu"
    epsilon = torch.finfo(torch.float16 if on_gpu and expected.dtype is torch.float32 else expected.dtype).eps
    return bool((actual - expected).abs().max() <= ROUNDINGS * epsilon * expected.abs().max())


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest value; inf for NaN, which Python's `max` loses."""
    difference = (actual - expected).abs().max() / expected.abs().max().clamp_min(1e-6)
    return float(difference.nan_to_num(math.inf))


def tolerance(like: Tensor) -> float:
    """Return the largest relative difference between outputs of a model in a dtype that are summed in two orders."""
    return TOLERANCE.get(like.dtype, 3e-2)
