"""Limit the values that chat templates of others compute: `10 ** 10 ** 9` is one step, which no signal ends.

Invariant: an operator's result is refused before it is computed. Loops are as long as jinja's own limits let them be.
"""

import re
from typing import Any, Final

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SIZE: Final = 1 << 26  # characters of a text, entries of a list
MAX_BITS: Final = 1 << 12  # of a whole number
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
        numbers = [value for value in (left, right) if isinstance(value, int)]
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


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _check(size: int, limit: int) -> None:
    if size > limit:
        raise SecurityError(f"the chat template computes a value of more than {limit:,} characters, entries or bits")
