"""Write values as block YAML. Imports no YAML library."""

import json
from typing import Any


def yaml_text(value: Any, indent: str = "") -> str:
    """Return block YAML of mappings, lists and plain values; strings are quoted, as YAML reads a bare `no` as false."""
    if isinstance(value, dict) and value:
        return "".join(f"{indent}{key}:{_value_text(item, indent)}" for key, item in value.items())
    if isinstance(value, list) and value:
        parts = (yaml_text(item, indent + "  ") for item in value)
        return "".join(f"{indent}- {part[len(indent) + 2 :]}" for part in parts)
    return f"{indent}{json.dumps(value)}\n"


def _value_text(item: Any, indent: str) -> str:
    """Return the text after ``key:``: a plain value on the same line, entries on the lines below."""
    return f"\n{yaml_text(item, indent + '  ')}" if isinstance(item, dict | list) and item else f" {json.dumps(item)}\n"
