"""Rows -> chat template -> tokens and label mask -> micro-batches, exactly resumable.

Files in this order: find_rows.py, rows.py, row_files.py, arrow_values.py, columns.py, row_settings.py, row_formats.py,
chat_template.py, encode.py (the label mask), encode_chunks.py, token_cache.py, dataset.py, load.py, sampler.py,
batch.py.
"""

from lorakit.data.dataset import TokenDataset
from lorakit.data.encode import Encoder
from lorakit.data.find_rows import find_sources
from lorakit.data.row_settings import RowSettings
from lorakit.data.sampler import BatchSampler, collate

__all__ = ["BatchSampler", "Encoder", "RowSettings", "TokenDataset", "collate", "find_sources"]
