"""Quantised bases: bitsandbytes' own bits, gradients of the dequantised weights, never a full base in floats."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lorakit.base.loading import load_for_training
from lorakit.errors import BaseModelError, RecipeError, RunError, TargetError, TemporaryFailure
from lorakit.lora import adapter_tensors, inject
from lorakit.patch import read_patch
from lorakit.quant.linear import QuantLinear, dequantized_weight
from lorakit.recipe import BaseSection
from tests.helpers.bases import make_base
from tests.helpers.quantized import SCHEMES, load_with_bitsandbytes
from tests.helpers.training import stop_at, train

CPU = torch.device("cpu")
IDS = torch.arange(3, 27).reshape(2, 12)
Recipe = Callable[..., Path]


def loaded(folder: Path, dtype: torch.dtype = torch.float32, **section: Any) -> Any:
    return load_for_training(BaseSection(model=str(folder), **section), folder, dtype, CPU, sharded=False).model


def dequantized(model: nn.Module) -> nn.Module:
    """The same model with plain layers that hold the dequantised weights."""
    plain = copy.deepcopy(model)
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, QuantLinear):
            own = nn.Linear(
                layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=layer.quantization.dtype
            )
            own.weight.data = dequantized_weight(layer).clone()
            if layer.bias is not None:
                own.bias = layer.bias
            parent, _, key = name.rpartition(".")
            setattr(plain.get_submodule(parent), key, own)
    return plain


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # bitsandbytes' own, on CPUs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", SCHEMES)
def test_weights_are_quantised_to_the_bits_of_bitsandbytes(
    base: Path, tmp_path: Path, how: str, dtype: torch.dtype
) -> None:
    ours, other = loaded(base, dtype, **SCHEMES[how]), load_with_bitsandbytes(base, how, dtype)

    quantized = {name for name, layer in ours.named_modules() if isinstance(layer, QuantLinear)}
    assert len(quantized) == 14
    assert quantized == {
        name for name, layer in other.named_modules() if type(layer).__name__ in ("Linear4bit", "Linear8bitLt")
    }
    for name in quantized:
        weight = ours.get_submodule(name).weight
        assert torch.equal(weight.flatten(), other.get_submodule(name).weight.data.flatten()), name

    other.save_pretrained(tmp_path / "quantized")
    reread = loaded(tmp_path / "quantized", dtype)  # without the key: the files are quantised

    for name in quantized:
        assert torch.equal(
            dequantized_weight(reread.get_submodule(name)), dequantized_weight(ours.get_submodule(name))
        ), name
    assert torch.equal(reread(input_ids=IDS).logits, ours(input_ids=IDS).logits)
    if how != "int8":  # which quantises the rows of x too, there
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.05}
        torch.testing.assert_close(ours(input_ids=IDS).logits, other(input_ids=IDS).logits, **tolerance)


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", [*SCHEMES, "fp8"])
def test_gradients_are_those_of_the_dequantised_weights(base: Path, how: str, dtype: torch.dtype, method: str) -> None:
    model = loaded(base, dtype, **SCHEMES.get(how, {"quantize": how}))
    oracle = dequantized(model)
    for one in (model, oracle):
        inject(one, rank=3, method=method)
        torch.manual_seed(2)
        for tensor in adapter_tensors(one).values():
            tensor.data += 0.1 * torch.randn_like(tensor)
        one(input_ids=IDS).logits.float().square().mean().backward()

    expected = adapter_tensors(oracle)
    assert torch.equal(model(input_ids=IDS).logits, oracle(input_ids=IDS).logits)
    for name, tensor in adapter_tensors(model).items():
        assert tensor.grad is not None
        assert expected[name].grad is not None
        torch.testing.assert_close(tensor.grad, expected[name].grad, rtol=0, atol=0)


def test_the_head_and_what_is_to_be_skipped_stay_as_they_are(base: Path) -> None:
    model = loaded(base, quantize="nf4", skip_modules=("layers.0", "down_proj"))

    quantized = {name for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
    assert len(quantized) == 6
    assert all(name.startswith("model.layers.1.") and not name.endswith("down_proj") for name in quantized)


def test_a_quantisation_that_is_not_possible_is_refused(base: Path, tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(BaseModelError, match=r"base.skip_modules: 'dwn_proj' matches no module.*down_proj"):
        loaded(base, quantize="nf4", skip_modules=("dwn_proj",))
    folder = tmp_path / "quantized"
    load_with_bitsandbytes(base, "nf4-double", torch.float32).save_pretrained(folder)
    with pytest.raises(
        BaseModelError, match=r"quantised already \(nf4 with quantised scales\); omit base.quantize: int8"
    ):
        loaded(folder, quantize="int8")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "quip"}}))
    with pytest.raises(BaseModelError, match="quantised with 'quip'; lorakit reads bitsandbytes"):
        loaded(folder)
    model = loaded(base, quantize="nf4")
    with pytest.raises(TargetError, match="q_proj is quantised, so it cannot be trained in full"):
        inject(model, targets=["k_proj"], modules_to_save=["q_proj"])


@pytest.mark.matrix
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_run_on_a_quantised_base_resumes_to_the_same_bytes(recipe: Recipe, optimizer: str, tmp_path: Path) -> None:
    start = {"init": "pissa", "rank": 8} if optimizer == "adamw" else {"rank": 128}
    settings: dict[str, Any] = {"base": {"quantize": "nf4"}, "adapter": start}
    first, output = train(recipe("one.yaml", **settings, output=str(tmp_path / "one"), train={"optimizer": optimizer}))
    stopped = recipe("two.yaml", **settings, output=str(tmp_path / "two"), train={"optimizer": optimizer})

    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, {5})
        with pytest.raises(TemporaryFailure):
            train(stopped)
    resumed, _ = train(stopped)

    assert "quantised  nf4 with quantised scales, 14 linear layers" in output
    one, two = read_patch(first), read_patch(resumed)
    assert one.metadata["base"]["quantized"]["name"] == "nf4"
    for name, layer in one.layers.items():
        assert layer.rank == (16 if optimizer == "adamw" else 128)  # pissa is saved on W itself
        for part, tensor in layer.tensors.items():
            assert torch.equal(tensor, two.layers[name].tensors[part])


def test_eight_bit_state_is_eight_bit_and_paging_needs_a_gpu(recipe: Recipe, tmp_path: Path) -> None:
    out, _ = train(recipe(adapter={"rank": 128}, train={"optimizer": "adamw8bit", "steps": 3}))
    engine = json.loads((out / "run.json").read_text())["engine"]
    assert engine["optimizer_bytes"] < 0.6 * 2 * engine["adapter_bytes"]
    with pytest.raises(RunError, match="paged_adamw8bit pages its state out of GPU memory"):
        train(recipe("paged.yaml", output=str(tmp_path / "paged"), train={"optimizer": "paged_adamw8bit", "steps": 3}))
    with pytest.raises(RecipeError, match="adamw8bit.*backend"):
        train(
            recipe(
                "zero.yaml",
                output=str(tmp_path / "zero"),
                train={"optimizer": "adamw8bit"},
                parallel={"backend": "zero2", "processes": 2},
            )
        )


MEASURE = """
import sys, torch
from pathlib import Path
from lorakit.base.loading import load_for_training
from lorakit.recipe import BaseSection
from lorakit.run.display import peak_resident_bytes
import transformers, bitsandbytes, accelerate
from lorakit.base.transformers_io import load_skeleton
folder = Path(sys.argv[1])
load_skeleton(folder)
before = peak_resident_bytes()
model = load_for_training(BaseSection(model="x", quantize="nf4"), folder, torch.bfloat16, torch.device("cpu"), sharded=False).model
print(peak_resident_bytes() - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.spread
@pytest.mark.matrix
def test_loading_never_has_a_full_base_in_floats_in_memory(tmp_path: Path, tokenizer: Any) -> None:
    folder = make_base(
        tmp_path / "base", tokenizer, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100MB")
    (folder / "model.safetensors").unlink()
    floats_bytes = sum(p.nbytes for p in model.parameters())

    done = subprocess.run([sys.executable, "-c", MEASURE, str(folder)], capture_output=True, text=True, check=True)

    grown, resident = map(int, done.stdout.split()[-2:])
    assert floats_bytes > 250e6
    assert resident < 0.4 * floats_bytes
    assert grown < 0.7 * floats_bytes


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("how", "change", "message"),
    [
        (
            "nf4-double",
            lambda t, w: t.update({w: t[w][:-1]}),
            r"q_proj.weight: \(511, 1\) torch.uint8; \(32, 32\) quantised as nf4 has",
        ),
        ("nf4-double", lambda t, w: t.pop(f"{w}.nested_absmax"), "nested_absmax: missing"),
        ("nf4-double", lambda t, w: t.update({f"{w}.absmax": t[f"{w}.absmax"].float()}), "absmax: .* torch.float32"),
        ("nf4", lambda t, w: t[f"{w}.quant_map"].mul_(2), "other values than bitsandbytes' own"),
        ("nf4", lambda t, w: t.update({f"{w}.quant_state.bitsandbytes__nf4": t[w].view(-1)[:9].clone()}), "damaged"),
        ("int8", lambda t, w: t.update({w.replace("weight", "SCB"): torch.ones(3)}), r"SCB: \(3,\)"),
    ],
)
def test_a_damaged_quantised_file_is_refused_before_anything_is_dequantised(
    base: Path, tmp_path: Path, how: str, change: Any, message: str
) -> None:
    from safetensors.torch import load_file, save_file

    load_with_bitsandbytes(base, how, torch.float32).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors, "model.layers.0.self_attn.q_proj.weight")
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})

    with pytest.raises(BaseModelError, match=message):
        loaded(tmp_path)
