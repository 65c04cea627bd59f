"""Keys and values of all running rows, in slots side by side.

One layer's keys are one tensor (slots, heads, positions, width). The decoding rows have the first slots, so that their
keys are a view; a row that is being prefilled has the slot behind them. Both sizes grow by doubling.
"""

from typing import Any, final

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _Window:
    """The part of all layers that the forward under way reads and writes.

    first, stop: its slots. starts: position of each row's first new token, (rows,). width: positions to read.
    """

    def __init__(self) -> None:
        self.first, self.stop, self.width = 0, 0, 0
        self.starts = torch.zeros(0, dtype=torch.int64)


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """The slots of one layer, as transformers' attention calls a cache."""

    def __init__(self, window: _Window) -> None:
        super().__init__()
        self._window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        _, heads, _, width = key_states.shape
        self.keys = key_states.new_zeros(1, heads, 1, width)
        self.values = value_states.new_zeros(1, value_states.shape[1], 1, value_states.shape[3])
        self.is_initialized = True

    def reserve(self, num_slots: int, num_positions: int) -> None:
        """Have so many slots and positions; what is stored stays."""
        self.keys, self.values = (_grown(tensor, num_slots, num_positions) for tensor in (self.keys, self.values))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values (rows, heads, tokens, width); return those of all positions."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window, count = self._window, key_states.shape[2]
        if window.stop > self.keys.shape[0] or window.width > self.keys.shape[2]:
            self.reserve(window.stop, window.width)
        slots = torch.arange(window.first, window.stop, device=key_states.device)[:, None]
        positions = window.starts[:, None] + torch.arange(count, device=key_states.device)
        self.keys[slots, :, positions] = key_states.transpose(1, 2)
        self.values[slots, :, positions] = value_states.transpose(1, 2)
        rows = slice(window.first, window.stop)
        return self.keys[rows, :, : window.width], self.values[rows, :, : window.width]

    def get_seq_length(self) -> int:
        return int(self._window.starts.max()) if len(self._window.starts) else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._window.width, 0

    def get_max_length(self) -> int:
        return -1


@final
class SlotCache(Cache):  # type: ignore[misc]
    """The keys and values of all running rows."""

    def __init__(self, num_layers: int) -> None:
        self._window = _Window()
        super().__init__(layers=[_SlotLayer(self._window) for _ in range(num_layers)])

    def set_window(self, first: int, starts: Tensor, num_new: int) -> None:
        """Choose the rows of the next forward: from slot ``first`` on, each with ``starts`` tokens stored."""
        window = self._window
        window.first, window.stop = first, first + len(starts)
        window.starts, window.width = starts, int(starts.max()) + num_new

    def move(self, source: int, target: int, num_positions: int) -> None:
        """Copy the first positions of one slot to another."""
        for layer in self.layers:
            layer.keys[target, :, :num_positions] = layer.keys[source, :, :num_positions]
            layer.values[target, :, :num_positions] = layer.values[source, :, :num_positions]

    def num_bytes(self) -> int:
        """Return the bytes of all slots."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer.is_initialized)


def size_class(number: int) -> int:
    """Return the power of two that is at least a number of slots or positions."""
    return 1 << max(0, number - 1).bit_length()


def _grown(tensor: Tensor, num_slots: int, num_positions: int) -> Tensor:
    slots, heads, positions, width = tensor.shape
    grown = tensor.new_zeros(max(slots, size_class(num_slots)), heads, max(positions, size_class(num_positions)), width)
    grown[:slots, :, :positions] = tensor
    return grown
