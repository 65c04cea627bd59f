"""A patch from a quantised base merges onto dequantised or original weights, and either is verified."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import lorakit
from lorakit.base.loading import load_for_training
from lorakit.cli import main
from lorakit.errors import BaseModelError, MergeError, PatchError
from lorakit.files.base_files import open_base_files
from lorakit.merging.tensors import trained_quantization
from lorakit.merging.verify import verify_merge
from lorakit.patch.find import open_weighted
from lorakit.quant.linear import QuantLinear, dequantized_weight
from lorakit.recipe import BaseSection
from tests.helpers.bases import make_base
from tests.helpers.patches import make_patch
from tests.helpers.quantized import load_with_bitsandbytes
from tests.helpers.training import train

IDS = torch.arange(3, 27).reshape(2, 12)

Recipe = Callable[..., Path]
CPU = torch.device("cpu")


@pytest.fixture(params=["nf4", *(pytest.param(how, marks=pytest.mark.matrix) for how in ("int8", "fp8"))])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def trained(recipe: Recipe, folder: Path, how: str, **base: Any) -> Path:
    settings = {"steps": 8, "learning_rate": 0.05}
    section = {"quantize": how} | base
    return train(recipe(f"{folder.name}.yaml", base=section, output=str(folder), train=settings))[0]


def dequantized(base: Path, how: str) -> dict[str, torch.Tensor]:
    """Return module.weight -> its value in training."""
    section = BaseSection(model="x", quantize=how)  # type: ignore[arg-type]
    model = load_for_training(section, base, torch.float32, CPU, sharded=False).model
    return {f"{n}.weight": dequantized_weight(m) for n, m in model.named_modules() if isinstance(m, QuantLinear)}


def verified(out: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((out / "merge.json").read_text())["verified"]
    return result


def test_the_printed_line_quantises_the_base_as_in_training(recipe: Recipe, tmp_path: Path, how: str) -> None:
    _, said = train(recipe(base={"quantize": how}, output=str(tmp_path / "a b"), train={"steps": 2, "warmup_steps": 0}))

    words = shlex.split(next(line for line in said.splitlines() if line.startswith("try it")))
    assert words[words.index("--quantize") + 1] == how
    assert main([*words[3:-1], "hi", "--max-new-tokens", "2"]) == 0


def test_two_ways_each_verified(recipe: Recipe, base: Path, tmp_path: Path, how: str) -> None:
    patch = trained(recipe, tmp_path / "patch", how)
    said: list[str] = []

    ways: dict[str, dict[str, Any]] = {"default": {}, "original": {"onto": "original"}}
    out = {
        name: lorakit.merge(base, patch, out=tmp_path / name, verify=True, say=said.append, **settings)
        for name, settings in ways.items()
    }

    stored, values = load_file(base / "model.safetensors"), dequantized(base, how)
    layers = lorakit.patch.read_patch(patch).layers
    merged = {name: load_file(folder / "model.safetensors") for name, folder in out.items()}
    for name, W in stored.items():
        for way, start in (("default", values.get(name, W)), ("original", W)):
            layer = layers.get(name.removesuffix(".weight"))
            exact = start.double()
            if layer is not None:
                exact = exact + layer.scale * (layer.tensors["lora_B"].double() @ layer.tensors["lora_A"].double())
            assert torch.equal(merged[way][name], exact.float()), (
                way,
                name,
            )  # layers that are not quantised are not changed
    for folder in out.values():
        assert verified(folder)["layers"] == len(layers)
        assert verified(folder)["largest_share_of_bound"] < 1
        assert verified(folder)["not_compared"] == {}
    assert "onto       dequantized: the weights used in training, dequantised" in said[0]
    assert sum(line.startswith("verified: ") for line in said) == 2
    unverified = lorakit.merge(base, patch, out=tmp_path / "unverified")
    assert "verified" not in json.loads((unverified / "merge.json").read_text())


def test_verifying_finds_a_merge_onto_other_weights_than_those_of_training(
    recipe: Recipe, base: Path, tmp_path: Path
) -> None:
    patch = trained(recipe, tmp_path / "patch", "nf4")
    original = lorakit.merge(base, patch, out=tmp_path / "original", onto="original")
    files = open_base_files(base)
    weighted = open_weighted([patch])
    lines = json.loads((original / "merge.json").read_text())["merged"]

    with pytest.raises(MergeError, match="merged and adapted outputs differ by"):
        verify_merge(base, weighted, original, lines, print, trained_quantization(files, [weighted[0].patch], None))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("how", ["nf4", pytest.param("int8", marks=pytest.mark.matrix)])
def test_a_base_whose_files_are_quantised(recipe: Recipe, base: Path, tmp_path: Path, tokenizer: Any, how: str) -> None:
    """With nothing but a quantised folder: train, load, merge."""
    folder = tmp_path / "quantized"
    load_with_bitsandbytes(base, "nf4-double" if how == "nf4" else "int8", torch.float32).save_pretrained(
        folder, max_shard_size="100KB"
    )
    tokenizer.save_pretrained(folder)
    patch = trained(recipe, tmp_path / "patch", "none", model=str(folder))

    out = lorakit.merge(folder, patch, out=tmp_path / "out", verify=True)

    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert verified(out)["largest_share_of_bound"] < 1
    adapted = lorakit.load(folder, {"x": patch}, dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    # float32 rounds otherwise in other orders: logits of about 2 differ by up to 1.3e-4 on some CPUs
    torch.testing.assert_close(merged(IDS).logits, adapted(IDS, adapters="x").logits, rtol=1e-4, atol=3e-4)
    with pytest.raises(MergeError, match="holds quantised weights only; name the base they were made from"):
        lorakit.merge(folder, patch, out=tmp_path / "no", onto="original")
    with pytest.raises(PatchError, match="trained on another base"):
        lorakit.merge(base, patch, out=tmp_path / "no", onto="original")
    known = lorakit.merge(base, patch, out=tmp_path / "known", onto="original", verify=True, allow={"base"})
    assert verified(known)["layers"] > 0


@pytest.mark.matrix
def test_options_that_contradict_the_training_are_refused(
    recipe: Recipe, base: Path, tmp_path: Path, tokenizer: Any
) -> None:
    plain, out = make_patch(base, tmp_path / "plain"), tmp_path / "out"
    quantized = trained(recipe, tmp_path / "quantized", "nf4")
    for settings, adapters, message in (
        ({"onto": "dequantized"}, [plain], "no patch was trained on a quantised base"),
        ({"onto": "half"}, [quantized], "onto: one of original, dequantized"),
        ({}, [quantized, plain], "trained on a base in nf4 in float32, another patch on one in floats"),
    ):
        with pytest.raises(MergeError, match=message):
            lorakit.merge(base, *adapters, out=out, **settings)
        assert not out.exists()
    both = lorakit.merge(base, quantized, plain, out=tmp_path / "both", onto="original", verify=True)
    assert json.loads((both / "merge.json").read_text())["onto"] == "original"
    other = make_base(tmp_path / "other", tokenizer, seed=3)
    with pytest.raises(PatchError, match="trained on another base"):
        lorakit.merge(other, quantized, out=out)
    with pytest.raises(BaseModelError, match="quantize: one of none, nf4"):
        lorakit.load(base, quantize="nf3")


@pytest.mark.matrix
def test_a_patch_on_a_base_in_another_form_says_so(recipe: Recipe, base: Path, tmp_path: Path) -> None:
    patch = trained(recipe, tmp_path / "patch", "nf4")

    quantized = lorakit.load(base, {"x": patch}, dtype="float32", quantize="nf4")
    plain = lorakit.load(base, {"x": patch}, dtype="float32")

    assert quantized.notes == ()
    assert "was trained on a base quantised as nf4, and this one is in floats" in plain.notes[0]
    assert (quantized(IDS, adapters="x").logits - plain(IDS, adapters="x").logits).abs().max() > 1e-3
    with pytest.raises(PatchError, match="quantised, so nothing can be merged into it"), quantized.merged("x"):
        pass


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_stay_unquantised_are_verified_as_the_merge_reads_them(
    recipe: Recipe, base: Path, tmp_path: Path, dtype: str
) -> None:
    base_section = {"quantize": "nf4", "skip_modules": ["q_proj", "down_proj"], "dtype": dtype}
    patch = trained(recipe, tmp_path / "patch", "nf4", **base_section)
    said: list[str] = []

    out = lorakit.merge(base, patch, out=tmp_path / "out", verify=True, say=said.append)

    assert (verified(out)["layers"], verified(out)["not_compared"]) == (14, {})
    assert any(line.startswith("verified: all 14 merged layers") for line in said)
    merged = load_file(out / "model.safetensors")
    merged["model.layers.0.self_attn.q_proj.weight"][0, 0] += 0.01
    save_file(merged, out / "model.safetensors")
    weighted = open_weighted([patch])
    quantization = trained_quantization(open_base_files(base), [weighted[0].patch], None)
    lines = json.loads((out / "merge.json").read_text())["merged"]
    with pytest.raises(MergeError, match=r"layers.0.self_attn.q_proj: merged and adapted outputs differ by"):
        verify_merge(base, weighted, out, lines, print, quantization)


def test_a_dora_patch_on_a_quantised_base_merges_as_it_was_trained(recipe: Recipe, base: Path, tmp_path: Path) -> None:
    path = recipe(
        "dora.yaml", base={"quantize": "nf4"}, adapter={"method": "dora", "dropout": 0.0}, output=str(tmp_path / "dora"),
        train={"steps": 8, "learning_rate": 0.05},
    )  # fmt: skip
    patch, _ = train(path)

    out = lorakit.merge(base, patch, out=tmp_path / "out", verify=True)

    assert verified(out)["layers"] > 0
