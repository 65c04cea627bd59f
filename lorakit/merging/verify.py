"""Compare a merged model with base + adapters: layer by layer against a bound, or by the error of its logits.

``verify_merge`` is for bases in floats: rounding explains every difference, or the merge fails. ``measure_error`` is
for quantised bases, where the distance is reported and not bounded.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from lorakit.base.loading import load_full
from lorakit.base.quantized import QuantConfig
from lorakit.base.transformers_io import load_base, load_tokenizer, vocabulary_size
from lorakit.errors import BaseModelError, MergeError
from lorakit.files.base_files import BaseFiles, open_base_files
from lorakit.inference.bind import build_adapter
from lorakit.lora.low_rank import concatenated
from lorakit.lora.methods import PLAIN
from lorakit.merging.readers import TrainedQuantization
from lorakit.patch import BaseShapes, Patch, PatchLayer, check_fits
from lorakit.patch.find import WeightedPatch
from lorakit.quant.files import is_quantized
from lorakit.quant.schemes import CPU
from lorakit.slots.bank import AdapterBank
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
) -> dict[str, Any]:
    """Run prompts through base + adapters and through the merged model, both in float32; returns the comparison.

    Raises MergeError unless every adapted layer gives the same output within |x| |R|, where R is the merged tensor's
    rounding error, whose norm is in the ledger's ``lines``. Logits of the full model are compared, not bounded.
    """
    rounding = {line["tensor"]: line["norm_of_rounding"] for line in lines}
    model = load_base(base, torch.float32, CPU)
    ids = prompt_ids(base, vocabulary_size(model))
    comparison = _Comparison(open_base_files(merged), rounding)
    with torch.no_grad(), with_patches(model, weighted, comparison):
        expected = [model(tokens).logits for tokens in ids]
    del model
    with torch.no_grad():
        actual = [load_base(merged, torch.float32, CPU)(tokens).logits for tokens in ids]
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


def measure_error(
    base: Path,
    weighted: Sequence[WeightedPatch],
    merged: Path,
    quantization: TrainedQuantization,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return the next-token error of the merged model, and of the bare base, against the quantised base + adapters.

    KL divergence, largest logit difference and number of equal next tokens of each, all in the dtype of training.
    """
    config = None if is_quantized(base) else QuantConfig(quantization.scheme, only=quantization.layers)
    trained = load_full(base, quantization.dtype, CPU, config)
    ids = prompt_ids(base, vocabulary_size(trained))
    with torch.no_grad():
        bare = _logits(trained, ids)
        with with_patches(trained, weighted):
            expected = _logits(trained, ids)
        del trained  # before the merged model is loaded, so that only one is in memory
        actual = _logits(load_base(merged, quantization.dtype, CPU), ids)
    with_patch = _error(expected, actual)
    without = _error(expected, bare)
    say(
        f"error      against the trained forward pass on {expected.shape[0]} tokens: KL {with_patch['kl']:.3g}, largest"
        f" logit difference {with_patch['largest']:.3g}, next token the same at {with_patch['same']} (the base without"
        f" adapters: KL {without['kl']:.3g}, {without['same']})"
    )
    return {"tokens": expected.shape[0], "merged": with_patch, "without_adapters": without}


class _Comparison:
    """Compares each adapted layer's output with the output of the merged tensor for the same input."""

    def __init__(self, merged: BaseFiles, rounding: dict[str, float]) -> None:
        self._merged = merged
        self._rounding = rounding
        self.shares: dict[str, float] = {}
        """largest difference of each layer, as a share of its bound"""

    def __call__(self, name: str, shapes: BaseShapes, layer: nn.Module, x: Tensor, y: Tensor) -> None:
        kind = shapes.layers[name][0]
        stored = f"{name}.weight"
        if stored not in self._merged.shard_of:
            head, embedding = shapes.tied or (None, None)
            stored = self._merged.weight_name(embedding if embedding and name == head else name)
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


Compare = Callable[[str, BaseShapes, nn.Module, Tensor, Tensor], None]
"""(layer name, shapes of the base, layer, input, output)"""


@contextmanager
def with_patches(model: nn.Module, weighted: Sequence[WeightedPatch], compare: Compare | None = None) -> Iterator[None]:
    """Apply the weighted sum of all patches to the model; ``compare`` is called for each layer as it runs."""
    shapes = BaseShapes.of(model)
    for one in weighted:
        check_fits(one.patch, shapes, "this base; a merge that changes the vocabulary cannot be verified")
    adapter = build_adapter(_summed(weighted), model, AdapterBank())
    route: ContextVar[Route | None] = ContextVar("route", default=None)
    handles = []
    for name in adapter.slots:
        layer = model.get_submodule(name)
        kind = shapes.layers[name][0] if name in shapes.layers else None
        handles.append(layer.register_forward_hook(SlotHook(name, kind, route), with_kwargs=True))
        if kind is not None and compare is not None:

            def hook(layer: nn.Module, inputs: Any, named: Any, y: Tensor, name: str = name) -> None:
                compare(name, shapes, layer, inputs[0] if inputs else next(iter(named.values())), y)

            handles.append(layer.register_forward_hook(hook, with_kwargs=True))
    token = route.set(Route((adapter,)))
    try:
        yield
    finally:
        route.reset(token)
        for handle in handles:
            handle.remove()


def _summed(weighted: Sequence[WeightedPatch]) -> Patch:
    """Return the weighted sum of patches that `check_comparable` accepts, as one patch."""
    patches = [one.patch for one in weighted]
    parts: dict[str, list[tuple[PatchLayer, float]]] = {}
    for one in weighted:
        for name, layer in one.patch.layers.items():
            parts.setdefault(name, []).append((layer, one.weight))
    return replace(
        next((patch for patch in patches if patch.new_tokens), patches[0]),
        layers={name: own[0][0] if len(own) == 1 and own[0][1] == 1.0 else _sum(own) for name, own in parts.items()},
        full_tensors={name: tensor for patch in patches for name, tensor in patch.full_tensors.items()},
        full_shapes={name: shape for patch in patches for name, shape in patch.full_shapes.items()},
        token_rows={name: rows for patch in patches for name, rows in patch.token_rows.items()},
    )


def _sum(parts: Sequence[tuple[PatchLayer, float]]) -> PatchLayer:
    """Return sum_i w_i s_i B_i A_i of one layer, with the ranks side by side."""
    factors, s = concatenated([(dict(layer.tensors), weight * layer.scale) for layer, weight in parts])
    tensors = {"lora_A": factors.A, "lora_B": factors.B}
    return replace(parts[0][0], method=PLAIN, rank=factors.rank, alpha=s * factors.rank, tensors=tensors)


def prompt_ids(base: Path, size: int) -> list[Tensor]:
    """Tokenise the prompts; without a tokenizer their bytes are the tokens. Each is (1, tokens), below ``size``."""
    try:
        tokenizer = load_tokenizer(base)
        rows = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    except BaseModelError:
        rows = []
    if not all(len(row) > 1 for row in rows) or not rows:  # one without a vocabulary
        rows = [list(prompt.encode()) for prompt in PROMPTS]
    return [torch.tensor([[token % size for token in row]]) for row in rows]


def _logits(model: nn.Module, ids: Sequence[Tensor]) -> Tensor:
    return torch.cat([model(tokens).logits[0].float() for tokens in ids])


def _error(expected: Tensor, actual: Tensor) -> dict[str, Any]:
    p = expected.log_softmax(-1)
    q = actual.log_softmax(-1)
    return {
        "kl": float((p.exp() * (p - q)).sum(-1).mean()), "largest": float((expected - actual).abs().max()),
        "same": int((expected.argmax(-1) == actual.argmax(-1)).sum()),
    }  # fmt: skip
