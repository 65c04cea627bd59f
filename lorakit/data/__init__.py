"""Rows -> chat template -> tokens and labels -> micro-batches, exactly resumable."""

from lorakit.data.ahead import Ahead
from lorakit.data.batches import Batches, collate
from lorakit.data.encode import Encoder, end_marker
from lorakit.data.prepare import RowCounts, RowSettings, TokenRows, prepare_rows
from lorakit.data.rows import find_sources

__all__ = [
    "Ahead", "Batches", "Encoder", "RowCounts", "RowSettings", "TokenRows", "collate", "end_marker",
    "find_sources", "prepare_rows",
]  # fmt: skip
