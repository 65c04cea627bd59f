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
from typing import Final

from lorakit.files.atomic import MANIFEST, remove_folder
from lorakit.files.cache import cache_folder

ROWS: Final = "rows.json"


@dataclass(frozen=True)
class CacheEntry:
    """One data set in the cache.

    num_bytes: on disk. last_used: seconds since 1970. num_rows: None of a damaged one. sources: names of its files.
    """

    path: Path
    num_bytes: int
    last_used: float
    num_rows: int | None
    sources: tuple[str, ...]


def cache_entries() -> list[CacheEntry]:
    """Return all data sets in the cache, least recently used first."""
    folder = cache_folder("tokens")
    paths = folder.iterdir() if folder.is_dir() else ()
    entries = [_entry(path) for path in paths if path.is_dir() and not path.name.startswith(".")]
    return sorted(entries, key=lambda entry: entry.last_used)


def remove_entries(entries: Collection[CacheEntry]) -> list[CacheEntry]:
    """Remove these entries; return those that were removed. One that a process reads or writes is left."""
    return [entry for entry in entries if _remove(entry.path)]


def trim_cache(limit_bytes: float) -> list[CacheEntry]:
    """Remove the least recently used entries until the others take at most ``limit_bytes``; return those removed."""
    entries = cache_entries()
    total = sum(entry.num_bytes for entry in entries)
    removed = list[CacheEntry]()
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
    try:
        rows = json.loads((path / ROWS).read_text())
    except (OSError, ValueError):
        rows = {}
    manifest = path / MANIFEST
    return CacheEntry(
        path,
        sum(file.stat().st_size for file in path.iterdir() if file.is_file()),
        manifest.stat().st_mtime if manifest.exists() else time.time(),
        rows.get("counts", {}).get("rows"),
        tuple(rows.get("sources", ())),
    )


def _remove(path: Path) -> bool:
    """Remove an entry; False if a process uses it."""
    try:
        # for writing, because NFS gives an exclusive lock to no other
        with open(path / MANIFEST, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_folder(path)
    except BlockingIOError:
        return False
    except FileNotFoundError:  # without a manifest it is damaged
        remove_folder(path)
    return True
