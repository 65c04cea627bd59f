"""A range of a safetensors file is read completely, however little one call of the system returns, or not at all."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from lorakit.errors import PatchError
from lorakit.files.safetensors import CODE_OF_DTYPE, SafetensorsFile, dtype_name, file_parts, open_tensors, parse_dtype

Read = Callable[[SafetensorsFile, str, int, int], Tensor]
READS: dict[str, Read] = {
    "range": lambda file, name, start, stop: file.read_elements(name, start, stop),
    "full": lambda file, name, start, stop: file.read(name).view(-1)[start:stop],
    "out": lambda file, name, start, stop: file.read_elements(
        name, start, stop, out=torch.empty(stop - start, dtype=torch.bfloat16)
    ),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with open(tmp_path / "x.safetensors", "wb") as file:
        file.writelines(file_parts({"before": torch.ones(3), "W": torch.arange(35).to(torch.bfloat16).view(5, 7)}, {}))
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


def test_the_tensors_of_a_cut_file_cannot_be_read(path: Path) -> None:
    os.truncate(path, os.path.getsize(path) - 4)
    with pytest.raises(PatchError, match="the file is cut or padded"):
        open_tensors(path)


def test_every_stored_dtype_has_one_name_and_one_code() -> None:
    assert len(set(CODE_OF_DTYPE.values())) == len(CODE_OF_DTYPE)
    for dtype in CODE_OF_DTYPE:
        assert parse_dtype(dtype_name(dtype)) is dtype
    for other in ("float33", "Tensor", "", None, 3):
        assert parse_dtype(other) is None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_header_escapes_as_anything_but_a_file_or_a_patch_error(data: st.DataObject, tmp_path_factory: Any) -> None:
    entry = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F99", 3]),
            "shape": st.lists(st.integers(-2, 2**40), max_size=3),
            "data_offsets": st.lists(st.integers(-1, 2**40), max_size=3),
        }
    )
    header = data.draw(
        st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), entry | st.none() | st.text(max_size=2))
    )
    text = data.draw(st.just(json.dumps(header).encode()) | st.binary(max_size=40))
    length = data.draw(st.just(len(text)) | st.integers(0, 2**63))
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + text + bytes(data.draw(st.integers(0, 16))))

    try:
        file = open_tensors(path)
    except PatchError:
        return
    for name in file.entries:
        file.read(name)


def test_duplicate_names_and_overlaps_are_refused(tmp_path: Path) -> None:
    twice = (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    )
    overlap = (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
    )
    for header, size, message in ((twice, 4, "'a' appears twice"), (overlap, 8, "b begins at byte")):
        (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
        with pytest.raises(PatchError, match=message):
            open_tensors(tmp_path / "x")


def test_tensors_of_every_dtype_survive(tmp_path: Path) -> None:
    tensors = {
        str(d): torch.arange(6).reshape(2, 3).to(d) for d in (torch.float32, torch.bfloat16, torch.float64, torch.int8)
    }
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}
    with open(tmp_path / "x", "wb") as file:
        file.writelines(file_parts(tensors, {"b": "2", "a": "1"}))

    ours, theirs = open_tensors(tmp_path / "x"), load_file(tmp_path / "x")
    for name, tensor in tensors.items():
        assert torch.equal(ours.read(name), tensor)
        assert torch.equal(theirs[name], tensor)
