"""A patch on experts knows its base by the stored tensors of the experts, however the files hold and name them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, MixtralConfig, MixtralForCausalLM

import lorakit
from lorakit.base.transformers_io import load_base
from lorakit.errors import PatchError
from lorakit.files.base_files import open_base_files
from lorakit.inspection.show import show
from lorakit.patch import check_base, read_patch
from lorakit.patch.fingerprint import BaseIdentity, fingerprint
from tests.helpers.models import build_variant
from tests.helpers.patches import make_patch

CPU = torch.device("cpu")
EXPERT = "model.layers.0.block_sparse_moe.experts.0.w2.weight"
IN_MEMORY = "model.layers.0.mlp.experts.down_proj"
ADAPTER = {"targets": ["q_proj"], "target_parameters": "all-experts", "rank": 2, "dropout": 0.0}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A base with 3 experts in each of 2 layers, each of 12,288 values: samples of them leave some values out."""
    folder = tmp_path_factory.mktemp("mixture")
    config = MixtralConfig(
        hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=3, num_experts_per_tok=2, vocab_size=len(tokenizer), initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def quantized(mixture: Path, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """The same base with its linear layers in nf4 in the files."""
    folder = tmp_path_factory.mktemp("quantized")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        mixture, dtype=torch.float32, device_map="cpu", quantization_config=settings
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def live(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patch of ``save_patch``, which records the base as it is in memory."""
    settings = {key: value for key, value in ADAPTER.items() if key != "dropout"}
    return make_patch(mixture, tmp_path_factory.mktemp("live") / "patch", **settings)


def changed(base: Path, folder: Path, name: str, index: int) -> Path:
    """Return a copy of a base in which one value of a stored tensor is another."""
    shutil.copytree(base, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[index] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def identity(base: Path) -> BaseIdentity:
    return BaseIdentity(open_base_files(base))


@pytest.mark.parametrize("kind", ["mixture", pytest.param("quantized", marks=pytest.mark.matrix)])
def test_a_patch_on_experts_is_trained_shown_loaded_and_merged(
    kind: str, recipe: Callable[..., Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    base = request.getfixturevalue(kind)
    path = recipe(base={"model": str(base)}, adapter=ADAPTER, train={"steps": 1, "warmup_steps": 0})
    result = lorakit.train(path)
    patch = read_patch(result.folder)

    recorded: Any = patch.metadata["base"]
    for digests in (recorded["weights"], recorded["full"]["weights"]):
        assert EXPERT in digests
        assert IN_MEMORY not in digests
        assert len([name for name in digests if ".weight." not in name]) == 2 + 2 * 9  # others are scales
    said: list[str] = []
    show(str(result.folder), str(base), said.append, full=True)
    assert any(line.endswith("by every value of 6 adapted weights and samples of all others") for line in said)
    lorakit.load(base, {"a": result.folder})
    lorakit.load_patch(load_base(base, torch.float32, CPU), result.folder) if kind == "mixture" else None
    ledger = json.loads((lorakit.merge(base, result.folder, out=tmp_path / "merged") / "merge.json").read_text())
    assert ledger["adapters"][0]["unverified"] is None

    for name, between_samples in (("sampled", 0), ("between", 600)):
        other = changed(base, tmp_path / name, EXPERT, between_samples)
        with pytest.raises(PatchError, match=rf"1 of 2[04] tensors of 6 adapted weights \({EXPERT} first\)"):
            lorakit.load(other, {"a": result.folder})
        with pytest.raises(PatchError, match=rf"1 of 2[04] tensors of 6 adapted weights \({EXPERT} first\)"):
            show(str(result.folder), str(other), said.append)
    with pytest.raises(PatchError, match="trained on another base than"):
        lorakit.merge(other, result.folder, out=tmp_path / "refused")


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_under_their_own_names_and_in_one_tensor_are_compared_too(
    name: str, tmp_path: Path, tokenizer: Any
) -> None:
    base = tmp_path / "base"
    build_variant(name).save_pretrained(base)
    names = [f"model.layers.0.mlp.experts.{key}" for key in ("gate_up_proj", "down_proj")]
    found = dict.fromkeys(stored for adapted in names for stored in identity(base).stored_names(adapted))
    if name == "gpt_oss":
        assert list(found) == names
    else:
        assert len(found) == 12
        assert all(stored.startswith("model.layers.0.mlp.experts.") for stored in found)
    assert identity(base).sampled(found).keys() == found.keys()


def test_save_patch_records_experts_as_files_hold_them(live: Path, mixture: Path, tmp_path: Path) -> None:
    patch = read_patch(live)
    recorded: Any = patch.metadata["base"]
    on_disk = fingerprint(identity(mixture), patch.layers)
    assert recorded["weights"] == on_disk["weights"]
    assert recorded["full"] == on_disk["full"]
    said: list[str] = []
    show(str(live), str(mixture), said.append, full=True)
    assert said[-1].endswith("by every value of 6 adapted weights alone, as the patch records no others")
    lorakit.merge(mixture, live, out=tmp_path / "merged")
    lorakit.load_patch(load_base(mixture, torch.float32, CPU), live)

    sampled = changed(mixture, tmp_path / "sampled", EXPERT, 0)
    with pytest.raises(PatchError, match=rf"1 of 2[04] tensors of 6 adapted weights \({EXPERT} first\)"):
        check_base(patch, identity(sampled))
    with pytest.raises(PatchError, match=rf"1 of 20 tensors of 6 adapted weights \({EXPERT} first\) differ"):
        lorakit.load_patch(load_base(sampled, torch.float32, CPU), live)
    between = changed(mixture, tmp_path / "between", EXPERT, 600)
    with pytest.raises(PatchError, match=rf"values of {IN_MEMORY} differ"):
        lorakit.merge(between, live, out=tmp_path / "refused")


@pytest.mark.parametrize("target", ["down_proj", "gate_up_proj"])
def test_a_patch_on_some_experts_records_all_stored_experts_of_their_layers(
    target: str, mixture: Path, tmp_path: Path
) -> None:
    patch = make_patch(mixture, tmp_path / "patch", targets=[], target_parameters=[f"experts.{target}"], rank=2)
    check_base(read_patch(patch), identity(mixture), full=True)
    lorakit.load_patch(load_base(mixture, torch.float32, CPU), patch)


def test_show_names_the_order_in_which_experts_of_another_program_are_read(live: Path, tmp_path: Path) -> None:
    said: dict[Path, list[str]] = {live: [], tmp_path / "foreign": []}
    lorakit.write_patch(tmp_path / "foreign", replace(read_patch(live), metadata={}))
    for folder, lines in said.items():
        show(str(folder), say=lines.append)
    own, foreign = (any("B is read as PEFT writes it" in line for line in lines) for lines in said.values())
    assert (own, foreign) == (False, True)
