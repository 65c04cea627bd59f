"""Tokenise rows into memory-mapped files of the user's cache, so that data larger than memory works.

Invariant: a set's folder is named by a digest of data, tokenizer, template and settings, and is written once, so that a
file of other tokens is never opened.
"""

import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Final

import tokenizers

from lorakit.data.chat_template import DATE_FUNCTION
from lorakit.data.dataset import ROWS, Part, TokenDataset, TokenTable, append_rows, finish_table
from lorakit.data.encode_chunks import INLINE_CHUNKS, ChunkEncoder, encode_chunks
from lorakit.data.row_counts import BadRows, RowCounts
from lorakit.data.row_files import count_file_rows
from lorakit.data.row_settings import RowSettings, all_columns
from lorakit.data.rows import RowSource, count_rows
from lorakit.errors import DataError
from lorakit.files.atomic import (
    GIVEN_ROWS,
    MANIFEST,
    atomic_folder,
    cache_folder,
    manifest_matches,
    remove_folder,
    try_lock,
)
from lorakit.files.progress import report_progress
from lorakit.files.text import read_object

FORMAT: Final = 14
"""part of the cache's key; change it whenever the same row would give other tokens or counts, or other files"""
POLL_SECONDS: Final = 0.1
SEEN: Final = "seen"  # file whose time is that of the last comparison with the manifest's digests
Progress = Callable[[int | None, int | None], None]
"""called with the number of rows so far, and of all rows or None; with None, None before a wait for another process
that tokenises the same rows"""


def no_progress(done: int | None, total: int | None) -> None:
    """Show nothing."""


def tokenize_sources(
    sources: list[RowSource], tokenizer: Any, settings: RowSettings, progress: Progress = no_progress
) -> TokenDataset:
    """Tokenise the rows of files, or open them from the cache. An interrupted call leaves nothing.

    Where the chat template writes today's date, and the settings have none, it is the clock's.
    Raises DataError: missing files; bad rows by reason, with the first ones' file and line; or no row left.
    TemporaryFailure: a process that tokenises was killed, or the cache's disk is full.
    """
    if DATE_FUNCTION in str(tokenizer.chat_template):  # with which the same row has other tokens tomorrow
        settings = replace(settings, today=settings.today or date.today().isoformat())
    versions = [source.version() for source in sources]
    folder = cache_folder("tokens") / _key(versions, tokenizer, settings)

    def write(staging: Path) -> None:
        _write_table(staging, sources, ChunkEncoder(tokenizer, settings), settings, progress)
        if versions != [source.version() for source in sources]:
            listed = ", ".join(source.name for source in sources)
            raise DataError(f"data: {listed} changed while it was read; run again when it is complete")

    cache_table(folder, write, progress)
    return TokenDataset([Part(TokenTable(folder, [source.name for source in sources]))])


def cache_table(folder: Path, write: Callable[[Path], None], progress: Progress) -> None:
    """Write a table into a folder of the cache, unless it is there. write: gets the staging folder.

    Raises DataError: the folder is damaged. TemporaryFailure: the disk is full.
    """
    if _is_intact(folder):
        return
    if folder.exists():
        raise DataError(f"{folder}: the token cache is damaged; remove this folder and run again")
    with _alone(folder, progress):
        if not _is_intact(folder):  # another process may have written it meanwhile
            with atomic_folder(folder) as staging:
                write(staging)


def _is_intact(folder: Path) -> bool:
    """True if the files are those of the manifest. Their content is read once, and again after one has changed."""
    seen = folder / SEEN
    changes = [path.stat().st_ctime_ns for path in folder.glob("*") if path.name not in (MANIFEST, SEEN)]
    is_known = seen.exists() and seen.stat().st_mtime_ns > max(changes, default=0)
    if not manifest_matches(folder, content=not is_known):
        return False
    with suppress(OSError):  # a cache that cannot be written
        seen.touch()
    return True


@contextmanager
def _alone(folder: Path, progress: Progress) -> Iterator[None]:
    """Wait for other processes that tokenise the same rows. A lock ends with its process, also a killed one."""
    path = folder.with_name(f"{folder.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        if not try_lock(file, fcntl.LOCK_EX):
            progress(None, None)
            while not try_lock(file, fcntl.LOCK_EX):
                report_progress()  # of the process that has the lock, which is alive
                time.sleep(POLL_SECONDS)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _write_table(
    staging: Path, sources: list[RowSource], encoder: ChunkEncoder, settings: RowSettings, progress: Progress
) -> None:
    counts = RowCounts(today=settings.today)
    bad = BadRows()
    num_read = 0
    total: int | None = None
    encoded = encode_chunks(sources, encoder, settings.limit, settings.max_bytes)
    with closing(encoded) as chunks:  # ends its processes after an error too
        for number, chunk in enumerate(chunks):
            append_rows(staging, chunk.columns, counts.tokens)
            counts.add(chunk.counts)
            for reason, source, line in chunk.bad:
                bad.add(reason, f"{sources[source].name}:{line}")
            num_read += chunk.num_read
            report_progress()
            if number == INLINE_CHUNKS:  # fewer are not worth counting all rows
                total = count_rows(sources, settings.limit)
            if number >= INLINE_CHUNKS:
                progress(num_read, total)
    _check(counts, bad, settings, sources)
    finish_table(staging, counts, [source.name for source in sources])


def _check(counts: RowCounts, bad: BadRows, settings: RowSettings, sources: list[RowSource]) -> None:
    """Raise DataError unless the rows can be used as the settings require."""
    listed = bad.listed(counts.bad)
    names = ", ".join(source.name for source in sources)
    if counts.bad and settings.on_bad_rows == "stop":
        others = ", or set data.on_bad_rows: skip to train on the other rows (skipped rows are counted)"
        raise DataError(
            f"data: {counts.bad} of {counts.file_rows + counts.eval_rows} rows cannot be used:\n  {listed}\n"
            f"Fix them{others if counts.bad < counts.file_rows else ''}"
        )
    num_long = counts.truncated + counts.dropped_unlabelled
    if num_long and settings.on_long_rows in ("stop", "split", "fill"):
        which = "" if settings.on_long_rows == "stop" else " that are no text alone"
        raise DataError(
            f"data: {num_long} of {counts.rows + counts.dropped_unlabelled} rows{which} are longer"
            f" than data.max_tokens {settings.max_tokens}; the longest has {counts.longest} tokens. Raise it, or choose"
            f" data.on_long_rows: truncate (which loses their ends and end tokens), drop, or for text split"
        )
    if not counts.rows:
        raise DataError(_no_row_left(counts, settings, names) + (f"\n  {listed}" if counts.bad else ""))
    absent = sorted(all_columns(settings.columns) - counts.mapped.keys())
    if absent and not settings.eval_side:  # of few held-out rows none may have a column that is rare
        others = ", ".join(map(repr, [*counts.mapped, *counts.unread]))
        raise DataError(f"data.columns: no row of {names} has {', '.join(map(repr, absent))}; its columns: {others}")


def _no_row_left(counts: RowCounts, settings: RowSettings, names: str) -> str:
    left_out = counts.changes()
    if counts.eval_rows:
        left_out.append(f"{counts.eval_rows:,} held out by data.eval: {settings.eval_share:g}")
    if left_out:
        return f"data: no row is left of {names}: {', '.join(left_out)}"
    if settings.eval_side:
        return (
            f"data.eval: {settings.eval_share:g} of the rows of {names} is none of them; give a larger share, name"
            " held-out rows, or among several sources give this one `eval: 0`"
        )
    return f"data: {names}: no rows in it; write a row on each line (docs/recipes.md), or name another file"


def _key(versions: list[str], tokenizer: Any, settings: RowSettings) -> str:
    parts = [FORMAT, versions, asdict(settings), tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template]
    parts += [{name: str(token) for name, token in tokenizer.special_tokens_map.items()}, tokenizers.__version__]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class CacheEntry:
    """A cached data set, or a file of rows that a Python caller gave."""

    path: Path
    num_bytes: int  # on disk
    last_used: float  # seconds since 1970
    num_rows: int | None  # None of a damaged one
    sources: tuple[str, ...]


def cache_entries() -> list[CacheEntry]:
    """Return all data sets in the cache, then the files of given rows, each least recently used first."""
    tables = [_entry(path) for path in cache_folder("tokens").glob("[!.]*") if path.is_dir()]
    given = [
        CacheEntry(path, path.stat().st_size, path.stat().st_mtime, count_file_rows(path), ("rows given in Python",))
        for path in cache_folder(GIVEN_ROWS).glob("*.jsonl")
    ]
    return [*sorted(tables, key=lambda entry: entry.last_used), *sorted(given, key=lambda entry: entry.last_used)]


def trim_cache(limit_bytes: float) -> list[CacheEntry]:
    """Remove the least recently used entries until the others take at most ``limit_bytes``; return those removed."""
    entries = cache_entries()
    total = sum(entry.num_bytes for entry in entries)
    removed = list[CacheEntry]()
    for entry in entries:
        if total > limit_bytes and remove_entry(entry):
            removed.append(entry)
            total -= entry.num_bytes
    return removed


def _entry(path: Path) -> CacheEntry:
    rows = read_object(path / ROWS)
    manifest = path / MANIFEST
    return CacheEntry(
        path,
        sum(file.stat().st_size for file in path.iterdir() if file.is_file()),
        manifest.stat().st_mtime if manifest.exists() else time.time(),
        rows.get("counts", {}).get("rows"),
        tuple(rows.get("sources", ())),
    )


def remove_entry(entry: CacheEntry) -> bool:
    """Remove an entry; False if a process reads or writes it, or a data set was made of it, whose run reads it."""
    path = entry.path
    if path.parent == cache_folder(GIVEN_ROWS):
        is_in_use = any(str(path) in other.sources for other in cache_entries())
        if not is_in_use:
            path.unlink(missing_ok=True)
        return not is_in_use
    try:
        with open(path / MANIFEST, "r+b") as file:  # for writing, because NFS gives an exclusive lock to no other
            if not try_lock(file, fcntl.LOCK_EX):
                return False
            remove_folder(path)
    except FileNotFoundError:  # without a manifest it is damaged
        remove_folder(path)
    return True
