"""A budget for keys and values: those of the running rows, and common prefixes in what the rows leave free.

Invariant: slots and prefixes together are within the budget. While slots are resized, one layer's exist twice. A block
of a prefix is read by a request of the same adapter alone, whatever the adapter is called.
"""

import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, final

from lorakit.decoding.kv_cache import Block, SlotCache, size_class
from lorakit.slots.routing import Adapter

BLOCK_TOKENS: Final = 16  # of a prefix that is stored or dropped together


@final
class KvMemory:
    """The slots of ``cache``, whose layers exist, and a prefix cache, within a number of bytes."""

    def __init__(self, cache: SlotCache, max_bytes: int, max_positions: int | None = None) -> None:
        self._cache = cache
        self._prefixes = PrefixCache()
        cache.resize(1, 1)
        states = cache.num_state_bytes()
        self.position_bytes = max(1, cache.num_bytes() - states)  # keys and values of one token, over all layers
        self._state_positions = -(-states // self.position_bytes)  # tokens that take as many bytes as a row's states
        cache.resize(0, 0)
        self.num_bytes = 0, 0  # of slots and of prefixes, after the last change
        self.max_positions = max_bytes // self.position_bytes
        if max_positions is not None:
            self.max_positions = min(self.max_positions, max_positions)

    def fits(self, num_rows: int, longest: int) -> bool:
        """True if slots for so many rows of up to ``longest`` tokens are within the budget."""
        return num_rows * (longest + self._state_positions) <= self.max_positions

    def reserve(self, num_rows: int, longest: int) -> None:
        """Have slots for so many rows of up to ``longest`` tokens, which fit.

        They are larger than that, so that they are copied seldom, as far as no prefix is dropped for it.
        """
        slots, positions = self._cache.sizes
        if num_rows <= slots and longest <= positions:
            return
        free = self.max_positions - len(self._prefixes) * BLOCK_TOKENS
        size = size_class(longest)
        tight = -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS
        roomy = (max(slots, 1 << (num_rows - 1).bit_length()), max(positions, size))
        choices = [one for one in (roomy, (num_rows, size)) if one[0] * (one[1] + self._state_positions) <= free]
        choices += [(num_rows, min(tight, self.max_positions // num_rows))]  # in the memory of prefixes
        self._resize(*choices[0])

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
        if self._cache.has_states:  # those of a prefix are not kept
            return
        slots, positions = self._cache.sizes
        room = (self.max_positions - slots * positions) // BLOCK_TOKENS
        missing = self._prefixes.missing(adapter, tokens[: room * BLOCK_TOKENS])
        starts = [(key, number * BLOCK_TOKENS) for number, key in missing]
        self._prefixes.shrink(room - len(missing))
        self._prefixes.put([(key, self._cache.read(slot, start, start + BLOCK_TOKENS)) for key, start in starts])
        self._count()

    def _resize(self, num_slots: int, num_positions: int) -> None:
        self._prefixes.shrink((self.max_positions - num_slots * num_positions) // BLOCK_TOKENS)
        self._cache.resize(num_slots, num_positions)
        self._count()

    def _count(self) -> None:
        # both at once, because other threads read them
        self.num_bytes = self._cache.num_bytes(), len(self._prefixes) * BLOCK_TOKENS * self.position_bytes


@final
class PrefixCache:
    """Blocks in the order of their last use."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, adapter: Adapter | None, tokens: Sequence[int]) -> list[Block]:
        keys = list(itertools.takewhile(self._blocks.__contains__, block_keys(adapter, tokens)))
        self._use(keys)
        return [self._blocks[key] for key in keys]

    def missing(self, adapter: Adapter | None, tokens: Sequence[int]) -> list[tuple[int, bytes]]:
        """Return number and key of each full block of ``tokens`` that is not stored."""
        keys = block_keys(adapter, tokens)
        self._use([key for key in keys if key in self._blocks])
        return [(number, key) for number, key in enumerate(keys) if key not in self._blocks]

    def put(self, blocks: Sequence[tuple[bytes, Block]]) -> None:
        """Store blocks of one row, the first one first."""
        self._blocks.update(blocks)
        self._use([key for key, _ in blocks])

    def shrink(self, num_blocks: int) -> None:
        while len(self._blocks) > max(0, num_blocks):
            self._blocks.popitem(last=False)

    def _use(self, keys: Sequence[bytes]) -> None:
        """Count blocks of one row as used, the first one last: a block is of no use without those before it."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)


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
