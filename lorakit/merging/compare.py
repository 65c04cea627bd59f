"""How far a merged model is from what was trained: the packed base with its adapters, on prompts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lorakit.base.load import load_base, num_tokens
from lorakit.base.quantized import QuantConfig, load_quantized, materialize
from lorakit.merging.dequantized import CPU, TrainedQuantization
from lorakit.merging.tensors import WeightedPatch
from lorakit.merging.verify import prompt_ids, with_patches
from lorakit.quant.files import is_quantized


def measure_error(
    base: Path, weighted: Sequence[WeightedPatch], merged: Path, seen: TrainedQuantization, say: Callable[[str], None]
) -> dict[str, Any]:
    """KL divergence of next tokens, largest logit difference and agreement, of the merged model and of the bare base.

    All three models run in the dtype that training ran in; the first is the packed base with the adapters.
    """
    trained = _load(base, seen)
    ids = prompt_ids(base, num_tokens(trained))
    with torch.no_grad():
        bare = _logits(trained, ids)
        with with_patches(trained, weighted):
            expected = _logits(trained, ids)
        del trained
        found = _logits(_load(merged, seen) if is_quantized(merged) else load_base(merged, seen.dtype, CPU), ids)
    with_it, without = _error(expected, found), _error(expected, bare)
    say(
        f"error      against the trained forward pass on {expected.shape[0]} tokens: KL {with_it['kl']:.3g}, largest"
        f" logit difference {with_it['largest']:.3g}, next token the same at {with_it['same']} (the base without"
        f" adapters: KL {without['kl']:.3g}, {without['same']})"
    )
    return {"tokens": expected.shape[0], "merged": with_it, "without_adapters": without}


def _load(folder: Path, seen: TrainedQuantization) -> nn.Module:
    """A model that is packed, or that is packed as training saw it."""
    how = None
    if not is_quantized(folder):
        how = QuantConfig(seen.packing, only=seen.layers)
    model, tensors = load_quantized(folder, seen.dtype, how, CPU)
    return materialize(model, tensors, CPU)


def _logits(model: nn.Module, ids: Sequence[Tensor]) -> Tensor:
    return torch.cat([model(tokens).logits[0].float() for tokens in ids])


def _error(expected: Tensor, found: Tensor) -> dict[str, Any]:
    p, q = expected.log_softmax(-1), found.log_softmax(-1)
    return {
        "kl": float((p.exp() * (p - q)).sum(-1).mean()), "largest": float((expected - found).abs().max()),
        "same": int((expected.argmax(-1) == found.argmax(-1)).sum()),
    }  # fmt: skip
