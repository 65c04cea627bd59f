"""Match names of modules with the regular expressions of recipes, patches and bases, as PEFT does.

By `regex` and not `re`, because its matches end after a time, and other threads go on meanwhile (decision 0075).
"""

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any, Final

import regex

from lorakit.errors import LorakitError, translate_error

MAX_LETTERS: Final = 50_000  # of an expression, which takes about a second to compile then
MATCH_SECONDS: Final = 1.0  # computing time of one match; an honest one takes microseconds


def check_expression(text: str) -> str:
    """Return the text. Raises ValueError: too long, or no expression for PEFT, which uses `re`, or for `regex`."""
    if len(text) > MAX_LETTERS:
        raise ValueError(f"a regular expression of {len(text):,} letters; at most {MAX_LETTERS:,} are read")
    failures = (re.error, regex.error, OverflowError, RecursionError)
    with translate_error(failures, ValueError, "not a regular expression"):
        with warnings.catch_warnings(action="ignore"):  # of meanings that later versions may give it
            re.compile(text)
        regex.compile(text)
    return text


def as_ending(key: str) -> str:
    """Return the expression of a key of PEFT's rank_pattern and alpha_pattern, which matches the end of a name."""
    return rf"(.*\.)?({key})$"


def matches_all(expression: str, name: str) -> bool:
    """True if a name matches from its beginning to its end. Raises LorakitError: this takes too long to find out."""
    return _matches(_compiled(expression).fullmatch, expression, name)


def matches_beginning(expression: str, name: str) -> bool:
    """True if a name's beginning matches. Raises LorakitError: as ``matches_all``."""
    return _matches(_compiled(expression).match, expression, name)


def _matches(method: Callable[..., Any], expression: str, name: str) -> bool:
    try:
        return method(name, timeout=MATCH_SECONDS, concurrent=True) is not None
    except TimeoutError:
        slow = f"takes more than {MATCH_SECONDS:g} s for the name {name!r}"
        raise LorakitError(f"the pattern {expression!r} {slow}; write a simpler one") from None


@functools.lru_cache(10_000)
def _compiled(expression: str) -> "regex.Pattern[str]":
    check_expression(expression)
    return regex.compile(expression)
