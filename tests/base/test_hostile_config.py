"""A config that would fill the memory, or run for hours, is refused before a model is built from it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorakit.base.transformers_io import load_skeleton
from lorakit.cli import main
from lorakit.errors import BaseModelError


@pytest.mark.parametrize("layers", [10**9, 10**18, -1, 2.5, "2", [2], True])
@pytest.mark.parametrize("part", [None, "text_config"])
def test_a_number_of_layers_that_no_base_has_is_refused_at_once(
    base: Path, tmp_path: Path, layers: Any, part: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "base"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": layers} if part is None else {part: {"num_hidden_layers": layers}}
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(BaseModelError, match="config.json: num_hidden_layers: from 0 to 10,000, got"):
        load_skeleton(folder)
    assert main(["generate", str(folder), "--prompt", "hi"]) == 2
    assert "num_hidden_layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    "types", [None, [], {}, {"model.layers.0.mlp.up_proj": "3"}, {"model.layers.0.mlp.up_proj": 999}]
)
def test_damaged_types_of_blocks_are_refused_by_name(
    base: Path, tmp_path: Path, recipe: Callable[..., Path], types: Any
) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "base"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gguf", "types": types}})
    )
    assert main(["generate", str(folder), "--prompt", "hi"]) == 2
    assert main(["merge", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert main(["plan", str(recipe(base={"model": str(folder)}))]) == 2
