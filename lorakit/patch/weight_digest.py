"""Digests of weights, over their shape and their values as float32, so that storage dtype and files do not matter.

``sampled-1`` covers 8 evenly spaced runs of 512 values and takes milliseconds for any base. ``full-1`` covers every
value.
"""

import hashlib
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from typing import Final

import torch
import xxhash
from torch import Tensor

RUNS = 8
RUN_ELEMENTS = 512
BLOCK_ELEMENTS: Final = 1 << 20
ReadElements = Callable[[int, int], Tensor]
"""(start, stop) -> these elements of a flattened tensor"""
Source = tuple[tuple[int, ...], ReadElements]
"""shape of a weight, and the function that reads it"""


class WeightDigest:
    """``full-1`` digest of one weight, updated with its values in stored order."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._state = xxhash.xxh3_128(json.dumps(shape).encode())
        self._float32 = torch.empty(0)  # reused, because touching new memory costs as much as the conversion

    def update(self, values: Tensor) -> None:
        if self._float32.numel() < values.numel():
            self._float32 = torch.empty(values.numel())
        self._state.update(self._float32[: values.numel()].copy_(values.reshape(-1)).numpy().data)

    def hexdigest(self) -> str:
        return str(self._state.hexdigest())


def sample_digest(shape: tuple[int, ...], read: ReadElements, runs: int = RUNS) -> str:
    """Return the ``sampled-1`` digest of a weight; another number of ``runs`` gives another digest."""
    size = math.prod(shape)
    last = max(0, size - RUN_ELEMENTS)
    starts = sorted({last * run // (runs - 1) for run in range(runs)})
    state = hashlib.sha256(json.dumps(shape).encode())
    for start in starts:
        values = read(start, min(start + RUN_ELEMENTS, size)).to(torch.float32)
        state.update(values.numpy().tobytes())
    return state.hexdigest()[:16]


def _full(shape: tuple[int, ...], read: ReadElements) -> str:
    state = WeightDigest(shape)
    size = math.prod(shape)
    for start in range(0, size, BLOCK_ELEMENTS):
        state.update(read(start, min(start + BLOCK_ELEMENTS, size)))
    return state.hexdigest()


def value_digests(sources: list[Source]) -> list[str]:
    """Return the ``full-1`` digest of each weight."""
    with ThreadPoolExecutor(min(8, cpu_count() or 1)) as pool:
        return list(pool.map(lambda source: _full(*source), sources))
