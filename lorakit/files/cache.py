"""The user's cache: files that a later call may read instead of computing them again, and that may be deleted."""

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lorakit.errors import LorakitError
from lorakit.files.atomic import write_json

GIVEN_ROWS: Final = "rows"  # cache of rows that Python callers gave


def user_cache() -> Path:
    """Return the folder of all programs' caches: ``$XDG_CACHE_HOME``, or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def cache_folder(name: str) -> Path:
    """Return lorakit's cache of this name; it need not exist."""
    return user_cache() / "lorakit" / name


def measured_once(question: str, measure: Callable[[], Any]) -> Any:
    """Return what this machine was measured to be, as JSON has it; the first call measures, so all runs choose alike.

    question: names all that the answer depends on, besides the machine.
    """
    key = hashlib.sha256(f"{platform.node()}: {question}".encode()).hexdigest()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RuntimeError):
        return json.loads((cache_folder("measured") / f"{key}.json").read_text())["answer"]
    answer = measure()
    # where nothing can be written, or nobody has a home, each run measures
    with contextlib.suppress(OSError, LorakitError, RuntimeError):
        path = cache_folder("measured") / f"{key}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"question": question, "answer": answer})
    return answer
