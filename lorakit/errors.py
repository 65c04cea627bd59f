"""The errors a user can fix; anything else that is raised is a bug.

LorakitError                    exit code 2: one block, no traceback
├── RecipeError                 a recipe that cannot be used; names every offending line
├── BaseModelError              a base that is missing, incomplete or not in a form lorakit reads
├── TargetError                 an adapter that would touch nothing, or something it cannot adapt
├── DataError                   rows that cannot be trained on
├── PatchError                  a patch that is cut, foreign, or belongs to another base
├── MergeError                  a merge that would lose or misplace part of an adapter
├── RunError                    a run that must not start, or had to stop (wrong folder, non-finite loss)
├── PeerFailure              another process of the run failed; its exit code is that one's
└── TemporaryFailure               exit code 75: state is kept, the same command continues
"""

import difflib
from collections.abc import Iterable


class LorakitError(Exception):
    """Base of everything a user can fix. The message says what, where, which value, and what to do."""

    exit_code = 2


class RecipeError(LorakitError):
    """A recipe that cannot be used; the message names every problem, one per line."""


class BaseModelError(LorakitError):
    """A base that is missing, incomplete or not in a form lorakit reads."""


class TargetError(LorakitError):
    """Targets that match nothing, or layers that cannot be adapted."""


class DataError(LorakitError):
    """Rows that cannot be trained on; names file and line."""


class PatchError(LorakitError):
    """A patch that is cut, foreign, or belongs to another base."""


class MergeError(LorakitError):
    """A merge that would lose or misplace part of an adapter."""


class RunError(LorakitError):
    """A run that must not start or had to stop."""


class PeerFailure(LorakitError):
    """Another process of the run failed, and this one ends with it; the message says which and why."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class TemporaryFailure(LorakitError):
    """Interrupted, or the disk is full: state is kept and the same command goes on."""

    exit_code = 75


def did_you_mean(word: str, known: Iterable[str], count: int = 3) -> str:
    """``" Nearest: 'a', 'b'."`` for the known words closest to ``word``, or an empty string."""
    found = difflib.get_close_matches(word, list(dict.fromkeys(known)), n=count, cutoff=0.5)
    return f" Nearest: {', '.join(map(repr, found))}." if found else ""
