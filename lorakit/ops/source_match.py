"""Recognise a function by its source code, comments and layout aside.

A fused form may replace a function only if it computes the same bits. Equal source code guarantees that. A class name
does not, because authors change formulas without renaming classes.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn


def forward_source(module: nn.Module) -> str:
    """Return the statements of a module's forward on one line; empty if the instance's forward was replaced."""
    return "" if "forward" in vars(module) else normalized_source(type(module).forward)


@cache
def normalized_source(function: Callable[..., Any]) -> str:
    """Return a function's statements on one line, without comments and docstring; empty without a source file."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError):
        return ""
    if not isinstance(tree, ast.FunctionDef):
        return ""
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    return "; ".join(ast.unparse(statement) for statement in body)
