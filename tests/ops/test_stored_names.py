"""A weight's tensor is found under the name that the files have, and under no name whose values are others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lorakit.errors import BaseModelError
from lorakit.files.base_files import open_base_files
from lorakit.ops.stored_names import tensor_name
from scripts.zoo.trial import make_small


@pytest.mark.parametrize("architecture", ["nemotron_h", "gemma3", "hy_v3", "deepseek_v4"])
def test_each_layer_is_found_with_its_own_values(architecture: str, tokenizer: Any, tmp_path: Path) -> None:
    base = make_small(architecture, tokenizer, tmp_path)
    files = open_base_files(base)
    stored = load_file(base / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(base)
    head = model.get_output_embeddings()  # it may be tied, and not stored
    layers = {name: one for name, one in model.named_modules() if type(one) is torch.nn.Linear and one is not head}
    assert any(f"{name}.weight" not in stored for name in layers)
    for name, module in layers.items():
        assert torch.equal(stored[tensor_name(files, name)], module.weight)


def test_a_tensor_that_is_permuted_while_it_is_loaded_is_no_weight_under_another_name(
    tokenizer: Any, tmp_path: Path
) -> None:
    base = make_small("mixtral", tokenizer, tmp_path)
    with pytest.raises(
        BaseModelError, match="no tensors for 'model.layers.0.mlp.experts.gate_up_proj'.*adapter.exclude"
    ):
        tensor_name(open_base_files(base), "model.layers.0.mlp.experts", "gate_up_proj")
