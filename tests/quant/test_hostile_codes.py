"""What would change the meaning of codes is read or refused, whatever a file or a config says."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorakit.base.loading import load_for_training
from lorakit.base.meta import check_stored_tensors
from lorakit.cli import main
from lorakit.errors import BaseModelError, LorakitError
from lorakit.merging.merge import merge
from lorakit.quant.linear import QuantLinear, dequantized_weight
from lorakit.recipe import BaseSection
from tests.helpers.bases import make_base
from tests.helpers.published import FORMS, publish

CPU = torch.device("cpu")
LAYER = "model.layers.1.mlp.up_proj"
Tensors = dict[str, Tensor]
NEEDED = (
    "weight",
    "qweight",
    "qzeros",
    "scales",
    "scale",
    "scale_inv",
    "scale_2",
    "packed",
    "zero_point",
    "W_q",
    "zero",
)
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda tensor: tensor.T if tensor.dim() == 2 else tensor[None],
    "one more": lambda tensor: tensor[..., None],
    "flat": lambda tensor: tensor.flatten(),
    "a number": lambda tensor: tensor.flatten()[0] if tensor.numel() else tensor,
    "short": lambda tensor: tensor[:-1] if tensor.dim() else tensor,
    "empty": lambda tensor: tensor[:0] if tensor.dim() else tensor,
}


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return make_base(tmp_path_factory.mktemp("codes") / "floats", tokenizer, hidden_size=64, intermediate_size=128)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, floats: Path) -> Callable[[str], tuple[Path, Tensors]]:
    """A base in a form, made once; and its weights."""
    made: dict[str, tuple[Path, Tensors]] = {}

    def of(form: str) -> tuple[Path, Tensors]:
        if form not in made:
            folder = tmp_path_factory.mktemp(form) / "base"
            made[form] = folder, publish(floats, folder, form)
        return made[form]

    return of


def changed(base: Path, folder: Path, tensors: Tensors | None = None, **settings: Any) -> Path:
    """A copy with other tensors, or other settings of its quantisation."""
    shutil.copytree(base, folder)
    if tensors is not None:
        stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path) -> Any:
    return load_for_training(BaseSection(model=str(folder)), folder, torch.float32, CPU, sharded=False).model


def is_right(folder: Path, weights: Tensors) -> bool:
    """True if the base is read, to the right weights; False if it is refused. Other weights fail the test."""
    try:
        model = load(folder)
        layers = {f"{name}.weight": layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
        assert layers.keys() == weights.keys()
        for name, layer in layers.items():
            torch.testing.assert_close(dequantized_weight(layer), weights[name], rtol=1e-6, atol=1e-8)
    except LorakitError as refusal:
        assert str(folder) in str(refusal)
        with pytest.raises(LorakitError):
            load(merge(folder, out=folder.with_name("merged")))
        return False
    return True


@pytest.mark.parametrize("form", FORMS)
def test_tensors_of_other_shapes_are_never_read_as_other_weights(
    published: Callable[[str], tuple[Path, Tensors]], tmp_path: Path, form: str
) -> None:
    base, weights = published(form)
    stored = load_file(base / "model.safetensors")
    tried = 0
    for name in (name for name in stored if name.startswith(f"{LAYER}.")):
        for change in SHAPES.values():
            other = change(stored[name])
            if other.shape == stored[name].shape:
                continue
            folder = changed(base, tmp_path / f"{tried}" / "base", stored | {name: other})
            is_right(folder, weights)
            tried += 1
    assert tried > 4


@pytest.mark.parametrize("form", FORMS)
def test_codes_without_a_scale_that_is_read_are_refused(
    published: Callable[[str], tuple[Path, Tensors]], tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base, weights = published(form)
    stored = load_file(base / "model.safetensors")
    own = [name for name in stored if name.startswith(f"{LAYER}.")]
    for name in own:
        without = {other: tensor for other, tensor in stored.items() if other != name}
        renamed = without | {name.replace(LAYER, f"{LAYER}.other"): stored[name]}
        for number, tensors in enumerate((without, renamed)):
            folder = changed(base, tmp_path / f"{name}-{number}" / "base", tensors)
            assert not is_right(folder, weights) or name.endswith("input_scale") or not name.endswith(NEEDED), name
    folder = changed(base, tmp_path / "unnamed" / "base")
    config = json.loads((folder / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    assert not is_right(folder, weights)


@pytest.mark.parametrize(
    ("form", "settings", "message"),
    [
        ("gptq", {"checkpoint_format": None}, None),
        ("gptq", {"checkpoint_format": "GPTQ"}, None),
        ("gptq-v2", {"checkpoint_format": None, "format": "gptq_v2"}, None),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ("gptq", {"rotation": "hadamard"}, "rotation hadamard"),
        ("gptq", {"bits": "4"}, "'4' bits"),
        ("gptq", {"group_size": -7}, "blocks of 1 x -7"),
        ("awq", {"version": None, "format": "gemv"}, "version gemv"),
        ("fp8", {"weight_block_size": [16, 64]}, "weight_scale_inv"),
        ("fp8", {"weight_block_size": [32.0, 32.0]}, "blocks of 32.0 x 32.0"),
        ("float8-channel", {"transform_config": {"config_groups": {"a": {"apply": [{"location": "input"}]}}}}, "input"),
        ("float8-channel", {"transform_config": {"config_groups": {"a": {"apply": [{"location": "weight_input"}]}}}}, None),
        ("float8-channel", {"transform_config": {}}, None),
        ("modelopt", {"quantized_layers": {"lm_head": {"quant_algo": "FP8"}}}, "quantized_layers"),
    ],
    ids=str,
)  # fmt: skip
def test_a_setting_that_changes_codes_is_read_or_refused(
    published: Callable[[str], tuple[Path, Tensors]],
    tmp_path: Path,
    form: str,
    settings: dict[str, Any],
    message: str | None,
) -> None:
    base, weights = published(form)
    folder = changed(base, tmp_path / "base", **settings)
    if message is None:
        assert is_right(folder, weights)
        return
    with pytest.raises(BaseModelError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("form", "name", "values"),
    [
        ("awq", "model.layers.0.mlp.act.scales", [7.0]),
        ("modelopt", f"{LAYER}.pre_quant_scale", [2.0]),
        ("hqq", f"{LAYER}.axis", 0),
        ("hqq", f"{LAYER}.nbits", 8),
        ("int4", f"{LAYER}.weight_g_idx", [1.0]),
        ("int8-channel", f"{LAYER}.weight_zero_point", [3.0]),
        ("fp8", "model.layers.0.mlp.experts.gate_up_proj_scale", [[1.0]]),
    ],
)
def test_a_tensor_that_changes_a_quantised_weight_is_refused(
    published: Callable[[str], tuple[Path, Tensors]], tmp_path: Path, form: str, name: str, values: Any
) -> None:
    base, _ = published(form)
    tensors = load_file(base / "model.safetensors") | {name: torch.tensor(values)}
    if "experts" in name:
        tensors[name.removesuffix("_scale")] = torch.ones(2, 4, 4).to(torch.float8_e4m3fn)
    folder = changed(base, tmp_path / "base", tensors)
    with pytest.raises(BaseModelError, match=name.rpartition(".")[2].removesuffix("_scale")):
        load(folder)


def test_marks_that_change_nothing_and_layers_for_further_tokens_are_read(
    published: Callable[[str], tuple[Path, Tensors]], tmp_path: Path
) -> None:
    base, weights = published("fp8")
    stored = load_file(base / "model.safetensors")
    further = {f"mtp.0.mlp.up_proj{name.removeprefix(LAYER)}": stored[name].clone() for name in stored if LAYER in name}
    marks = {f"{LAYER}.activation_scale": torch.tensor(2.0), f"{LAYER}.weight_zero_point": torch.zeros(3)}
    assert further
    assert is_right(changed(base, tmp_path / "base", stored | further | marks), weights)


@pytest.mark.parametrize("ignore", [3, True, "lm_head", [3], [None], [[]], ["("], ["re:("]], ids=str)
def test_plan_names_a_list_of_skipped_layers_that_is_none(
    published: Callable[[str], tuple[Path, Tensors]],
    tmp_path: Path,
    ignore: Any,
    recipe: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = changed(published("int4")[0], tmp_path / "base", ignore=ignore)
    assert main(["plan", str(recipe(base={"model": str(folder)}))]) == 2
    assert "no list of patterns of layers to skip" in capsys.readouterr().err


def test_the_masks_that_old_files_hold_are_no_codes(floats: Path, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(floats, folder)
    tensors = load_file(folder / "model.safetensors")
    mask = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
    masks = {f"model.layers.{n}.self_attn.{name}": mask.clone() for n, name in enumerate(("bias", "causal_mask"))}
    save_file(tensors | masks, folder / "model.safetensors", {"format": "pt"})

    assert load(folder) is not None
    check_stored_tensors(folder)
