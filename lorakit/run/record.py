"""Lock a run's output folder as long as its process lives; write run.json there, and check it when the run goes on."""

import fcntl
import json
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

from lorakit.errors import RunError
from lorakit.files.atomic import try_lock, write_json
from lorakit.files.text import first_of, flatten, read_object
from lorakit.patch.adapter_config import CONFIG_FILE
from lorakit.version import VERSION, versions

RECORD: Final = "run.json"
SAMPLES: Final = "samples.json"
"""the first held-out rows with their answers in the last evaluation that generated, the first, and the best one"""
RESUMABLE_KEYS: Final = {
    "data.cache_gb", "evaluation.max_new_tokens", "evaluation.measures", "evaluation.num_rows", "output",
    "train.activation_checkpointing", "train.activation_offload", "train.eval_every_steps", "train.eval_generate",
    "train.keep_checkpoints", "train.log_to", "train.micro_batch_size", "train.save_every_seconds",
    "train.save_every_steps",
}  # fmt: skip
"""keys that may change in a run that goes on, as those of `parallel`: no update depends on them but in last digits"""
MEASURE_KEYS: Final = {"evaluation.max_new_tokens", "evaluation.num_rows"}
"""those of them that change what a measure is of, so that its best value before and after do not compare"""
EXTENDABLE_KEYS: Final = {"train.steps", "train.epochs", "train.early_stopping_evals", "train.select"}
"""keys that decide when a run ends and which step becomes the patch; a finished run goes on where one changed"""
OTHERS: Final = frozenset({"best", "last"})  # folders of the output for the patch of the step that was not chosen
START_OVER: Final = "start over: `lorakit train RECIPE --fresh` (in Python fresh=True)"
"""remedy of errors, also of other commands than train"""
SHOWN_CHANGES: Final = 10
LOOK_SECONDS: Final = 0.1  # before the second try, because `is_locked` of another process has the lock for an instant


class RunRecord:
    """Record of the run in an output folder. ``goes_on``: it had finished, and its recipe has another end now."""

    def __init__(self, folder: Path, values: dict[str, Any], *, goes_on: bool = False) -> None:
        self._path = folder / RECORD
        self.values = values
        self.goes_on = goes_on

    @property
    def finished(self) -> bool:
        """True if there is nothing left to do."""
        return self.values.get("status") == "finished" and not self.goes_on

    def start(self, **facts: Any) -> None:
        """Record the facts of a start. Raises RunError: data or base are no longer what the run began with."""
        for key in ("data", "base"):
            if lines := _changed(self.values.get(key) or {}, facts[key], f"{key}."):
                shown = first_of(lines, SHOWN_CHANGES, "\n  ")
                what = f"{self._path}: {key} has changed since this run began"
                raise RunError(f"{what}:\n  {shown}\nPut it back, or {START_OVER}")
        if "starts" in self.values and self.values.get("own_objective") != facts.get("own_objective"):
            is_own = facts.get("own_objective", False)
            before, now = ("the recipe's objective", "objective=... of lorakit.train")[:: 1 if is_own else -1]
            raise RunError(f"{self._path}: this run began with {before}, and goes on with {now}; use the same")
        start = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "host": platform.node(), "versions": versions()}
        start |= {"parallel": self.values["recipe"]["parallel"], "total_steps": facts["total_steps"]}
        self.values.setdefault("starts", []).append(start)
        for key in self.values.pop("facts_of_end", ()):  # of an end that was not the last
            self.values.pop(key, None)
        self.values |= {"status": "running", **facts}
        write_json(self._path, self.values)

    def finish(self, status: str = "finished", **facts: Any) -> None:
        """Record how the run ended. ``status``: `stopped` for a run that goes on with the same recipe."""
        self.values |= {"status": status, "facts_of_end": sorted(facts), **facts}
        write_json(self._path, self.values)


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], within: str) -> list[str]:
    """Return a line for each recorded fact that is another now; a fact that the record lacks is none."""
    if "digest" in before and before["digest"] == now.get("digest"):
        return []  # the same rows, which a newer lorakit may count otherwise
    lines = []
    for name, fact in sorted(before.items()):
        if isinstance(fact, dict) and isinstance(now.get(name), dict):
            lines += _changed(fact, now[name], f"{within}{name}.")
        elif name not in now or now[name] != fact:
            lines.append(f"{within}{name}: {repr(fact)[:60]} before, {repr(now.get(name))[:60]} now")
    return lines


def recorded_run(folder: Path) -> dict[str, Any]:
    """Return the values of a record; empty without a readable one, which `open_record` refuses with a message."""
    values = read_object(folder / RECORD)
    return values if isinstance(values.get("recipe"), dict) else {}


def open_record(folder: Path, recipe: dict[str, Any], *, fresh: bool) -> RunRecord:
    """Read the record of an output folder, or make a new one. Nothing is written.

    ``fresh``: the run in the folder is about to be discarded, so any record is accepted.
    Raises RunError: the folder holds files of others or another recipe's run, or another run deletes it.
    """
    for above in folder.absolute().parents:
        if (above / RECORD).exists() and folder.absolute().relative_to(above).parts[0] in {*OTHERS, "checkpoints"}:
            raise RunError(f"output: {folder} is in a folder that the run in {above} deletes; choose another output")
    path = folder / RECORD
    is_new = not path.exists() and not (folder / CONFIG_FILE).exists()
    if is_new:
        _check_empty(folder)
    if is_new or fresh:
        return RunRecord(folder, {"lorakit": VERSION, "recipe": recipe})
    if not path.exists():
        raise RunError(f"output: {folder} holds a patch that no run here made; choose another output, or {START_OVER}")
    try:
        values = json.loads(path.read_text())
        # here, because whoever only reads a record needs no schema, and importing it takes a quarter of a second
        from lorakit.recipe.schema import default_values

        # a run of an older lorakit has no keys that are newer: it did what their defaults say
        before = flatten(default_values()) | flatten(values["recipe"])
        before.pop("train.compile", None)  # of an older lorakit, where it changed last digits at most
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise RunError(f"{path}: cannot be read ({problem}); {START_OVER}") from None
    now = flatten(recipe)
    changed = {key for key in now | before if now.get(key) != before.get(key)}
    may_change = RESUMABLE_KEYS | EXTENDABLE_KEYS
    if now.get("evaluation.best") != "loss":
        may_change -= MEASURE_KEYS
    if differing := [key for key in changed if key not in may_change and not key.startswith("parallel.")]:
        both = ((key, repr(before.get(key))[:200], repr(now.get(key))[:200]) for key in sorted(differing))
        lines = "\n".join(f"  {key}: {old} before, {new} now" for key, old, new in both)
        what = f"output: {folder} holds the run of another recipe"
        raise RunError(f"{what}:\n{lines}\nChoose another output, or {START_OVER}")
    goes_on = values.get("status") == "finished" and not changed.isdisjoint(EXTENDABLE_KEYS)
    return RunRecord(folder, {**values, "recipe": recipe}, goes_on=goes_on)


def _check_empty(folder: Path) -> None:
    """Raise RunError unless an output folder without a record and without a patch is empty, or not there."""
    others = sorted(other.name for other in folder.iterdir() if other.name != ".lock") if folder.exists() else []
    if steps := sorted((folder / "checkpoints").glob(f"step-*/{CONFIG_FILE}")):
        remedy = f"put it back, or choose another output and begin there (adapter.start_from: {steps[-1].parent})"
        raise RunError(f"output: {folder} holds checkpoints of a run and no {RECORD}, the record of them; {remedy}")
    if others:
        raise RunError(f"output: {folder} holds other files ({', '.join(others[:4])}); choose a new or an empty folder")


def read_samples(folder: Path) -> dict[str, list[Mapping[str, Any]]]:
    """Return step -> held-out rows with the answers of that step; empty without a readable file of them."""
    samples = read_object(folder / SAMPLES)
    by_step = {**samples.get("earlier", {}), str(samples.get("step")): samples.get("rows")}
    lists = {step: rows for step, rows in by_step.items() if isinstance(rows, list)}
    return {step: [row for row in rows if isinstance(row, Mapping)] for step, rows in lists.items()}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder; in the end delete an empty one. Raises RunError: a living run holds it, or it is read-only."""
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+")  # noqa: SIM115 - stays open, because closing it releases the lock
    except OSError as problem:
        raise RunError(f"output: {folder.absolute()} cannot be written: {problem.strerror}") from None
    with file:
        if not _lock(path, file):
            time.sleep(LOOK_SECONDS)
            if not _lock(path, file):
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise RunError(f"output: {folder} is in use by {holder}; wait for it, stop it or choose another output")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            with suppress(OSError):
                if [each.name for each in folder.iterdir()] == [path.name]:  # of a run that was refused before it began
                    path.unlink()
                    folder.rmdir()


def _lock(path: Path, file: IO[Any]) -> bool:
    """Lock an open file; False if another process prevents that, or if a refused run has deleted the file since."""
    with suppress(FileNotFoundError):
        return try_lock(file, fcntl.LOCK_EX) and os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


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
