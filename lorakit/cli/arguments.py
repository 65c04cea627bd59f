"""Options that several commands share, and the texts they are written as."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lorakit.errors import LorakitError

Run = Callable[[argparse.Namespace], int]
Add = Callable[[str, Run, str], argparse.ArgumentParser]
"""(name, what runs, sentence for --help) -> the command's parser"""


def named(items: Sequence[str], flag: str) -> dict[str, str]:
    """NAME=VALUE options as a mapping.

    Raises:
        LorakitError: not of that form, a name given twice, or one that means the plain base.
    """
    found: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not (name and equals and value):
            raise LorakitError(f"{flag} {item!r}: write it as NAME=PATH")
        if name in ("none", "base"):
            raise LorakitError(f"{flag} {item!r}: {name!r} means the plain base; choose another name")
        if name in found:
            raise LorakitError(f"{flag} {item!r}: the name {name!r} is given twice")
        found[name] = value
    return found


def weighted(text: str) -> tuple[str, float]:
    """DIR or DIR:WEIGHT.

    Raises:
        LorakitError: the weight is no number.
    """
    if text.startswith("builtin:"):
        raise LorakitError(f"{text!r} is a base; write the base first, then the patches (with --as-patch patches only)")
    path, colon, weight = text.rpartition(":")
    if not colon or Path(text).is_dir():
        return text, 1.0
    try:
        return path, float(weight)
    except ValueError:
        raise LorakitError(f"{text!r}: write it as DIR or DIR:WEIGHT, with a number") from None


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 expected, got {text!r}")
    return int(text)


def recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """A recipe and its overrides."""
    parser.add_argument("recipe", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override recipe keys")


def base_argument(parser: argparse.ArgumentParser) -> None:
    """The base."""
    parser.add_argument("base", help="model folder, hub id or builtin:tiny")


def adapter_argument(parser: argparse.ArgumentParser) -> None:
    """Adapters by name."""
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=DIR", help="patch to load; may be repeated"
    )


def revision_argument(parser: argparse.ArgumentParser) -> None:
    """Which state of a hub id."""
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")


def mismatch_argument(parser: argparse.ArgumentParser) -> None:
    """The way past a base that is not the patch's."""
    parser.add_argument("--allow-base-mismatch", action="store_true", help="accept a patch trained on another base")


def dtype_argument(parser: argparse.ArgumentParser) -> None:
    """What a base is loaded in."""
    options: dict[str, Any] = {"choices": ("auto", "float32", "bfloat16"), "default": "auto"}
    parser.add_argument("--dtype", **options)
