"""Explain validation errors as lines of ``file:line: key: problem, value, nearest valid name``."""

import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, ValidationError

from lorakit.errors import did_you_mean
from lorakit.recipe.other_tools import known_elsewhere
from lorakit.recipe.schema import Recipe

MAX_SHOWN = 60
VALUES: Final = {
    ("adapter.method", "qlora"): "QLoRA is method: lora on a quantised base, base.quantize: nf4",
    ("base.quantize", "4bit"): "Say nf4",
    ("base.quantize", "8bit"): "Say int8",
    ("train.schedule", "cosine_with_restarts"): "Say cosine, with train.schedule_cycles",
    ("train.schedule", "cosine_with_min_lr"): "Say cosine, with train.min_learning_rate",
    ("train.schedule", "constant_with_warmup"): "Say constant, with train.warmup_steps",
    ("train.schedule", "warmup_stable_decay"): "Say wsd",
    **{
        ("objective.name", name): "Preferences and rewards are not trained yet; TRL goes on from a patch"
        for name in ("dpo", "ipo", "kto", "orpo", "simpo", "grpo", "ppo", "reward")
    },
}
"""values of other trainers that no name of lorakit is similar to, and the remedy"""
PATH: Final = re.compile(r"(\w+)\.(\w+)")


def explain(
    path: Path, node: yaml.Node, values: Any, sources: dict[tuple[str, ...], str], error: ValidationError
) -> list[str]:
    """Return one line per problem. ``values``: with overrides. ``sources``: overridden key -> text of the override."""
    lines: dict[str, int] = {}
    problems = error.errors()
    refused_texts = {tuple(_recipe_keys(values, problem)) for problem in problems if problem["type"] == "value_error"}
    for problem in problems:
        keys = _recipe_keys(values, problem)
        # of `text or list`, the branch that was not meant: the other one has an error of its own
        if problem["type"] == "string_type" and isinstance(problem["input"], list):
            continue
        if problem["type"] == "tuple_type" and tuple(keys) in refused_texts:
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


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections that a value may be, such as those of a union or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _sections_in(part)


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
        remedy = VALUES.get((".".join(map(str, keys)), str(value)))
        return f"{text}, got {shown}." + (f" {remedy}." if remedy else did_you_mean(str(value), expected))
    return text if isinstance(value, dict) else f"{text}, got {shown}"


def _nearest_keys(name: str, within: list[int | str]) -> str:
    """Return the keys nearest to an unknown one: of its section, but first a key of this name in another section."""
    remedy = known_elsewhere(name)
    path = PATH.fullmatch(remedy or "")
    if path is None and remedy is not None and name not in _known_keys([]):
        return f" A key of other trainers; in lorakit {remedy}."
    name = path[2] if path else name
    known = _known_keys(within)
    if path and name in known:
        return f" Nearest: '{name}'."
    sections = {section: _known_keys([section]) for section in Recipe.model_fields}
    elsewhere = {key: section for section, keys in sections.items() if keys != _known_keys([]) for key in keys}
    if name in elsewhere and name not in known:
        return f" Nearest: '{elsewhere[name]}.{name}'."
    return did_you_mean(name, known)


def _known_keys(keys: list[int | str]) -> list[str]:
    model: type[BaseModel] = Recipe
    for key in (key for key in keys if not isinstance(key, int)):
        annotation = model.model_fields[key].annotation if key in model.model_fields else None
        sections = list(_sections_in(annotation))
        if sections:
            model = sections[0]
        elif not isinstance(annotation, types.UnionType):
            return []
    return list(model.model_fields)
