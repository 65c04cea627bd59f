"""Keys and values of all running rows, in slots, and the states of layers that have some.

The slots of one size are one tensor of a layer: its keys are (slots, heads, positions, width). A row moves to a larger
slot when it outgrows its own, so that a long row makes no other one longer. Every position of a layer is stored, also
in layers with a sliding window, whose mask leaves out the older ones.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionLayer

from lorakit.decoding.generation import Generation

MIN_POSITIONS: Final = 64  # of a slot, so that short rows are not copied at every token
BLOCK_TOKENS: Final = 16
Block = list[tuple[Tensor, Tensor]]
"""keys and values (heads, positions, width) of some positions of a row, for each layer"""
NO_SLOT: Final = (0, 0)


@dataclass(frozen=True)
class _Part:
    """Rows of a forward whose slots have one size, and their new tokens without padding."""

    size: int
    slots: slice | list[int]  # of the rows; a range where they lie side by side
    width: int  # positions to read, which may be more than a slot has
    rows: Tensor  # of the tokens in the forward
    columns: Tensor
    token_slots: Tensor  # where they are stored
    positions: Tensor


class _SlotLayer(DynamicLayer):  # type: ignore[misc]
    """The slots of one layer, as transformers' attention calls a cache."""

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()
        self._cache = cache
        self.stored: dict[int, tuple[Tensor, ...]] = {}  # positions -> keys and values of the slots of this size

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = key_states[:0, :, :0]
        self.values = value_states[:0, :, :0]
        self.is_initialized = True
        for size, num_slots in self._cache.num_slots.items():
            self.resize(size, num_slots)

    def resize(self, size: int, num_slots: int) -> None:
        """Have so many slots of a size. Those that there were keep what they store."""
        before = self.stored.pop(size, (self.keys, self.values))
        if num_slots:
            self.stored[size] = tuple(_resized(tensor, num_slots, size) for tensor in before)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Store the new tokens' keys and values (rows, heads, tokens, width); return those of all positions.

        Rows in slots of several sizes: tuples of tensors, which only ``attention_in_parts`` takes.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        read: tuple[list[Tensor], list[Tensor]] = [], []
        for part in self._cache.parts:
            for own, new, parts in zip(self.stored[part.size], (key_states, value_states), read, strict=True):
                own[part.token_slots, :, part.positions] = new[part.rows, :, part.columns]
                stored = own[part.slots, :, : part.width]
                missing = part.width - part.size
                # not without need, because pad copies
                parts.append(F.pad(stored, (0, 0, 0, missing)) if missing > 0 else stored)
        keys, values = read
        return (keys[0], values[0]) if len(keys) == 1 else (tuple(keys), tuple(values))

    def get_seq_length(self) -> int:
        return max((row.num_stored for row in self._cache.forward_rows), default=0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.width, 0


class _StateLayer(_SlotLayer, LinearAttentionLayer):  # type: ignore[misc]
    """The slots of a layer with states, as transformers' linear attention calls a cache. It may have keys too.

    A forward gets the states of its rows, and those that it gives are stored when it is over: one that fails changes
    none. Zeros are the states before a row's first token.
    """

    def __init__(self, cache: "SlotCache", number_of_states: int) -> None:
        _SlotLayer.__init__(self, cache)
        LinearAttentionLayer.__init__(self, number_of_states)
        self.zeros: dict[tuple[bool, int], Tensor] = {}  # (is convolution's, number) -> (1, ...)
        self.states: dict[Generation, dict[tuple[bool, int], Tensor]] = {}

    def lazy_initialization(self, *keys_and_values: Tensor, **states: Any) -> None:
        if states:  # which transformers gives by name
            LinearAttentionLayer.lazy_initialization(self, **states)
        else:
            _SlotLayer.lazy_initialization(self, *keys_and_values)

    def begin(self) -> None:
        """Give a forward the states of its rows."""
        for is_conv, number in self.zeros:
            states = [self.states.get(row, self.zeros)[is_conv, number] for row in self._cache.forward_rows]
            # a copy, because the convolution's are written in place when one token comes
            (self.conv_states if is_conv else self.recurrent_states)[number] = torch.cat(states)
            self.has_previous_state[number] = True

    def commit(self) -> None:
        for is_conv, given in ((True, self.conv_states), (False, self.recurrent_states)):
            for number, states in given.items():
                if states is not None:
                    self.zeros[is_conv, number] = torch.zeros_like(states[:1])
                    for row, own in zip(self._cache.forward_rows, states.split(1), strict=True):
                        self.states.setdefault(row, {})[is_conv, number] = own


@final
class SlotCache(Cache):  # type: ignore[misc]
    """The slots of a model's layers, and the rows that have them. config: of its text. device: of its forwards."""

    def __init__(self, config: Any, device: torch.device, *, one_size: bool) -> None:
        self.one_size = one_size  # True if a forward's rows must have slots of one size: the model reads keys by itself
        self._device = device
        self.num_slots: dict[int, int] = {}  # positions -> slots of this size, of which some may be free
        self.forward_rows: Sequence[Generation] = ()  # of the forward under way
        self.parts: list[_Part] = []  # of that forward
        self.width = 0  # positions that it reads
        self._slots: dict[Generation, tuple[int, int]] = {}  # size and number of its slot
        self._num_rows: Counter[int] = Counter()  # size -> rows, which have the first slots
        numbers = _numbers_of_states(config)
        super().__init__(layers=[_StateLayer(self, number) if number else _SlotLayer(self) for number in numbers])
        self._state_layers = [layer for layer in self.layers if isinstance(layer, _StateLayer)]
        self.has_states = bool(self._state_layers)
        """True if rows have states too: no prefix of them is kept, and padding would reach them"""

    @property
    def position_bytes(self) -> int:
        """Bytes of the keys and values of one token, over all layers, which exist. 1 where there are states alone."""
        tensors = (tensor for layer in self._own_layers() for tensor in (layer.keys, layer.values))
        num_bytes: int = sum(tensor.shape[1] * tensor.shape[3] * tensor.element_size() for tensor in tensors)
        return max(1, num_bytes)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one row."""
        return sum(zeros.nbytes for layer in self._state_layers for zeros in layer.zeros.values())

    def size_of(self, row: Generation) -> int:
        """Return the positions of a row's slot; 0 if it has none."""
        return self._slots.get(row, NO_SLOT)[0]

    def arrange(self, sizes: Mapping[Generation, int], num_slots: Mapping[int, int]) -> None:
        """Give each row a slot of its size, and have ``num_slots`` by size. What rows have stored stays.

        One layer is copied at a time. While a row moves, it has two slots; if memory for one is missing, none changes.
        """
        moving = [row for row, size in sizes.items() if size != self.size_of(row)]
        needed = self._num_rows + Counter(sizes[row] for row in moving)
        # of two counters, | has the larger number of each size
        for size, number in (Counter(self.num_slots) | needed | Counter(num_slots)).items():
            self._resize(size, number)
        for row in moving:
            slot = sizes[row], self._num_rows[sizes[row]]
            if row in self._slots:
                self._copy(self._slots[row], slot, row.num_stored)
                self._leave(row)
            self._num_rows[sizes[row]] += 1
            self._slots[row] = slot
        for size in list(self.num_slots):
            self._resize(size, num_slots.get(size, 0))

    def free(self, row: Generation) -> None:
        """Free the slot of a row, if it has one."""
        if row in self._slots:
            self._leave(row)
        for layer in self._state_layers:
            layer.states.pop(row, None)

    def erase(self, row: Generation) -> None:
        """Fill a row's slot with zeros: a NaN would reach the next row, because 0 times NaN is NaN in attention."""
        size, slot = self._slots.get(row, NO_SLOT)
        for layer in self._own_layers():
            for tensor in layer.stored.get(size, ()):
                tensor[slot] = 0

    def in_order(self, rows: Sequence[Generation]) -> list[int]:
        """Return the indices of rows in the order of their slots, in which a forward takes them."""
        return sorted(range(len(rows)), key=lambda index: self._slots[rows[index]])

    def begin(
        self, rows: Sequence[Generation], counts: Sequence[int], num_tokens: int, width: Callable[[int], int]
    ) -> Tensor:
        """Choose the rows of the next forward, in order; return the positions of their new tokens, (rows, num_tokens).

        counts: new tokens of each; rows with fewer than ``num_tokens`` are padded on the left with tokens at position
        0, which are not stored. width: positions to read for rows of so many tokens.
        """
        starts = [row.num_stored for row in rows]
        offsets = torch.arange(num_tokens) - num_tokens + torch.tensor(counts)[:, None]  # below 0 in padding
        positions = (offsets + torch.tensor(starts)[:, None]).masked_fill(offsets < 0, 0)
        self.forward_rows = rows
        self.parts = []
        of_new = (offsets >= 0).nonzero()  # (tokens, 2): row and column
        sizes = [self.size_of(row) for row in rows]
        for size in dict.fromkeys(sizes):
            first = sizes.index(size)
            stop = first + sizes.count(size)
            slots = [self._slots[row][1] for row in rows[first:stop]]
            is_range = slots[-1] - slots[0] == stop - first - 1
            own = of_new[(of_new[:, 0] >= first) & (of_new[:, 0] < stop)]
            token_slots = torch.tensor(slots)[own[:, 0] - first]
            longest = max(map(sum, zip(starts[first:stop], counts[first:stop], strict=True)))
            tensors = (*own.unbind(1), token_slots, positions[own[:, 0], own[:, 1]])
            read = slice(slots[0], slots[-1] + 1) if is_range else slots
            self.parts.append(_Part(size, read, width(longest), *(tensor.to(self._device) for tensor in tensors)))
        self.width = max(part.width for part in self.parts)
        for layer in self._state_layers:
            layer.begin()
        return positions.to(self._device)

    def commit(self) -> None:
        """Store the states that a forward gave."""
        for layer in self._state_layers:
            layer.commit()
        self.forward_rows = ()

    def read(self, row: Generation, start: int) -> Block:
        """Return a copy of a block of a row's positions, from ``start`` on."""
        size, slot = self._slots[row]
        stop = start + BLOCK_TOKENS
        stored = (layer.stored[size] for layer in self._own_layers())
        return [(keys[slot, :, start:stop].clone(), values[slot, :, start:stop].clone()) for keys, values in stored]

    def write(self, row: Generation, blocks: list[Block]) -> None:
        """Store blocks one after another in a row's slot, from its first position on."""
        size, slot = self._slots[row]
        for layer, parts in zip(self._own_layers(), zip(*blocks, strict=True), strict=True):
            for own, tensors in zip(layer.stored[size], zip(*parts, strict=True), strict=True):
                new = torch.cat(tensors, dim=1)
                own[slot, :, : new.shape[1]] = new

    def num_bytes(self) -> int:
        """Return the bytes of all slots, and of the rows' states."""
        num_positions = sum(size * number for size, number in self.num_slots.items())
        return num_positions * self.position_bytes + len(self._slots) * self.state_bytes

    def _resize(self, size: int, number: int) -> None:
        before = self.num_slots.get(size, 0)
        if number == before:
            return
        self.num_slots[size] = min(before, number)  # all that are in every layer, if one of them fails
        for layer in self._own_layers():
            layer.resize(size, number)
        self.num_slots[size] = number
        if not number:
            del self.num_slots[size]

    def _copy(self, source: tuple[int, int], target: tuple[int, int], num_positions: int) -> None:
        """Copy the first positions of a slot, (size, number), to another one."""
        for layer in self._own_layers():
            for old, new in zip(layer.stored[source[0]], layer.stored[target[0]], strict=True):
                new[target[1], :, :num_positions] = old[source[1], :, :num_positions]

    def _leave(self, row: Generation) -> None:
        """Take a row out of its slot, into which the last one of the same size moves."""
        free = size, _ = self._slots.pop(row)
        self._num_rows[size] -= 1
        last = size, self._num_rows[size]
        for other in [other for other, slot in self._slots.items() if slot == last]:
            self._copy(last, free, other.num_stored)
            self._slots[other] = free

    def _own_layers(self) -> list[Any]:
        """Return the layers with keys and values of their own; others read those of an earlier layer."""
        return [layer for layer in self.layers if layer.is_initialized]


def _numbers_of_states(config: Any) -> list[int]:
    return [getattr(layer, "number_of_states", 0) for layer in DynamicCache(config=config).layers]


def has_states(config: Any) -> bool:
    """True if layers of a model of this config have states."""
    return any(_numbers_of_states(config))


def size_class(num_positions: int) -> int:
    """Return a number of positions up to a quarter above this one, so that growing slots are copied seldom."""
    step = max(MIN_POSITIONS, 1 << max(0, num_positions.bit_length() - 3))
    return -(-num_positions // step) * step


def tight_size(num_positions: int) -> int:
    """Return a number of positions that rows outgrow after ``BLOCK_TOKENS`` at most."""
    return -(-num_positions // BLOCK_TOKENS) * BLOCK_TOKENS


def _resized(tensor: Tensor, num_slots: int, num_positions: int) -> Tensor:
    slots, _, positions, _ = tensor.shape
    return F.pad(tensor, (0, 0, 0, num_positions - positions, 0, 0, 0, num_slots - slots))  # below 0 it is cut
