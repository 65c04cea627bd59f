"""Keys and values of all running rows, and the states of layers that have some, in slots side by side.

One layer's keys are one tensor (slots, heads, positions, width). The decoding rows have the first slots, so that their
keys are a view; a row that is being prefilled has the slot behind them. Every position of a layer is stored, also in
layers with a sliding window, whose mask leaves out the older ones.
"""

from collections.abc import Sequence
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin

MIN_POSITIONS: Final = 64  # of a slot, so that short rows are not copied at every token
Block = list[tuple[Tensor, Tensor]]
"""keys and values (heads, positions, width) of some positions of a slot, for each layer"""


class _ForwardSpan:
    """The part of all layers that the forward under way reads and writes, and the size of a layer's slots.

    first, stop: its slots. longest: tokens of its longest row before it. width: positions to read, which may
    be more than a slot has. rows, columns: of the new tokens in the forward, without padding. slots, positions: where
    they are stored.
    """

    def __init__(self) -> None:
        self.first = 0
        self.stop = 0
        self.longest = 0
        self.width = 0
        self.rows = torch.zeros(0, dtype=torch.int64)
        self.columns = self.rows
        self.slots = self.rows
        self.positions = self.rows
        self.num_slots = 0
        self.num_positions = 0


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """The slots of one layer, as transformers' attention calls a cache."""

    def __init__(self, span: _ForwardSpan) -> None:
        super().__init__()
        self._span = span

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = _resized(key_states[:0], self._span.num_slots, self._span.num_positions)
        self.values = _resized(value_states[:0], self._span.num_slots, self._span.num_positions)
        self.is_initialized = True

    def resize(self, num_slots: int, num_positions: int) -> None:
        self.keys = _resized(self.keys, num_slots, num_positions)  # one after the other: both exist twice meanwhile
        self.values = _resized(self.values, num_slots, num_positions)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values (rows, heads, tokens, width); return those of all positions."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        span = self._span
        self.keys[span.slots, :, span.positions] = key_states[span.rows, :, span.columns]
        self.values[span.slots, :, span.positions] = value_states[span.rows, :, span.columns]
        rows = slice(span.first, span.stop)
        missing = max(0, span.width - span.num_positions)
        keys, values = (F.pad(own[rows, :, : span.width], (0, 0, 0, missing)) for own in (self.keys, self.values))
        return keys, values

    def tensors(self) -> list[Tensor]:
        """Return what is stored, each (slots, ...)."""
        return [self.keys, self.values] if self.is_initialized else []

    def get_seq_length(self) -> int:
        return self._span.longest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._span.width, 0

    def get_max_length(self) -> int:
        return -1


class _StateLayer(_SlotLayer, LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """The slots of a layer with states, as transformers' linear attention calls a cache. It may have keys too.

    A forward gets the states of its rows, and those that it gives are stored when it is over: one that fails changes
    none. Zeros are the states before a row's first token.
    """

    def __init__(self, span: _ForwardSpan, number_of_states: int) -> None:
        _SlotLayer.__init__(self, span)
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states)
        self.stored: dict[tuple[bool, int], Tensor] = {}  # (is convolution's, number) -> (slots, ...)

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *self.stored.values()]

    def begin(self, new_slots: Sequence[int]) -> None:
        """Give a forward the states of its rows. new_slots: of rows without a token before."""
        for (is_conv, number), states in self.stored.items():
            states[new_slots] = 0
            rows = states[self._span.first : self._span.stop]
            # the convolution's are written in place when one token comes
            (self.conv_states if is_conv else self.recurrent_states)[number] = rows.clone() if is_conv else rows
            self.has_previous_state[number] = True

    def commit(self) -> None:
        for is_conv, given in ((True, self.conv_states), (False, self.recurrent_states)):
            for number, states in given.items():
                if states is not None:
                    zeros = states.new_zeros(self._span.num_slots, *states.shape[1:])
                    own = self.stored.setdefault((is_conv, number), zeros)
                    own[self._span.first : self._span.stop] = states

    def resize_states(self, num_slots: int) -> None:
        for key, states in self.stored.items():
            self.stored[key] = states.new_zeros(num_slots, *states.shape[1:])
            both = min(len(states), num_slots)
            self.stored[key][:both] = states[:both]

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Return the columns before the new ones, and these, (rows, channels, columns); keep the last ones."""
        size = self.conv_kernel_size[state_idx] or conv_kernel_size or conv_states.shape[-1]
        self.conv_kernel_size[state_idx] = size
        if self.has_previous_state[state_idx]:
            conv_states = torch.cat([self.conv_states[state_idx], conv_states], dim=-1)
        else:
            conv_states = F.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        self.conv_states[state_idx] = conv_states[..., -size:]
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


@final
class SlotCache(Cache):  # type: ignore[misc]
    """The slots of a model's layers. config: of its text."""

    def __init__(self, config: Any) -> None:
        self._span = _ForwardSpan()
        self._config = config

        def slots_of(layer: Any) -> _SlotLayer:
            has_states = isinstance(layer, LinearAttentionCacheLayerMixin)
            return _StateLayer(self._span, layer.number_of_states) if has_states else _SlotLayer(self._span)

        super().__init__(layers=[slots_of(layer) for layer in DynamicCache(config=config).layers])

    @property
    def has_states(self) -> bool:
        """True if rows have states too: no prefix of them is kept, and padding would reach them."""
        return bool(self._state_layers())

    @property
    def sizes(self) -> tuple[int, int]:
        """Slots, and positions of each."""
        return self._span.num_slots, self._span.num_positions

    def resize(self, num_slots: int, num_positions: int) -> None:
        """Have so many slots and positions; what is stored in both sizes stays. One layer at a time is copied."""
        for layer in self._own_layers():
            layer.resize(num_slots, num_positions)
        for layer in self._state_layers():
            layer.resize_states(num_slots)
        self._span.num_slots = num_slots
        self._span.num_positions = num_positions

    def without_slots(self) -> "SlotCache":
        """Return a cache for the same layers, which exist, that has no slots."""
        other = SlotCache(self._config)
        for layer, own in zip(other.layers, self.layers, strict=True):
            if own.is_initialized:
                layer.lazy_initialization(own.keys[:0], own.values[:0])
            if isinstance(own, _StateLayer):
                layer.stored = {key: states[:0] for key, states in own.stored.items()}
                layer.conv_kernel_size = dict(own.conv_kernel_size)
        return other

    def set_span(
        self,
        first: int,
        starts: Sequence[int],
        counts: Sequence[int],
        num_tokens: int,
        width: int,
        device: torch.device,
    ) -> Tensor:
        """Choose the rows of the next forward; return the positions of their new tokens, (rows, num_tokens).

        starts: tokens that each row has stored. counts: its new ones; rows with fewer than ``num_tokens`` are padded on
        the left with tokens at position 0, which are not stored. width: positions to read.
        """
        span = self._span
        span.first = first
        span.stop = first + len(starts)
        span.longest = max(starts)
        span.width = width
        offsets = torch.arange(num_tokens) - num_tokens + torch.tensor(counts)[:, None]  # below 0 in padding
        rows, columns = (offsets >= 0).nonzero(as_tuple=True)
        positions = (offsets + torch.tensor(starts)[:, None]).masked_fill(offsets < 0, 0)
        span.rows = rows.to(device)
        span.columns = columns.to(device)
        span.slots = (rows + first).to(device)
        span.positions = positions[rows, columns].to(device)
        for layer in self._state_layers():
            layer.begin([first + row for row, start in enumerate(starts) if start == 0])
        return positions.to(device)

    def commit(self) -> None:
        """Store the states that a forward gave."""
        for layer in self._state_layers():
            layer.commit()

    def move(self, source: int, target: int, num_positions: int) -> None:
        for layer in self._own_layers():
            layer.keys[target, :, :num_positions] = layer.keys[source, :, :num_positions]
            layer.values[target, :, :num_positions] = layer.values[source, :, :num_positions]
        for states in self._states():
            states[target] = states[source]

    def read(self, slot: int, start: int, stop: int) -> Block:
        """Return a copy of a slot's positions from ``start`` to ``stop``."""
        return [
            (layer.keys[slot, :, start:stop].clone(), layer.values[slot, :, start:stop].clone())
            for layer in self._own_layers()
        ]

    def write(self, slot: int, blocks: list[Block]) -> None:
        """Store blocks one after another in a slot, from its first position on."""
        for layer, parts in zip(self._own_layers(), zip(*blocks, strict=True), strict=True):
            keys, values = (torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
            layer.keys[slot, :, : keys.shape[1]] = keys
            layer.values[slot, :, : values.shape[1]] = values

    def erase(self, slot: int) -> None:
        """Fill a slot with zeros: a NaN in it would reach the next row, because 0 times NaN is NaN in attention."""
        for layer in self.layers:
            for tensor in layer.tensors():
                tensor[slot : slot + 1] = 0  # a range, because a row that failed to get a slot has none

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors())

    def num_state_bytes(self) -> int:
        return sum(states.nbytes for states in self._states())

    def _own_layers(self) -> list[Any]:
        """Return the layers with keys and values of their own; others read those of an earlier layer."""
        return [layer for layer in self.layers if layer.is_initialized]

    def _state_layers(self) -> list[_StateLayer]:
        return [layer for layer in self.layers if isinstance(layer, _StateLayer)]

    def _states(self) -> list[Tensor]:
        return [states for layer in self._state_layers() for states in layer.stored.values()]


def size_class(num_positions: int) -> int:
    """Return a number of positions up to a quarter above this one, so that growing slots are copied seldom."""
    step = max(MIN_POSITIONS, 1 << max(0, num_positions.bit_length() - 3))
    return -(-num_positions // step) * step


def _resized(tensor: Tensor, num_slots: int, num_positions: int) -> Tensor:
    slots, heads, positions, width = tensor.shape
    resized = tensor.new_zeros(num_slots, heads, num_positions, width)
    both = slice(min(slots, num_slots)), slice(None), slice(min(positions, num_positions))
    resized[both] = tensor[both]
    return resized
