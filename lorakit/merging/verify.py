"""Does the merged model do what base + adapters do? Layer by layer against a bound, and over the whole model."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from lorakit.base.load import load_base, load_tokenizer, num_tokens
from lorakit.errors import BaseModelError, MergeError
from lorakit.inference.bind import bind
from lorakit.lora.layer_kinds import EMBEDDING
from lorakit.lora.routing import Adapter, Route, Slot, SlotHook
from lorakit.merging.tensors import WeightedPatch
from lorakit.patch import BaseFiles, BaseShapes, check_fits, open_base_files

PROMPTS: Final = (
    "The quick brown fox jumps over the lazy dog.",
    "Mira from Oslo ordered 3 lamps on Monday.",
    "def add(a, b):\n    return a + b\n",
)
FLOAT32_SLACK: Final = 1e-5
"""of |x| |W|: what float32 products summed in another order may differ by"""


def verify_merge(
    base: Path,
    weighted: Sequence[WeightedPatch],
    merged: Path,
    lines: Iterable[dict[str, Any]],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run prompts through base + adapters and through the merged model, both in float32; returns what was found.

    Every adapted layer must give the same output within |x| |R|, where R, from the ledger, is what rounding the merged
    tensor took away. How far that moves the whole model's logits is measured, not bounded.

    Raises:
        MergeError: a layer differs by more than rounding explains; or the merge is of a kind that cannot be compared.
    """
    rounding = {line["tensor"]: line["norm_of_rounding"] for line in lines}
    device = torch.device("cpu")
    model = load_base(base, torch.float32, device)
    ids = prompt_ids(base, num_tokens(model))
    comparing = _Comparison(open_base_files(merged), rounding)
    with torch.no_grad(), with_patches(model, weighted, comparing):
        expected = [model(tokens).logits for tokens in ids]
    del model
    with torch.no_grad():
        found = [load_base(merged, torch.float32, device)(tokens).logits for tokens in ids]
    pairs = list(zip(expected, found, strict=True))
    result = {
        "layers": len(comparing.shares), "largest_share_of_bound": max(comparing.shares.values(), default=0.0),
        "largest_logit_difference": max(float((a - b).abs().max()) for a, b in pairs),
        "logit_spread": float(torch.cat([a.flatten() for a, _ in pairs]).std()),
        "tokens": sum(tokens.numel() for tokens in ids),
        "same_next_token": sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in pairs),
    }  # fmt: skip
    say(
        "verified: {layers} layers within the bound of their rounding (largest: {largest_share_of_bound:.0%} of it);"
        " logits differ by at most {largest_logit_difference:.3g} (their spread is {logit_spread:.3g}), next token the"
        " same at {same_next_token} of {tokens} places".format(**result)
    )
    return result


class _Comparison:
    """Compares each adapted layer's output with what the merged tensor gives for the same input."""

    def __init__(self, merged: BaseFiles, rounding: dict[str, float]) -> None:
        self._merged, self._rounding = merged, rounding
        self.shares: dict[str, float] = {}

    def __call__(self, name: str, shapes: BaseShapes, layer: nn.Module, x: Tensor, y: Tensor) -> None:
        kind = shapes.layers[name][0]
        own = f"{name}.weight"
        stored = own if own in self._merged.shard_of else self._merged.weight_name(self._holder(name, shapes))
        W = self._read(stored)
        rounded = self._rounding.get(stored, 0.0)
        if kind is EMBEDDING:
            rows = torch.ones(x.numel()) * float(getattr(layer, "embed_scale", 1.0))
            got = kind.shrink(layer, x, W.T)
        else:
            rows = x.reshape(-1, x.shape[-1]).norm(dim=1)
            bias = None
            if getattr(layer, "bias", None) is not None:
                bias_stored = self._merged.tensor_name(name, "bias")
                bias, rounded = self._read(bias_stored), rounded + self._rounding.get(bias_stored, 0.0)
            got = kind.product(x, W, bias)
        difference = (got - y).reshape(-1, y.shape[-1]).norm(dim=1)
        bound = rows * rounded + FLOAT32_SLACK * (rows * W.norm() + 1)
        share = float((difference / bound).max())
        if not share <= 1.0:
            raise MergeError(
                f"{name}: merged and adapted outputs differ by {share:.3g} times what rounding explains;"
                " nothing was written. Please report this"
            )
        self.shares[name] = max(share, self.shares.get(name, 0.0))

    def _holder(self, name: str, shapes: BaseShapes) -> str:
        return shapes.tied[1] if shapes.tied is not None and name == shapes.tied[0] else name

    def _read(self, stored: str) -> Tensor:
        return self._merged.shard_of[stored].read(stored).float()


Compare = Callable[[str, BaseShapes, nn.Module, Tensor, Tensor], None]
"""(layer name, shapes of the base, layer, input, output)"""


@contextmanager
def with_patches(
    model: nn.Module, weighted: Sequence[WeightedPatch], comparing: Compare | None = None
) -> Iterator[None]:
    """The model with all patches on it at once, each layer compared as it runs."""
    shapes = BaseShapes.of(model)
    for one in weighted:
        check_fits(one.patch, shapes, "this base; a merge that changes the vocabulary cannot be verified")
    slots = _summed([(one, bind(one.patch, model)) for one in weighted])
    route: ContextVar[Route | None] = ContextVar("route", default=None)
    handles = []
    for name in slots:
        layer = model.get_submodule(name)
        kind = shapes.layers[name][0] if name in shapes.layers else None
        handles.append(layer.register_forward_hook(SlotHook(name, kind, route), with_kwargs=True))
        if kind is not None and comparing is not None:

            def compare(layer: nn.Module, inputs: Any, named: Any, y: Tensor, name: str = name) -> None:
                comparing(name, shapes, layer, inputs[0] if inputs else next(iter(named.values())), y)

            handles.append(layer.register_forward_hook(compare, with_kwargs=True))
    token = route.set(Route((Adapter("all", slots),)))
    try:
        yield
    finally:
        route.reset(token)
        for handle in handles:
            handle.remove()


def _summed(bound: list[tuple[WeightedPatch, dict[str, Slot]]]) -> dict[str, Slot]:
    """One slot per layer for the weighted sum of all patches."""
    names = dict.fromkeys(name for _, slots in bound for name in slots)
    return {name: _sum([(one, slots[name]) for one, slots in bound if name in slots]) for name in names}


def _sum(slots: list[tuple[WeightedPatch, Slot]]) -> Slot:
    alone = [slot for _, slot in slots if slot.gain is not None or slot.rows is not None]
    if alone:
        if len(slots) > 1 or slots[0][0].weight != 1.0:
            raise MergeError("verify: magnitudes and token rows can be compared when one patch with weight 1 has them")
        return alone[0]
    stand_ins = [(one, slot.replacement) for one, slot in slots if slot.replacement is not None]
    if stand_ins and (len(slots) > 1 or stand_ins[0][0].weight != 1.0):
        raise MergeError("verify: whole tensors can be compared when one patch with weight 1 brings them")
    factors = [
        (slot.A, one.weight * slot.scale * slot.B) for one, slot in slots if slot.A is not None and slot.B is not None
    ]
    replacement = stand_ins[0][1] if stand_ins else None
    if not factors:
        return Slot(replacement=replacement)
    return Slot(1.0, torch.cat([A for A, _ in factors]), torch.cat([B for _, B in factors], dim=1), replacement)


def prompt_ids(base: Path, size: int) -> list[Tensor]:
    """The prompts in the base's tokens; in bytes when it has no tokenizer."""
    try:
        tokenizer = load_tokenizer(base)
        rows = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    except BaseModelError:
        rows = []
    if not all(len(row) > 1 for row in rows) or not rows:  # transformers makes an empty tokenizer where there is none
        rows = [list(prompt.encode()) for prompt in PROMPTS]
    return [torch.tensor([[token % size for token in row]]) for row in rows]
