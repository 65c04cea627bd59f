"""Compare a merged model with base + adapters, layer by layer: only rounding may differ, or the merge fails."""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from lorakit.base.loading import load_full
from lorakit.base.quantized import QuantConfig
from lorakit.base.transformers_io import has_tokenizer, load_base, load_tokenizer, vocabulary_size
from lorakit.derive.combine import summands
from lorakit.errors import MergeError
from lorakit.files.base_files import BaseFiles, open_base_files
from lorakit.inference.bind import build_adapter
from lorakit.lora.low_rank import concatenated
from lorakit.merging.readers import TrainedQuantization
from lorakit.patch import BaseShapes, Patch
from lorakit.patch.find import WeightedPatch
from lorakit.patch.patch import low_rank_layer
from lorakit.quant.files import is_quantized
from lorakit.quant.schemes import CPU
from lorakit.slots.hooks import SlotHook
from lorakit.slots.routing import Route

PROMPTS: Final = (
    "The quick brown fox jumps over the lazy dog.",
    "Mira from Oslo ordered 3 lamps on Monday.",
    "def add(a, b):\n    return a + b\n",
)
FLOAT32_SLACK: Final = 1e-5
"""share of |x| |W| by which float32 products may differ when summed in another order"""


def verify_merge(
    base: Path,
    weighted: Sequence[WeightedPatch],
    merged: Path,
    lines: Iterable[dict[str, Any]],
    say: Callable[[str], None],
    quantization: TrainedQuantization | None = None,
) -> dict[str, Any]:
    """Run prompts through base + adapters and through the merged model, both in float32; returns the comparison.

    ``quantization``: of a base that was merged onto its dequantised weights; only its quantised layers are compared.

    Raises MergeError unless every adapted layer gives the same output within |x| |R|, where R is the merged tensor's
    rounding error, whose norm is in the ledger's ``lines``. Logits of the full model are compared, not bounded.
    """
    rounding = {line["tensor"]: line["norm_of_rounding"] for line in lines}
    if quantization is None:
        model = load_base(base, torch.float32, CPU)
    else:
        config = None if is_quantized(base) else QuantConfig(quantization.scheme, only=quantization.layers)
        # quantised layers round their weights to the dtype of training still, as the merge does
        model = load_full(base, quantization.dtype, CPU, config).float()
    rows = [list(range(64))]
    if has_tokenizer(base):
        tokenizer = load_tokenizer(base)
        rows = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    ids = [torch.tensor([row]) % vocabulary_size(model) for row in rows]
    comparison = _Comparison(open_base_files(merged), rounding, None if quantization is None else quantization.layers)
    add_patches(model, weighted, comparison)
    with torch.no_grad():
        expected = [model(tokens).logits for tokens in ids]
        del model  # before the merged model is loaded, so that only one is in memory
        model = load_base(merged, torch.float32, CPU)
        actual = [model(tokens).logits for tokens in ids]
    pairs = list(zip(expected, actual, strict=True))
    result = {
        "layers": len(comparison.shares), "largest_share_of_bound": max(comparison.shares.values(), default=0.0),
        "largest_logit_difference": max(float((a - b).abs().max()) for a, b in pairs),
        "logit_spread": float(torch.cat([a.flatten() for a, _ in pairs]).std()),
        "tokens": sum(tokens.numel() for tokens in ids),
        "same_next_token": sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in pairs),
    }  # fmt: skip
    say(
        "verified: all {layers} merged layers compute the same as base + adapters, up to the rounding of their weights"
        " (at most {largest_share_of_bound:.0%} of what rounding can explain); logits differ by at most"
        " {largest_logit_difference:.3g} (their spread is {logit_spread:.3g}), next token the same at {same_next_token}"
        " of {tokens} places".format(**result)
    )
    return result


def check_comparable(weighted: Sequence[WeightedPatch]) -> None:
    """Raise MergeError, before the merge, if ``verify_merge`` could not compare these patches after it."""
    for one in weighted:
        others = {name for other in weighted if other is not one for name in _changed_modules(other.patch)}
        for name, alone in _changed_modules(one.patch).items():
            if alone and (one.weight != 1.0 or name in others):
                raise MergeError(
                    f"verify: {one.folder} changes {name} by more than a low-rank update (a magnitude, token rows,"
                    " experts or a full tensor), which can be compared when one patch with weight 1 changes it; leave"
                    " --verify out"
                )


def _changed_modules(patch: Patch) -> dict[str, bool]:
    """Return the modules that a patch changes, and whether each must be changed by one patch alone to be compared."""
    modules = dict.fromkeys((name.rpartition(".")[0] for name in patch.full_shapes), True)
    for name, layer in patch.layers.items():
        # False also beside a full tensor, because PEFT saves copies of the base's embedding beside its update
        modules[name.rpartition(".")[0] if layer.num_experts else name] = not layer.plain
    return modules | dict.fromkeys(patch.token_rows, True)


class _Comparison:
    """Compares each adapted layer's output with the output of the merged tensor for the same input."""

    def __init__(self, merged: BaseFiles, rounding: dict[str, float], only: Collection[str] | None) -> None:
        self._merged = merged
        self._rounding = rounding
        self._only = only
        self.shares: dict[str, float] = {}
        """largest difference of each layer, as a share of its bound"""

    def __call__(self, name: str, shapes: BaseShapes, layer: nn.Module, x: Tensor, y: Tensor) -> None:
        if self._only is not None and name not in self._only:
            return
        kind = shapes.layers[name][0]
        stored = f"{name}.weight"
        if stored not in self._merged.shard_of:
            head, embedding = shapes.tied or (None, None)
            stored = self._merged.tensor_name(embedding if embedding and name == head else name)
        W = self._read(stored)
        error_norm = self._rounding.get(stored, 0.0)
        if kind.takes_ids:
            norms = torch.ones(x.numel()) * float(getattr(layer, "embed_scale", 1.0))
            merged = kind.shrink(layer, x, W.T)
        else:
            norms = x.reshape(-1, x.shape[-1]).norm(dim=1)
            bias = None
            if getattr(layer, "bias", None) is not None:
                stored_bias = self._merged.tensor_name(name, "bias")
                bias = self._read(stored_bias)
                error_norm = error_norm + self._rounding.get(stored_bias, 0.0)
            merged = kind.product(x, W, bias)
        difference = (merged - y).reshape(-1, y.shape[-1]).norm(dim=1)
        bound = norms * error_norm + FLOAT32_SLACK * (norms * W.norm() + 1)
        share = float((difference / bound).max())
        if not share <= 1.0:  # so written that a NaN fails too
            raise MergeError(
                f"{name}: merged and adapted outputs differ by {share:.3g} times what rounding explains;"
                " nothing was written. Please report this"
            )
        self.shares[name] = max(share, self.shares.get(name, 0.0))

    def _read(self, stored: str) -> Tensor:
        return self._merged.shard_of[stored].read(stored).float()


def add_patches(model: nn.Module, weighted: Sequence[WeightedPatch], compare: _Comparison) -> None:
    """Apply the weighted sum of all patches to the model; ``compare`` is called for each layer as it runs."""
    shapes = BaseShapes.of(model)
    adapter = build_adapter(_summed(weighted), model, {})
    route: ContextVar[Route | None] = ContextVar("route")
    route.set(Route((adapter,)))
    for name in adapter.slots:
        layer = model.get_submodule(name)
        kind = shapes.layers[name][0] if name in shapes.layers else None
        layer.register_forward_hook(SlotHook(name, kind, route), with_kwargs=True)
        if kind is not None:

            def hook(layer: nn.Module, inputs: Any, named: Any, y: Tensor, name: str = name) -> None:
                compare(name, shapes, layer, inputs[0] if inputs else next(iter(named.values())), y)

            layer.register_forward_hook(hook, with_kwargs=True)


def _summed(weighted: Sequence[WeightedPatch]) -> Patch:
    """Return the weighted sum of patches that `check_comparable` accepts, as one patch."""
    patches = [one.patch for one in weighted]
    layers = {}
    for name, own in summands(weighted).items():
        like, factor = own[0]
        if len(own) == 1 and factor == like.scale:  # with weight 1, by any method
            layers[name] = like
        else:
            factors, s = concatenated([(dict(layer.tensors), factor) for layer, factor in own])
            layers[name] = low_rank_layer(factors, s, like.sizes, like.embedding)
    return replace(
        next((patch for patch in patches if patch.new_tokens), patches[0]),
        layers=layers,
        full_tensors={name: tensor for patch in patches for name, tensor in patch.full_tensors.items()},
        full_shapes={name: shape for patch in patches for name, shape in patch.full_shapes.items()},
        token_rows={name: rows for patch in patches for name, rows in patch.token_rows.items()},
    )
