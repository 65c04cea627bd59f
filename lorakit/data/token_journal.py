"""Save the records of chunks while rows are tokenised, so that an interrupted call does not begin anew.

The file is a sequence of (bytes of the record, its xxh3 digest, record); the first record has the names of the sources
as JSON. Invariant: only complete records are read. The rest, of a process that was killed, is cut off.
"""

import fcntl
import itertools
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, final

_HEADER: Final = struct.Struct("<QQ")


@final
class TokenJournal:
    """The records of one data set, in the order of its chunks. ``sources``: names of its files."""

    def __init__(self, path: Path, file: BinaryIO, sources: list[str]) -> None:
        self.path, self._file = path, file
        self._stops = list(_complete_records(file))
        file.seek(self._stops[-1] if self._stops else 0)
        file.truncate()
        if not self._stops:
            self.append(json.dumps(sources).encode())

    def __len__(self) -> int:
        return len(self._stops) - 1

    def append(self, record: bytes) -> None:
        """Save a record."""
        self._file.write(_HEADER.pack(len(record), _checksum(record)))
        self._file.write(record)
        self._file.flush()  # to the kernel, so that it outlives this process
        self._stops.append(self._file.tell())

    def records(self) -> Iterator[memoryview]:
        """Yield every record, as a view of the file."""
        view = memoryview(mmap.mmap(self._file.fileno(), self._stops[-1], access=mmap.ACCESS_READ))
        for start, stop in itertools.pairwise(self._stops):
            yield view[start + _HEADER.size : stop]


@contextmanager
def open_journal(path: Path, sources: list[str], waits: Callable[[], None]) -> Iterator[TokenJournal]:
    """Open the journal of a data set. Remove it when its rows are cached.

    ``waits``: called before it waits for another process that has the journal open.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with open(path, "a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waits()
                fcntl.flock(file, fcntl.LOCK_EX)
            # else another process removed it meanwhile
            if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                yield TokenJournal(path, file, sources)
                return


def journal_sources(path: Path) -> tuple[str, ...]:
    """Return the names of a journal's sources; none if the file was cut before them, or is of an earlier version."""
    with open(path, "rb") as file:
        if (stop := next(_complete_records(file), None)) is None:
            return ()
        file.seek(_HEADER.size)
        try:
            return tuple(json.loads(file.read(stop - _HEADER.size)))
        except ValueError:
            return ()


def _complete_records(file: BinaryIO) -> Iterator[int]:
    """Yield where each complete record ends."""
    total = file.seek(0, os.SEEK_END)
    file.seek(0)
    while len(header := file.read(_HEADER.size)) == _HEADER.size:
        size, checksum = _HEADER.unpack(header)
        if size > total - file.tell() or _checksum(file.read(size)) != checksum:
            return
        yield file.tell()


def _checksum(record: bytes) -> int:
    import xxhash

    return xxhash.xxh3_64_intdigest(record)
