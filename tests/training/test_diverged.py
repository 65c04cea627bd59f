"""A run that can no longer learn, or whose base computes no numbers, ends with the reason instead of a patch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lorakit
from lorakit.errors import BaseModelError, LorakitError, RunError, TargetError
from lorakit.lora.untrained import explain_not_numbers
from lorakit.run.metrics import read_metrics
from tests.helpers.changed_models import copy_changed
from tests.helpers.training import train

Recipe = Callable[..., Path]


def test_a_run_whose_logits_are_all_equal_ends_after_20_steps_with_the_reason(
    recipe: Recipe, base: Path, tmp_path: Path
) -> None:
    def without_last_norm(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"].zero_()

    dead = copy_changed(base, tmp_path / "dead", without_last_norm)
    path = recipe(base={"model": str(dead)}, train={"steps": 40, "save_every_steps": 9})
    message = r"step 20: the last 20 steps had a gradient of norm 0 and the loss of a model whose logits are all equal"
    with pytest.raises(RunError, match=message) as problem:
        train(path)

    assert problem.value.exit_code == 2
    assert "The checkpoint after step 18 is kept. Lower train.learning_rate" in str(problem.value)
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 21))
    assert {line["accuracy"] for line in lines if "loss" in line} == {0.0}
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_of_the_base_that_is_no_number_is_named(
    recipe: Recipe, base: Path, tmp_path: Path, value: float
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"

    def break_one(tensors: dict[str, Tensor]) -> None:
        tensors[name][3, 5] = value

    broken = copy_changed(base, tmp_path / "broken", break_one)
    for targets in ("all-linear", ["layers.0.self_attn.q_proj"]):  # the layer is adapted, and is not
        with pytest.raises(LorakitError, match=rf"the base computes nan or inf in float32: .*: {name} \(1 of "):
            train(recipe(base={"model": str(broken)}, adapter={"targets": targets}))
    model = lorakit.load(broken, dtype="float32").model
    with pytest.raises(TargetError, match="computes nan or inf"):
        lorakit.inject(model)
    assert not any(isinstance(module, nn.Linear) and type(module) is not nn.Linear for module in model.modules())


def test_a_base_that_overflows_in_float16_is_told_from_a_broken_one(recipe: Recipe, base: Path, tmp_path: Path) -> None:
    def enlarge(tensors: dict[str, Tensor]) -> None:
        for name in ("up_proj", "gate_proj"):
            tensors[f"model.layers.0.mlp.{name}.weight"].mul_(3e4)

    large = copy_changed(base, tmp_path / "large", enlarge)
    with pytest.raises((BaseModelError, TargetError), match="float16 ends at 65,504, .*: set base.dtype to bfloat16"):
        train(recipe(base={"model": str(large), "dtype": "float16"}))
    train(recipe(base={"model": str(large)}, train={"steps": 2, "warmup_steps": 1}))


def test_weights_that_are_numbers_are_not_blamed() -> None:
    weights = [("a", torch.ones(2)), ("b", torch.ones(2, dtype=torch.int8)), ("c", torch.ones(2, device="meta"))]
    assert "its weights are numbers. Take another dtype" in explain_not_numbers(weights, torch.float32)
