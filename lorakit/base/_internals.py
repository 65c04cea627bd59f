"""Private names of torch and transformers that base/ depends on, each behind one function.

tests/base/test_internals.py asserts that every one still exists and still means the same.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor


def was_written(tensor: Tensor) -> bool:
    """True if an in-place operation changed the tensor since its creation.

    Read in torch 2.13: ``Tensor._version`` counts in-place operations, on the meta device too. Without the counter, a
    parameter that transformers overwrites while loading would be filled with the stored values instead.
    """
    return tensor._version > 0


def without_length_warning(tokenizer: Any) -> Any:
    """Keep a tokenizer from warning of texts longer than the base's positions; lorakit checks the rows itself.

    Read in transformers 5.23: ``_eventual_warn_about_too_long_sequence`` warns once, and stores that it has in
    ``deprecation_warnings``.
    """
    getattr(tokenizer, "deprecation_warnings", {})["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


@contextlib.contextmanager
def without_zero3() -> Iterator[None]:
    """Disable transformers' own ZeRO-3 partitioning inside the block.

    Read in transformers 5.17 and 5.23: ``_hf_deepspeed_config_weak_ref`` refers to the DeepSpeed config that
    accelerate's plugin registered, and no public function returns it. Without this, ``from_pretrained`` would partition
    the parameters that it builds, which lorakit's engine does afterwards.
    """
    from transformers.integrations import deepspeed

    registered = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = registered
