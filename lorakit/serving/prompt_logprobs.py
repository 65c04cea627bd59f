"""Compute the log-probabilities of a prompt's own tokens, which completions with ``echo`` report.

They come from a forward beside the engine's, so they are those of the engine up to the order of its sums.
"""

from collections.abc import Sequence
from typing import Final

import torch

from lorakit.decoding.sampling import TokenLogprobs, top_logprobs
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.lora.routing import Adapter, Route

CHUNK_TOKENS: Final = 128
"""positions whose logits are in memory at once: 80 MB with 150,000 tokens"""


@torch.no_grad()
def prompt_logprobs(
    model: AdaptedModel, adapter: Adapter | None, ids: Sequence[int], number: int
) -> list[TokenLogprobs | None]:
    """Return the log-probabilities of each token given those before it; None for the first.

    number: most probable tokens to report at each position.
    """
    device = next(model.model.parameters()).device
    logprobs: list[TokenLogprobs | None] = [None]
    cache = None
    for start in range(0, len(ids) - 1, CHUNK_TOKENS):
        part = list(ids[start : min(start + CHUNK_TOKENS, len(ids) - 1)])
        output = model.run(
            Route((adapter,)), input_ids=torch.tensor([part], device=device), past_key_values=cache, use_cache=True
        )
        cache = output.past_key_values
        for logits, token in zip(output.logits[0].float().cpu(), ids[start + 1 :], strict=False):
            logprobs.append(top_logprobs(logits, token, number))
    return logprobs
