"""Attend to rows whose keys are in several tensors: each tensor's rows by one call of the model's own attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor, nn

from lorakit.ops._internals import attention_function

PREFIX: Final = "parts_"
_SWITCHED: Final = Lock()  # one forward at a time; those of other threads, without parts, go on as ever


@contextmanager
def attention_in_parts(model: nn.Module) -> Iterator[None]:
    """Let a transformers model attend to keys that its cache gives as tuples of tensors, each of the next rows."""
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    with _SWITCHED:
        own = config._attn_implementation
        config._attn_implementation = _registered(own)
        try:
            yield
        finally:
            config._attn_implementation = own


@cache
def _registered(inner: str) -> str:
    """Register an attention function that calls the one named ``inner``, and return its name."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Any, **rest: Any) -> Any:
        attention = attention_function(module, inner)
        if not isinstance(key, tuple):
            return attention(module, query, key, value, attention_mask, **rest)
        outputs = []
        start = 0
        for keys, values in zip(key, value, strict=True):
            rows = slice(start, start + len(keys))
            start = rows.stop
            mask = attention_mask[rows, :, :, : keys.shape[2]]
            outputs.append(attention(module, query[rows], keys, values, mask, **rest)[0])
        filling = len(query) - start  # rows that only fill the batch have no keys
        outputs.append(outputs[0].new_zeros(filling, *outputs[0].shape[1:]))
        return torch.cat(outputs), None

    ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + inner, ALL_MASK_ATTENTION_FUNCTIONS[inner])
    ALL_ATTENTION_FUNCTIONS.register(PREFIX + inner, attend)
    return PREFIX + inner
