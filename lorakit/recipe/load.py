"""Load a recipe from YAML, or raise one RecipeError that names every problem by file and line.

Accepted is a safe subset of YAML: no aliases, no tags, no duplicate keys, at most 1 MB. ``1e-4`` is a number.
"""

import json
import numbers
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import ValidationError

from lorakit.errors import RecipeError, translate_error
from lorakit.recipe.explain import explain, explain_foreign
from lorakit.recipe.objective import PREFERENCE_LEARNING_RATE, PREFERENCES
from lorakit.recipe.schema import DEFAULTS, Recipe

MAX_BYTES = 1_000_000
Launched = Callable[[], Mapping[str, int] | None]
ALTERNATIVES = (("epochs", "steps"), ("warmup_steps", "warmup_ratio"))
"""keys of `train` of which a recipe has one; an override of it replaces the other one of the file"""


def load_recipe(path: str | Path, overrides: tuple[str, ...] = (), *, launched: Launched = lambda: None) -> Recipe:
    """Load the recipe in a YAML file, with ``key.path=value`` overrides applied before validation.

    launched: returns the numbers of `processes` and `nodes` that a launcher started; None if none did.
    Raises RecipeError: names all problems, one ``file:line: key: problem`` per line.
    """
    if not isinstance(path, str | Path):
        raise RecipeError(f"recipe: the path of a YAML file, got a {type(path).__name__}")
    path = Path(path)
    node, values = _read(path)
    if not isinstance(values, dict):
        raise RecipeError(f"{path}:1: a recipe is a mapping of sections, got {type(values).__name__}")
    if (text := explain_foreign(values)) is not None:
        raise RecipeError(f"{path}: {text}")
    sources = {tuple(key.split(".")): item for item in overrides for key in [item.partition("=")[0]]}
    values = {key: {} if value is None and key != "output" else value for key, value in values.items()}
    if problems := [problem for item in overrides for problem in _apply(values, item)]:
        raise RecipeError("\n".join(problems))
    _drop_replaced(values, sources)
    _count_processes(path, values, launched)
    # here and not in a validator, because after one that is called first pydantic takes no list for a tuple
    values = _with_own_defaults(values)
    text = as_json(values, path)
    try:
        # strict JSON mode: bool -> int and "8" -> 8 are errors, but a list may fill a tuple
        return Recipe.model_validate_json(text)
    except ValidationError as error:
        raise RecipeError("\n".join(explain(path, node, json.loads(text), sources, error))) from None


def _drop_replaced(values: dict[str, Any], sources: Mapping[tuple[str, ...], str]) -> None:
    """Remove each key of the file whose alternative is overridden, unless both are: then the error names both."""
    section = values.get("train")
    if not isinstance(section, dict):
        return
    for pair in ALTERNATIVES:
        given = [key for key in pair if ("train", key) in sources and section[key] is not None]
        if len(given) == 1:
            (other,) = set(pair) - set(given)
            section.pop(other, None)


def _count_processes(path: Path, values: dict[str, Any], launched: Launched) -> None:
    """Replace `parallel.processes: auto` by the launcher's numbers. Raises RecipeError: there is no launcher."""
    section = values.get("parallel")
    if not isinstance(section, dict) or section.get("processes") != "auto":
        return
    numbers = launched()
    if numbers is None:
        why = "no launcher, such as torchrun, started this one; name a number, as in parallel.processes=8"
        raise RecipeError(f"{path}: parallel.processes: auto: {why}")
    values["parallel"] = {"nodes": numbers["nodes"], **section, "processes": numbers["processes"]}


def _with_own_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe with the defaults of `train` that its optimizer and its objective have of their own."""
    train = values.get("train", {})
    objective = values.get("objective")
    if not isinstance(train, dict):
        return values
    defaults = DEFAULTS.get(str(train.get("optimizer")), {})
    if isinstance(objective, dict) and objective.get("name") in PREFERENCES:
        defaults = {**defaults, "learning_rate": PREFERENCE_LEARNING_RATE}
    return {**values, "train": {**defaults, **train}} if defaults else values


def as_json(values: Any, where: str | Path = "recipe") -> str:
    """Return values of a recipe as JSON. Raises RecipeError, which names ``where``: JSON has no such value."""
    what = f"{where}: only text, numbers, true/false, lists and mappings"
    with translate_error((TypeError, ValueError), RecipeError, what):  # a YAML date, a set, a key that is a list
        return json.dumps(values, indent=1, default=plain_value)


def plain_value(value: Any) -> Any:
    """Return a path or number of numpy as JSON has it. Raises TypeError: it is neither."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise TypeError(f"got {str(value)[:60]!r}, a {type(value).__name__}")


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys, aliases and explicit tags, and reads scalars as YAML 1.2 does.

    There ``1e-4`` is a number; ``yes``, ``010``, ``2:30`` and ``2026-01-01`` are texts.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.composer.ComposerError(None, None, "aliases and anchors are not allowed", event.start_mark)
        if getattr(event, "tag", None) not in (None, "!"):
            raise yaml.composer.ComposerError(None, None, f"tag {event.tag} is not allowed", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                shown = repr(key.value) if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
                problem = f"a key must be text, got {shown}; put it in quotes, and a text that begins with {{ or [ too"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if key.value in seen:
                problem = f"key '{key.value}' appears twice, first on line {seen[key.value]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


_DECIMAL = r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]{0,30})", list("-+0123456789")),
    ("float", rf"{_DECIMAL}|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def _read(path: Path) -> tuple[yaml.Node, Any]:
    """Return the node and the value of a file's only document."""
    try:
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            raise RecipeError(f"{path}: {path.stat().st_size} bytes; a recipe has at most {MAX_BYTES}")
        loader = _Loader(path.read_text(encoding="utf-8"))
        if (node := loader.get_single_node()) is None:
            raise RecipeError(f"{path}: the file is empty; `lorakit init` writes a recipe for your base and rows")
        return node, loader.construct_document(node)
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such recipe; looked for {path.absolute()}") from None
    except UnicodeDecodeError as problem:
        raise RecipeError(f"{path}: not UTF-8 text: {problem}") from None
    except yaml.YAMLError as problem:
        raise RecipeError(_explain_yaml(path, problem)) from None
    except RecursionError:
        raise RecipeError(f"{path}: nested too deeply") from None
    except OSError as problem:
        raise RecipeError(f"{path}: cannot be read: {problem.strerror or problem}") from None


def _explain_yaml(path: Path, problem: yaml.YAMLError) -> str:
    mark = getattr(problem, "problem_mark", None)
    line = f":{mark.line + 1}" if mark else ""
    return f"{path}{line}: {getattr(problem, 'problem', None) or problem}"


def _apply(values: dict[str, Any], item: str) -> list[str]:
    """Set one ``key.path=value`` in ``values`` and return the problems, if any."""
    key, equals, text = item.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        return [f"override '{item}': write it as key.path=value, for instance train.learning_rate=1e-4"]
    try:
        # a pattern such as *.jsonl is no alias, which a recipe may not have
        value = text if text.startswith("*") else yaml.load(text, _Loader)  # a SafeLoader
    except yaml.YAMLError as problem:
        explained = _explain_yaml(Path(f"override '{item}'"), problem)
        return [f"{explained}. A text with such characters goes in quotes: '{key}=\"{text}\"'"]
    except RecursionError:
        return [f"override '{item[:40]}...': nested too deeply"]
    for part in parts[:-1]:
        child = values.setdefault(part, {})
        if not isinstance(child, dict):
            return [f"override '{item}': '{part}' is not a section"]
        values = child
    values[parts[-1]] = value
    return []
