"""The weight files of a base are one file, or the files that an index names truly."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from lorakit.cli import main
from lorakit.errors import BaseModelError
from lorakit.files.base_files import open_base_files
from tests.helpers.bases import make_base


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../model.safetensors"}}, "only plain file names are allowed"),
        ({"weight_map": {"a": "absent.safetensors"}}, "no such file"),
        ({"weight_map": {"a": "model.safetensors"}}, "a: model.safetensors expected, None found"),
        ({"weight_map": {"a": "b\0.safetensors"}}, "only plain file names are allowed"),
        ({"weight_map": {"a\x1b[31m\nb": "model.safetensors"}}, r"'a\\x1b\[31m\\nb' is mapped to 'model"),
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


@pytest.mark.parametrize("kind", ["pipe", "folder", "huge"])
@pytest.mark.parametrize("command", [["generate", "{base}", "--prompt", "hi"], ["merge", "{base}", "adapters/json", "--out", "{out}"]])  # fmt: skip
def test_a_config_that_is_no_file_of_a_size_is_refused(
    base: Path, tmp_path: Path, kind: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(base, tmp_path / "base")
    config = folder / "config.json"
    config.unlink()
    if kind == "pipe":
        os.mkfifo(config)
    elif kind == "folder":
        config.mkdir()
    else:
        with config.open("wb") as file:
            file.truncate(1 << 40)  # sparse

    assert main([word.format(base=folder, out=tmp_path / "out") for word in command]) == 2
    said = capsys.readouterr().err
    assert "config.json" in said
    assert len(said) < 1000
