"""Compare each merged layer with base + adapters on the same input: only rounding may differ, or the merge fails."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from lorakit.base.lazy import LazyTensors
from lorakit.base.loading import load_full
from lorakit.base.meta import check_stored_tensors, load_on_meta
from lorakit.base.quantized import QuantConfig, quantized_weight
from lorakit.base.transformers_io import load_base, vocabulary_size
from lorakit.errors import MergeError
from lorakit.files.base_files import BaseFiles, open_base_files
from lorakit.files.text import Say
from lorakit.inference.bind import build_adapter
from lorakit.merging.tensors import TrainedQuantization
from lorakit.ops.stored_names import tensor_name
from lorakit.patch import BaseShapes
from lorakit.patch.find import WeightedPatch
from lorakit.quant.files import quantization_config
from lorakit.quant.schemes import CPU
from lorakit.slots.hooks import SlotHook
from lorakit.slots.routing import Route

NUM_TOKENS: Final = 64
NOT_LINEAR: Final = "it is no linear layer"
MIXED: Final = "its magnitude, token rows or full tensor have a weight, or another patch changes it too"
FLOAT32_SLACK: Final = 1e-5  # share of |x| |W| by which float32 products may differ when summed in another order


def verify_merge(
    base: Path,
    weighted: Sequence[WeightedPatch],
    merged: Path,
    lines: Iterable[dict[str, Any]],
    say: Say,
    quantization: TrainedQuantization | None = None,
) -> dict[str, Any]:
    """Run base + adapters in float32, and compare each layer's output with its merged tensor's; returns the result.

    ``quantization``: of a base that was merged onto its dequantised weights.
    Raises MergeError unless every compared layer gives the same output within |x| |R|, where R is the merged tensor's
    rounding error, whose norm is in the ledger's ``lines``. BaseModelError: the merged folder lacks tensors.
    """
    check_stored_tensors(merged)
    if quantization is None:
        model = load_base(base, torch.float32, CPU)
    else:
        is_stored = quantization_config(base) is not None
        layers = dict.fromkeys(quantization.layers, quantization.scheme)
        config = None if is_stored else QuantConfig(quantization.scheme, layers=layers)
        # quantised layers round their weights to the dtype of training still, as the merge does
        model = load_full(base, quantization.dtype, CPU, config).float()
        stored = LazyTensors(base, load_on_meta(base, torch.float32))
        for name, parameter in model.named_parameters():
            if name.endswith(".bias") or quantized_weight(model.get_submodule(name.rpartition(".")[0])) is None:
                stored.fill(name, 0, parameter)  # because the merge does not round unquantised ones
    shapes = BaseShapes.of(model)
    changed = _add_patches(model, weighted, shapes)
    reasons = dict.fromkeys(changed, NOT_LINEAR) | incomparable_layers(weighted, shapes)
    rounding = {line["tensor"]: line["norm_of_rounding"] for line in lines}
    shares: dict[str, float] = {}
    compare = partial(_compare, open_base_files(merged), shapes, rounding, shares)
    for name in [name for name in changed if reasons[name] is None]:
        model.get_submodule(name).register_forward_hook(partial(compare, name), with_kwargs=True)
    with torch.no_grad():
        model(torch.arange(NUM_TOKENS)[None] * vocabulary_size(model) // NUM_TOKENS)
    if not shares:
        raise MergeError("verify: no layer that could be compared was reached by a token; leave --verify out")
    left_out = {name: reasons[name] or "no token reached it" for name in sorted(changed - shares.keys())}
    first = next(iter(left_out.items()), None)
    largest = max(shares.values())
    number = f"{len(shares)} of {len(changed)}" if left_out else f"all {len(changed)}"
    rounding_share = f"the rounding of their weights (at most {largest:.0%} of what rounding can explain)"
    more = f"; {len(left_out)} could not be compared, {first[0]} first ({first[1]})" if first else ""
    say(f"verified: {number} merged layers compute the same as base + adapters, up to {rounding_share}{more}")
    return {"layers": len(shares), "largest_share_of_bound": largest, "not_compared": left_out}


def incomparable_layers(weighted: Sequence[WeightedPatch], shapes: BaseShapes) -> dict[str, str | None]:
    """Return changed module -> why base + adapters do not compute its output as the merged model does; None: they do.

    A layer with a magnitude, token rows or a full tensor can be compared if a single patch changes it, with weight 1,
    because such changes do not add up.
    """
    special: list[tuple[WeightedPatch, str]] = []
    num_patches = Counter[str]()
    for one in weighted:
        own = {name.rpartition(".")[0] for name in one.patch.full_shapes} | one.patch.token_rows.keys()
        if shapes.tied is not None and shapes.tied[1] in one.patch.token_rows:
            own.add(shapes.tied[0])
        own |= {name for name, layer in one.patch.layers.items() if not layer.plain}
        special += [(one, name) for name in own]
        num_patches.update(own | one.patch.layers.keys())
    mixed = {name for one, name in special if one.weight != 1.0 or num_patches[name] > 1}
    return {name: NOT_LINEAR if name not in shapes.layers else MIXED if name in mixed else None for name in num_patches}


def _compare(
    merged: BaseFiles, shapes: BaseShapes, rounding: Mapping[str, float], shares: dict[str, float], name: str,
    layer: nn.Module, inputs: Sequence[Tensor], named: Mapping[str, Tensor], y: Tensor,
) -> None:  # fmt: skip
    """Compare a layer's output with the merged tensor's, as a hook. shares: layer -> largest difference / bound."""
    x = inputs[0] if inputs else next(iter(named.values()))
    kind = shapes.layers[name][0]
    stored = f"{name}.weight"
    if stored not in merged.shard_of:
        head, embedding = shapes.tied or (None, None)
        stored = tensor_name(merged, embedding if embedding and name == head else name)
    W = merged.shard_of[stored].read(stored).float()
    error_norm = rounding.get(stored, 0.0)
    if kind.takes_ids:
        norms = torch.ones(x.numel()) * float(getattr(layer, "embed_scale", 1.0))
        expected = kind.shrink(layer, x, W.T)
    else:
        norms = x.reshape(-1, x.shape[-1]).norm(dim=1)
        bias = None
        if getattr(layer, "bias", None) is not None:
            stored_bias = tensor_name(merged, name, "bias")
            bias = merged.shard_of[stored_bias].read(stored_bias).float()
            error_norm = error_norm + rounding.get(stored_bias, 0.0)
        expected = kind.product(x, W, bias)
    difference = (expected - y).reshape(-1, y.shape[-1]).norm(dim=1)
    bound = norms * error_norm + FLOAT32_SLACK * (norms * W.norm() + 1)
    share = float((difference / bound).max())
    if not share <= 1.0:  # so written that a NaN fails too
        raise MergeError(f"{name}: merged and adapted outputs differ by {share:.3g} times what rounding explains")
    shares[name] = max(share, shares.get(name, 0.0))


def _add_patches(model: nn.Module, weighted: Sequence[WeightedPatch], shapes: BaseShapes) -> set[str]:
    """Apply the patches to the model, each by hooks of its own; return the modules that they change."""
    changed: set[str] = set()
    for one in sorted(weighted, key=lambda one: len(one.patch.new_tokens)):  # last the one that adds logits
        layers = {name: replace(layer, alpha=one.weight * layer.alpha) for name, layer in one.patch.layers.items()}
        adapter = build_adapter(replace(one.patch, layers=layers), model, shapes, {}, facts=None, expected_adapters=1)
        route: ContextVar[Route | None] = ContextVar("route")
        route.set(Route((adapter,)))
        for name in adapter.slots:
            kind = shapes.layers[name][0] if name in shapes.layers else None
            model.get_submodule(name).register_forward_hook(SlotHook(name, kind, route), with_kwargs=True)
        changed |= adapter.slots.keys()
    return changed
