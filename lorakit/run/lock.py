"""Lock an output folder for one run; the lock ends with its process."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from lorakit.errors import RunError


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder for this process.

    Raises:
        RunError: another living run holds it (named by process and host), or the folder cannot be written.
    """
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+")  # noqa: SIM115 - stays open, because closing it releases the lock
    except OSError as problem:
        raise RunError(f"output: {folder.absolute()} cannot be written: {problem.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise RunError(
                f"output: {folder} is in use by {holder}; wait for it, stop it, or choose another output"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
