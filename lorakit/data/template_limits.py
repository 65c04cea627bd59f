"""Limit the values that chat templates of others compute: `10 ** 10 ** 9` is one step, which no signal ends.

Invariant: a large text, number or list is refused before it is computed, whether of an operator, a method, a filter or
a block, or within few times its limit; and a rendering that computes too long ends at its next step.
"""

import re
import threading
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from functools import wraps
from math import inf
from typing import Any, Final, ParamSpec, TypeVar

from jinja2 import Environment, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

P = ParamSpec("P")
T = TypeVar("T")
MAX_SIZE: Final = 1 << 24  # characters of a text, entries of a list
LIST_ENTRY: Final = 16  # characters that an entry of a list counts as, where lists are added
MAX_BITS: Final = 1 << 12  # of a whole number
MAX_SECONDS: Final = 5.0  # that a thread computes for one rendering
WIDTH: Final = re.compile(r"%(\([^)]*\))?[^%a-zA-Z]*(\*|\d{5})")  # of a number in `'%9999999d' % 1`
FIELD: Final = re.compile(r"\{[^{}]+\{|\{.*:[^{}]{0,8}\d{5}", re.DOTALL)  # the same in `'{:9999999}'.format(1)`
ADDED: Final[Mapping[str, Callable[..., int]]] = {
    **dict.fromkeys(
        ("center", "ljust", "rjust", "zfill", "do_center", "do_batch", "do_slice"),
        lambda _, *given, **named: _largest(given, named),
    ),
    **dict.fromkeys(
        ("tojson", "do_tojson"), lambda value, *given, **named: _largest(given, named) * _weight(value) * _depth(value)
    ),
    **dict.fromkeys(  # which take the square of their time
        ("do_pprint", "do_striptags", "do_urlize", "do_wordwrap"),
        lambda value, *given, **named: max(1024, _largest(given, named)) * _weight(value),
    ),
    **dict.fromkeys(
        ("replace", "do_replace"), lambda text, old, new, *_, **__: str(text).count(str(old)) * len(str(new))
    ),
    **dict.fromkeys(
        ("format", "format_map"),
        lambda text, *given, **named: (
            (len(FIELD.findall(text.replace("{{", ""))) << 30) + text.count("{") * _weight([*given, *named.values()])
        ),
    ),
    "do_format": lambda text, *given, **named: (
        (len(WIDTH.findall(str(text))) << 30) + str(text).count("%") * _weight([*given, *named.values()])
    ),
    "strftime_now": lambda text: len(text) << 12,  # a field of which may be of 255 characters
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
    """Writes a template as Python in which what the sandbox does not intercept is limited: `~`, `|`, `[]` and `{}`.

    Each block, so each turn of a loop, and each comparison is a step, at which the time is looked at.
    """

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.step()")
        super().blockvisit(nodes, frame)

    def _visit(self, node: Any, frame: Frame, function: str = "limited") -> None:
        self.write(f"environment.{function}(")
        getattr(super(), f"visit_{type(node).__name__}")(node, frame)
        self.write(")")

    def _visit_step(self, node: Any, frame: Frame) -> None:
        self._visit(node, frame, "step")

    visit_Concat = visit_Dict = visit_Filter = visit_List = _visit
    visit_Compare = visit_Test = _visit_step

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        (self._visit_step if isinstance(node.arg, nodes.Slice) else super().visit_Getitem)(node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        (self._visit if node.ctx == "load" else super().visit_Tuple)(node, frame)


class LimitedSandbox(ImmutableSandboxedEnvironment):
    """jinja's sandbox, in which operators raise SecurityError instead of computing a huge value."""

    intercepted_binops = frozenset(("**", "*", "%", "+"))
    code_generator_class = _Code

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filters = _Filters({name: _checked(function) for name, function in self.filters.items()})
        self.globals.pop("lipsum")  # writes any number of words in one step

    def concat(self, parts: Iterable[str]) -> str:
        """Join what a template, a macro or a block writes."""
        written = []
        size = 0
        for part in parts:
            size += len(part)
            _check(size, MAX_SIZE)
            written.append(part)
        return "".join(written)

    def step(self, value: T | None = None) -> T | None:
        """Return a value; raise EndlessTemplate where the thread, by its own time, computes too long."""
        if time.perf_counter() > _LIMITS.clock and time.thread_time() > _LIMITS.computed:
            raise EndlessTemplate(f"the chat template computes for more than {MAX_SECONDS:g} seconds")
        return value

    def call_filter(self, *args: Any, **kwargs: Any) -> Any:
        return self.step(super().call_filter(*args, **kwargs))

    def call_test(self, *args: Any, **kwargs: Any) -> Any:
        return self.step(super().call_test(*args, **kwargs))

    def getitem(self, *args: Any) -> Any:  # of the attributes that filters look up, too
        return self.step(super().getitem(*args))

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(getattr(function, "__wrapped__", function), "__self__", None)  # jinja wraps `format` itself
        if isinstance(own, bytes | int) and function.__name__ != "decode":
            raise SecurityError("the chat template calls a method of bytes or of a number")
        if isinstance(own, str):
            function = _checked(function, own)
        elif getattr(function, "__name__", "") == "strftime_now":
            function = _checked(function)
        return self.limited(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        numbers = [value for value in (left, right) if isinstance(value, int)] if operator != "+" else []
        if len(numbers) == 2 and operator in ("*", "**"):
            bits = [value.bit_length() for value in numbers]
            _check(bits[0] * abs(right) if operator == "**" else sum(bits), MAX_BITS)
        elif operator == "*" and numbers:
            _check(max(_weight(left), _weight(right)) * abs(numbers[0]), MAX_SIZE)
        elif operator == "%" and isinstance(left, str):
            if WIDTH.search(left):
                raise SecurityError("the chat template writes a number of 10,000 digits or more")
            _check(left.count("%") * _weight(right), MAX_SIZE)
        result = self.step(super().call_binop(context, operator, left, right))
        _check(_size(result) * (LIST_ENTRY if isinstance(result, list) else 1), MAX_SIZE)
        # of a list no deeper, because a template may append to one for every message
        _check(sum(map(_size, result)) if isinstance(result, list) else 0, MAX_SIZE)
        return result

    def limited(self, value: Any) -> Any:
        """Return a value that was computed from limited ones."""
        self.step()
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
    """Raised where a chat template computes too long."""


def limited_rendering(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function that renders raise EndlessTemplate where what its templates compute takes too long."""

    @wraps(function)
    def limited(*args: P.args, **kwargs: P.kwargs) -> T:
        _LIMITS.clock, _LIMITS.computed = time.perf_counter() + MAX_SECONDS, time.thread_time() + MAX_SECONDS
        try:
            return function(*args, **kwargs)
        finally:
            _LIMITS.clock = inf

    return limited


class _Limits(threading.local):
    """When the rendering of a thread is to end. clock: by the clock, which is read fast; computed: by its own time."""

    clock = inf
    computed = inf


_LIMITS: Final = _Limits()


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _largest(given: Iterable[Any], named: Mapping[str, Any]) -> int:
    """Return the largest number among arguments, or the length of the longest text."""
    return max((abs(one) if isinstance(one, int) else _weight(one) for one in (*given, *named.values())), default=0)


def _weight(value: Any, known: dict[int, int] | None = None) -> int:
    """Return how many characters and entries a value has, with those of all entries, as often as it holds them."""
    known = {} if known is None else known
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")  # its own gives what the template set
    if isinstance(value, dict):
        entries = [*value, *value.values()]
    elif isinstance(value, ItemsView):
        entries = [part for item in value for part in item]
    else:
        entries = list(value) if isinstance(value, list | tuple | KeysView | ValuesView) else []
    if entries and id(value) not in known:
        known[id(value)] = 0  # of a list in itself
        known[id(value)] = len(value) + sum(_weight(entry, known) for entry in entries)
    return known.get(id(value), _size(value))


def _depth(value: Any) -> int:
    """Return how many lists and mappings are in one another at most, and 1."""
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return 1 + max(map(_depth, entries), default=0)


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
