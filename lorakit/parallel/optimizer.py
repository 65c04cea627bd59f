"""The optimizer and the course of its learning rate."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn

from lorakit.quant.bnb import bnb_optimizer

SCHEDULES: Final = ("cosine", "linear", "constant")
RATIO: Final = "rate_ratio"


def build_optimizer(
    tensors: Mapping[str, nn.Parameter], *, name: str = "adamw", betas: tuple[float, float], epsilon: float,
    weight_decay: float, ratio: float | None = None,
) -> torch.optim.Optimizer:  # fmt: skip
    """AdamW (Loshchilov & Hutter 2019) over named float32 tensors; the learning rate is set at every step.

    ``ratio``: how many times that rate B learns with (LoRA+, Hayou et al. 2024, arXiv 2402.12354).
    """
    groups = [{"params": list(tensors.values()), RATIO: 1.0}]
    if ratio is not None:
        B = {name for name in tensors if name.endswith("lora_B")}
        groups = [
            {"params": [tensor for name, tensor in tensors.items() if (name in B) == which], RATIO: factor}
            for which, factor in ((False, 1.0), (True, ratio))
        ]
        groups = [group for group in groups if group["params"]]
    settings: dict[str, Any] = {"lr": 0.0, "betas": betas, "eps": epsilon, "weight_decay": weight_decay}
    if name != "adamw":
        return bnb_optimizer(name, groups, **settings)
    return torch.optim.AdamW(groups, **settings, fused=True)


def set_rate(groups: Iterable[dict[str, Any]], rate: float) -> None:
    """Give every group of an optimizer its learning rate."""
    for group in groups:
        group["lr"] = rate * group.get(RATIO, 1.0)


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
