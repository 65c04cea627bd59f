"""Explain validation errors as lines of ``file:line: key: problem, value, nearest valid name``.

Invariant: docs/coming-from.md has a row for every key of another trainer that is known here, with the same keys of
lorakit.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from lorakit.errors import did_you_mean
from lorakit.files.text import columns
from lorakit.recipe.data import SourceSection
from lorakit.recipe.parallel import OffloadSection
from lorakit.recipe.schema import Recipe
from lorakit.recipe.section import Section

MAX_SHOWN = 60
NESTED: Final[dict[tuple[str, ...], type[Section]]] = {
    ("data", "train"): SourceSection,
    ("data", "eval"): SourceSection,
    ("parallel", "offload"): OffloadSection,
}
"""sections inside of sections"""
PATH: Final = re.compile(r"(\w+)\.(\w+)")
MIN_KEYS: Final = 3  # keys of another tool, at the top of a file, that make it that tool's
SHOWN_CHARACTERS: Final = 30
PAGE: Final = "docs/coming-from.md"
FOREIGN_KEYS: Final[dict[str, dict[str, Any]]] = yaml.safe_load(
    (Path(__file__).parent.parent / "assets" / "other_tools.yaml").read_text(encoding="utf-8")
)
"""tool -> the keys of its configurations, and lorakit's for each"""
FOREIGN_VALUES: Final[dict[str, dict[str, str]]] = FOREIGN_KEYS.pop("values")
"""lorakit's key -> those values of other trainers that no name of lorakit is similar to, with a remedy"""
SHARED: Final = ("transformers", "PEFT")  # tables of keys that all tools take
SHORT_NAMES: Final = {"lr": "train.learning_rate"}  # which people write without a look at any documentation


def explain(
    path: Path, node: yaml.Node, values: Any, sources: dict[tuple[str, ...], str], error: ValidationError
) -> list[str]:
    """Return one line per problem. ``values``: with overrides. ``sources``: overridden key -> text of the override."""
    lines: dict[str, int] = {}
    problems = [(problem, _recipe_keys(values, problem)) for problem in error.errors()]
    refused_texts = [keys for problem, keys in problems if problem["type"] == "value_error"]
    for problem, keys in problems:
        # of `text or list`, the branch that was not meant: the other one has an error of its own
        is_list = problem["type"] == "string_type" and isinstance(problem["input"], list)
        if is_list or (problem["type"] == "tuple_type" and keys in refused_texts):
            continue
        override = next((text for key, text in sources.items() if list(key) == keys[: len(key)]), None)
        line = _line(node, keys)
        message = _message(problem, keys)
        beside = [text for key, text in sources.items() if list(key[: len(keys)]) == keys and _names(message, key)]
        where = f"override '{override}'" if override else f"{path}:{line}"
        if not override and beside:
            where += f" with override {' and '.join(map(repr, beside))}"
        name = ".".join(map(str, keys))
        lines[f"{where}: {name + ': ' if name else ''}{message}"] = line
    return sorted(lines, key=lambda text: lines[text])


def explain_foreign(values: Mapping[Any, Any]) -> str | None:
    """Return whose configuration a file is, and its keys with lorakit's; None for a recipe."""
    tables = dict(FOREIGN_KEYS)
    shared = {key: name for table in SHARED for key, name in tables.pop(table).items()}
    tool = max(tables, key=lambda name: len(tables[name].keys() & values.keys()))
    is_own = not tables[tool].keys().isdisjoint(values)
    name = tool if is_own else "transformers' Trainer"
    names = {**shared, **tables[tool]}
    is_recipe = any(key in Recipe.model_fields and isinstance(value, Mapping) for key, value in values.items())
    if is_recipe or len(names.keys() & values.keys()) < MIN_KEYS:
        return None
    lines = columns([(f"  {key}: {_short(value)}", names.get(key, f"- (see {PAGE})")) for key, value in values.items()])
    return (
        f"this is a configuration of {name}, not a recipe. Its keys, and lorakit's:\n"
        + "\n".join(lines)
        + f"\n{PAGE} has such a file beside its recipe; `lorakit init` writes one for your base and rows"
        + (f", and `lorakit init --from coming-from/{tool.lower()}` copies that of the page" if is_own else "")
    )


def _recipe_keys(values: Any, problem: Any) -> list[int | str]:
    """Return the keys of a problem's location in the values, without pydantic's names for members of a union."""
    location = problem["loc"]
    keys = list[int | str]()
    for part in location:
        is_key = part in values if isinstance(values, dict) else isinstance(part, int) and isinstance(values, list)
        if is_key:
            keys.append(part)
            values = values[part]
    return [*keys, location[-1]] if problem["type"] == "missing" else keys


def _names(message: str, key: tuple[str, ...]) -> bool:
    """True if a message about several keys is about this one."""
    return re.search(rf"\b{re.escape(key[-1])}\b", message) is not None or message.startswith(f"{key[0]}: ")


def _line(node: yaml.Node, keys: list[int | str]) -> int:
    line = node.start_mark.line + 1
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            pair = next((pair for pair in node.value if pair[0].value == str(key)), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            node = node.value[key]
            line = node.start_mark.line + 1
    return line


def _message(problem: Any, keys: list[int | str]) -> str:
    kind, value = problem["type"], problem["input"]
    if kind == "extra_forbidden":
        return f"unknown key.{_nearest_keys(str(keys[-1]), keys[:-1])}"
    if kind == "missing":
        return "this key is required"
    text = problem["msg"].removeprefix("Value error, ")
    if keys == ["train", "warmup_steps"] and isinstance(value, float) and 0 < value < 1:
        return f"a number of steps, got {value}; a share of all steps is train.warmup_ratio: {value}"
    shown = repr(value) if len(repr(value)) <= MAX_SHOWN else repr(value)[:MAX_SHOWN] + "..."
    if kind == "literal_error":
        expected = re.findall(r"'([^']*)'", problem["ctx"]["expected"])
        remedy = FOREIGN_VALUES.get(".".join(map(str, keys)), {}).get(str(value))
        return f"{text}, got {shown}." + (f" {remedy}." if remedy else did_you_mean(str(value), expected))
    return text if isinstance(value, dict) else f"{text}, got {shown}"


def _nearest_keys(name: str, within: list[int | str]) -> str:
    """Return the keys nearest to an unknown one: of its section, but first a key of this name in another section."""
    remedy = next((table[name] for table in (*FOREIGN_KEYS.values(), SHORT_NAMES) if name in table), None)
    path = PATH.fullmatch(remedy or "")
    if path is None and remedy is not None and name not in _known_keys([]):
        return f" A key of other trainers; in lorakit {remedy}."
    name = path[2] if path else name
    known = _known_keys(within)
    if path and name in known:
        return f" Nearest: '{name}'."
    elsewhere = next((section for section in Recipe.model_fields if name in _known_keys([section])), None)
    if elsewhere is not None and name not in known:
        return f" Nearest: '{elsewhere}.{name}'."
    return did_you_mean(name, known)


def _known_keys(keys: list[int | str]) -> list[str]:
    """Return the keys of the section at a location of a recipe."""
    names = tuple(key for key in keys if isinstance(key, str))
    section = NESTED.get(names) or (Recipe.model_fields[names[0]].annotation if names else Recipe)
    return list(getattr(section, "model_fields", ()))


def _short(value: Any) -> str:
    if isinstance(value, Mapping | list):
        return "..."
    text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
