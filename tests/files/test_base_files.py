"""The weight files of a base are one file, or the files that an index names truly."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from lorakit.errors import BaseModelError
from lorakit.files.base_files import open_base_files
from tests.helpers.bases import make_base


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../model.safetensors"}}, "only plain file names are allowed"),
        ({"weight_map": {"a": "absent.safetensors"}}, "no such file"),
        ({"weight_map": {"a": "model.safetensors"}}, "a should be in model.safetensors, found in None"),
        ({}, "has no weight_map"),
    ],
)
def test_an_index_that_lies_is_refused(base: Path, tmp_path: Path, index: dict[str, Any], message: str) -> None:
    folder = shutil.copytree(base, tmp_path / "base")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(BaseModelError, match=message):
        open_base_files(folder)


def test_a_folder_with_two_sets_of_weights_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    base = make_base(tmp_path / "base", tokenizer)
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(sharded, max_shard_size="50KB")
    shutil.copytree(sharded, base, dirs_exist_ok=True)
    with pytest.raises(BaseModelError, match="holds model.safetensors and an index of other files"):
        open_base_files(base)
