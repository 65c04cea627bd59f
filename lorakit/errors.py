"""The errors a user can fix; any other exception is a bug."""

import copyreg
import difflib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class LorakitError(Exception):
    """Base of all errors a user can fix. The message names the problem, its location, the value, and the remedy.

    The command says it in one block without a traceback, and ends with `exit_code`.
    """

    exit_code = 2

    def __reduce__(self) -> tuple[Any, ...]:
        # between processes without __init__, because some errors are built of more than their message
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class RecipeError(LorakitError):
    """An invalid recipe; the message names every problem, one per line."""


class BaseModelError(LorakitError):
    """A base that is missing, incomplete or in an unsupported form."""


class TargetError(LorakitError):
    """Targets that match nothing, or layers that cannot be adapted."""


class AdapterNotLoadedError(LorakitError):
    """A name under which no adapter is loaded."""


class ContextLengthError(LorakitError):
    """A prompt, or a prompt with its answer, is longer than there is room for."""


class DataError(LorakitError):
    """Rows that cannot be trained on; the message names file and line."""


class PatchError(LorakitError):
    """A patch that is truncated, in an unsupported form, or of another base."""


class HubError(LorakitError):
    """A repository of the hub that cannot be read or written."""


class MergeError(LorakitError):
    """A merge that would lose or misplace part of an adapter."""


class RunError(LorakitError):
    """A run that must not start or had to stop: a wrong folder, a loss that is not finite."""


class PeerFailure(LorakitError):
    """Another process of the run failed, so this process ends too. The message names that process and its error."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class TemporaryFailure(LorakitError):
    """Interrupted, or the disk is full. State is saved, and the same command continues."""

    exit_code = 75


@dataclass(frozen=True)
class translate_error:
    """Raise another error, with the message "{what}: {problem}", for exceptions of these kinds in a block.

    A class, because mypy assumes that a function under `contextmanager` may swallow exceptions, and then rejects a
    `return` in the block. what: None if the exception's own message is enough.
    """

    kinds: type[Exception] | tuple[type[Exception], ...]
    error: type[Exception]
    what: str | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, problem: BaseException | None, traceback: object) -> None:
        if isinstance(problem, self.kinds):
            raise self.error(str(problem) if self.what is None else f"{self.what}: {problem}") from None


def collect_problems(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return a function's result for each item. Raises DataError: with the problems of all items, each once."""
    results = list[Result]()
    problems = list[str]()
    for item in items:
        try:
            results.append(function(item))
        except (DataError, HubError) as problem:
            problems.append(str(problem))
    if problems:
        raise DataError("\n".join(dict.fromkeys(problems)))
    return results


def did_you_mean(word: str, known: Iterable[str], count: int = 3, within: Path | None = None) -> str:
    """Return ``" Nearest: 'a', 'b'."`` with the known words closest to ``word``, or an empty string.

    within: the folder of these words, if they are names of files.
    """
    matches = difflib.get_close_matches(word, list(dict.fromkeys(known)), n=count, cutoff=0.5)
    shown = matches if within is None else [str(within / match) for match in matches]
    return f" Nearest: {', '.join(map(repr, shown))}." if shown else ""


def check_absent(path: str | Path | None, name: str = "--out", error: type[LorakitError] = LorakitError) -> None:
    """Raise an error if the file or folder that is about to be written exists. name: of the option with its path."""
    if path is not None and os.path.lexists(path):
        raise error(f"{name}: {path} exists already; choose another name, or remove it")


def check_platform() -> None:
    """Raise LorakitError on Windows."""
    if sys.platform == "win32":
        raise LorakitError(
            "Windows lacks what lorakit needs (locks of files, durable folders, groups of processes): run it in WSL,"
            " which is Linux"
        )
