"""Add noise to the embeddings of training rows: NEFTune (Jain et al. 2023, arXiv 2310.05914).

The noise is a function of seed, step, row, position and column, as dropout's masks are (decision 0032). So it is the
same in any micro-batch, packed or padded, and on any rank, and a run that goes on needs no state for it.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lorakit.ops.dropout import current_keys, hashes

STREAM = "embedding noise"
"""name that keeps the noise apart from the masks of layers"""


def add_embedding_noise(model: nn.Module, alpha: float) -> None:
    """Make a language model add noise to its embeddings, in training mode and in micro-batches of an engine alone."""
    model.get_input_embeddings().register_forward_hook(partial(_add_noise, alpha))  # type: ignore[operator]


def has_noise(embedding: nn.Module) -> bool:
    """True if an embedding adds noise in training."""
    hooks = embedding._forward_hooks.values()
    return any(isinstance(hook, partial) and hook.func is _add_noise for hook in hooks)


def _add_noise(alpha: float, embedding: nn.Module, _: Any, x: Tensor) -> Tensor | None:
    num_tokens = x.shape[:-1].numel()
    width = x.shape[-1]
    keys = current_keys(num_tokens)
    if not embedding.training or keys is None:
        return None
    uniform = hashes(keys, STREAM, width, x.device).float().mul_(2.0**-31)  # in [-1, 1]
    limits = alpha * torch.rsqrt(keys.lengths * width).to(x.device, torch.float32)
    return x + uniform.mul_(limits[:, None]).to(x.dtype).view(x.shape)
