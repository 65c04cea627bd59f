"""A budget for keys and values: those of the running rows, and common prefixes in what the rows leave free.

Invariant: slots and prefixes together are within the budget, but for a row that moves, which has two slots meanwhile. A
block of a prefix is read by a request of the same adapter alone, whatever the adapter is called.
"""

import hashlib
import itertools
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import final

from lorakit.decoding.generation import Generation
from lorakit.decoding.kv_cache import BLOCK_TOKENS, Block, SlotCache, size_class, tight_size
from lorakit.slots.routing import Adapter


@final
class KvMemory:
    """The slots of ``cache``, whose layers exist, and a prefix cache, within a number of bytes."""

    def __init__(self, cache: SlotCache, max_bytes: int, max_positions: int | None = None) -> None:
        self._cache = cache
        self._prefixes = PrefixCache()
        self.position_bytes = cache.position_bytes
        self._state_positions = _state_positions(cache)
        self.num_bytes = 0, 0  # of slots and of prefixes, after the last change
        in_bytes = max_bytes // self.position_bytes
        self.max_positions = in_bytes if max_positions is None else min(in_bytes, max_positions)
        self.longest = self.max_positions - self._state_positions  # tokens of a row that is alone

    @classmethod
    def for_rows(cls, cache: SlotCache, num_rows: int, longest: int) -> "KvMemory":
        """Return a memory in which so many rows of up to ``longest`` tokens fit."""
        return cls(cache, num_rows * (tight_size(longest) + _state_positions(cache)) * cache.position_bytes)

    def fits(self, lengths: Sequence[int]) -> bool:
        """True if slots for rows of so many tokens are within the budget."""
        return self._cost(Counter(self._sizes(lengths, tight_size))) <= self.max_positions

    def reserve(self, rows: Sequence[Generation]) -> None:
        """Have a slot for every row, which fit; larger ones, to be copied seldom, as far as no prefix is dropped."""
        lengths = [len(row.tokens) for row in rows]
        before = [self._cache.size_of(row) for row in rows]
        if all(length <= size for length, size in zip(lengths, before, strict=True)):
            return
        roomy = self._sizes(lengths, size_class, before)
        exact = Counter(roomy)
        # of two counters, | has the larger number of each size
        most = Counter(self._cache.num_slots) | Counter({size: 1 << (n - 1).bit_length() for size, n in exact.items()})
        free = self.max_positions - len(self._prefixes) * BLOCK_TOKENS
        tight = self._sizes(lengths, tight_size)
        choices = [(roomy, counts) for counts in (most, exact) if self._cost(counts) <= free]
        sizes, num_slots = [*choices, (tight, Counter(tight))][0]  # the last one in the memory of prefixes
        self._arrange(dict(zip(rows, sizes, strict=True)), num_slots)

    def trim(self, rows: Sequence[Generation]) -> None:
        """Free slots if the rows that are left need half of them or less."""
        sizes = {row: size for row in rows if (size := self._cache.size_of(row))}
        if 2 * self._cost(Counter(sizes.values())) <= self._cost(self._cache.num_slots):
            self._arrange(sizes, Counter(sizes.values()))

    def missing_blocks(self, row: Generation) -> list[bytes]:
        """Return the keys of the full blocks of a row, without its last token, that could be stored, and are not."""
        if self._cache.has_states:
            return []
        return self._prefixes.use(block_keys(row.adapter, row.tokens[:-1]))

    def load_prefix(self, row: Generation) -> int:
        """Copy the longest stored prefix of a row to its slot, without its last token; return its tokens."""
        keys = block_keys(row.adapter, row.tokens[:-1])
        blocks = [self._prefixes[key] for key in itertools.takewhile(self._prefixes.__contains__, keys)]
        if blocks:
            self._cache.write(row, blocks)
        return len(blocks) * BLOCK_TOKENS

    def save_prefix(self, row: Generation) -> None:
        """Store the blocks of a row's tokens that have keys and values, as far as there is room."""
        if self._cache.has_states:  # those of a prefix are not kept
            return
        room = (self.max_positions - self._cost(self._cache.num_slots)) // BLOCK_TOKENS
        num_tokens = min(row.num_stored, room * BLOCK_TOKENS)
        keys = block_keys(row.adapter, row.tokens[:num_tokens])
        self._prefixes.shrink(room - len(self._prefixes.use(keys)))
        for number, key in enumerate(keys):
            if key not in self._prefixes:
                self._prefixes[key] = self._cache.read(row, number * BLOCK_TOKENS)
        self._prefixes.use(keys)
        self._count()

    def _sizes(
        self, lengths: Sequence[int], size: Callable[[int], int], at_least: Sequence[int] | None = None
    ) -> list[int]:
        """Return the sizes of the slots of rows of so many tokens. at_least: of each."""
        sizes = list(map(max, map(size, lengths), at_least or [0] * len(lengths)))
        if len(sizes) == 1:  # a row alone may have all
            sizes = [max(lengths[0], min(sizes[0], self.longest))]
        return [max(sizes)] * len(sizes) if self._cache.one_size else sizes

    def _cost(self, num_slots: Mapping[int, int]) -> int:
        """Return the positions that slots take, and states in slots."""
        return sum((size + self._state_positions) * number for size, number in num_slots.items())

    def _arrange(self, sizes: Mapping[Generation, int], num_slots: Mapping[int, int]) -> None:
        self._prefixes.shrink((self.max_positions - self._cost(num_slots)) // BLOCK_TOKENS)
        self._cache.arrange(sizes, num_slots)
        self._count()

    def _count(self) -> None:
        # both at once, because other threads read them
        self.num_bytes = self._cache.num_bytes(), len(self._prefixes) * BLOCK_TOKENS * self.position_bytes


@final
class PrefixCache(OrderedDict[bytes, Block]):
    """Blocks in the order of their last use."""

    def use(self, keys: Sequence[bytes]) -> list[bytes]:
        """Count blocks of one row as used, the first one last, which the others need; return the keys not stored."""
        for key in reversed(keys):
            if key in self:
                self.move_to_end(key)
        return [key for key in keys if key not in self]

    def shrink(self, num_blocks: int) -> None:
        while len(self) > max(0, num_blocks):
            self.popitem(last=False)


def _state_positions(cache: SlotCache) -> int:
    """Return the tokens whose keys and values take as many bytes as the states of a row."""
    return -(-cache.state_bytes // cache.position_bytes)


def block_keys(adapter: Adapter | None, tokens: Sequence[int]) -> list[bytes]:
    root = "base"
    if adapter is not None:  # its number no later adapter gets
        root = f"digest {adapter.identity}" if adapter.identity else f"number {adapter.number}"
    keys = []
    key = root.encode()
    for stop in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        block = array("q", tokens[stop - BLOCK_TOKENS : stop])
        key = hashlib.blake2b(key + block.tobytes(), digest_size=32).digest()
        keys.append(key)
    return keys
