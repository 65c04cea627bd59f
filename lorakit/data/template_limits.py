"""Limit the values that chat templates of others compute: `10 ** 10 ** 9` is one step, which no signal ends.

Invariant: an operator's result is refused before it is computed, and a rendering ends, in whatever thread it runs.
"""

import ctypes
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from types import FrameType
from typing import Any, Final, ParamSpec, TypeVar

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

P = ParamSpec("P")
T = TypeVar("T")
MAX_SIZE: Final = 1 << 24  # characters of a text, entries of a list
MAX_BITS: Final = 1 << 12  # of a whole number
MAX_TICKS: Final = 10  # of one rendering; counted, because a process that was suspended has computed nothing
TICK: Final = 0.5  # seconds
WIDTH: Final = re.compile(r"%[^%a-zA-Z]*(\*|\d{5})")  # of a number in `'%9999999d' % 1`


class _Code(CodeGenerator):
    """Writes a template as Python in which `~`, which the sandbox does not intercept, is limited too."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.limited(")
        super().visit_Concat(node, frame)
        self.write(")")


class LimitedSandbox(ImmutableSandboxedEnvironment):
    """jinja's sandbox, in which operators raise SecurityError instead of computing a huge value."""

    intercepted_binops = frozenset(("**", "*", "%", "+"))
    code_generator_class = _Code

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        numbers = [value for value in (left, right) if isinstance(value, int)] if operator != "+" else []
        if len(numbers) == 2 and operator in ("*", "**"):
            bits = [value.bit_length() for value in numbers]
            _check(bits[0] * abs(right) if operator == "**" else sum(bits), MAX_BITS)
        elif operator == "*" and numbers:
            _check(max(_size(left), _size(right)) * abs(numbers[0]), MAX_SIZE)
        elif operator == "%" and isinstance(left, str) and WIDTH.search(left):
            raise SecurityError("the chat template writes a number of 10,000 digits or more")
        return self.limited(super().call_binop(context, operator, left, right))

    def limited(self, value: Any) -> Any:
        """Return a value that was computed from two limited ones."""
        _check(_size(value), MAX_SIZE)
        return value


class EndlessTemplate(SecurityError):
    """Raised in a thread in which a chat template computes too long."""

    def __init__(self, text: str = f"the chat template computes for more than {MAX_TICKS * TICK:g} seconds") -> None:
        super().__init__(text)


def limited_rendering(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function that renders raise EndlessTemplate, in its thread, where loops in loops take too long."""

    @wraps(function)
    def limited(*args: P.args, **kwargs: P.kwargs) -> T:
        renderings, thread = _watched(), threading.get_ident()
        if thread in renderings:
            return function(*args, **kwargs)
        renderings[thread] = _Rendering(sys._getframe())
        try:
            return function(*args, **kwargs)
        finally:
            renderings.pop(thread, None)
            _raise_in(thread, None)  # what is not raised yet would be raised in what follows

    return limited


@dataclass
class _Rendering:
    """A rendering under way. ticks: since its start."""

    frame: FrameType
    ticks: int = 0


@lru_cache(maxsize=1)
def _watched() -> dict[int, _Rendering]:
    """Return the renderings of this process, by thread, which another thread watches: no lock that could stay held."""
    renderings: dict[int, _Rendering] = {}

    def watch() -> None:
        while True:
            time.sleep(TICK)
            _tick(renderings)

    threading.Thread(target=watch, daemon=True).start()
    return renderings


def _tick(renderings: dict[int, _Rendering]) -> None:
    """End renderings that take too long. No frame is held between ticks: it would hold what its function does."""
    for thread, rendering in list(renderings.items()):
        rendering.ticks += 1
        frame = sys._current_frames().get(thread)
        while frame is not None and frame is not rendering.frame:
            frame = frame.f_back
        if frame is None:  # it has ended, whatever interrupted its end
            renderings.pop(thread, None)
        elif rendering.ticks >= MAX_TICKS:  # again, because a template or a finalizer may catch it
            _raise_in(thread, EndlessTemplate)


os.register_at_fork(after_in_child=_watched.cache_clear)  # a process that was forked has no such thread


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    raised = ctypes.py_object(error) if error else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _check(size: int, limit: int) -> None:
    if size > limit:
        raise SecurityError(f"the chat template computes a value of more than {limit:,} characters, entries or bits")
