"""A budget for keys and values: those of the running rows, and common prefixes in what the rows leave free.

Invariant: slots and prefixes together are within the budget. While slots are resized, one layer's exist twice.
"""

from collections.abc import Sequence
from typing import final

from lorakit.decoding.kv_cache import SlotCache, size_class
from lorakit.decoding.prefix_cache import BLOCK_TOKENS, PrefixCache
from lorakit.errors import LorakitError
from lorakit.slots.routing import Adapter


@final
class KvMemory:
    """The slots of ``cache``, whose layers exist, and a prefix cache, within a number of bytes."""

    def __init__(self, cache: SlotCache, max_bytes: int, max_positions: int | None = None) -> None:
        self._cache = cache
        self._prefixes = PrefixCache()
        cache.resize(1, 1)
        self.position_bytes = cache.num_bytes()
        """keys and values of one token, over all layers"""
        cache.resize(0, 0)
        self.num_bytes = 0, 0
        """of slots and of prefixes, after the last change"""
        self.max_positions = max_bytes // self.position_bytes
        if max_positions is not None:
            self.max_positions = min(self.max_positions, max_positions)
        if self.max_positions < 2:
            raise LorakitError(
                f"kv memory: {max_bytes} bytes hold the keys and values of {max_bytes // self.position_bytes} tokens of"
                f" this base, {self.position_bytes} bytes each; a request needs 2 at least"
            )

    def fits(self, num_rows: int, longest: int) -> bool:
        """True if slots for so many rows of up to ``longest`` tokens are within the budget."""
        return num_rows * longest <= self.max_positions

    def reserve(self, num_rows: int, longest: int) -> None:
        """Have slots for so many rows of up to ``longest`` tokens, which fit.

        They are larger than that, so that they are copied seldom, as far as no prefix is dropped for it.
        """
        slots, positions = self._cache.sizes
        if num_rows <= slots and longest <= positions:
            return
        free = self.max_positions - len(self._prefixes) * BLOCK_TOKENS
        roomy = max(slots, 1 << (num_rows - 1).bit_length()), max(positions, size_class(longest))
        tight = num_rows, -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS
        for sizes, room in ((roomy, free), ((num_rows, size_class(longest)), free), (tight, self.max_positions)):
            if sizes[0] * sizes[1] <= room:
                self._resize(*sizes)
                return
        self._resize(num_rows, self.max_positions // num_rows)

    def trim(self, num_rows: int, longest: int) -> None:
        """Free slots if the rows that are left need a quarter of them or less."""
        slots, positions = self._cache.sizes
        if 4 * num_rows * size_class(longest) <= slots * positions:
            self._resize(num_rows, size_class(longest) if num_rows else 0)

    def missing_blocks(self, adapter: Adapter | None, tokens: Sequence[int]) -> list[bytes]:
        """Return the keys of the full blocks of ``tokens``, without the last token, that are not stored."""
        return [key for _, key in self._prefixes.missing(adapter, tokens[:-1])]

    def load_prefix(self, adapter: Adapter | None, tokens: Sequence[int], slot: int) -> int:
        """Copy the longest stored prefix of ``tokens`` to a slot, without the last token; return its tokens."""
        blocks = self._prefixes.find(adapter, tokens[:-1])
        if blocks:
            self._cache.write(slot, blocks)
        return len(blocks) * BLOCK_TOKENS

    def save_prefix(self, adapter: Adapter | None, tokens: Sequence[int], slot: int) -> None:
        """Store the blocks of ``tokens``, whose keys and values are in a slot, as far as there is room."""
        slots, positions = self._cache.sizes
        room = (self.max_positions - slots * positions) // BLOCK_TOKENS
        missing = self._prefixes.missing(adapter, tokens[: room * BLOCK_TOKENS])
        self._prefixes.shrink(room - len(missing))
        self._prefixes.put(
            [
                (key, self._cache.read(slot, number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS))
                for number, key in missing
            ]
        )
        self._count()

    def _resize(self, num_slots: int, num_positions: int) -> None:
        self._prefixes.shrink((self.max_positions - num_slots * num_positions) // BLOCK_TOKENS)
        self._cache.resize(num_slots, num_positions)
        self._count()

    def _count(self) -> None:
        # both at once, because other threads read them
        self.num_bytes = self._cache.num_bytes(), len(self._prefixes) * BLOCK_TOKENS * self.position_bytes
