"""Which adapter each row of a batch uses.

Invariant: a route and its adapters are immutable, so that a call under way is not changed by a load, unload or swap.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn

from lorakit.errors import TargetError
from lorakit.slots.bank import FactorBlock, Factors

adapter_numbers: Final = itertools.count()  # a number for each adapter, which no later one gets


@dataclass(frozen=True, eq=False)
class Slot:
    """One adapter's tensors for one layer: the output is y + s (x A^T) B^T.

    With a gain g (DoRA) it is b + g (y - b) + s (x A^T) (g B)^T, where b is the layer's bias.
    """

    factors: Factors | None = None
    """None if the adapter has no low-rank update here. B is multiplied by s already, and by the gain if there is one"""
    replacement: nn.Module | None = None
    """a copy of the layer with some tensors of the adapter's own, run instead of it (modules_to_save, biases)"""
    gain: Tensor | None = None  # m / |V| of DoRA, (out,)
    rows: tuple[Tensor, Tensor] | None = None
    """ids of tokens, (tokens,), and their rows of the embedding, and of a head that is tied to it, (tokens, width)"""
    new_rows: Tensor | None = None
    """(new tokens, width): rows of a head for tokens behind those of the base; an embedding's are among ``rows``"""

    @property
    def is_low_rank(self) -> bool:
        """True for a low-rank update and nothing else."""
        return self.factors is not None and all(
            part is None for part in (self.replacement, self.gain, self.rows, self.new_rows)
        )


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter: its slots by layer name. Immutable, so that a call in progress is not changed by a swap."""

    number: int  # from `adapter_numbers`
    slots: Mapping[str, Slot]
    identity: str | None = None  # digest of its tensors and settings; None if it was not read from files
    facts: Any = None  # what its loader keeps with it, so that a call under way still has it after a swap
    num_new_tokens: int = 0  # logits that its rows have more than the base's


def own_logits(adapters: Sequence[Adapter | None], logits: Tensor) -> list[Tensor | Exception]:
    """Return the logits (rows, vocabulary) row by row without those of other adapters' new tokens, or a row's error."""
    numbers = [0 if adapter is None else adapter.num_new_tokens for adapter in adapters]
    size = logits.shape[-1] - max(numbers)
    sound = (logits.amax(-1) < math.inf).tolist()  # not NaN either
    return [
        row[: size + number] if is_sound else ArithmeticError("the logits are not numbers")
        for row, number, is_sound in zip(logits, numbers, sound, strict=True)
    ]


TokenGroup = tuple[Adapter | None, slice | Tensor]
"""an adapter, and its tokens: a range, because slicing copies nothing, or else their indices"""
Update = tuple[Tensor, Tensor]
"""A (r, in) and s B transposed (r, out), in one dtype, which may be wider than the layer's"""


@dataclass(frozen=True, eq=False)
class SlotTokens:
    """The tokens of neighbouring slots of a bank, filled up to equally many for each slot."""

    tokens: Tensor  # (slots * width,)
    own: Tensor  # tokens whose adapter has one of these slots, each once
    indices: Tensor  # where ``own`` are among ``tokens``

    @classmethod
    def of(cls, slots: Sequence[Sequence[int]], step: int, device: torch.device) -> "SlotTokens":
        """Return the table of each slot's tokens, perhaps none, whose width is a multiple of ``step``."""
        width = -(-max(map(len, slots)) // step) * step
        filled = [[*own, *itertools.repeat(0, width - len(own))] for own in slots]
        indices = [slot * width + column for slot, own in enumerate(slots) for column in range(len(own))]
        lists = itertools.chain(*filled), itertools.chain(*slots), indices
        return cls(*(torch.tensor([*numbers], device=device) for numbers in lists))


@dataclass(frozen=True, eq=False)
class Route:
    """The adapter of each row of a batch; None: the base. One alone fits any batch. height: as of ``BatchSizes``."""

    adapters: tuple[Adapter | None, ...]
    tokens_per_row: int | None = None  # of the forward under way; None before it is known
    height: int = 1
    # shared by the routes of all passes
    _groups: dict[tuple[int, torch.device], list[TokenGroup]] = field(default_factory=dict, repr=False)
    _blocks: dict[Any, list[tuple[FactorBlock, SlotTokens]]] = field(default_factory=dict, repr=False)
    _tables: dict[Any, SlotTokens] = field(default_factory=dict, repr=False)
    _updates: dict[tuple[str, torch.dtype], Update | None] = field(default_factory=dict, repr=False)
    _only_adds: dict[str, bool | None] = field(default_factory=dict, repr=False)

    @cached_property
    def is_uniform(self) -> bool:
        """True if every token has the same adapter."""
        return all(adapter is self.adapters[0] for adapter in self.adapters)

    @cached_property
    def has_adapters(self) -> bool:
        return any(adapter is not None for adapter in self.adapters)

    @cached_property
    def num_new_tokens(self) -> int:
        """Logits that the adapter with the most new tokens has more than the base."""
        return max(0 if adapter is None else adapter.num_new_tokens for adapter in self.adapters)

    def of_pass(self, tokens_per_row: int) -> "Route":
        return replace(self, tokens_per_row=tokens_per_row)

    def slot(self, adapter: Adapter | None, layer: str) -> Slot | None:
        """Return an adapter's slot of a layer; None if it leaves the layer as it is."""
        return None if adapter is None else adapter.slots.get(layer)

    def slots(self, layer: str) -> list[Slot]:
        """Return the slots of a layer that the adapters of this route have."""
        slots = (self.slot(adapter, layer) for adapter in set(self.adapters))
        return [slot for slot in slots if slot is not None]

    def span(self, layer: str, states: Any) -> int:
        """Return the tokens of each row in states of a layer, a tensor (rows, tokens, width) or (tokens, width).

        Raises TargetError: it is neither, because the layer mixes the rows of the batch.
        """
        count = len(self.adapters)
        shape = tuple(states.shape) if isinstance(states, Tensor) else ()
        num_tokens = math.prod(shape[:-1])
        # experts get tokens in the order of their routing, whose number may equal that of the batch
        is_flat = len(shape) == 2 and ".experts." not in layer
        has_rows = len(shape) > 2 and shape[0] == count
        if not (has_rows or (is_flat and num_tokens in (count, count * (self.tokens_per_row or 1)))):
            mixed = f"{layer} has states {shape} in a batch of {count} rows: this model mixes rows there"
            raise TargetError(f"{mixed}; use one adapter for the whole batch")
        return num_tokens // count

    def groups(self, span: int, device: torch.device) -> list[TokenGroup]:
        """Return each adapter with its tokens. Indices are made on the device once, not sent for every layer."""
        if (span, device) not in self._groups:
            tokens: dict[Adapter | None, list[int]] = {}
            for number, adapter in enumerate(self.adapters):
                tokens.setdefault(adapter, []).extend(range(number * span, (number + 1) * span))
            self._groups[span, device] = [(adapter, _slice_or_index(own, device)) for adapter, own in tokens.items()]
        return self._groups[span, device]

    def only_adds(self, layer: str) -> bool | None:
        """True if low-rank updates are all that the adapters of this route do in a layer; None if they do nothing."""
        if layer not in self._only_adds:
            slots = self.slots(layer)
            self._only_adds[layer] = all(slot.is_low_rank for slot in slots) if slots else None
        return self._only_adds[layer]

    def only_update(self, layer: str, dtype: torch.dtype) -> Update | None:
        """Return the update in a layer of the one adapter of all rows; None of several, or where it changes more."""
        key = layer, dtype
        if key not in self._updates:
            slot = self.slot(self.adapters[0], layer) if self.is_uniform else None
            factors = slot.factors if slot is not None and slot.is_low_rank else None
            wide = factors and torch.promote_types(dtype, factors.A.dtype)
            self._updates[key] = factors and (factors.A.to(wide), factors.B.to(wide))
        return self._updates[key]

    def blocks(self, layer: str, x: Tensor) -> list[tuple[FactorBlock, SlotTokens]]:
        """Return the factors of a layer, with the tokens of each: for one token of each row of x."""
        key = layer, x.dtype, x.device
        if key not in self._blocks:
            tokens: dict[FactorBlock, dict[int, list[int]]] = {}
            for row, adapter in enumerate(self.adapters):
                slot = self.slot(adapter, layer)
                if slot is not None and slot.factors is not None:
                    tokens.setdefault(slot.factors.block, {}).setdefault(slot.factors.slot, []).append(row)
            self._blocks[key] = [
                (block.part(run, x.dtype), self._table([own.get(slot, ()) for slot in run], x.device))
                for block, own in tokens.items()
                for run in _runs(own)
            ]
        return self._blocks[key]

    def _table(self, slots: Iterable[Sequence[int]], device: torch.device) -> SlotTokens:
        own = tuple(map(tuple, slots))
        if (own, device) not in self._tables:  # most layers have the same
            self._tables[own, device] = SlotTokens.of(own, self.height, device)
        return self._tables[own, device]


def _runs(slots: Iterable[int]) -> list[range]:
    """Return ranges that hold these slots and few others, since a range is read without a copy."""
    runs: list[range] = []
    for slot in sorted(slots):
        if runs and slot <= runs[-1].stop + 1:
            runs[-1] = range(runs[-1].start, slot + 1)
        else:
            runs.append(range(slot, slot + 1))
    return runs


def _slice_or_index(indices: list[int], device: torch.device) -> slice | Tensor:
    """Return ascending indices as a slice if they are one, or else on the device."""
    start = indices[0]
    stop = indices[-1] + 1
    return slice(start, stop) if stop - start == len(indices) else torch.tensor(indices, device=device)
