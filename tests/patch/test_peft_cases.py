"""PEFT's own table of cases for LoRA on models of one's own: each is computed as PEFT does, or refused by name.

The rows are those of ``tests/test_custom_models.py`` of PEFT 0.21 whose config is a LoraConfig, with inputs of our own.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import KasaConfig, LoraConfig, MontecloraConfig, PeftModel, VeloraConfig, get_peft_model
from peft.tuners.lora.config import BdLoraConfig
from peft.tuners.lora.layer import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import lorakit
from lorakit.cli import main
from lorakit.errors import PatchError
from lorakit.patch import read_patch, write_patch
from tests.helpers.patches import TENSORS, save_peft_patch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's own

Case = tuple[str, dict[str, Any]]  # model, settings of PEFT


class Own(nn.Module):
    """Layers by name, called in their order with ReLU between them; `lin0` and behind it get flat rows."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        for number, (name, layer) in enumerate(self.named_children()):
            x = x.relu() if number > 1 else x
            x = x.flatten(1) if name.startswith("lin") else x
            x = layer(x, x, x)[0] if name == "mha" else layer(x)
        return x


class ProductWithParameter(nn.Module):
    """A linear layer whose weight is (in, out), and which is no nn.Linear."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_in, num_out))
        self.bias = nn.Parameter(torch.randn(num_out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def build(kind: str) -> tuple[nn.Module, Tensor]:
    """Return a model with the same values in each call, and its input."""
    torch.manual_seed(0)
    rows = torch.randn(9, 10)
    image = torch.randn(4, 16, 5, 5)
    last = nn.Linear(10, 2)
    built: dict[str, tuple[dict[str, nn.Module], Tensor]] = {
        "MLP": ({"lin0": nn.Linear(10, 20), "lin1": nn.Linear(20, 2)}, rows),
        "EmbConv1D": (
            {"emb": nn.Embedding(100, 5), "conv1d": Conv1D(1, 5), "lin0": last},
            torch.arange(90).view(9, 10),
        ),
        "Conv1d": ({"conv1d": nn.Conv1d(1, 1, 2), "lin0": nn.Linear(9, 2)}, rows[:, None]),
        "Conv2d": ({"conv2d": nn.Conv2d(5, 10, 3), "lin0": last}, image[:, :5, :3, :3]),
        "Conv2dGroups": ({"conv2d": nn.Conv2d(16, 16, 3, groups=8), "lin0": nn.Linear(144, 2)}, image),
        "Conv2dGroups2": ({"conv2d": nn.Conv2d(16, 32, 3, groups=2), "lin0": nn.Linear(288, 2)}, image),
        "Conv3d": ({"conv3d": nn.Conv3d(5, 10, 3), "lin0": last}, torch.randn(4, 5, 3, 3, 3)),
        "MHA": ({"mha": nn.MultiheadAttention(10, 2), "lin0": last}, rows),
        "Parameters": ({"lin0": ProductWithParameter(10, 20), "lin1": ProductWithParameter(20, 2)}, rows),
    }
    layers, x = built[kind]
    return Own(**layers).eval(), x


def on(*names: str, **config: Any) -> dict[str, Any]:
    return {"target_modules": [*names], **config}


DORA = {"use_dora": True}
EQUAL: dict[str, Case] = {
    "a name": ("MLP", {"target_modules": "lin0"}),
    "a list": ("MLP", on("lin0")),
    "the last layer": ("MLP", on("lin1")),
    "both layers": ("MLP", on("lin0", "lin1")),
    "a module in full": ("MLP", on("lin0", modules_to_save=["lin1"])),
    "alpha and dropout": ("MLP", on("lin0", lora_alpha=4, lora_dropout=0.1)),
    "DoRA": ("MLP", on("lin0", **DORA)),
    "DoRA on both": ("MLP", on("lin0", "lin1", **DORA)),
    "DoRA with alpha": ("MLP", {"target_modules": "lin1", "lora_alpha": 32, **DORA}),
    "MiCA": ("MLP", on("lin0", init_lora_weights="mica", r=4)),
    "Conv1D": ("EmbConv1D", on("conv1d")),
    "embedding": ("EmbConv1D", on("emb")),
    "embedding and Conv1D": ("EmbConv1D", on("emb", "conv1d")),
    "DoRA of Conv1D": ("EmbConv1D", on("conv1d", **DORA)),
    "DoRA of an embedding": ("EmbConv1D", on("emb", **DORA)),
    "DoRA of embedding and Conv1D": ("EmbConv1D", on("emb", "conv1d", **DORA)),
    "VeLoRA random": ("MLP", on("lin0", velora_config=VeloraConfig(num_groups=2, init_type="random"))),
    "VeLoRA average": ("MLP", on("lin0", "lin1", velora_config=VeloraConfig(num_groups=2, init_type="batch_average"))),
    "VeLoRA once": ("MLP", on("lin0", velora_config=VeloraConfig(num_groups=2, init_type="batch_average_once"))),
    "MonteCLoRA": ("MLP", on("lin0", monteclora_config=MontecloraConfig(num_samples=2))),
    "BD-LoRA of A": ("MLP", on("lin0", "lin1", use_bdlora=BdLoraConfig(target_modules_bd_a=["lin0"], match_strict=False))),
    "biases of B": ("MLP", on("lin0", "lin1", lora_bias=True, lora_alpha=32)),
    "rows of tokens": ("EmbConv1D", on("conv1d", trainable_token_indices={"emb": [0, 10]})),
    "a parameter of a Linear": ("MLP", on("lin0", target_parameters=["lin1.weight"])),
}  # fmt: skip
REFUSED: dict[str, Case] = {
    "a parameter of another module": ("Parameters", {"target_parameters": ["lin0.weight"]}),
    "KaSA": ("MLP", on("lin0", kasa_config=KasaConfig(), r=4)),  # it cuts singular values off the base
    "BD-LoRA of B": (
        "MLP", on("lin0", "lin1", use_bdlora=BdLoraConfig(target_modules_bd_b=["lin1"], nblocks=2, match_strict=False)),
    ),
    "BD-LoRA of both": (
        "MLP",
        on("lin0", "lin1", use_bdlora=BdLoraConfig(target_modules_bd_a=["lin0"], target_modules_bd_b=["lin1"], nblocks=2)),
    ),
    "Conv1d": ("Conv1d", on("conv1d")),
    "Conv2d": ("Conv2d", on("conv2d")),
    "Conv2d and a Linear": ("Conv2d", on("conv2d", "lin0")),
    "Conv2d in groups": ("Conv2dGroups", on("conv2d")),
    "Conv2d in two groups": ("Conv2dGroups2", on("conv2d")),
    "Conv3d": ("Conv3d", on("conv3d")),
    "Conv3d and a Linear": ("Conv3d", on("conv3d", "lin0")),
    "DoRA of Conv1d": ("Conv1d", on("conv1d", **DORA)),
    "DoRA of Conv2d": ("Conv2d", on("conv2d", **DORA)),
    "DoRA of Conv2d and a Linear": ("Conv2d", on("conv2d", "lin0", **DORA)),
    "DoRA of Conv2d in groups": ("Conv2dGroups", on("conv2d", **DORA)),
    "DoRA of Conv2d in two groups": ("Conv2dGroups2", on("conv2d", **DORA)),
    "DoRA of Conv3d": ("Conv3d", on("conv3d", **DORA)),
    "DoRA of Conv3d and a Linear": ("Conv3d", on("conv3d", "lin0", **DORA)),
    "biases of B of Conv2d": ("Conv2d", on("conv2d", lora_bias=True, lora_alpha=32)),
    "biases of B of Conv3d": ("Conv3d", on("conv3d", lora_bias=True, lora_alpha=32)),
    "MultiheadAttention": ("MHA", on("mha")),
    "MultiheadAttention and a Linear": ("MHA", on("mha", "lin0")),
}  # fmt: skip


def close(got: Tensor, expected: Tensor) -> bool:
    return bool((got - expected).norm() <= 1e-5 * expected.norm())


def save(case: Case, folder: Path) -> Tensor:
    """Save an adapter of PEFT with random values, and return what PEFT computes with the file."""
    kind, config = case
    base, x = build(kind)
    plain = base(x).detach()
    model = get_peft_model(base, LoraConfig(**config))
    torch.manual_seed(1)
    for key, tensor in model.named_parameters():
        if tensor.requires_grad and ("lora_" in key or "modules_to_save" in key or "trainable_tokens" in key):
            tensor.data.add_(torch.randn_like(tensor) * 0.3)
    model.save_pretrained(folder)
    with torch.no_grad():
        expected = in_peft(kind, folder)
        assert close(model.eval()(x), expected)
    assert not close(plain, expected)
    return expected


def in_peft(kind: str, folder: Path) -> Tensor:
    base, x = build(kind)
    with torch.no_grad():
        return PeftModel.from_pretrained(base, folder).eval()(x)


@pytest.mark.parametrize("case", EQUAL)
def test_a_case_of_peft_is_computed_merged_and_saved_as_peft_does(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = EQUAL[case][0]
    expected = save(EQUAL[case], tmp_path / "patch")
    _, x = build(kind)

    with torch.no_grad():
        model = lorakit.load_patch(build(kind)[0], tmp_path / "patch")
        assert close(model(x), expected)
        saved = lorakit.save_patch(model, tmp_path / "saved")
        assert close(lorakit.merge_into(model)(x), expected)
        rewritten = write_patch(tmp_path / "rewritten", read_patch(tmp_path / "patch"))
        for folder in (saved, rewritten):
            assert close(in_peft(kind, folder), expected)
            assert close(lorakit.load_patch(build(kind)[0], folder)(x), expected)
    assert main(["show", str(tmp_path / "patch")]) == 0
    assert "another program" in capsys.readouterr().out


@pytest.mark.parametrize(
    "patterns",
    [{"alpha_pattern": {"lin1.weight": 32}}, {"rank_pattern": {"lin1.weight": 2}}, {"rank_pattern": {"lin1": 2}}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:The following (alpha|rank)_pattern keys")  # PEFT's, which uses them all the same
def test_ranks_and_alphas_of_a_linears_parameter_are_put_on_a_model(patterns: dict[str, Any], tmp_path: Path) -> None:
    expected = save(("MLP", on("lin0", target_parameters=["lin1.weight"], **patterns)), tmp_path)
    model, x = build("MLP")
    with torch.no_grad():
        assert close(lorakit.load_patch(model, tmp_path)(x), expected)


@pytest.mark.parametrize("case", REFUSED)
def test_a_case_of_peft_that_is_not_computed_is_refused(case: str, tmp_path: Path) -> None:
    kind = REFUSED[case][0]
    save(REFUSED[case], tmp_path)

    with pytest.raises(PatchError):
        lorakit.load_patch(build(kind)[0], tmp_path)


@pytest.mark.parametrize("case", ["VeLoRA once", "MonteCLoRA"])
def test_what_changes_training_alone_is_not_written_again(case: str, tmp_path: Path) -> None:
    save(EQUAL[case], tmp_path / "patch")

    rewritten = write_patch(tmp_path / "rewritten", read_patch(tmp_path / "patch"))

    tensors = [load_file(folder / TENSORS) for folder in (tmp_path / "patch", rewritten)]
    assert {key for key in tensors[0] if key.endswith(".weight")} == tensors[1].keys() < tensors[0].keys()
    config = json.loads((rewritten / "adapter_config.json").read_text())
    assert not config.get("velora_config")
    assert not config.get("monteclora_config")


def test_biases_of_b_are_merged_by_their_patchs_weight(tmp_path: Path, tokenizer: Any) -> None:
    config = {"target_modules": ["q_proj", "v_proj"], "lora_bias": True, "lora_alpha": 32}
    base, folder, peft = save_peft_patch(tmp_path, "opt", tokenizer, **config)
    for module in peft.modules():
        if isinstance(module, LoraLayer):
            module.scaling["default"] *= 0.5
    ids = torch.arange(4, 24)[None]
    with torch.no_grad():
        expected = peft(input_ids=ids).logits

    out = lorakit.merge(base, (folder, 0.5), out=tmp_path / "merged")

    assert close(lorakit.load(out, dtype="float32")(ids).logits, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_factors_that_are_stored_in_16_bits_are_scaled_in_more(
    tmp_path: Path, tokenizer: Any, dtype: torch.dtype
) -> None:
    config = {"target_modules": ["q_proj", "v_proj"], "lora_bias": True, "r": 3, "lora_alpha": 5}
    base, folder, _ = save_peft_patch(tmp_path, "opt", tokenizer, **config)
    tensors = load_file(folder / TENSORS)
    big = next(key for key in tensors if key.endswith("lora_B.weight"))
    tensors |= {big: 5e4 * tensors[big] / tensors[big].abs().max()}
    save_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, folder / TENSORS)
    ids = torch.arange(4, 24)[None]
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    with torch.no_grad():
        expected = model(input_ids=ids).logits

    assert close(lorakit.load(base, {"a": folder}, dtype="float32")(ids, adapters="a").logits, expected)
    assert close(lorakit.load(lorakit.merge(base, folder, out=tmp_path / "m"), dtype="float32")(ids).logits, expected)


def test_biases_of_b_without_a_bias_of_the_base_or_beside_a_full_one_are_refused(tmp_path: Path) -> None:
    save(EQUAL["biases of B"], tmp_path)
    model, _ = build("MLP")
    model.get_submodule("lin1").register_parameter("bias", None)
    with pytest.raises(PatchError, match=r"lin1.bias is not a parameter of this base"):
        lorakit.load_patch(model, tmp_path)

    tensors = load_file(tmp_path / TENSORS)
    save_file(tensors | {"base_model.model.lin0.base_layer.bias": torch.zeros(20)}, tmp_path / TENSORS)
    with pytest.raises(PatchError, match=r"lin0 has lora_B.bias and a bias in full"):
        read_patch(tmp_path)


def test_every_row_of_the_table_is_here() -> None:
    assert len(EQUAL) + len(REFUSED) == 46
