"""The user's cache: files that a later call may read instead of computing them again, and that may be deleted."""

import os
from pathlib import Path
from typing import Final

GIVEN_ROWS: Final = "rows"  # cache of rows that Python callers gave


def user_cache() -> Path:
    """Return the folder of all programs' caches: ``$XDG_CACHE_HOME``, or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def cache_folder(name: str) -> Path:
    """Return lorakit's cache of this name; it need not exist."""
    return user_cache() / "lorakit" / name
