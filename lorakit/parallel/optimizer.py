"""Build the optimizer of the adapter's tensors, and set its learning rate."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from lorakit.errors import RunError
from lorakit.quant.bnb import OPTIMIZERS as BNB_OPTIMIZERS
from lorakit.quant.bnb import bnb_optimizer

if TYPE_CHECKING:
    from lorakit.recipe import TrainSection

RATE_RATIO: Final = "rate_ratio"  # key of a parameter group: its learning rate over the run's


def build_optimizer(train: "TrainSection", tensors: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe's `train` section, of torch or bitsandbytes, over named float32 tensors.

    The learning rate is 0 until `set_rate`. With `loraplus_lr_ratio` that of B is this multiple of A's (LoRA+, Hayou et
    al. 2024, arXiv 2402.12354). Raises RunError: as `check_tensors`, or bitsandbytes is not installed.
    """
    name = train.optimizer
    betas = train.beta1, train.beta2
    check_tensors(name, tensors)
    groups = [{"params": list(tensors.values()), RATE_RATIO: 1.0}]
    if train.loraplus_lr_ratio is not None:
        B = {name for name in tensors if name.endswith("lora_B")}
        groups = [
            {"params": [tensor for name, tensor in tensors.items() if (name in B) == is_B], RATE_RATIO: rate_ratio}
            for is_B, rate_ratio in ((False, 1.0), (True, train.loraplus_lr_ratio))
        ]
        # torch wants a group, and a pipeline's stage may have nothing to train
        groups = [group for group in groups if group["params"]] or groups[:1]
    settings: dict[str, Any] = {"lr": 0.0, "weight_decay": train.weight_decay}
    if name == "sgd":
        return torch.optim.SGD(groups, **settings, momentum=betas[0])
    if name == "muon":  # updates of the size of AdamW's, so that learning rates are those of AdamW
        return torch.optim.Muon(groups, **settings, momentum=betas[0], adjust_lr_fn="match_rms_adamw")
    if name == "adafactor":
        # torch multiplies the rate by max(eps, root mean square of the tensor): with its own 1e-3, B, which starts at
        # zero, would hardly move
        return torch.optim.Adafactor(groups, **settings, eps=(None, 1.0))
    settings |= {"betas": betas} | ({} if name == "lion" else {"eps": train.epsilon})
    if name in BNB_OPTIMIZERS:
        return bnb_optimizer(name, groups, **settings)
    return torch.optim.AdamW(groups, **settings, fused=True)


def check_tensors(name: str, tensors: Mapping[str, nn.Parameter]) -> None:
    """Raise RunError unless an optimizer can update these tensors: muon updates the matrices A and B alone."""
    others = [key for key, tensor in tensors.items() if tensor.dim() != 2 or not key.endswith(("lora_A", "lora_B"))]
    if name == "muon" and others:
        what = f"{len(others)} other tensors learn here, {others[0]} {tuple(tensors[others[0]].shape)} first"
        raise RunError(f"train.optimizer: muon updates the matrices A and B alone; {what}. Use adamw")


def set_rate(groups: Iterable[dict[str, Any]], rate: float) -> None:
    """Set the learning rate of every group of an optimizer."""
    for group in groups:
        group["lr"] = rate * group.get(RATE_RATIO, 1.0)
