"""List and remove the tokenised rows in the user's cache; keep them below a size.

Invariant: rows that a living process reads are not removed. A TokenDataset locks its manifest for that.
"""

import fcntl
import json
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lorakit.data.token_journal import journal_sources
from lorakit.files.atomic import MANIFEST, remove_folder
from lorakit.files.cache import cache_folder

ROWS: Final = "rows.json"
JOURNAL: Final = ".journal"


@dataclass(frozen=True)
class CacheEntry:
    """One data set in the cache, or the journal of one that is not complete.

    num_bytes: on disk. last_used: seconds since 1970. num_rows: None for a journal. sources: names of its files.
    """

    path: Path
    num_bytes: int
    last_used: float
    num_rows: int | None
    sources: tuple[str, ...]


def cache_entries() -> list[CacheEntry]:
    """Return all data sets and journals in the cache, least recently used first."""
    folder = cache_folder("tokens")
    paths = [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []
    return sorted((_entry(path) for path in paths), key=lambda entry: entry.last_used)


def remove_entries(entries: Collection[CacheEntry]) -> list[CacheEntry]:
    """Remove these entries; return those that were removed. One that a process reads or writes is left."""
    return [entry for entry in entries if _remove(entry.path)]


def trim_cache(limit_bytes: float) -> list[CacheEntry]:
    """Remove the least recently used entries until the others take at most ``limit_bytes``; return those removed."""
    entries = cache_entries()
    total, removed = sum(entry.num_bytes for entry in entries), []
    for entry in entries:
        if total > limit_bytes and _remove(entry.path):
            removed.append(entry)
            total -= entry.num_bytes
    return removed


def mark_in_use(folder: Path) -> int:
    """Note the time of use of an entry; return a file descriptor whose lock protects the entry until it is closed."""
    (folder / MANIFEST).touch()
    file = os.open(folder / MANIFEST, os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def _entry(path: Path) -> CacheEntry:
    rows: dict[str, Any]
    try:
        rows = json.loads((path / ROWS).read_text()) if path.is_dir() else {"sources": journal_sources(path)}
    except (OSError, ValueError):
        rows = {}
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]
    lock = _lock_file(path)
    return CacheEntry(
        path,
        sum(file.stat().st_size for file in files),
        lock.stat().st_mtime if lock.exists() else time.time(),
        rows.get("rows"),
        tuple(rows.get("sources", ())),
    )


def _lock_file(path: Path) -> Path:
    return path / MANIFEST if path.is_dir() else path


def _remove(path: Path) -> bool:
    """Remove an entry; False if a process uses it."""
    try:
        # for writing, because NFS gives an exclusive lock to no other
        with open(_lock_file(path), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_folder(path) if path.is_dir() else path.unlink()
    except BlockingIOError:
        return False
    except FileNotFoundError:  # without a manifest it is damaged
        if path.is_dir():
            remove_folder(path)
    return True
