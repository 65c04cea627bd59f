"""Build the optimizer of the adapter's tensors, and compute its learning rate at each step."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn

from lorakit.errors import RunError
from lorakit.quant.bnb import OPTIMIZERS as BNB_OPTIMIZERS
from lorakit.quant.bnb import bnb_optimizer

SCHEDULES: Final = ("cosine", "linear", "polynomial", "wsd", "constant")
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
    """Return an optimizer of torch or bitsandbytes over named float32 tensors.

    The learning rate is 0 until `set_rate`. loraplus_lr_ratio: learning rate of B over that of A (LoRA+, Hayou et al.
    2024, arXiv 2402.12354); None means the same rate.

    Raises:
        RunError: as `check_tensors`, or bitsandbytes is not installed.
    """
    check_tensors(name, tensors)
    groups = [{"params": list(tensors.values()), RATE_RATIO: 1.0}]
    if loraplus_lr_ratio is not None:
        B = {name for name in tensors if name.endswith("lora_B")}
        groups = [
            {"params": [tensor for name, tensor in tensors.items() if (name in B) == is_B], RATE_RATIO: rate_ratio}
            for is_B, rate_ratio in ((False, 1.0), (True, loraplus_lr_ratio))
        ]
        # torch wants a group, and a pipeline's stage may have nothing to train
        groups = [group for group in groups if group["params"]] or groups[:1]
    settings: dict[str, Any] = {"lr": 0.0, "weight_decay": weight_decay}
    if name == "sgd":
        return torch.optim.SGD(groups, **settings, momentum=betas[0])
    if name == "muon":  # updates of the size of AdamW's, so that learning rates are those of AdamW
        return torch.optim.Muon(groups, **settings, momentum=betas[0], adjust_lr_fn="match_rms_adamw")
    if name == "adafactor":
        # torch multiplies the rate by max(eps, root mean square of the tensor): with its own 1e-3, B, which starts at
        # zero, would hardly move
        return torch.optim.Adafactor(groups, **settings, eps=(None, 1.0))
    settings |= {"betas": betas} | ({} if name == "lion" else {"eps": epsilon})
    if name in BNB_OPTIMIZERS:
        return bnb_optimizer(name, groups, **settings)
    return torch.optim.AdamW(groups, **settings, fused=True)


def check_tensors(name: str, tensors: Mapping[str, nn.Parameter]) -> None:
    """Return if an optimizer can update these tensors.

    Raises:
        RunError: muon, and a tensor that is not a matrix A or B.
    """
    others = [key for key, tensor in tensors.items() if tensor.dim() != 2 or not key.endswith(("lora_A", "lora_B"))]
    if name == "muon" and others:
        raise RunError(
            f"train.optimizer: muon makes the singular values of a matrix's update equal, which is meant for A and B;"
            f" {len(others)} other tensors learn here, {others[0]} {tuple(tensors[others[0]].shape)} first. Use adamw"
        )


def set_rate(groups: Iterable[dict[str, Any]], rate: float) -> None:
    """Set the learning rate of every group of an optimizer."""
    for group in groups:
        group["lr"] = rate * group.get(RATE_RATIO, 1.0)


def learning_rate(
    step: int,
    *,
    peak: float,
    schedule: str,
    warmup_steps: int,
    total_steps: int,
    end: float = 0.0,
    power: float = 2.0,
    cycles: int = 1,
    decay_ratio: float = 0.2,
) -> float:
    """Return the learning rate of a step, counted from 0.

    The rate rises linearly over the warm-up, then follows the schedule. All schedules but `constant` reach `end` after
    the last step. power: of `polynomial`. cycles: of `cosine`, each from peak to end (Loshchilov & Hutter 2017, arXiv
    1608.03983). decay_ratio: share of the steps after warm-up in which `wsd` falls.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if schedule == "constant":
        return peak
    if schedule == "cosine":
        # after the last step the last cycle is over, and no other begins
        in_cycle = progress * cycles - min(math.floor(progress * cycles), cycles - 1)
        share = 0.5 * (1 + math.cos(math.pi * in_cycle))
    elif schedule == "wsd":
        share = min(1.0, (1 - progress) / decay_ratio)
    else:
        share = (1 - progress) ** (power if schedule == "polynomial" else 1.0)
    return end + (peak - end) * share
