"""Read safetensors files by ranges, with every header checked, and write them deterministically.

Format: 8 bytes of header length (little-endian), a JSON header, the data. Not by the safetensors library, because that
writes metadata in random order, ignores the umask and accepts duplicate names.
The table of dtypes is the package's only one.
"""

import json
import math
import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lorakit.errors import PatchError, translate_error
from lorakit.files.atomic import file_signature
from lorakit.files.progress import report_progress
from lorakit.files.text import unique_keys

MODEL_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""name -> dtype in which a base is loaded, computed or merged"""
DTYPE_OF_CODE: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
"""code in a safetensors header -> dtype"""
CODE_OF_DTYPE: Final = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
MAX_HEADER_BYTES: Final = 100_000_000


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return the name of a dtype as recipes and files write it: ``bfloat16``, not ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: Any) -> torch.dtype | None:
    """Return the torch dtype with this name; None if ``name`` is not the name of one."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    return dtype if isinstance(dtype, torch.dtype) else None


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file. ``start``, ``end``: its byte range, from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class SafetensorsFile:
    """The checked header of a safetensors file. Tensors are read from the file on every call."""

    path: Path
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    header: bytes  # the JSON text as it stands in the file

    def read(self, name: str) -> Tensor:
        """Return one full tensor in its stored dtype. Errors as ``read_elements``."""
        entry = self.entries[name]
        return self.read_elements(name, 0, math.prod(entry.shape)).reshape(entry.shape)

    def read_elements(self, name: str, start: int, stop: int, *, out: Tensor | None = None) -> Tensor:
        """Return elements ``start`` to ``stop`` of a flattened tensor in its stored dtype; read no other bytes.

        ``out``: contiguous CPU tensor (stop - start,) of that dtype to read into; None: a new one. Raises PatchError.
        """
        entry = self.entries[name]
        first = entry.start + start * entry.dtype.itemsize
        out = torch.empty(stop - start, dtype=entry.dtype) if out is None else out
        assert (out.dtype, out.shape) == (entry.dtype, (stop - start,)), (name, out.dtype, out.shape)
        if start == stop:
            return out
        view = out.view(torch.uint8).numpy().data
        done = 0
        try:
            # pread, not a memory map, because mapped pages count as memory of the process;
            # in a loop, because Linux reads at most 2,147,479,552 bytes in one call
            while done < len(view) and (num_bytes := os.preadv(self._handle, [view[done:]], first + done)):
                done += num_bytes
        except OSError as problem:
            raise PatchError(f"{self.path}: {name} cannot be read: {problem.strerror}") from None
        report_progress()
        if done < len(view):
            raise PatchError(f"{self.path}: the file ended while {name} was read")
        return out

    def signature(self) -> list[int] | None:
        """Return numbers that change with the file that is read, also where another one took its name."""
        return file_signature(self._handle)

    @cached_property
    def _handle(self) -> int:
        """Descriptor of the file, because many small reads open it once. It is closed when this object is freed."""
        handle = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, handle)
        return handle


def open_tensors(
    path: Path, max_header_bytes: int = MAX_HEADER_BYTES, max_file_bytes: int | None = None
) -> SafetensorsFile:
    """Return a safetensors file, its header checked. Raises PatchError: missing, cut, too large, or another header."""
    try:
        if path.exists() and not path.is_file():
            raise PatchError(f"{path}: not a regular file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if max_file_bytes is not None and size > max_file_bytes:
                raise PatchError(f"{path}: {size:,} bytes, and {max_file_bytes:,} are allowed")
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise PatchError(f"{path}: not a complete safetensors file ({size} bytes, header of {length})")
            if length > max_header_bytes:
                raise PatchError(f"{path}: a header of {length:,} bytes, and {max_header_bytes:,} are allowed")
            header = file.read(length)
    except FileNotFoundError:
        raise PatchError(f"{path}: no such file; looked for {path.absolute()}") from None
    except OSError as problem:
        raise PatchError(f"{path}: cannot be read: {problem.strerror}") from None
    return _checked(path, header, size)


def _checked(path: Path, text: bytes, size: int) -> SafetensorsFile:
    with translate_error((ValueError, RecursionError), PatchError, f"{path}: the header is not valid"):
        header = json.loads(text, object_pairs_hook=unique_keys)
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


def _entry(path: Path, name: str, facts: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape, (start, end) = DTYPE_OF_CODE[facts["dtype"]], tuple(facts["shape"]), facts["data_offsets"]
        valid = all(type(number) is int and number >= 0 for number in (*shape, start, end))
        valid = valid and end - start == math.prod(shape) * dtype.itemsize
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise PatchError(f"{path}: {name}: its dtype, shape and byte range do not fit: {str(facts)[:200]}")
    return TensorEntry(dtype, shape, data_start + start, data_start + end)


def file_parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file's header and tensors: the same tensors and metadata always give the same bytes."""
    yield header_bytes({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}, metadata)
    for tensor in tensors.values():
        yield tensor_bytes(tensor)
        report_progress()


def header_bytes(shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Return length and JSON header for tensors that follow in the given order, padded to a multiple of 8 bytes."""
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    for name, (dtype, shape) in shapes.items():
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODE_OF_DTYPE[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return with_length_prefix(text + b" " * (-len(text) % 8))


def with_length_prefix(header: bytes) -> bytes:
    """Return a JSON header with its length in 8 bytes before it, as a file begins."""
    return len(header).to_bytes(8, "little") + header


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
