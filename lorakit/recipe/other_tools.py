"""Recognise the configuration of another trainer, and name lorakit's key for each of its keys.

Invariant: docs/coming-from.md has a row for every key here, with the same keys of lorakit.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from lorakit.files.text import columns

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


def known_elsewhere(key: str) -> str | None:
    """Return lorakit's keys for another trainer's key, as a text; None for a key that no trainer here has."""
    tables = (*FOREIGN_KEYS.values(), SHORT_NAMES)
    return next((table[key] for table in tables if key in table), None)


def explain_foreign(values: Mapping[Any, Any], sections: Mapping[str, Any]) -> str | None:
    """Return whose configuration a file is, and its keys with lorakit's; None for a recipe. sections: of recipes."""
    tables = dict(FOREIGN_KEYS)
    shared = {key: name for table in SHARED for key, name in tables.pop(table).items()}
    tool = max(tables, key=lambda name: len(tables[name].keys() & values.keys()))
    is_own = not tables[tool].keys().isdisjoint(values)
    name = tool if is_own else "transformers' Trainer"
    names = {**shared, **tables[tool]}
    is_recipe = any(key in sections and isinstance(value, Mapping) for key, value in values.items())
    if is_recipe or len(names.keys() & values.keys()) < MIN_KEYS:
        return None
    lines = columns([(f"  {key}: {_short(value)}", names.get(key, f"- (see {PAGE})")) for key, value in values.items()])
    return (
        f"this is a configuration of {name}, not a recipe. Its keys, and lorakit's:\n"
        + "\n".join(lines)
        + f"\n{PAGE} has such a file beside its recipe; `lorakit init` writes one for your base and rows"
        + (f", and `lorakit init --from coming-from/{tool.lower()}` copies that of the page" if is_own else "")
    )


def _short(value: Any) -> str:
    if isinstance(value, Mapping | list):
        return "..."
    text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
