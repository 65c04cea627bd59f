"""Check what a grammar of JSON leaves open: names that come twice, and schemas whose answers have no end."""

import json
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import unquote

from lorakit.errors import LorakitError

QUOTE: Final = ord('"')
NEEDED: Final = re.compile(rb"0{0,2}|00[01].?")
"""hex digits of the characters that JSON has to escape, and their beginnings"""
ENDLESS: Final = re.compile(r"[^$]*|[^$|]*(?:\]|\.|\\[dws]|\w)[+*]\$")
"""patterns of which each beginning of a name has names without number"""


@dataclass(frozen=True)
class JsonPosition:
    """A position in a JSON text while it is written."""

    open: tuple[frozenset[str] | None, ...] = ()  # names of each open object so far; None: of a list
    last: int = 0  # byte before, without strings and white space
    string: bytes | None = None
    """a name that has begun; of another string the backslash that it ends with; None: outside of strings"""

    def after(self, text: bytes) -> "JsonPosition | None":
        """Return the position behind more text. None: a name comes twice, or has an escape that it does not need.

        A grammar reads a name with an escape as another name, whose value obeys another schema.
        """
        position: JsonPosition | None = self
        for byte in text:
            if position is not None:
                position = position._after(byte) if position.string is None else position._in_string(byte)
        return position

    def _after(self, byte: int) -> "JsonPosition":
        if byte == QUOTE:
            return replace(self, string=b"")
        if byte in b"{[":
            return JsonPosition((*self.open, frozenset() if byte == ord("{") else None), byte)
        return JsonPosition(self.open[:-1] if byte in b"}]" else self.open, self.last if byte in b" \t\r\n" else byte)

    def _in_string(self, byte: int) -> "JsonPosition | None":
        assert self.string is not None
        names = self.open[-1] if self.open and self.last in b"{," else None
        is_escaped = (len(self.string) - len(self.string.rstrip(b"\\"))) % 2 == 1
        is_end = byte == QUOTE and not is_escaped
        if names is None:
            return replace(self, string=None if is_end else b"\\" * (byte == ord("\\") and not is_escaped))
        if is_end:
            name = json.loads(f'"{self.string.decode(errors="replace")}"')
            return None if name in names else JsonPosition((*self.open[:-1], names | {name}), QUOTE)
        written = self.string + bytes([byte])
        escape = written.rfind(b"\\u")
        is_needless = escape >= 0 and not NEEDED.fullmatch(written[escape + 2 : escape + 6])
        return None if is_needless else replace(self, string=written)


def check_ends(schema: dict[str, Any], field: str) -> None:
    """Raise LorakitError, with the request's field, for a schema with answers whose beginning has no end.

    llguidance refuses others. Left are patterns whose names run out, and references that need themselves.
    """
    targets = {}
    ending = set[str]()
    try:
        for one in _objects_in(schema):
            for pattern in one.get("patternProperties", ()):
                if one.get("additionalProperties") is not False or not ENDLESS.fullmatch(pattern):
                    why = f"the names of {pattern!r} may run out, and none comes twice"
                    remedy = "list them, or say additionalProperties: false and have no $, or + or * before it"
                    raise LorakitError(f"{field}: patternProperties: {why}: {remedy}")
            if isinstance(one.get("$ref"), str):
                targets[one["$ref"]] = _target(schema, one["$ref"])
        while more := {name for name, target in targets.items() if name not in ending and _can_end(target, ending)}:
            ending |= more
    except (TypeError, ValueError, LookupError, AttributeError) as problem:  # in a part that llguidance does not read
        raise LorakitError(f"{field}: the schema cannot be read: {type(problem).__name__}: {problem}") from None
    if circle := sorted(targets.keys() - ending):
        raise LorakitError(f"{field}: $ref {circle[0]!r} requires itself, so no answer has an end; make it optional")


def _objects_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects_in(inner)


def _target(schema: Any, reference: str) -> Any:
    if reference != "#" and not reference.startswith("#/"):
        raise ValueError(f"$ref {reference!r} is not '#', and does not begin with '#/'")
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        schema = schema[int(key)] if isinstance(schema, list) else schema[key]
    return schema


def _can_end(schema: Any, ending: Set[str]) -> bool:
    """True if an answer that obeys a schema can end. ending: references of which this is certain."""
    if not isinstance(schema, dict):
        return bool(schema)
    properties, names = schema.get("properties", {}), schema.get("required", [])
    others = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties", True)]
    prefix, num_items = schema.get("prefixItems", []), int(schema.get("minItems", 0))
    needed = [properties[name] for name in names if name in properties]
    needed += others if schema.get("minProperties", 0) > len(names) or set(names) - properties.keys() else []
    needed += prefix[:num_items] + [schema.get("items", True)] * (num_items > len(prefix))
    choices = [schema[key] for key in ("anyOf", "oneOf") if key in schema]
    return (
        ("$ref" not in schema or schema["$ref"] in ending)
        and all(_can_end(one, ending) for one in (*needed, *schema.get("allOf", ())))
        and all(any(_can_end(one, ending) for one in choice) for choice in choices)
    )
