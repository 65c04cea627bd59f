"""Rows -> chat template -> tokens and labels -> micro-batches, exactly resumable."""

from lorakit.data.encode import Encoder, end_marker
from lorakit.data.prefetch import Ahead
from lorakit.data.rows import find_sources
from lorakit.data.sampler import Batches, collate
from lorakit.data.token_cache import RowCounts, RowSettings, TokenRows, prepare_rows

__all__ = [
    "Ahead", "Batches", "Encoder", "RowCounts", "RowSettings", "TokenRows", "collate", "end_marker",
    "find_sources", "prepare_rows",
]  # fmt: skip
