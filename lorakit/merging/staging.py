"""The folder a merged model grows in, beside its target: what is finished in it survives a kill and is used again.

``.NAME.merging/`` holds ``model/``, which becomes the target in one rename, and ``progress.json``: the digest of all
inputs, and of every finished file its size, its time and its lines of the ledger.
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
    """A merge under way, or one that was interrupted. ``inputs``: a digest of everything it is made from."""

    def __init__(self, target: Path, inputs: str) -> None:
        self._target, self._inputs = target, inputs
        self.folder = target.with_name(f".{target.name}.merging")
        self.model = self.folder / "model"
        self._progress = self.folder / "progress.json"
        self._finished: dict[str, dict[str, Any]] = {}

    def open(self) -> None:
        """Take up what an interrupted merge of the same inputs left, or start with nothing."""
        told: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            told = json.loads(self._progress.read_text())
        if not isinstance(told, dict) or told.get("inputs") != self._inputs:
            shutil.rmtree(self.model, ignore_errors=True)
            told = {"inputs": self._inputs, "finished": {}}
        for part in self.folder.glob("*.part"):
            part.unlink()
        self._finished = told["finished"]
        self.model.mkdir(exist_ok=True)

    def finished(self, name: str) -> Lines | None:
        """The ledger's lines of a file that is whole already, else None."""
        told = self._finished.get(name)
        if told is None or told["stamp"] != file_signature(self.model / name):
            return None
        lines: Lines = told["lines"]
        return lines

    def finish(self, part: Path, name: str, lines: Lines) -> None:
        """A file was written beside its place: make it durable, and remember that it is whole."""
        sync_file(part)
        os.replace(part, self.model / name)
        self._finished[name] = {"stamp": file_signature(self.model / name), "lines": lines}
        write_json(self._progress, {"inputs": self._inputs, "finished": self._finished})

    def commit(self) -> None:
        """Give the model its name."""
        commit_folder(self.model, self._target)
        shutil.rmtree(self.folder)


@contextlib.contextmanager
def staged(target: Path, inputs: str) -> Iterator[Staging]:
    """A staging folder for ``target``, held by this process alone.

    An interruption or a full disk leaves it for the next run; an error that another run would meet again removes it.

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
