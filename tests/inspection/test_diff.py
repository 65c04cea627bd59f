"""Two patches are the same if they compute the same; differences are listed, largest first."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorakit.derive.combine import combine
from lorakit.errors import PatchError
from lorakit.inspection.diff import diff
from lorakit.patch import read_patch
from tests.helpers.bases import make_base
from tests.helpers.changed_models import Q
from tests.helpers.patches import deltas, make_patch, save_peft_patch, without_facts

TENSORS = "adapter_model.safetensors"


class Said(list[str]):
    """The printed lines."""

    def __call__(self, text: str) -> None:
        self.append(text)

    def row(self, start: str) -> list[str]:
        """Return the words of the only line that begins with ``start``."""
        (line,) = (text for text in self if text.startswith(start))
        return line.split()

    def rows(self, header: str) -> list[list[str]]:
        """Return the words of every line of a table."""
        begin = next(number for number, text in enumerate(self) if text.startswith(header)) + 1
        end = next(number for number in range(begin, len(self)) if not self[number] or self[number].startswith("..."))
        return [text.split() for text in self[begin:end]]


@pytest.fixture
def patch(base: Path, tmp_path: Path) -> Path:
    return make_patch(base, tmp_path / "patch")


def retensored(folder: Path, copy: Path, change: Any) -> Path:
    """Copy a patch with changed tensors."""
    without_facts(folder, copy, lambda facts: None)
    tensors = load_file(copy / TENSORS)
    change(tensors)
    save_file(tensors, copy / TENSORS)
    return copy


def test_a_patch_is_the_same_as_itself(patch: Path, tmp_path: Path) -> None:
    said = Said()
    assert diff(patch, shutil.copytree(patch, tmp_path / "copy"), said)
    assert said == ["the same: 14 updates and 0 full tensors, exactly"]


def test_patches_with_other_factors_and_the_same_updates_are_the_same(patch: Path, tmp_path: Path) -> None:
    def rescaled(tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            tensors[key] = tensor * 8 if "lora_A" in key else tensor / 8

    said = Said()
    assert diff(patch, retensored(patch, tmp_path / "rescaled", rescaled), said)
    assert said[-1].startswith("the same: 14 updates and 0 full tensors, updates within ")

    said.clear()
    assert diff(patch, combine(patch, out=tmp_path / "turned", how="ties", density=1, rank=4), said)
    assert said[-1].startswith("the same: 14 updates and 0 full tensors, updates within ")


def test_differences_are_measured_on_the_updates_and_shown_most_different_first(base: Path, tmp_path: Path) -> None:
    one = make_patch(base, tmp_path / "one", targets=["q_proj", "k_proj"])
    two = make_patch(base, tmp_path / "two", seed=1, rank=3, targets=["q_proj", "v_proj"])
    said = Said()

    assert not diff(one, two, said)

    rows = said.rows("update of")
    a, b = deltas(one), deltas(two)
    assert [row[0].rpartition(".")[2] for row in rows] == ["v_proj", "v_proj", "q_proj", "q_proj", "k_proj", "k_proj"]
    assert [row[1:] for row in rows[:2]] == [["-", "3", "inf", "-"]] * 2
    assert [row[1:] for row in rows[4:]] == [["4", "-", "1", "-"]] * 2
    for name, *ranks, difference, cosine in rows[2:4]:
        assert ranks == ["4", "3"]
        assert float(difference) == pytest.approx(float((a[name] - b[name]).norm() / a[name].norm()), rel=5e-3)
        assert float(cosine) == pytest.approx(
            float((a[name] * b[name]).sum() / a[name].norm() / b[name].norm()), abs=1e-4
        )
    assert said[-1] == "different: 6 of 6 updates, 0 of 0 full tensors"


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_a_difference_below_float32_is_none_and_above_it_is_one(patch: Path, tmp_path: Path, part: str) -> None:
    key = f"base_model.model.{Q}.{part}.weight"
    near, far = (
        retensored(patch, tmp_path / str(factor), lambda t, factor=factor: t.update({key: t[key] * factor}))
        for factor in (1 + 2**-22, 1 + 2**-18)
    )
    said = Said()
    assert diff(patch, near, said)
    assert not diff(patch, far, said)
    ((name, *_, difference, cosine),) = said.rows("update of")
    assert (name, cosine) == (Q, "1.0000")
    assert float(difference) == pytest.approx(2**-18, rel=0.01)
    assert said[-1] == "different: 1 of 14 updates, 0 of 0 full tensors"


def test_long_tables_are_cut_after_the_most_different(base: Path, tmp_path: Path, tokenizer: Any) -> None:
    deep = make_base(tmp_path / "deep", tokenizer, num_hidden_layers=5)
    one, two = (make_patch(deep, tmp_path / f"{n}", seed=n) for n in range(2))
    said = Said()
    assert not diff(one, two, said)
    assert len(said.rows("update of")) == 20
    assert said[-2:] == ["... and 15 more\n", "different: 35 of 35 updates, 0 of 0 full tensors"]


def test_patches_of_different_bases_are_not_the_same(patch: Path, tmp_path: Path) -> None:
    def other(facts: dict[str, Any]) -> None:
        facts["base"]["weights"][Q] = "0"

    said = Said()
    assert not diff(patch, without_facts(patch, tmp_path / "other", other), said)
    assert f"made for different bases: the weights of 1 of 14 shared layers ({Q} first)\n" in said
    assert said[-1] == "different: 0 of 14 updates, 0 of 0 full tensors, and the bases they were made for"
    assert diff(patch, without_facts(patch, tmp_path / "unknown"), said)

    a, b = (
        without_facts(patch, tmp_path / text, lambda facts, text=text: facts["base"].update(config=text))
        for text in ("one", "two")
    )
    assert not diff(a, b, said)
    assert "made for different bases: config\n" in said
    assert diff(a, patch, said)


def test_full_tensors_and_shapes_are_compared_too(tmp_path: Path, tokenizer: Any) -> None:
    config: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}
    _, one, _ = save_peft_patch(tmp_path / "a", "llama", tokenizer, **config)
    _, small, _ = save_peft_patch(tmp_path / "b", "opt", tokenizer, target_modules=["q_proj"])
    key = "base_model.model.lm_head.weight"
    two = retensored(one, tmp_path / "two", lambda t: t.update({key: t[key] * 2}))
    said = Said()

    assert not diff(one, two, said)
    assert said.rows("full tensor")[0][::5] == [
        "lm_head.weight",
        f"{read_patch(one).full_tensors['lm_head.weight'].abs().max():.3g}",
    ]
    assert said[-1] == "different: 0 of 2 updates, 1 of 6 full tensors"
    said.clear()
    assert not diff(one, small, said)
    assert said[-1] == "different: 4 of 4 updates, 6 of 6 full tensors"
    assert diff(one, one, Said())


def test_what_is_no_patch_is_not_compared(base: Path, patch: Path, tmp_path: Path) -> None:
    with pytest.raises(PatchError, match=f"{base}: a whole model, not a patch"):
        diff(base, patch, Said())
    with pytest.raises(PatchError, match="absent"):
        diff(patch, tmp_path / "absent", Said())
