"""Bases quantised by other programs: the weights that their own code reads, in training, merges and answers."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import lorakit
from lorakit.base.loading import load_for_training
from lorakit.cli import main
from lorakit.errors import BaseModelError, PatchError
from lorakit.files.base_files import open_base_files
from lorakit.merging.merge import merge
from lorakit.patch import BaseIdentity, fingerprint, read_patch
from lorakit.quant.linear import QuantExperts, QuantLinear, dequantized_weight
from lorakit.quant.published import quant_scheme
from lorakit.recipe import BaseSection
from scripts.zoo.trial import small_config
from tests.helpers.bases import make_base
from tests.helpers.models import build_variant
from tests.helpers.patches import make_patch
from tests.helpers.published import FORMS, publish
from tests.helpers.training import train

CPU = torch.device("cpu")
IDS = torch.arange(3, 27).reshape(2, 12)
Recipe = Callable[..., Path]
GPT_OSS = "gpt-oss"  # experts in MXFP4


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("published") / "floats"
    return make_base(folder, tokenizer, hidden_size=64, intermediate_size=128)


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_for_training(BaseSection(model=str(folder)), folder, dtype, CPU, sharded=False).model


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_that_the_formats_own_code_reads(floats: Path, tmp_path: Path, form: str) -> None:
    weights = publish(floats, tmp_path / "base", form)

    model = loaded(tmp_path / "base")

    layers = {name for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
    assert {f"{name}.weight" for name in layers} == weights.keys()
    assert len(layers) == 14
    for name in layers:
        torch.testing.assert_close(
            dequantized_weight(model.get_submodule(name)), weights[f"{name}.weight"], rtol=1e-6, atol=1e-8
        )
    plain: Any = AutoModelForCausalLM.from_pretrained(floats)
    plain.load_state_dict(weights, strict=False)
    torch.testing.assert_close(model(input_ids=IDS).logits, plain(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)


def test_fp8_has_the_values_of_compressed_tensors(floats: Path, tmp_path: Path) -> None:
    expected = publish(floats, tmp_path / "base", "float8-channel")
    section = BaseSection(model=str(floats), quantize="fp8")

    model: Any = load_for_training(section, floats, torch.float32, CPU, sharded=False).model

    for name, weight in expected.items():
        assert torch.equal(dequantized_weight(model.get_submodule(name.removesuffix(".weight"))), weight)
    scheme = quant_scheme("fp8")
    zeros = torch.zeros(2, 3)
    assert torch.equal(scheme.dequantize(scheme.quantize(zeros), (2, 3), torch.float32), zeros)


@pytest.mark.parametrize(
    "form",
    [
        "fp8",
        *(pytest.param(form, marks=pytest.mark.matrix) for form in ("int4-asymmetric", "gptq-ordered", "nvfp4", "hqq")),
    ],
)
def test_a_run_trains_checks_plans_and_merges_onto_what_it_saw(
    recipe: Recipe, floats: Path, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = publish(floats, tmp_path / "base", form)
    path = recipe(base={"model": str(tmp_path / "base")}, train={"steps": 4})
    assert main(["check", str(path)]) == 0
    assert main(["plan", str(path)]) == 0
    capsys.readouterr()

    out, said = train(path)

    assert f"quantised  {quantization(out)['name']}, 14 linear layers\n" in said
    merged = load_file(merge(tmp_path / "base", (out, 1.0), out=tmp_path / "merged") / "model.safetensors")
    patch = read_patch(out)
    for name, weight in weights.items():
        low_rank = patch.layers[name.removesuffix(".weight")].tensors
        change = low_rank["lora_B"].double() @ low_rank["lora_A"].double() * 4  # alpha / r
        torch.testing.assert_close(merged[name].double(), weight.double() + change, rtol=1e-5, atol=1e-6)
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    adapted = lorakit.load(tmp_path / "base", adapters={"a": out}, dtype="float32")
    prompts = ["say 3", "say 11"]
    alone = lorakit.load(tmp_path / "merged", dtype="float32")
    assert adapted.generate(prompts, adapters=["a", "a"], max_new_tokens=8) == alone.generate(prompts, max_new_tokens=8)


def quantization(out: Path) -> dict[str, Any]:
    recorded: dict[str, Any] = read_patch(out).metadata["base"]["quantized"]
    return recorded


@pytest.mark.spread
@pytest.mark.parametrize(
    "form", ["fp8", *(pytest.param(form, marks=pytest.mark.matrix) for form in (GPT_OSS, "gptq-ordered"))]
)
@pytest.mark.parametrize("backend", ["fsdp2", pytest.param("zero3", marks=pytest.mark.matrix)])
def test_shards_of_two_processes_take_the_steps_of_one(
    recipe: Recipe, floats: Path, tmp_path: Path, form: str, backend: str, tokenizer: Any
) -> None:
    if form == GPT_OSS:
        gpt_oss(tmp_path / "base", tokenizer)
    else:
        publish(floats, tmp_path / "base", form)
    patches = {}
    for name in ("single", backend):
        parallel = {"backend": name, "processes": 1 if name == "single" else 2}
        path = recipe(
            base={"model": str(tmp_path / "base")}, adapter={"dropout": 0.0}, train={"steps": 3}, parallel=parallel,
            output=str(tmp_path / name),
        )  # fmt: skip
        assert main(["train", str(path)]) == 0
        patches[name] = read_patch(tmp_path / name)
    for name, layer in patches["single"].layers.items():
        for key, tensor in layer.tensors.items():
            torch.testing.assert_close(patches[backend].layers[name].tensors[key], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "quantised with gptq: 3 bits; 4 are read"),
        ({"quant_method": "quip"}, "quantised with 'quip'; lorakit reads bitsandbytes"),
        ({"quant_method": "awq", "version": "marlin"}, "version marlin; gemm is read"),
        ({"quant_method": "compressed-tensors", "config_groups": 3}, "damaged"),
        ({"quant_method": "compressed-tensors"}, "several groups of layers; one of all linear layers is read"),
        ({"group_size": 16}, "qzeros: "),
        ({"group_size": "many"}, "damaged"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ; FP8 and NVFP4 are read"),
        ({"quant_method": "hqq", "quant_config": {}}, "settings for each layer; 4 bits along axis 1 are read"),
    ],
    ids=str,
)
def test_a_form_that_is_not_read_is_refused_by_name(
    floats: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    publish(floats, tmp_path / "base", "gptq")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["quantization_config"] |= change
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))

    with pytest.raises(BaseModelError) as caught:
        loaded(tmp_path / "base")
    assert message in str(caught.value)


@pytest.mark.parametrize("lost", ["qzeros", "scales", "qweight"])
def test_a_missing_or_short_tensor_is_named_before_a_product(floats: Path, tmp_path: Path, lost: str) -> None:
    publish(floats, tmp_path / "base", "gptq")
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.1.mlp.up_proj.{lost}"
    save_file({**tensors, name: tensors[name][:1].contiguous()}, file, {"format": "pt"})
    with pytest.raises(BaseModelError, match=r"model\.layers\.1\.mlp\.up_proj\."):
        loaded(tmp_path / "base")

    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(BaseModelError, match=r"model\.layers\.1\.mlp\.up_proj"):
        loaded(tmp_path / "base")


@pytest.mark.parametrize("form", ["gptq", "gptq-ordered"])
def test_columns_of_other_groups_are_an_error_while_they_are_read(floats: Path, tmp_path: Path, form: str) -> None:
    publish(floats, tmp_path / "base", form)
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.g_idx"][3] = 99 if form == "gptq-ordered" else 1
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(BaseModelError, match="g_idx: not the columns of 2 groups with desc_act"):
        loaded(tmp_path / "base")


def gpt_oss(folder: Path, tokenizer: Any) -> dict[str, Tensor]:
    """Write a small gpt-oss with its experts in MXFP4, as it is published; return what transformers makes of these."""
    tokens = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config("gpt_oss", len(tokenizer), tokens)).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    experts = {}
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, width, out = stored.pop(name).shape
        codes = torch.randint(256, (count, out, width // 32, 16), dtype=torch.uint8)
        exponents = torch.randint(118, 123, (count, out, width // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": codes, f"{name}_scales": exponents}
        experts[name] = convert_moe_packed_tensors(codes, exponents)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    return experts


def mixture(folder: Path, tokenizer: Any, form: str) -> Path:
    """Write a small mixture whose experts are quantised in this form, and return its folder."""
    if form == GPT_OSS:
        gpt_oss(folder / form, tokenizer)
        return folder / form
    torch.manual_seed(0)
    config = small_config("qwen3_moe", len(tokenizer))
    config.moe_intermediate_size = 64
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "floats")
    tokenizer.save_pretrained(folder / "floats")
    publish(folder / "floats", folder / form, form)
    return folder / form


@pytest.mark.parametrize("form", [GPT_OSS, "fp8", "fp8-tensor", "nvfp4", "int4-asymmetric", "awq", "hqq"])
def test_quantised_experts_compute_as_plain_floats_do(tmp_path: Path, tokenizer: Any, form: str) -> None:
    base = mixture(tmp_path, tokenizer, form)
    plain = merge(base, out=tmp_path / "plain", dtype="float32")
    expected = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)

    model = loaded(base)

    in_codes = [one for one in model.modules() if isinstance(one, QuantExperts)]
    assert len(in_codes) == 2 * len(model.model.layers)
    assert not any(name.endswith("_proj") for name, _ in model.named_parameters())
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-5, atol=1e-6)
    embedded, others = (one.get_input_embeddings()(IDS).detach().requires_grad_() for one in (model, expected))
    for one, x in ((model, embedded), (expected, others)):
        one(inputs_embeds=x).logits.square().sum().backward()
    torch.testing.assert_close(embedded.grad, others.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", [GPT_OSS, pytest.param("fp8", marks=pytest.mark.matrix)])
def test_a_base_with_quantised_experts_is_trained_served_and_merged(
    recipe: Recipe, tmp_path: Path, tokenizer: Any, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = mixture(tmp_path, tokenizer, form)
    path = recipe(base={"model": str(base)}, train={"steps": 3})
    assert main(["check", str(path)]) == 0
    assert main(["plan", str(path)]) == 0
    out, _ = train(path)
    merged = merge(base, (out, 1.0), out=tmp_path / "merged", dtype="float32")

    model = lorakit.load(base, {"a": out}, dtype="float32")

    expected = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    torch.testing.assert_close(model(IDS, adapters="a").logits, expected(IDS).logits, rtol=1e-4, atol=1e-5)
    prompt = [5, 6, 7]
    for token in model.generate_ids([prompt], ["a"], max_new_tokens=4)[0]:
        assert token == int(expected(torch.tensor([prompt])).logits[0, -1].argmax())
        prompt.append(token)
    capsys.readouterr()
    for adapter in (
        {"target_parameters": "all-experts"}, {"targets": ["down_proj"]}, {"targets": ["experts"]},
        {"targets": ["experts.gate_up_proj"]},
    ):  # fmt: skip
        adapts_them = recipe(base={"model": str(base)}, adapter={"dropout": 0.0, **adapter})
        assert main(["check", str(adapts_them)]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert said.count("hold its experts quantised; `lorakit merge BASE") == 1, adapter
        assert "block_scale" not in said

    floats = merge(base, out=tmp_path / "plain")
    patch = make_patch(floats, tmp_path / "patch", target_parameters="all-experts", targets=["q_proj"])
    with pytest.raises(PatchError) as caught:
        lorakit.load(base, {"a": patch}, allow={"base"})
    num_layers = len(read_patch(patch).layers)
    assert f"{num_layers * 2 // 3} of its {num_layers} parts\n" in str(caught.value)
    assert "hold its experts quantised; `lorakit merge BASE --out FOLDER` writes the base" in str(caught.value)


@pytest.mark.matrix
def test_quantised_experts_are_written_in_plain_floats_and_trained(
    recipe: Recipe, tmp_path: Path, tokenizer: Any
) -> None:
    experts = gpt_oss(tmp_path / "base", tokenizer)

    assert main(["merge", str(tmp_path / "base"), "--out", str(tmp_path / "floats")]) == 0

    floats = load_file(tmp_path / "floats" / "model.safetensors")
    for name, expected in experts.items():
        assert torch.equal(floats[name], expected), name
    assert not any(name.endswith(("_blocks", "_scales")) for name in floats)
    assert "quantization_config" not in json.loads((tmp_path / "floats" / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "floats", dtype=torch.float32)
    torch.testing.assert_close(lorakit.load(tmp_path / "floats", dtype="float32")(IDS).logits, model(IDS).logits)
    out, _ = train(recipe(base={"model": str(tmp_path / "floats")}, train={"steps": 3}))
    assert merge(tmp_path / "floats", (out, 1.0), out=tmp_path / "merged").is_dir()


@pytest.mark.parametrize(
    ("form", "described", "adapted"),
    [
        ("fp8", "fp8-blocks, 8 linear layers and 4 experts' parameters", "8 of 9 linear layers"),
        (GPT_OSS, "mxfp4, 4 experts' parameters", "8 of 9 linear layers"),
    ],
)
def test_every_command_names_the_quantisation_and_the_frozen_experts_alike(
    recipe: Recipe, tmp_path: Path, tokenizer: Any, form: str, described: str, adapted: str, capsys: Any
) -> None:
    base = mixture(tmp_path, tokenizer, form)
    path = recipe(base={"model": str(base)}, train={"steps": 3})
    out, said = train(path)
    commands = (["check", str(path)], ["plan", str(path)], ["show", str(base)], ["show", str(out)])
    printed = {"train": said}
    for command in commands:
        assert main(command) == 0
        printed[" ".join(command)] = capsys.readouterr().out

    for command, text in printed.items():
        assert re.search(rf"^quantised +{re.escape(described)}$", text, re.MULTILINE), command
    frozen = "the routed experts experts.gate_up_proj, experts.down_proj"
    for command in ("train", f"check {path}"):
        assert f"targets    {adapted} and 0 of 4 experts' parameters (q_proj, " in printed[command]
        assert f"frozen     {frozen}\n" in printed[command]
    assert "experts.down_proj" in printed[f"show {base}"]


def test_a_new_recipe_offers_no_quantisation_of_quantised_files(
    rows: Path, base: Path, tmp_path: Path, tokenizer: Any
) -> None:
    for folder in (base, mixture(tmp_path, tokenizer, GPT_OSS)):
        out = tmp_path / f"{folder.name}.yaml"
        assert main(["init", "--base", str(folder), "--data", str(rows), "--out", str(out), "--yes"]) == 0
        assert ("quantize" in out.read_text()) is (folder == base)


@pytest.mark.parametrize(("form", "scheme"), [("fp8", "fp8-blocks"), (GPT_OSS, "mxfp4")])
def test_files_that_are_quantised_already_are_not_quantised_by_the_recipe(
    recipe: Recipe, tmp_path: Path, tokenizer: Any, form: str, scheme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = mixture(tmp_path, tokenizer, form)
    path = recipe(base={"model": str(base), "quantize": "nf4"})
    line = f"{base}: its files are quantised already ({scheme}); omit base.quantize: nf4"

    for command in ("check", "plan", "train"):
        assert main([command, str(path)]) == 2
        assert line in " ".join(capsys.readouterr().err.split()), command


@pytest.mark.parametrize("option", ["--verify", "--untie"])
def test_options_of_a_change_need_an_adapter(
    floats: Path, tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(floats, tmp_path / "base", "fp8")
    assert main(["merge", str(tmp_path / "base"), "--out", str(tmp_path / "out"), option]) == 2
    assert f"{option.removeprefix('--')}: there is no adapter" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["cut", "floats", "gone"])
def test_damaged_mxfp4_experts_are_refused_by_name(tmp_path: Path, tokenizer: Any, change: str) -> None:
    gpt_oss(tmp_path / "base", tokenizer)
    stored = load_file(tmp_path / "base" / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    scales = stored.pop(name)
    if change != "gone":
        stored[name] = scales[:, :-1].clone() if change == "cut" else scales.float()
    save_file(stored, tmp_path / "base" / "model.safetensors", {"format": "pt"})

    with pytest.raises(BaseModelError, match="down_proj_blocks and its scales"):
        merge(tmp_path / "base", out=tmp_path / "floats")
    assert not (tmp_path / "floats").exists()


def test_experts_whose_blocks_cross_are_written_in_plain_floats(tmp_path: Path, tokenizer: Any) -> None:
    """A block of 32 rows, of which 24 are the first projection's."""
    build_variant("qwen3_moe").save_pretrained(tmp_path / "floats")
    tokenizer.save_pretrained(tmp_path / "floats")
    weights = publish(tmp_path / "floats", tmp_path / "base", "fp8")
    assert any(".experts." in name for name in weights)
    with pytest.raises(BaseModelError, match="write the base in plain floats"):
        loaded(tmp_path / "base")

    merged = load_file(merge(tmp_path / "base", out=tmp_path / "plain", dtype="float32") / "model.safetensors")

    for name, weight in weights.items():
        torch.testing.assert_close(merged[name], weight, rtol=1e-2, atol=1e-6)  # in the dtype of the config first
    assert type(loaded(tmp_path / "plain")).__name__ == "Qwen3MoeForCausalLM"


def change(folder: Path, name: str) -> None:
    """Change the last value of a tensor of a base."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    changed = tensors[name].reshape(-1).view(torch.uint8)
    changed[-tensors[name].element_size()] ^= 1  # its lowest bit
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("form", FORMS)
def test_each_tensor_of_a_quantised_layer_is_of_the_fingerprint(floats: Path, tmp_path: Path, form: str) -> None:
    """Codes are half of a weight: its scales, zeros and order of rows are the other."""
    layer = "model.layers.1.mlp.up_proj"
    publish(floats, tmp_path / "base", form)
    recorded = fingerprint(BaseIdentity(open_base_files(tmp_path / "base")), [layer])
    names = [name for name in load_file(tmp_path / "base" / "model.safetensors") if name.startswith(layer)]
    assert len(names) > 1

    assert any(name.endswith("qweight") for name in recorded["full"]["weights"]) == (form[:4] in ("gptq", "awq"))
    for name in names:
        change(tmp_path / "base", name)
        here = BaseIdentity(open_base_files(tmp_path / "base"))
        assert here.full(recorded["full"]["weights"]) != recorded["full"]["weights"], name
        change(tmp_path / "base", name)


def test_a_patch_is_refused_on_codes_with_another_scale(floats: Path, tmp_path: Path, recipe: Recipe) -> None:
    publish(floats, tmp_path / "base", "fp8")
    out = tmp_path / "out"
    train(recipe(base={"model": str(tmp_path / "base")}, train={"steps": 3}, output=str(out)))
    lorakit.load(tmp_path / "base", adapters={"a": out})

    change(tmp_path / "base", "model.layers.1.mlp.up_proj.weight_scale_inv")

    with pytest.raises(
        PatchError, match=r"1 of 28 tensors of 14 adapted weights \(model.layers.1.mlp.up_proj.weight_scale_inv first\)"
    ):
        lorakit.load(tmp_path / "base", adapters={"a": out})
