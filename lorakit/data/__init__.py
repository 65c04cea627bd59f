"""Rows -> chat template -> tokens and label mask -> micro-batches, exactly resumable."""

from lorakit.data.dataset import TokenDataset
from lorakit.data.encode import Encoder
from lorakit.data.find_rows import find_sources
from lorakit.data.row_settings import RowSettings
from lorakit.data.sampler import BatchSampler, collate

__all__ = ["BatchSampler", "Encoder", "RowSettings", "TokenDataset", "collate", "find_sources"]
