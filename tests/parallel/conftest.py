"""Batches of the rows that tests of engines train on."""

from pathlib import Path
from typing import Any

import pytest

from lorakit.data.row_settings import RowSettings
from lorakit.data.sampler import BatchSampler
from tests.helpers.rows import tokenize_rows


@pytest.fixture
def batches(rows: Path, tokenizer: Any) -> Any:
    prepared = tokenize_rows(str(rows), "train", tokenizer, RowSettings(64, "truncate", "stop", "answer"))

    def make(micro_batch_size: int, packing: bool = True) -> BatchSampler:
        return BatchSampler(prepared, 8, micro_batch_size, packing, 0)

    return make
