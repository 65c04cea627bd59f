"""Limit the values that chat templates of others compute: `10 ** 10 ** 9` is one step, which no signal ends.

Invariant: a large text, number or list is refused before it is computed, whether of an operator, a method, a filter or
a block, or within few times its limit; and a rendering ends, in whatever thread it runs.
"""

import ctypes
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, wraps
from types import FrameType
from typing import Any, Final, ParamSpec, TypeVar

from jinja2 import Environment, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

P = ParamSpec("P")
T = TypeVar("T")
MAX_SIZE: Final = 1 << 24  # characters of a text, entries of a list
LIST_ENTRY: Final = 16  # characters that an entry of a list counts as, where lists are added
MAX_BITS: Final = 1 << 12  # of a whole number
MAX_TICKS: Final = 10  # of one rendering; counted, because a process that was suspended has computed nothing
TICK: Final = 0.5  # seconds
WIDTH: Final = re.compile(r"%(\([^)]*\))?[^%a-zA-Z]*(\*|\d{5})")  # of a number in `'%9999999d' % 1`
FIELD: Final = re.compile(r"\{[^{}]+\{|\{.*:[^{}]{0,8}\d{5}", re.DOTALL)  # the same in `'{:9999999}'.format(1)`
ADDED: Final[Mapping[str, Callable[..., int]]] = {
    **dict.fromkeys(
        ("center", "ljust", "rjust", "zfill", "do_center", "do_batch", "do_slice"),
        lambda _, *given, **named: _largest(given, named),
    ),
    **dict.fromkeys(
        ("tojson", "do_wordwrap", "do_urlize"), lambda value, *given, **named: _largest(given, named) * _weight(value)
    ),
    **dict.fromkeys(
        ("replace", "do_replace"), lambda text, old, new, *_, **__: str(text).count(str(old)) * len(str(new))
    ),
    **dict.fromkeys(("format", "format_map"), lambda text, *_, **__: len(FIELD.findall(text.replace("{{", ""))) << 30),
    "do_format": lambda text, *_, **__: len(WIDTH.findall(str(text))) << 30,
    "do_round": lambda _, *given, **named: _largest(given, named) << 10,
    "do_sum": lambda _, *given, **named: sum(isinstance(v, list | tuple) for v in (*given, *named.values())) << 30,
    "do_indent": lambda text, *given, **named: (str(text).count("\n") + 1) * _largest(given, named),
    "expandtabs": lambda text, *given, **named: text.count("\t") * _largest(given, named),
    "translate": lambda text, table: len(text) * _weight(table),
    "join": lambda glue, parts: len(glue) * len(parts) + _weight(parts),
    "do_join": lambda parts, d="", attribute=None: len(str(d)) * len(parts) + _weight(parts),
}
"""method of a text, or function of a filter -> how many characters it adds to its text with such arguments"""


class _Code(CodeGenerator):
    """Writes a template as Python in which what the sandbox does not intercept is limited: `~`, `|`, `[]` and `{}`."""

    def _visit(self, node: Any, frame: Frame) -> None:
        self.write("environment.limited(")
        getattr(super(), f"visit_{type(node).__name__}")(node, frame)
        self.write(")")

    visit_Concat = visit_Dict = visit_Filter = visit_List = _visit

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        (self._visit if node.ctx == "load" else super().visit_Tuple)(node, frame)


class LimitedSandbox(ImmutableSandboxedEnvironment):
    """jinja's sandbox, in which operators raise SecurityError instead of computing a huge value."""

    intercepted_binops = frozenset(("**", "*", "%", "+"))
    code_generator_class = _Code

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filters = _Filters({name: _checked(function) for name, function in self.filters.items()})

    def concat(self, parts: Iterable[str]) -> str:
        """Join what a template, a macro or a block writes."""
        written = []
        size = 0
        for part in parts:
            size += len(part)
            _check(size, MAX_SIZE)
            written.append(part)
        return "".join(written)

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(getattr(function, "__wrapped__", function), "__self__", None)  # jinja wraps `format` itself
        if isinstance(own, bytes | int) and function.__name__ != "decode":
            raise SecurityError("the chat template calls a method of bytes or of a number")
        if isinstance(own, str):
            function = _checked(function, own)
        return self.limited(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        numbers = [value for value in (left, right) if isinstance(value, int)] if operator != "+" else []
        if len(numbers) == 2 and operator in ("*", "**"):
            bits = [value.bit_length() for value in numbers]
            _check(bits[0] * abs(right) if operator == "**" else sum(bits), MAX_BITS)
        elif operator == "*" and numbers:
            _check(max(_weight(left), _weight(right)) * abs(numbers[0]), MAX_SIZE)
        elif operator == "%" and isinstance(left, str) and WIDTH.search(left):
            raise SecurityError("the chat template writes a number of 10,000 digits or more")
        result = super().call_binop(context, operator, left, right)
        _check(_size(result) * (LIST_ENTRY if isinstance(result, list) else 1), MAX_SIZE)
        # of a list no deeper, because a template may append to one for every message
        _check(sum(map(_size, result)) if isinstance(result, list) else 0, MAX_SIZE)
        return result

    def limited(self, value: Any) -> Any:
        """Return a value that was computed from limited ones."""
        if isinstance(value, int):
            _check(value.bit_length(), MAX_BITS)
        else:
            _check(len(value) if isinstance(value, str) else _weight(value), MAX_SIZE)
        return value


class _Filters(dict[str, Callable[..., Any]]):
    """The filters of a sandbox, to which transformers adds `tojson`."""

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _checked(function))


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


def _largest(given: Iterable[Any], named: Mapping[str, Any]) -> int:
    """Return the largest number among arguments, or the length of the longest text."""
    return max((abs(one) if isinstance(one, int) else _weight(one) for one in (*given, *named.values())), default=0)


def _weight(value: Any, known: dict[int, int] | None = None) -> int:
    """Return how many characters and entries a value has, with those of all entries, as often as it holds them."""
    known = {} if known is None else known
    if isinstance(value, list | tuple | dict) and id(value) not in known:
        known[id(value)] = 0  # of a list in itself
        entries = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = len(value) + sum(_weight(entry, known) for entry in entries)
    return known.get(id(value), _size(value))


def _checked(function: Callable[..., Any], *text: str) -> Callable[..., Any]:
    """Let a filter, or the method of a text, refuse to compute a large text."""
    added = ADDED.get(function.__name__)
    if added is None:
        return function

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
        own = args[1:] if args and isinstance(args[0], nodes.EvalContext | Environment | Context) else args
        _check(added(*text, *own, **kwargs), MAX_SIZE)
        return function(*args, **kwargs)

    return checked


def _check(size: int, limit: int) -> None:
    if size > limit:
        raise SecurityError(f"the chat template computes a value of more than {limit:,} characters, entries or bits")
