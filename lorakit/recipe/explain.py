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
from lorakit.recipe.schema import Recipe

MAX_SHOWN = 60
OTHER_NAMES: Final = {
    "lr": "learning_rate", "r": "rank", "lora_r": "rank", "target_modules": "targets", "max_steps": "steps",
    "num_train_epochs": "epochs", "per_device_train_batch_size": "micro_batch_size", "cutoff_len": "max_tokens",
    "lora_model_dir": "start_from", "adapter_name_or_path": "start_from", "sequence_len": "max_tokens",
    "max_seq_length": "max_tokens", "gradient_checkpointing": "activation_checkpointing",
    "lr_scheduler_type": "schedule", "optim": "optimizer", "min_lr": "min_learning_rate", "adam_beta1": "beta1",
    "adam_beta2": "beta2", "adam_epsilon": "epsilon", "neftune_noise_alpha": "neftune_alpha",
    "label_smoothing_factor": "label_smoothing", "num_cycles": "schedule_cycles",
    "val_set_size": "eval", "val_size": "eval", "max_samples": "limit", "context_parallel_size": "sequence",
    "tensor_parallel_size": "tensor", "report_to": "log_to",
}  # fmt: skip
"""names of other trainers that are not similar to lorakit's, and lorakit's"""


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
    shown = repr(value) if len(repr(value)) <= MAX_SHOWN else repr(value)[:MAX_SHOWN] + "..."
    if kind == "literal_error":
        expected = re.findall(r"'([^']*)'", problem["ctx"]["expected"])
        return f"{text}, got {shown}.{did_you_mean(str(value), expected)}"
    return text if isinstance(value, dict) else f"{text}, got {shown}"


def _nearest_keys(name: str, within: list[int | str]) -> str:
    """Return the keys nearest to an unknown one: of its section, but first a key of this name in another section."""
    if (ours := OTHER_NAMES.get(name)) in _known_keys(within):
        return f" Nearest: '{ours}'."
    name = ours or name
    sections = {section: _known_keys([section]) for section in Recipe.model_fields}
    elsewhere = {key: section for section, keys in sections.items() if keys != _known_keys([]) for key in keys}
    if name in elsewhere and name not in _known_keys(within):
        return f" Nearest: '{elsewhere[name]}.{name}'."
    return did_you_mean(name, _known_keys(within))


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
