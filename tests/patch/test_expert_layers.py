"""Adapters of PEFT before 0.19, with one A and one B for each expert's Linear layers, on experts in one parameter."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import _build_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter

import lorakit
from lorakit.errors import PatchError, TargetError
from lorakit.patch import read_patch
from lorakit.patch.fit import EXPERT
from tests.helpers.models import build_variant
from tests.helpers.patches import TENSORS

IDS = torch.arange(3, 27).reshape(2, 12)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # PEFT's own
CASES: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "all of Mixtral": ("mixtral", ["q_proj", "w1", "w2", "w3"], {}),
    "all of Qwen3": ("qwen3_moe", ["q_proj", "gate_proj", "up_proj", "down_proj"], {}),
    "one with rslora": ("mixtral", ["w2"], {"use_rslora": True}),
    "all with rslora": ("mixtral", ["w1", "w2", "w3"], {"use_rslora": True}),
}


def close(one: Tensor, two: Tensor) -> bool:
    return torch.allclose(one, two, atol=2e-5)


def logits_of(base: Path, patch: Path | None = None) -> Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        logits: Tensor = (model if patch is None else PeftModel.from_pretrained(model, patch))(input_ids=IDS).logits
    return logits


def write(folder: Path, architecture: str, targets: list[str], tokenizer: Any, **config: Any) -> tuple[Path, Path]:
    """Write a base, and a patch with the layers' names that transformers 4 had: those of the base's file.

    Beside them, as `sum`, the base plus s B A of each layer, which is what the patch was trained to compute.
    """
    base, patch = folder / "base", folder / "patch"
    build_variant(architecture).save_pretrained(base)
    tokenizer.save_pretrained(base)
    torch.manual_seed(0)
    tensors = {}
    stored = load_file(base / "model.safetensors")
    for key, W in stored.items():
        name = key.removesuffix(".weight")
        if name.endswith(tuple(f".{target}" for target in targets)):
            A, B = 0.2 * torch.randn(3, W.shape[1]), 0.2 * torch.randn(W.shape[0], 3)
            tensors |= {f"base_model.model.{name}.lora_A.weight": A, f"base_model.model.{name}.lora_B.weight": B}
            stored[key] = W + (5 / math.sqrt(3) if config.get("use_rslora") else 5 / 3) * (B @ A)
    save_file(stored, shutil.copytree(base, folder / "sum") / "model.safetensors", {"format": "pt"})
    patch.mkdir()
    save_file(tensors, patch / TENSORS)
    settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 5, "target_modules": targets, "peft_version": "0.17.0"}
    (patch / "adapter_config.json").write_text(json.dumps({**settings, "task_type": "CAUSAL_LM", **config}))
    return base, patch


@pytest.mark.parametrize("case", CASES)
def test_updates_of_each_experts_layers_are_served_merged_and_trained_further(
    case: str, tmp_path: Path, tokenizer: Any
) -> None:
    architecture, targets, config = CASES[case]
    base, patch = write(tmp_path, architecture, targets, tokenizer, **config)
    expected = logits_of(tmp_path / "sum")
    assert not close(logits_of(base), expected)
    if case != "all with rslora":  # PEFT 0.21 doubles rank and alpha of gate and up, which is another scale then
        assert close(logits_of(base, patch), expected)

    model = lorakit.load(base, {"x": patch}, dtype="float32")
    assert close(model(IDS, adapters="x").logits, expected)
    with model.merged("x") as merged:
        assert close(merged(IDS).logits, expected)
    assert close(
        logits_of(lorakit.merge(base, patch, out=tmp_path / "merged", verify=case == "all of Qwen3")), expected
    )

    own = lorakit.load_patch(AutoModelForCausalLM.from_pretrained(base), patch)
    with torch.no_grad():
        assert close(own(input_ids=IDS).logits, expected)
    assert close(logits_of(base, lorakit.save_patch(own, tmp_path / "saved")), expected)


def test_an_update_of_a_router_that_was_a_linear_layer_is_served_and_not_trained(
    tmp_path: Path, tokenizer: Any
) -> None:
    base, patch = write(tmp_path, "mixtral", ["q_proj", "gate", "w1", "w2", "w3"], tokenizer)

    assert close(lorakit.load(base, {"x": patch}, dtype="float32")(IDS, adapters="x").logits, logits_of(base, patch))
    with pytest.raises(TargetError, match=r"mlp.gate.weight' matches none of the 4 3-D parameters"):
        lorakit.load_patch(AutoModelForCausalLM.from_pretrained(base), patch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda key: None if ".experts.2.w1." in key else key, "gate_up_proj: its experts' updates differ in rank or"),
        (lambda key: None if ".w3." in key else key, r"some \(of w1, of w3\) are missing; merge it with PEFT"),
        (lambda key: key.replace("experts.2", "experts.5"), "are missing"),
    ],
)
def test_updates_of_some_experts_alone_are_refused(change: Any, message: str, tmp_path: Path, tokenizer: Any) -> None:
    base, patch = write(tmp_path, "mixtral", ["w1", "w2", "w3"], tokenizer)
    tensors = {change(key): tensor for key, tensor in load_file(patch / TENSORS).items()}
    save_file({key: tensor for key, tensor in tensors.items() if key}, patch / TENSORS)

    with pytest.raises(PatchError, match=message):
        lorakit.load(base, {"x": patch})


def test_two_updates_of_one_layer_under_two_names_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    base, patch = write(tmp_path, "mixtral", ["w1", "w2", "w3"], tokenizer)
    tensors = load_file(patch / TENSORS)
    tensors |= {key.replace(".block_sparse_moe.", ".mlp."): t.clone() for key, t in tensors.items() if ".w2." in key}
    save_file(tensors, patch / TENSORS)
    read_patch(patch)

    with pytest.raises(PatchError, match="holds two updates of one layer"):
        lorakit.load(base, {"x": patch})


def test_an_update_of_each_expert_beside_one_of_all_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    base, patch = write(tmp_path, "mixtral", ["w2"], tokenizer)
    tensors = load_file(patch / TENSORS)
    of_all = "base_model.model.model.layers.0.mlp.experts."  # as PEFT names target_parameters' factors
    rank = next(iter(tensors.values())).shape[0]
    tensors |= {f"{of_all}lora_A.weight": torch.ones(4 * rank, 48), f"{of_all}lora_B.weight": torch.ones(32, 4 * rank)}
    save_file(tensors, patch / TENSORS)
    config = json.loads((patch / "adapter_config.json").read_text())
    config["target_parameters"] = ["mlp.experts.down_proj"]
    (patch / "adapter_config.json").write_text(json.dumps(config))

    with pytest.raises(PatchError, match="holds two updates of one layer"):
        lorakit.load(base, {"x": patch})


def test_transformers_stacks_experts_in_the_order_that_is_read_here() -> None:
    steps = [step for steps in _build_checkpoint_conversion_mapping().values() for step in steps]
    checked = 0
    for step in steps:
        if not isinstance(step, WeightConverter) or len(step.target_patterns) != 1:
            continue
        names = [re.sub(r"\\|\.weight$", "", pattern).replace("*", "0") for pattern in step.source_patterns]
        matches = [EXPERT.fullmatch(f"model.layers.0.mlp.{name.lstrip('.')}") for name in names]
        if not step.target_patterns[0].endswith(("experts.gate_up_proj", "experts.down_proj")) or not all(matches):
            continue
        checked += 1
        order = [(bool(match[3]), bool(match[4])) for match in matches if match]
        assert order == ([(False, True)] if len(order) == 1 else [(False, False), (True, False)])
        kinds = [(type(one).__name__, getattr(one, "dim", None)) for one in step.operations]
        assert kinds == [("MergeModulelist", 0), ("Concatenate", 1)][: len(order)]
    assert checked > 50
