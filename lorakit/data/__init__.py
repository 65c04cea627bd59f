"""Rows -> chat template -> tokens and labels -> micro-batches, exactly resumable."""

from lorakit.data.encode import Encoder, end_marker
from lorakit.data.prefetch import Prefetcher
from lorakit.data.rows import find_sources
from lorakit.data.sampler import BatchSampler, collate
from lorakit.data.token_cache import RowCounts, RowSettings, TokenDataset, tokenize_rows

__all__ = [
    "BatchSampler",
    "Encoder",
    "Prefetcher",
    "RowCounts",
    "RowSettings",
    "TokenDataset",
    "collate",
    "end_marker",
    "find_sources",
    "tokenize_rows",
]  # fmt: skip
