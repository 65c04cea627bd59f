"""Adapters written by the real PEFT: read, served, merged and written again, with PEFT as the judge."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file

import lorakit
from lorakit.errors import LorakitError, PatchError
from lorakit.patch import read_patch, write_patch
from tests.helpers.models import build
from tests.helpers.patches import peft_model, save_peft_patch

IDS = torch.arange(3, 27).reshape(2, 12) % 64
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # PEFT's own


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got - expected).norm() <= 2e-5 * expected.norm())


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "all linear": ("qwen3", {"target_modules": "all-linear", "r": 3, "lora_alpha": 7.5}),
    "regex and rslora": ("llama", {"target_modules": r".*\.(up|down)_proj", "use_rslora": True, "r": 5}),
    "patterns": (
        "llama",
        {
            "target_modules": ["q_proj", "up_proj"], "rank_pattern": {r"layers\.1\..*": 3, "up_proj": 6},
            "alpha_pattern": {"up_proj": 4.25},
        },
    ),
    "one layer": ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "embedding": ("llama", {"target_modules": ["q_proj", "embed_tokens"], "r": 4}),
    "scaled embedding": ("gemma3_text", {"target_modules": ["embed_tokens"], "r": 4, "use_rslora": True}),
    "embedding alone": ("gpt2", {"target_modules": ["wte"]}),
    "head": ("llama", {"target_modules": ["lm_head", "q_proj"]}),
    "tied head": ("gpt2", {"target_modules": ["lm_head"]}),
    "biases of adapted layers": ("opt", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "every bias": ("opt", {"target_modules": ["q_proj", "fc1"], "bias": "all"}),
    "whole modules": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    "whole tied embedding": ("gpt2", {"target_modules": ["c_attn"], "modules_to_save": ["wte"]}),
    "embedding with its head": ("gemma3_text", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "head with its embedding": ("gemma3_text", {"target_modules": ["lm_head"], "ensure_weight_tying": True}),
    "whole embedding with its head": (
        "gemma3_text", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["default", "sql"])
def test_what_peft_writes_is_served_merged_and_written_back(
    case: str, name: str, tmp_path: Path, tokenizer: Any
) -> None:
    architecture, config = CASES[case]
    base, folder, peft = save_peft_patch(tmp_path, architecture, tokenizer, name, **config)
    with torch.no_grad():
        expected = peft(input_ids=IDS).logits
        plain = build(architecture)(input_ids=IDS).logits
    assert not close(plain, expected)

    model = lorakit.load(base, {"x": folder}, dtype="float32")
    assert close(model(IDS, adapters="x").logits, expected)
    if case != "every bias":  # OPT lays the rows of a batch end to end before some of its layers
        assert close(model(IDS, adapters=["x", None]).logits, torch.cat([expected[:1], plain[1:]]))
        first = torch.cat([model(IDS[:1, :1], adapters="x").logits, model(IDS[1:, :1]).logits])
        assert close(model(IDS[:, :1], adapters=["x", None]).logits, first)  # one token: adapters side by side
    assert torch.equal(model(IDS).logits, plain)
    with model.merged("x") as merged:
        assert close(merged(IDS).logits, expected)

    rewritten = write_patch(tmp_path / "rewritten", read_patch(folder))
    before, after = load_file(folder / "adapter_model.safetensors"), load_file(rewritten / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert all(before[key].dtype == after[key].dtype and torch.equal(before[key], after[key]) for key in before)
    assert json.loads((folder / "adapter_config.json").read_text()) == json.loads(
        (rewritten / "adapter_config.json").read_text()
    )
    assert close(PeftModel.from_pretrained(build(architecture), rewritten).eval()(input_ids=IDS).logits, expected)

    out = merge_somehow(base, folder, tmp_path / "merged")
    assert close(lorakit.load(out, dtype="float32")(IDS).logits, expected)


@pytest.mark.parametrize("case", [case for case, (_, config) in CASES.items() if "ensure_weight_tying" in config])
def test_training_goes_on_from_a_patch_that_changes_embedding_and_head_alike(
    case: str, tmp_path: Path, tokenizer: Any
) -> None:
    architecture, config = CASES[case]
    base, folder, peft = save_peft_patch(tmp_path, architecture, tokenizer, **config)

    model = lorakit.load_patch(build(architecture), folder)

    with torch.no_grad():
        assert close(model(input_ids=IDS).logits, peft(input_ids=IDS).logits)
    again = lorakit.load_patch(build(architecture), lorakit.save_patch(model, tmp_path / "again"))
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def merge_somehow(base: Path, folder: Path, out: Path) -> Path:
    """Merged as it is, or with a head of its own where only one of two tied tensors changes."""
    try:
        return lorakit.merge(base, folder, out=out, verify=True)
    except LorakitError as problem:
        assert "--untie" in str(problem)
        return lorakit.merge(base, folder, out=out, untie=True, verify=True)


MODULES = {
    "llama": ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"],
    "gpt2": ["c_attn", "c_proj", "c_fc", "wte"],
    "opt": ["q_proj", "v_proj", "fc2", "out_proj"],
    "mixtral": ["q_proj", "v_proj", "lm_head"],
}


@st.composite
def configurations(draw: st.DrawFn) -> tuple[str, dict[str, Any], torch.dtype, str]:
    """An architecture, settings of PEFT, a dtype of storage and a name for the adapter."""
    architecture = draw(st.sampled_from(sorted(MODULES)))
    modules = MODULES[architecture]
    targets = draw(st.lists(st.sampled_from(modules), min_size=1, unique=True))
    config: dict[str, Any] = {
        "target_modules": targets,
        "r": draw(st.integers(1, 9)),
        "lora_alpha": draw(st.one_of(st.integers(1, 40), st.floats(0.5, 40, allow_nan=False).map(lambda x: round(x, 3)))),
        "use_rslora": draw(st.booleans()),
        "lora_dropout": draw(st.sampled_from([0.0, 0.25])),
        "bias": draw(st.sampled_from(["none", "none", "lora_only", "all"])),
        "rank_pattern": draw(st.dictionaries(st.sampled_from([*modules, r"layers\.1\..*", r".*\.0\..*"]), st.integers(1, 9), max_size=2)),
        "alpha_pattern": draw(st.dictionaries(st.sampled_from([*modules, "[a-z]*_proj"]), st.integers(1, 30), max_size=2)),
        "layers_to_transform": draw(st.sampled_from([None, None, [1], 0])),
        "fan_in_fan_out": architecture == "gpt2",
    }  # fmt: skip
    left = [name for name in ("norm", "lm_head", "ln_f", "embed_tokens") if name not in targets]
    config["modules_to_save"] = draw(st.sampled_from([None, None, left[:1], left]))
    return (
        architecture, config, draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16])),
        draw(st.sampled_from(["default", "sql", "a-b", "lora"])),
    )  # fmt: skip


@pytest.mark.matrix
@settings(max_examples=40, deadline=None, derandomize=True)
@given(configurations())
def test_any_adapter_of_peft_means_the_same(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, drawn: tuple[str, dict[str, Any], torch.dtype, str]
) -> None:
    architecture, config, dtype, name = drawn
    folder = tmp_path_factory.mktemp("drawn")
    build(architecture).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    try:
        model = peft_model(architecture, name, **config)
    except ValueError:
        return  # PEFT refuses the settings, or they match nothing
    for key, parameter in model.named_parameters():
        if "lora_" in key or "modules_to_save" in key:
            parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder / "patch")
    patch = folder / "patch" / ("" if name == "default" else name)
    try:
        oracle = PeftModel.from_pretrained(build(architecture), patch).eval()  # PEFT's own reading of its file
    except RuntimeError:  # it sorts overlapping patterns when it saves, and then finds other ranks than it wrote
        with pytest.raises(PatchError, match="the config says rank"):
            read_patch(patch)
        return
    with torch.no_grad():
        expected = oracle(input_ids=IDS).logits

    ours = lorakit.load(folder / "base", {"x": patch}, dtype="float32")

    assert close(ours(IDS, adapters="x").logits, expected)
    rewritten = write_patch(folder / "rewritten", read_patch(patch))
    before, after = load_file(patch / "adapter_model.safetensors"), load_file(rewritten / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert all(before[key].dtype == after[key].dtype and torch.equal(before[key], after[key]) for key in before)
    with ours.merged("x") as merged:
        assert close(merged(IDS).logits, expected)
