"""Choose the device that models compute on: a GPU of this machine, else its CPU."""

from typing import Final

import torch

UNTESTED: Final = ("mps", "xpu")
"""Apple's and Intel's GPUs: used where torch has them, in one process; no test has run on one"""


def device_type() -> str:
    """Return the kind of this machine's GPUs as torch names it: cuda (ROCm's too), mps or xpu; without any, cpu."""
    if torch.cuda.is_available():
        return "cuda"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None and accelerator.type in UNTESTED else "cpu"


def find_gpus() -> list[torch.device]:
    """Return the GPUs of this machine."""
    kind = device_type()
    if kind == "cpu":
        return []
    number = torch.accelerator.device_count() if kind in UNTESTED else torch.cuda.device_count()
    return [torch.device(kind, index) for index in range(number)]
