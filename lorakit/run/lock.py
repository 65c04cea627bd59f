"""Lock an output folder for one run; the lock ends with its process."""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from lorakit.errors import RunError
from lorakit.files.atomic import try_lock

LOOK_SECONDS = 0.1  # pause before the second try, because `is_locked` of another process has the lock for an instant


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder. Raises RunError: a living run holds it (process and host), or it cannot be written."""
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+")  # noqa: SIM115 - stays open, because closing it releases the lock
    except OSError as problem:
        raise RunError(f"output: {folder.absolute()} cannot be written: {problem.strerror}") from None
    with file:
        if not try_lock(file, fcntl.LOCK_EX):
            time.sleep(LOOK_SECONDS)
            if not try_lock(file, fcntl.LOCK_EX):
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise RunError(f"output: {folder} is in use by {holder}; wait for it, stop it or choose another output")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def check_writable(folder: Path) -> None:
    """Raise RunError if a run could not write the folder, or make it. Nothing is written."""
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise RunError(f"output: {folder.absolute()} cannot be written: {parent} is a file or write-protected")


def is_locked(folder: Path) -> bool:
    """True if a run holds the folder. Nothing is written, so a folder that can only be read will do."""
    try:
        with open(folder / ".lock") as file:
            return not try_lock(file, fcntl.LOCK_SH)
    except OSError:  # no file, so no run that was started since the folder was copied here
        return False
