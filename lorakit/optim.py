"""The optimizer and the course of its learning rate."""

import math
from collections.abc import Iterable
from typing import Final

import torch
from torch import nn

SCHEDULES: Final = ("cosine", "linear", "constant")


def build_optimizer(
    tensors: Iterable[nn.Parameter], *, betas: tuple[float, float], epsilon: float, weight_decay: float
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019) over float32 tensors; the learning rate is set at every step."""
    return torch.optim.AdamW(list(tensors), lr=0.0, betas=betas, eps=epsilon, weight_decay=weight_decay, fused=True)


def learning_rate(step: int, *, peak: float, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """The learning rate of step ``step`` (counted from 0).

    Rises linearly over the warm-up and then follows the schedule; cosine and linear reach zero after the last step.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (1 - progress) if schedule == "linear" else peak
