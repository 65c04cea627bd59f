"""docs/recipe-reference.md is what the schema says, and the schema says something of every key."""

import json
from collections.abc import Iterator
from typing import Any

from lorakit.recipe.schema import schema_text
from scripts.recipe_reference import PAGE, page


def keys_of(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, section in {"recipe": schema, **schema["$defs"]}.items():
        for key, value in section.get("properties", {}).items():
            yield f"{name}.{key}", value


def test_every_key_has_a_description() -> None:
    assert [name for name, value in keys_of(json.loads(schema_text())) if not value.get("description")] == []


def test_a_key_that_is_required_has_no_default_on_the_page() -> None:
    defaults = {row[0]: row[2] for line in page().splitlines() if line.startswith("| `") for row in [cells(line)]}
    required = ["output", "base.model", "data.train", "data.train.path"]
    assert [key for key, default in defaults.items() if not default] == sorted(required, key=list(defaults).index)


def cells(line: str) -> list[str]:
    return [cell.strip(" `") for cell in line.replace("\\|", "").split("|")[1:]]


def test_the_page_is_written_from_the_schema_and_has_every_key_once() -> None:
    text = PAGE.read_text()
    assert text == page(), "run python -m scripts.recipe_reference"
    rows = [line.split("|")[1].strip(" `") for line in text.splitlines() if line.startswith("| `")]
    keys = [key for key, value in keys_of(json.loads(schema_text())) if "$ref" not in value]
    assert sorted(row.rpartition(".")[2] for row in rows) == sorted(key.rpartition(".")[2] for key in keys)
