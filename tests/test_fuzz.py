"""Damaged rows, recipes and patches: only lorakit's own errors, and what is accepted means what it meant.

`python -m scripts.fuzz` runs thousands of cases; these are a few, and the ones that were found.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import to_conversation
from lorakit.errors import PatchError
from lorakit.patch import read_patch
from scripts.fuzz import patch_law, recipe_law, row_law, run
from tests.helpers.patches import make_patch

CASES = 200


def test_a_damaged_row_is_a_bad_row_or_its_labels_are_its_own_texts() -> None:
    run(row_law(), CASES)


def test_a_damaged_pair_is_a_bad_row_or_two_answers_to_one_prompt() -> None:
    run(row_law(pairs=True), CASES)


def test_a_damaged_recipe_is_refused_or_reads_back_as_itself(tmp_path: Path) -> None:
    run(recipe_law(tmp_path), CASES)


def test_a_damaged_patch_is_refused_or_is_the_same_adapter(tmp_path: Path) -> None:
    run(patch_law(tmp_path), CASES)


@pytest.mark.parametrize("calls", [1, "clock", [1], {"name": "clock"}])
def test_tool_calls_that_are_no_list_of_mappings_are_refused(calls: Any) -> None:
    with pytest.raises(BadRow, match="message 1: tool_calls: a list of mappings expected"):
        to_conversation({"messages": [{"role": "assistant", "content": "yes", "tool_calls": calls}]})


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("target_modules", True, "a regular expression or a list of names, got True"),
        ("exclude_modules", [1], r"a regular expression or a list of names, got \[1\]"),
        ("target_modules", "(", "'\\(' is not a regular expression"),
        ("layers_to_transform", [0, "1"], "must be layer numbers"),
    ],
)
def test_a_patch_that_chooses_layers_with_other_types_is_refused(
    base: Path, tmp_path: Path, key: str, value: Any, problem: str
) -> None:
    patch = make_patch(base, tmp_path / "patch")
    config = json.loads((patch / "adapter_config.json").read_text())
    (patch / "adapter_config.json").write_text(json.dumps(config | {key: value}))

    with pytest.raises(PatchError, match=f"{key}.*{problem}"):
        read_patch(patch)
