"""Write text: aligned columns, sizes in bytes, counts, durations; and read objects of JSON."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lorakit.errors import LorakitError

MAX_NAME: Final = 128  # characters
Say = Callable[[str], None]  # prints a line
UNITS: Final = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
SHORT_NAMES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def full_dtype_name(name: Any) -> Any:
    """Return torch's name of a dtype for the field's short one; anything else unchanged, for its own check."""
    return SHORT_NAMES.get(name, name) if isinstance(name, str) else name


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, for `json.loads`. Raises ValueError: a key is there twice."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} appears twice")
        result[key] = value
    return result


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file cannot be read, or holds no object."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def columns(rows: Sequence[Sequence[str]], align: str = "") -> list[str]:
    """Return a line for each row, in equal columns. align: ``<`` or ``>`` for each column, by default left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = align.ljust(len(widths), "<")
    line = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return [line.format(*row).rstrip() for row in rows]


def say_lines(say: Say, lines: Iterable[str]) -> None:
    for line in lines:
        say(line)


def size(num_bytes: float) -> str:
    """Return bytes in decimal units with three significant digits, such as ``16.1 GB``."""
    for unit, name in UNITS:
        if num_bytes >= unit:
            value = num_bytes / unit
            return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {name}"
    return f"{num_bytes:.0f} bytes"


def count(number: int) -> str:
    """Return a count in short, such as ``8.03 B``, ``131.07 k`` or ``28``."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return str(number)


def first_of(texts: Sequence[str], number: int, between: str = ", ") -> str:
    """Return so many texts, and how many more there are: after a comma's list, else as an item of its own."""
    joint = " " if between == ", " else f"{between}... "
    more = f"{joint}and {len(texts) - number} more" if len(texts) > number else ""
    return between.join(texts[:number]) + more


def facts(**values: Any) -> list[str]:
    """Return a line for each value that is not None: its name, with spaces for underscores, and the value."""
    return [f"{name.replace('_', ' '):<12} {value}" for name, value in values.items() if value is not None]


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 thread``, ``2 threads`` or ``2 processes``."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def duration(seconds: float) -> str:
    """Return seconds as text: ``41 s``, ``12 min 5 s`` or ``3 h 20 min``."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{rounded} s"
    minutes, rest = divmod(rounded, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def check_name(name: object, what: str, error: type[LorakitError] = LorakitError) -> None:
    """Raise an error unless this can name a model or an adapter in lists, logs and metrics. what: has the name."""
    if not (isinstance(name, str) and name.isprintable() and name.strip() == name and 0 < len(name) <= MAX_NAME):
        rule = f"a name has 1 to {MAX_NAME} characters that can be printed, and no space at its ends"
        raise error(f"{what}: {rule}; got {str(name)[:MAX_NAME]!r}")


CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Return a text of others with its control characters escaped, which move a terminal's cursor and colours."""
    return CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)
