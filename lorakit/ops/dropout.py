"""Dropout and embedding noise that are functions of each token and column, and not of how the work is cut.

A value is zero where the hash of its token's key and its column's key is small. An engine derives a token's key from
the run's seed, the step, the row and the position in it. So a token gets the same zeros in any micro-batch, packed or
padded, and on any rank. For backward nothing is saved but the keys, one number for each token and each column.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK_ELEMENTS: Final = {"cpu": 1 << 16, "cuda": 1 << 24}
"""values hashed at a time: on CPUs their 32-bit hashes, 256 KiB, stay in a core's cache"""
GOLDEN: Final = -0x61C8864680B583EB  # 2**64 / golden ratio, odd, as a signed number: multiples of it are spread evenly


@dataclass(frozen=True, eq=False)
class DropoutMask:
    """The mask of one layer for some tokens. Applied again, it is the same."""

    token_keys: Tensor  # (tokens,) int32
    column_keys: Tensor  # (columns,) int32
    p: float  # probability of a zero

    def apply(self, x: Tensor) -> Tensor:
        """Set values of x (..., columns), of these tokens, to zero, and divide the others by 1 - p."""
        keep = torch.empty(len(self.token_keys), x.shape[-1], dtype=torch.bool, device=x.device)
        num_rows = max(1, BLOCK_ELEMENTS.get(x.device.type, BLOCK_ELEMENTS["cpu"]) // x.shape[-1])
        threshold = round(self.p * 2**32) - 2**31  # int32 counts from -2**31
        end = num_rows if x.is_meta else None  # a plan counts memory, and one block is there at a time
        for keys, part in zip(self.token_keys[:end].split(num_rows), keep[:end].split(num_rows), strict=True):
            torch.ge(_hashed(keys, self.column_keys), threshold, out=part)
        return (x * keep.view(x.shape)).mul_(1 / (1 - self.p))


@final
@dataclass(frozen=True)
class DrawnMask:
    """torch's own dropout, for torch.compile, which would compile a graph for the keys of each layer."""

    p: float  # probability of a zero

    def apply(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p)


def dropped(x: Tensor, mask: DropoutMask | DrawnMask | None) -> Tensor:
    """Return x after dropout. mask: its zeros; None: x itself."""
    return x if mask is None else mask.apply(x)


@final
@dataclass(frozen=True, eq=False)
class TokenKeys:
    """A key for each token: of its row's seed and its position, both (tokens,) int64. lengths: tokens of its row."""

    seeds: Tensor
    positions: Tensor
    lengths: Tensor
    _on_device: dict[torch.device, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.seeds)

    def of(self, tokens: slice) -> "TokenKeys":
        return TokenKeys(self.seeds[tokens], self.positions[tokens], self.lengths[tokens])

    def on(self, device: torch.device) -> Tensor:
        """Return the keys, (tokens,) int32, on a device; computed when the first layer asks for them."""
        if device not in self._on_device:
            self._on_device[device] = _mixed(self.seeds + self.positions * GOLDEN).to(device)
        return self._on_device[device]


_token_keys: list[TokenKeys | None] = []
"""the keys of the micro-batch that an engine computes; a global, because recomputation runs in autograd's threads"""


@contextmanager
def use_token_keys(keys: TokenKeys | None) -> Iterator[None]:
    """Use the keys of a micro-batch, or of a part of it, for all masks made in the block. None: random ones."""
    _token_keys.append(keys)
    try:
        yield
    finally:
        _token_keys.pop()


def current_keys(num_tokens: int) -> TokenKeys | None:
    """Return the keys of the engine's micro-batch if it has so many tokens; else None."""
    keys = _token_keys[-1] if _token_keys else None
    return keys if keys is not None and len(keys) == num_tokens else None


def dropout_mask(x: Tensor, p: float, layer: str) -> DropoutMask | DrawnMask:
    """Return the mask for x (..., columns). Outside an engine's micro-batch, torch's global generator draws keys."""
    if torch.compiler.is_compiling():
        return DrawnMask(p)
    num_tokens = x.shape[:-1].numel()
    if (token_keys := current_keys(num_tokens)) is not None:
        keys = token_keys.on(x.device)
    else:
        keys = torch.randint(-(2**31), 2**31, (num_tokens,), dtype=torch.int32).to(x.device)
    return DropoutMask(keys, column_keys(layer, range(x.shape[-1]), x.device), p)


def _hashed(token_keys: Tensor, column_keys: Tensor) -> Tensor:
    """Return the hash of each token's key (tokens,) and column's key (columns,), (tokens, columns), all int32."""
    # two rounds of multiplying, with the high bits brought to the low ones in between; int32 wraps around
    mixed = (token_keys[:, None] ^ column_keys).mul_(0x21F0AAAD)
    return mixed.bitwise_xor_(mixed >> 15).mul_(0x735A2D97)


def column_keys(layer: str, columns: range, device: torch.device) -> Tensor:
    """Return the keys (columns,) of some columns of a layer's input."""
    # a plan on meta counts every tensor that is made, so it must not get an earlier plan's
    return (_cached_keys.__wrapped__ if device.type == "meta" else _cached_keys)(layer, columns, device)


@lru_cache(4096)  # a model's layers
def _cached_keys(layer: str, columns: range, device: torch.device) -> Tensor:
    numbers = torch.arange(columns.start, columns.stop, device=device)
    return _mixed(numbers * GOLDEN + zlib.crc32(layer.encode()))


def _mixed(values: Tensor) -> Tensor:
    """Return the high half of a 64-bit hash. Source: SplitMix64 (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> 30)) * -0x40A7B892E31B1A47
    values = (values ^ (values >> 27)) * -0x6B2FB644ECCEEE15
    return (values >> 32).to(torch.int32)


def add_embedding_noise(model: nn.Module, alpha: float) -> None:
    """Add noise to embeddings in an engine's training: NEFTune (Jain et al. 2023, arXiv 2310.05914; decision 0032)."""
    model.get_input_embeddings().register_forward_hook(partial(_add_noise, alpha))  # type: ignore[operator]


def _add_noise(alpha: float, embedding: nn.Module, _: Any, x: Tensor) -> Tensor | None:
    num_tokens = x.shape[:-1].numel()
    width = x.shape[-1]
    keys = current_keys(num_tokens)
    if not embedding.training or keys is None:
        return None
    columns = column_keys("embedding noise", range(width), x.device)
    uniform = _hashed(keys.on(x.device), columns).float().mul_(2.0**-31)  # in [-1, 1]
    limits = alpha * torch.rsqrt(keys.lengths * width).to(x.device, torch.float32)
    return x + uniform.mul_(limits[:, None]).to(x.dtype).view(x.shape)
