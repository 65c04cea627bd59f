"""Tables own what follows from them: another method, kind of layer or quantiser touches its own file alone."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import lorakit
from lorakit.base.find import find_base
from lorakit.base.loading import load_full
from lorakit.base.quantized import linear_layers, quant_config, quantization_facts
from lorakit.lora.methods import FACTORS, METHODS, LayerCall, Method, MethodTensor, Tensors
from lorakit.patch import read_patch
from lorakit.quant.published import SCHEMES
from lorakit.quant.schemes import QuantScheme, Shapes

PACKAGE = Path(lorakit.__file__).parent
IDS = torch.arange(5, 25)[None]


def texts_and_attributes(path: Path) -> set[str]:
    """Every string of a file but docstrings, every attribute that it reads, and what it imports of the layer kinds."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    words = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    }
    words |= {f".{node.attr}" for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imports = (
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "layer_kinds" in str(node.module)
    )
    return words | {f"import {alias.name}" for node in imports for alias in node.names}


@pytest.mark.parametrize(
    ("words", "known_to"),
    [
        (set(METHODS) - {"lora"}, {"lora/methods.py", "recipe/schema.py"}),
        pytest.param({"lora_magnitude_vector", "weight_norm"}, {"lora/methods.py"}, marks=pytest.mark.matrix),
        pytest.param({"import EMBEDDING", "import CONV1D"}, {"lora/layer_kinds.py"}, marks=pytest.mark.matrix),
        pytest.param(
            {"nf4", "fp4", "int8", "fp8"},
            {"recipe/schema.py", "cli/generate.py"},  # --help imports no torch and no pydantic
            marks=pytest.mark.matrix,
        ),
    ],
    ids=["methods", "tensors of methods", "kinds of layers", "quantisation schemes"],
)
def test_a_table_is_the_only_place_that_compares_with_its_rows(words: set[str], known_to: set[str]) -> None:
    naming = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if words & texts_and_attributes(path) and path.relative_to(PACKAGE).parts[0] != "quant"
    }
    assert naming <= known_to


def apply_gated(inputs: LayerCall, tensors: Tensors, s: float) -> Tensor:
    y = inputs.y()
    delta = inputs.low_rank(inputs.x, tensors["lora_A"], tensors["lora_B"], y.dtype)
    return y + s * tensors["lora_gate"].to(y.dtype) * delta


def merge_gated(W: Tensor, tensors: Tensors, s: float) -> Tensor:
    return W + s * tensors["lora_gate"][:, None] * (tensors["lora_B"] @ tensors["lora_A"])


GATED = Method(
    scale=lambda alpha, r: alpha / r,
    apply=apply_gated,
    fused=None,
    merge=merge_gated,
    serve=lambda tensors, W, s: (tensors["lora_A"], tensors["lora_gate"][:, None] * tensors["lora_B"], None),
    tensors={**FACTORS, "lora_gate": MethodTensor(("out",))},
    start=lambda W: {"lora_gate": torch.ones(len(W))},
    peft={"use_gate": True},
)
"""s g B A with a trainable gate g (out,)"""


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["embed_tokens", "q_proj"]], ids=str)
def test_a_method_with_a_tensor_of_its_own_is_one_row(
    targets: list[str], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Injected, trained, saved, read, put onto a model, merged and served beside another adapter."""
    monkeypatch.setitem(METHODS, "gated", GATED)  # type: ignore[arg-type]

    def live() -> Any:
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()

    expected_base = live()(IDS).logits
    model = lorakit.inject(live(), method="gated", rank=3, targets=targets)
    assert torch.equal(model(IDS).logits, expected_base)
    optimizer = torch.optim.Adam(lorakit.adapter_tensors(model).values(), lr=0.05)
    for _ in range(3):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
    expected = model(IDS).logits.detach()
    assert (expected - expected_base).abs().max() > 0.01
    folder = lorakit.save_patch(model, tmp_path / "patch")
    plain = lorakit.save_patch(lorakit.inject(live(), rank=2), tmp_path / "plain")

    patch = read_patch(folder)
    assert {layer.method for layer in patch.layers.values()} == {"gated"}
    gates = sum(layer.sizes[0] for layer in patch.layers.values())
    assert patch.num_parameters == gates + sum(3 * sum(layer.sizes) for layer in patch.layers.values())
    assert torch.equal(lorakit.load_patch(live(), folder)(IDS).logits, expected)
    served = lorakit.load(base, {"gated": folder, "plain": plain}, dtype="float32")
    rows = served(IDS.repeat(3, 1), adapters=["gated", None, "plain"]).logits
    torch.testing.assert_close(rows[:1], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rows[1:2], expected_base, rtol=1e-4, atol=1e-4)
    lorakit.merge(base, folder, out=tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-4)


@final
@dataclass(frozen=True)
class HalfPrecision(QuantScheme):
    """Not quantised at all: the bits of float16."""

    block = None

    def shapes(self, out_features: int, in_features: int) -> Shapes:
        return {"weight": ((out_features, in_features), torch.int16)}

    def quantize(self, W: Tensor) -> dict[str, Tensor]:
        return {"weight": W.detach().to(torch.float16).view(torch.int16)}

    def dequantize(self, tensors: Mapping[str, Tensor | None], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        weight = tensors["weight"]
        assert weight is not None
        return weight.view(torch.float16).to(dtype)

    def working_bytes(self, num_values: int) -> int:
        return 2 * num_values

    def stored_names(self, weight: str) -> dict[str, str]:
        return {"weight": weight}


def test_a_quantiser_is_one_row(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base is loaded in it, adapted, planned, and a merge goes onto the weights of training."""
    monkeypatch.setitem(SCHEMES, "half", HalfPrecision)  # type: ignore[arg-type]
    model = load_full(find_base(str(base)), torch.float32, torch.device("cpu"), quant_config("half"))
    half = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for name in linear_layers(half):
        if name != "lm_head":
            half.get_submodule(name).weight.data = half.get_submodule(name).weight.data.half().float()
    torch.testing.assert_close(model(IDS).logits, half(IDS).logits, rtol=1e-5, atol=1e-5)

    lorakit.inject(model, rank=2)
    model(IDS, labels=IDS).loss.backward()
    assert all(tensor.grad is not None for tensor in lorakit.adapter_tensors(model).values())
    facts = quantization_facts(model)
    assert facts is not None
    assert facts["name"] == "half"
    assert lorakit.load(base, quantize="half", dtype="float32").generate(["a"], max_new_tokens=1)
