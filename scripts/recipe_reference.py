"""Write docs/recipe-reference.md, every recipe key, from the schema: ``python -m scripts.recipe_reference``."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from lorakit.recipe import Recipe

PAGE: Final = Path(__file__).parents[1] / "docs" / "recipe-reference.md"
WORDS: Final = {"string": "text", "boolean": "true, false", "integer": "integer", "number": "number", "null": "null"}
LIMITS: Final = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
LARGEST_SHOWN: Final = 2**53
"""limits beyond it are those of the machine and say nothing"""


def page() -> str:
    """Return the text of docs/recipe-reference.md."""
    schema = Recipe.model_json_schema()  # not `schema_text`, which sorts the keys
    definitions = schema["$defs"]
    lines = [
        "# Every key of a recipe",
        "",
        "Written by `python -m scripts.recipe_reference` from the schema. [recipes.md](recipes.md) explains recipes;"
        " [recipe.schema.json](recipe.schema.json) is for editors. A key without a default is required, one below"
        " another, such as `data.train.path`, where its mapping is given. An unknown key is an error.",
    ]
    top = {name: value for name, value in schema["properties"].items() if "$ref" not in value}
    lines += ["", "## Top level", "", *_table(top, schema["required"], definitions)]
    for name, value in schema["properties"].items():
        if name not in top:
            section = _resolve(value, definitions)
            lines += ["", f"## {name}", "", value["description"], ""]
            lines += _table(section["properties"], section.get("required", []), definitions, f"{name}.")
    return "\n".join(lines) + "\n"


def _table(keys: Mapping[str, Any], required: list[str], definitions: Mapping[str, Any], prefix: str = "") -> list[str]:
    lines = ["| key | values | default | about |", "|---|---|---|---|"]
    for name, value, is_required in _flat(keys, required, definitions, prefix, set()):
        default = "" if is_required else f"`{json.dumps(value.get('default'))}`"
        about = " ".join(value["description"].split()).replace("|", "\\|")
        lines.append(f"| `{name}` | {_values(value, definitions)} | {default} | {about} |")
    return lines


def _flat(
    keys: Mapping[str, Any], required: list[str], definitions: Mapping[str, Any], prefix: str, shown: set[str]
) -> Iterator[tuple[str, Any, bool]]:
    """Yield the keys of a section, each with True if it is required, and the keys below those that may be a section."""
    for name, value in keys.items():
        yield prefix + name, value, name in required
        for section in dict.fromkeys(_sections_in(value)):
            if section in shown:
                continue
            shown.add(section)
            inner = _resolve({"$ref": section}, definitions)
            below = f"{prefix}{name}."
            yield from _flat(inner["properties"], inner.get("required", []), definitions, below, shown)


def _sections_in(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield the references to sections among the values that a key takes."""
    for choice in [*_choices(value), *([value["items"]] if "items" in value else [])]:
        if "$ref" in choice:
            yield choice["$ref"]
        yield from _sections_in(choice)


def _choices(value: Mapping[str, Any]) -> list[Any]:
    return [*value.get("anyOf", []), *value.get("oneOf", [])]


def _resolve(value: Mapping[str, Any], definitions: Mapping[str, Any]) -> Any:
    return definitions[value["$ref"].rpartition("/")[2]] if "$ref" in value else value


def _values(value: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Return the values that a key takes, as text."""
    if choices := _choices(value):
        return " or ".join(_values(choice, definitions) for choice in choices)
    if "enum" in value:
        return ", ".join(str(one).lower() if isinstance(one, bool) else f"`{one}`" for one in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if "$ref" in value:
        return "keys below" if "properties" in _resolve(value, definitions) else "any"
    kind = str(value.get("type"))
    if kind == "array":
        return f"list of {_values(value['items'], definitions)}"
    if kind == "object":
        return f"mapping of names to {_values(value['additionalProperties'], definitions)}"
    limits = [f"{word} {value[key]:g}" for key, word in LIMITS.items() if abs(value.get(key, 2**60)) < LARGEST_SHOWN]
    return " ".join([WORDS[kind], ", ".join(limits)]).strip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
