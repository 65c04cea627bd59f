"""Stage a merged model in a folder beside its target, so that a killed merge resumes after its last finished file.

``.NAME.merging/`` holds ``model/``, which becomes the target in one rename, and ``progress.json``: the digest of all
inputs, and for every finished file its size, its time and its lines of the ledger.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lorakit.errors import LorakitError, MergeError, TemporaryFailure
from lorakit.files.atomic import commit_folder, disk_full_as_retryable, file_signature, sync_file, write_json

Lines = list[dict[str, Any]]


class Staging:
    """A merge in progress, or an interrupted one. ``inputs``: digest of everything that the result depends on."""

    def __init__(self, target: Path, inputs: str) -> None:
        self._target, self._inputs = target, inputs
        self.folder = target.with_name(f".{target.name}.merging")
        self.model = self.folder / "model"
        self._progress = self.folder / "progress.json"
        self._finished: dict[str, dict[str, Any]] = {}

    def open(self) -> None:
        """Resume an interrupted merge of the same inputs, or start with an empty folder."""
        progress: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            progress = json.loads(self._progress.read_text())
        if not isinstance(progress, dict) or progress.get("inputs") != self._inputs:
            shutil.rmtree(self.model, ignore_errors=True)
            progress = {"inputs": self._inputs, "finished": {}}
        for part in self.folder.glob("*.part"):
            part.unlink()
        self._finished = progress["finished"]
        self.model.mkdir(exist_ok=True)

    def finished(self, name: str) -> Lines | None:
        """Return the ledger's lines of a finished file; None if it is unfinished or has changed since."""
        record = self._finished.get(name)
        if record is None or record["stamp"] != file_signature(self.model / name):
            return None
        lines: Lines = record["lines"]
        return lines

    def finish(self, part: Path, name: str, lines: Lines) -> None:
        """Make a written file durable under its final name, then record it as finished."""
        sync_file(part)
        os.replace(part, self.model / name)
        self._finished[name] = {"stamp": file_signature(self.model / name), "lines": lines}
        write_json(self._progress, {"inputs": self._inputs, "finished": self._finished})

    def commit(self) -> None:
        """Rename the model to the target."""
        commit_folder(self.model, self._target)
        shutil.rmtree(self.folder)


@contextlib.contextmanager
def staged(target: Path, inputs: str) -> Iterator[Staging]:
    """Open a staging folder for ``target``, locked by this process.

    An interruption or a full disk leaves the folder for the next run. Any other error would recur, so it removes the
    folder.

    Raises:
        MergeError: ``target`` exists, or another process merges into it. TemporaryFailure: the disk is full.
    """
    staging = Staging(target, inputs)
    staging.folder.mkdir(parents=True, exist_ok=True)
    with open(staging.folder / ".lock", "w") as lock, disk_full_as_retryable(target):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MergeError(f"out: another process is merging into {target}; wait for it, or choose another") from None
        if os.path.lexists(target):
            shutil.rmtree(staging.folder)
            raise MergeError(f"out: {target} exists already; choose another folder, or remove it")
        try:
            staging.open()
            yield staging
        except LorakitError as problem:
            if not isinstance(problem, TemporaryFailure):
                shutil.rmtree(staging.folder, ignore_errors=True)
            raise
