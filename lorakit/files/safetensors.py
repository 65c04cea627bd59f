"""Safetensors files, read with suspicion and written the same way every time.

Format: 8 bytes of header length (little-endian), a JSON header, the data. The header is checked before any tensor
is allocated. Written here rather than by the safetensors library, which orders metadata at random, ignores the
umask and accepts duplicate names.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from lorakit.errors import PatchError

READERS, READ_BYTES = 4, 1 << 22
MAX_HEADER_BYTES: Final = 100_000_000
DTYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: byte range from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class SafetensorsFile:
    """The checked header of a safetensors file."""

    path: Path
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    header: bytes
    """the JSON text as it stands in the file"""
    content: memoryview | None = None
    """the whole file, when it was read at once"""

    def read(self, name: str) -> Tensor:
        """One whole tensor, as stored."""
        entry = self.entries[name]
        return self.read_elements(name, 0, math.prod(entry.shape)).reshape(entry.shape)

    def into_memory(self) -> "SafetensorsFile":
        """The same with the whole file in memory: tensors are views of it, and nothing is read again.

        Raises:
            PatchError: the file is no longer what its checked header describes.
        """
        with _opened(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            content = np.empty(size, np.uint8).data  # not a bytearray, which would be zeroed first
            read = _read_in_parallel(file.fileno(), content)
        end = max((entry.end for entry in self.entries.values()), default=8 + len(self.header))
        if read != size or size != end or bytes(content[8 : 8 + len(self.header)]) != self.header:
            raise PatchError(f"{self.path}: the file changed while it was read")
        return replace(self, content=content)

    def read_elements(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of the flattened tensor; nothing else is read."""
        entry = self.entries[name]
        size = entry.dtype.itemsize
        if start == stop:
            return torch.empty(0, dtype=entry.dtype)
        if self.content is not None:
            part = self.content[entry.start + start * size : entry.start + stop * size]
            return torch.frombuffer(part, dtype=entry.dtype)
        buffer = bytearray((stop - start) * size)
        with open(self.path, "rb") as file:
            file.seek(entry.start + start * size)
            if file.readinto(buffer) != len(buffer):
                raise PatchError(f"{self.path}: the file ended while {name} was read")
        return torch.frombuffer(buffer, dtype=entry.dtype)


class RangeReader:
    """Reads parts of a file's tensors through one handle, each into the memory of the one before."""

    def __init__(self, file: SafetensorsFile) -> None:
        self._file = file
        self._handle = os.open(file.path, os.O_RDONLY)
        self._buffer = np.empty(0, np.uint8)

    def __enter__(self) -> "RangeReader":
        return self

    def __exit__(self, *problem: object) -> None:
        os.close(self._handle)

    def elements(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of a flattened tensor, until the next call."""
        entry = self._file.entries[name]
        count = (stop - start) * entry.dtype.itemsize
        if count > self._buffer.size:
            self._buffer = np.empty(count, np.uint8)
        if not count:
            return torch.empty(0, dtype=entry.dtype)
        view = self._buffer[:count].data
        if os.preadv(self._handle, [view], entry.start + start * entry.dtype.itemsize) != count:
            raise PatchError(f"{self._file.path}: the file ended while {name} was read")
        return torch.frombuffer(view, dtype=entry.dtype)


def open_tensors(
    path: Path, max_header_bytes: int = MAX_HEADER_BYTES, max_file_bytes: int | None = None
) -> SafetensorsFile:
    """The header of a safetensors file, checked: sizes, ranges, dtypes, no duplicate or overlapping tensors.

    Tensors are read from the file when they are asked for.

    Raises:
        PatchError: the file is missing, cut, too large, or not what its header says; names file and tensor.
    """
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if max_file_bytes is not None and size > max_file_bytes:
            raise PatchError(f"{path}: {size:,} bytes, and {max_file_bytes:,} are allowed (Caps.file_bytes)")
        return _parse(path, file, size, max_header_bytes)


def _read_in_parallel(handle: int, content: memoryview) -> int:
    """Bytes read: most of the time goes into first touching the memory, which threads can share."""

    def part(start: int) -> int:
        return os.preadv(handle, [content[start : start + READ_BYTES]], start)

    if len(content) <= READ_BYTES:
        return part(0)
    with ThreadPoolExecutor(READERS) as pool:
        return sum(pool.map(part, range(0, len(content), READ_BYTES)))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    try:
        if path.exists() and not path.is_file():
            raise PatchError(f"{path}: not a regular file")
        with open(path, "rb") as file:
            yield file
    except FileNotFoundError:
        raise PatchError(f"{path}: no such file; looked for {path.absolute()}") from None
    except OSError as problem:
        raise PatchError(f"{path}: cannot be read: {problem.strerror}") from None


def _parse(path: Path, file: BinaryIO, size: int, max_header_bytes: int) -> SafetensorsFile:
    text = _header_text(path, file, size, max_header_bytes)
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as problem:
        raise PatchError(f"{path}: the header is not valid: {problem}") from None
    if not isinstance(header, dict):
        raise PatchError(f"{path}: the header is not a mapping")
    data_start = 8 + len(text)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise PatchError(f"{path}: the header's __metadata__ is not a mapping of texts")
    entries = {name: _entry(path, name, facts, data_start) for name, facts in header.items()}
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            raise PatchError(f"{path}: {name} begins at byte {entry.start}, expected {position}")
        position = entry.end
    if position != size:
        raise PatchError(f"{path}: {size} bytes, but its header describes {position}; the file is cut or padded")
    return SafetensorsFile(path, entries, metadata, text)


class Writable(Protocol):
    """What a tensor file is written into."""

    def write(self, content: bytes | memoryview) -> int: ...


def write_tensors(file: Writable, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file: the same tensors and metadata always give the same bytes."""
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    file.write(header_bytes(shapes, metadata))
    for tensor in tensors.values():
        file.write(tensor_bytes(tensor))


def header_bytes(shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON header for tensors that follow in the given order, padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    for name, (dtype, shape) in shapes.items():
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return with_length_prefix(text + b" " * (-len(text) % 8))


def with_length_prefix(header: bytes) -> bytes:
    """A JSON header with its length before it, as a file begins."""
    return len(header).to_bytes(8, "little") + header


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The raw bytes of a tensor, in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _header_text(path: Path, file: BinaryIO, size: int, max_header_bytes: int) -> bytes:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise PatchError(f"{path}: not a whole safetensors file ({size} bytes, header of {length})")
    if length > max_header_bytes:
        raise PatchError(f"{path}: a header of {length:,} bytes, and {max_header_bytes:,} are allowed")
    return file.read(length)


def _entry(path: Path, name: str, facts: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape, (start, end) = DTYPES[facts["dtype"]], tuple(facts["shape"]), facts["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, start, end))
        right = whole and end - start == math.prod(shape) * dtype.itemsize
    except (KeyError, TypeError, ValueError):
        right = False
    if not right:
        raise PatchError(f"{path}: {name}: its dtype, shape and byte range do not fit: {str(facts)[:200]}")
    return TensorEntry(dtype, shape, data_start + start, data_start + end)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key!r} appears twice")
        result[key] = value
    return result
