"""Import bitsandbytes, and build its optimizers. The only importer."""

import logging
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

import torch

from lorakit.errors import RunError

INSTALL: Final = "install it with `pip install 'lorakit[quant]'`"
OPTIMIZERS: Final = {
    "adamw8bit": "AdamW8bit",
    "paged_adamw8bit": "PagedAdamW8bit",
    "paged_adamw": "PagedAdamW",
    "lion": "Lion",
}
"""name in recipes -> class of bitsandbytes"""


def bnb_optimizer(name: str, groups: Iterable[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """Return an optimizer of bitsandbytes over groups of float32 tensors. Raises RunError as ``check_optimizer``."""
    groups = list(groups)
    check_optimizer(name, on_gpu=all(tensor.device.type == "cuda" for group in groups for tensor in group["params"]))
    return getattr(bitsandbytes().optim, OPTIMIZERS[name])(groups, **settings)


def check_optimizer(name: str, *, on_gpu: bool) -> None:
    """Raise RunError unless bitsandbytes is installed and this machine can run the optimizer."""
    if name not in OPTIMIZERS:
        return
    bitsandbytes()
    if name.startswith("paged") and not on_gpu:
        raise RunError(f"train.optimizer: {name} pages its state out of GPU memory, and there is none; use adamw8bit")


@lru_cache(maxsize=1)
def bitsandbytes() -> Any:
    """Import and return bitsandbytes, with its log messages off meanwhile. Raises RunError if that fails."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # because it logs an error if its native library cannot be loaded
    try:
        import bitsandbytes
    except ImportError as problem:
        raise RunError(f"bitsandbytes cannot be imported ({problem}); {INSTALL}") from None
    finally:
        logging.disable(level)
    return bitsandbytes
