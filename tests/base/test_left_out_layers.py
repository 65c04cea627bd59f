"""A base is loaded with all layers that its files have, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lorakit
from lorakit.base.meta import check_stored_tensors
from lorakit.errors import BaseModelError
from tests.helpers.bases import make_base


def test_layers_that_the_config_leaves_out_are_missed(tokenizer: Any, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", tokenizer, num_hidden_layers=3)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "layer_types": None}))
    for load in (lorakit.load, check_stored_tensors):
        with pytest.raises(BaseModelError, match=r"its files have model\.layers\.2, and by its config.json"):
            load(base)


def test_layers_of_another_kind_in_the_files_are_left_out_on_purpose(tokenizer: Any, tmp_path: Path) -> None:
    """As those that predict further tokens: they have a projection that no layer of the model has."""
    base = make_base(tmp_path / "base", tokenizer, num_hidden_layers=2)
    tensors = load_file(base / "model.safetensors")
    more = {
        name.replace("layers.1.", "layers.2."): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.1." in name
    }
    more["model.layers.2.eh_proj.weight"] = torch.ones(2, 2)
    save_file(tensors | more, base / "model.safetensors", {"format": "pt"})
    lorakit.load(base)
