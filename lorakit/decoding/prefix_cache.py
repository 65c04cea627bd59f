"""Keys and values of common prefixes, in blocks of tokens.

Invariant: a block is read by a request of the same adapter alone, whatever the adapter is called. Its key is a digest
of the adapter's identity and of all tokens up to its end, because the keys and values of a token depend on both. A base
has one cache, and is never written.
"""

import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, final

from lorakit.decoding.kv_cache import Block
from lorakit.slots.routing import Adapter

BLOCK_TOKENS: Final = 16


@final
class PrefixCache:
    """Blocks in the order of their last use."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._blocks)

    def find(self, adapter: Adapter | None, tokens: Sequence[int]) -> list[Block]:
        """Return the stored blocks that ``tokens`` begin with."""
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
        """Drop the blocks that were unused for longest, until so many are left."""
        while len(self._blocks) > max(0, num_blocks):
            self._blocks.popitem(last=False)

    def _use(self, keys: Sequence[bytes]) -> None:
        """Count blocks of one row as used, the first one last: a block is of no use without those before it."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)


def block_keys(adapter: Adapter | None, tokens: Sequence[int]) -> list[bytes]:
    """Return the key of each full block of ``tokens``."""
    if adapter is None:
        root = "base"
    elif adapter.identity is None:
        root = f"number {adapter.number}"  # which no later adapter gets
    else:
        root = f"digest {adapter.identity}"
    keys = []
    key = root.encode()
    for stop in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        block = array("q", tokens[stop - BLOCK_TOKENS : stop])
        key = hashlib.blake2b(key + block.tobytes(), digest_size=32).digest()
        keys.append(key)
    return keys
