"""Build the optimizer of the adapter's tensors, and compute its learning rate at each step."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn

from lorakit.quant.bnb import bnb_optimizer

SCHEDULES: Final = ("cosine", "linear", "constant")
RATE_RATIO: Final = "rate_ratio"  # key of a parameter group: its learning rate over the run's


def build_optimizer(
    tensors: Mapping[str, nn.Parameter],
    *,
    name: str = "adamw",
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
    loraplus_lr_ratio: float | None = None,
) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov & Hutter 2019), or an optimizer of bitsandbytes, over named float32 tensors.

    The learning rate is 0 until `set_rate`. loraplus_lr_ratio: learning rate of B over that of A (LoRA+, Hayou et al.
    2024, arXiv 2402.12354); None means the same rate.
    """
    groups = [{"params": list(tensors.values()), RATE_RATIO: 1.0}]
    if loraplus_lr_ratio is not None:
        B = {name for name in tensors if name.endswith("lora_B")}
        groups = [
            {"params": [tensor for name, tensor in tensors.items() if (name in B) == is_B], RATE_RATIO: rate_ratio}
            for is_B, rate_ratio in ((False, 1.0), (True, loraplus_lr_ratio))
        ]
        groups = [group for group in groups if group["params"]]
    settings: dict[str, Any] = {"lr": 0.0, "betas": betas, "eps": epsilon, "weight_decay": weight_decay}
    if name != "adamw":
        return bnb_optimizer(name, groups, **settings)
    return torch.optim.AdamW(groups, **settings, fused=True)


def set_rate(groups: Iterable[dict[str, Any]], rate: float) -> None:
    """Set the learning rate of every group of an optimizer."""
    for group in groups:
        group["lr"] = rate * group.get(RATE_RATIO, 1.0)


def learning_rate(step: int, *, peak: float, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """Return the learning rate of a step, counted from 0.

    The rate rises linearly over the warm-up, then follows the schedule. Cosine and linear reach zero after the last
    step.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (1 - progress) if schedule == "linear" else peak
