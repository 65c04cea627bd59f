"""Options that several commands share, and the functions that parse their values."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lorakit.errors import LorakitError, did_you_mean
from lorakit.files.atomic import write_file
from lorakit.files.text import check_name, printable

RunCommand = Callable[[argparse.Namespace], int | None]  # Parsed options -> exit code; None is 0
AddCommand = Callable[[str, RunCommand, str], argparse.ArgumentParser]
"""(name, function to run, sentence for --help) -> the command's parser."""


def print_line(text: str) -> None:
    """Print a text at once, so that a pipe shows progress."""
    print(printable(text), flush=True)


def parse_named(items: Sequence[str], flag: str) -> dict[str, str]:
    """Parse repeated NAME=PATH options into a mapping.

    Raises LorakitError: an item of another form, a repeated name, or a name reserved for the plain base.
    """
    paths: dict[str, str] = {}
    for item in items:
        name, equals, path = item.partition("=")
        if not (name and equals and path):
            raise LorakitError(f"{flag} {item!r}: write it as NAME=PATH")
        check_name(name, flag)
        if name in ("none", "base"):
            raise LorakitError(f"{flag} {item!r}: {name!r} means the plain base; choose another name")
        if name in paths:
            raise LorakitError(f"{flag} {item!r}: the name {name!r} is given twice")
        paths[name] = path
    return paths


def picked(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names}


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return those of the options that are not at their defaults."""
    return {name: value for name, value in picked(options, *names).items() if value != options.parser.get_default(name)}


def refuse(options: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """Raise LorakitError, with the reason, if one of the options is given, because it would change nothing."""
    if wrong := given(options, *names):
        raise LorakitError(f"{', '.join('--' + name.replace('_', '-') for name in wrong)}: {reason}")


def write_or_print(text: str, out: str | None) -> None:
    if out is None:
        print(text, end="")
    else:
        write_file(Path(out), text)


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 expected, got {text!r}")
    return int(text)


def port_number(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"a port from 0 to 65535 expected (0: any free one), got {text!r}")
    return int(text)


def add_repeated(parser: argparse.ArgumentParser, flag: str, metavar: str, text: str, **more: Any) -> None:
    """Add an option that may be given several times; its value is the list of them."""
    parser.add_argument(flag, action="append", default=[], metavar=metavar, help=f"{text}; may be repeated", **more)


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file")
    # a default, without which argparse says that overrides are required where the recipe is missing
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.path=value", help="override recipe keys")


def add_adapted_base(parser: argparse.ArgumentParser) -> None:
    """Add a base, its adapters, and which of them are accepted."""
    parser.add_argument("base", help="model folder, hub id or builtin:tiny")
    add_repeated(parser, "--adapter", "NAME=DIR", "patch, a folder or ORG/NAME[@REVISION] on the hub")
    add_revision_option(parser)
    add_allow_option(parser)


def add_revision_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")


def add_metric_option(parser: argparse.ArgumentParser) -> None:
    text = "measure answers with FUNCTION(predicted, expected) -> number too; the file's code runs"
    add_repeated(parser, "--metric", "FILE.py:FUNCTION", text)


def add_columns_option(parser: argparse.ArgumentParser) -> None:
    """Add the columns of a file that have other names than the keys of rows."""
    text = (
        "column that has the value of a key of rows, or a text with columns in braces, as data.columns of recipes:"
        " instruction=question output=answer"
    )
    parser.add_argument("--columns", nargs="+", action="extend", default=[], metavar="KEY=COLUMN", help=text)


def parse_template_kwargs(text: str) -> dict[str, Any]:
    """Parse variables for a chat template: a JSON mapping of names to text, numbers, true or false."""
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict) or not all(isinstance(one, bool | int | float | str) for one in values.values()):
        example = '{"enable_thinking": false}'
        raise argparse.ArgumentTypeError(f"a mapping in JSON such as {example} expected, got {text!r}")
    return values


def parse_columns(items: Sequence[str]) -> dict[str, str]:
    """Parse KEY=COLUMN options, as `data.columns` of a recipe.

    Raises LorakitError: an item of another form, a key that rows do not have, or a template that cannot be filled.
    """
    from lorakit.recipe.data import ROW_KEYS, check_columns

    columns: dict[str, str] = {}
    for item in items:
        key, _, column = item.partition("=")
        if not column or key in columns:
            raise LorakitError(f"--columns {item!r}: write each key once, as KEY=COLUMN")
        if key not in ROW_KEYS:
            raise LorakitError(f"--columns {item!r}: the keys are {', '.join(ROW_KEYS)}.{did_you_mean(key, ROW_KEYS)}")
        columns[key] = column
    try:
        return dict(check_columns(columns))
    except ValueError as problem:
        raise LorakitError(f"--columns {problem}") from None


def add_allow_option(parser: argparse.ArgumentParser) -> None:
    """Add what is accepted of a base that a patch was not trained on."""
    text = "accept a patch trained on another base, or with prompts that are written in another way"
    parser.add_argument("--allow", type=_allow, default=frozenset(), metavar="base,template", help=text)


def _allow(text: str) -> frozenset[str]:
    from lorakit.patch.same_base import ALLOW  # here, because its package imports torch

    words = frozenset(word.strip() for word in text.split(","))
    for word in words - {*ALLOW}:
        raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(ALLOW)}.{did_you_mean(word, ALLOW)}")
    return words
