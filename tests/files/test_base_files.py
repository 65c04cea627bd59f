"""The weight files of a base are one file, or the files that an index names truly."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lorakit.errors import BaseModelError
from lorakit.files.base_files import open_base_files


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
