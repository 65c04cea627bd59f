"""Code that is recognised word for word, its comments aside: what it computes must stay what it computed."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn


def forward_source(module: nn.Module) -> str:
    """The statements of a module's forward on one line; nothing where its forward has been replaced."""
    return "" if "forward" in vars(module) else normalized_source(type(module).forward)


@cache
def normalized_source(function: Callable[..., Any]) -> str:
    """The statements of a function on one line, without comments; nothing when its source is not to be had."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError):
        return ""
    if not isinstance(tree, ast.FunctionDef):
        return ""
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    return "; ".join(ast.unparse(statement) for statement in body)
