"""A range of a safetensors file is read completely, however little one call of the system returns, or not at all."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lorakit.errors import PatchError
from lorakit.files.dtypes import CODE_OF_DTYPE, dtype_name, parse_dtype
from lorakit.files.safetensors import RangeReader, SafetensorsFile, open_tensors, read_header, write_tensors

Read = Callable[[SafetensorsFile, str, int, int], Tensor]
READS: dict[str, Read] = {
    "range": lambda file, name, start, stop: file.read_elements(name, start, stop),
    "full": lambda file, name, start, stop: file.read(name).view(-1)[start:stop],
    "out": lambda file, name, start, stop: file.read_elements(
        name, start, stop, out=torch.empty(stop - start, dtype=torch.bfloat16)
    ),
    "memory": lambda file, name, start, stop: file.into_memory().read_elements(name, start, stop),
    "reader": lambda file, name, start, stop: read_twice(file, name, start, stop),
}


def read_twice(file: SafetensorsFile, name: str, start: int, stop: int) -> Tensor:
    with RangeReader(file) as reader:
        reader.elements(name, 0, 1)
        return reader.elements(name, start, stop).clone()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with open(tmp_path / "x.safetensors", "wb") as file:
        write_tensors(file, {"before": torch.ones(3), "W": torch.arange(35).to(torch.bfloat16).view(5, 7)}, {})
    return tmp_path / "x.safetensors"


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_call_that_returns_few_bytes_is_followed_by_others(
    path: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, sizes = os.preadv, []

    def short(handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """As Linux does above 2,147,479,552 bytes, but above 5."""
        sizes.append(preadv(handle, [buffers[0][:5]], offset))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", short)
    assert torch.equal(read(open_tensors(path), "W", 2, 33), torch.arange(2, 33).to(torch.bfloat16))
    assert len(sizes) > 31 * 2 / 5


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_file_that_is_cut_after_its_header_was_checked_is_refused(path: Path, read: Read) -> None:
    file = open_tensors(path)
    os.truncate(path, os.path.getsize(path) - 4)
    with pytest.raises(PatchError, match=r"the file ended while W was read|changed while it was read"):
        read(file, "W", 2, 35)


def test_a_file_that_vanished_is_an_error_with_words(path: Path) -> None:
    file = open_tensors(path)
    path.unlink()
    with pytest.raises(PatchError, match="W cannot be read: No such file or directory"):
        file.read("W")


def test_the_header_of_a_cut_file_can_be_read_and_its_tensors_cannot(path: Path) -> None:
    header = read_header(path)
    os.truncate(path, os.path.getsize(path) - 4)
    assert read_header(path) == header
    assert header["W"] == {"dtype": "BF16", "shape": [5, 7], "data_offsets": [12, 82]}
    with pytest.raises(PatchError, match="the file is cut or padded"):
        open_tensors(path)


def test_every_stored_dtype_has_one_name_and_one_code() -> None:
    assert len(set(CODE_OF_DTYPE.values())) == len(CODE_OF_DTYPE)
    for dtype in CODE_OF_DTYPE:
        assert parse_dtype(dtype_name(dtype)) is dtype
    for other in ("float33", "Tensor", "", None, 3):
        assert parse_dtype(other) is None
