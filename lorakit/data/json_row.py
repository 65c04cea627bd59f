"""Parse one JSON text to a row.

Invariant: a text that is no row becomes a BadRow with the reason; nothing else is raised.
"""

import json
import math
from typing import Any, Final

ARRAY_REMEDY: Final = "a file that is one JSON array is read if its name ends in .json"


class BadRow(ValueError):
    """A row that cannot be trained on; the message is the reason."""


def parse_raw(raw: Any) -> Any | BadRow:
    """Return the row that `read_raw` read."""
    return parse_row(raw) if isinstance(raw, bytes) else raw


def without_none(value: Any) -> Any:
    """Remove the empty fields of a table's row, because a table gives every row the fields of all rows."""
    if isinstance(value, dict):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list) else value


def parse_row(raw: bytes) -> Any | BadRow:
    """Parse one JSON line, or return a BadRow with the reason."""
    try:
        row = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constants, parse_float=_finite
        )
        json.dumps(row, ensure_ascii=False).encode()  # raises for half a surrogate pair, which json.loads accepts
        return row
    except UnicodeEncodeError:
        return BadRow("half a surrogate pair (\\ud800 to \\udfff), which is no character")
    except UnicodeDecodeError as problem:
        return BadRow(f"not UTF-8: byte {problem.start}")
    except json.JSONDecodeError as problem:
        array = f"; {ARRAY_REMEDY}" if raw.startswith(b"[") else ""
        return BadRow(f"not JSON: {problem.msg} at column {problem.colno}{array}")
    except RecursionError:
        return BadRow("not JSON: nested too deeply")
    except BadRow as problem:
        return problem
    except ValueError as problem:  # a number with more digits than Python reads
        return BadRow(f"not JSON: {problem}")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise BadRow(f"key {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return result


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise BadRow(f"not JSON: {text} is too large for a number")
    return number


def _no_constants(text: str) -> Any:
    raise BadRow(f"not JSON: {text}")
