"""Runs that start from a patch: its settings, its first loss, and what stands of it in records."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lorakit.cli import main
from lorakit.errors import LorakitError, PatchError, RecipeError, TemporaryFailure
from lorakit.files.safetensors import open_tensors
from lorakit.merging.merge import merge
from lorakit.patch import read_patch
from lorakit.run.metrics import read_metrics
from tests.helpers.bases import make_base
from tests.helpers.patches import make_patch, save_trained_peft
from tests.helpers.training import stop_at, train

Recipe = Callable[..., Path]
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"rank": 4, "alpha": 6, "targets": ["q_proj", "down_proj"], "layers": (1,)},
    "rslora, patterns": {"rank": 4, "method": "rslora", "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 3}},
    "dora": {"rank": 3, "method": "dora"},
    "head and rows": {"rank": 2, "targets": ["v_proj"], "modules_to_save": ["lm_head"], "trainable_tokens": [9, 5]},
}
ONCE = ("lora", "head and rows")


def start(recipe: Recipe, patch: Path, name: str = "recipe.yaml", **sections: Any) -> Path:
    """Write a recipe that starts from a patch, and names no settings that the patch has."""
    path = recipe(name, **sections)
    content = json.loads(path.read_text())
    content["adapter"] = {"start_from": str(patch), **sections.get("adapter", {})}
    path.write_text(json.dumps(content))
    return path


def first_loss(out: Path) -> float:
    return float(next(line["eval_loss"] for line in read_metrics(out / "metrics.jsonl") if "eval_loss" in line))


def loss_of(patch: Path, base: Path, recipe: Recipe, tmp_path: Path) -> float:
    """Held-out loss of a patch on another way: merged into its base, under an adapter that changes nothing."""
    merged = merge(base, (patch, 1.0), out=tmp_path / "merged")
    out, _ = train(recipe("m.yaml", base={"model": str(merged)}, train={"steps": 3}, output=str(tmp_path / "m")))
    return first_loss(out)


@pytest.mark.parametrize(
    "settings",
    [pytest.param(ADAPTERS[name], marks=[] if name in ONCE else [pytest.mark.matrix]) for name in ADAPTERS],
    ids=ADAPTERS,
)
def test_the_first_loss_is_that_of_the_patch(
    recipe: Recipe, base: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    patch = make_patch(base, tmp_path / "patch", **settings)

    out, said = train(start(recipe, patch, train={"steps": 3}))

    assert first_loss(out) == pytest.approx(loss_of(patch, base, recipe, tmp_path), rel=1e-5)
    assert f"start from {patch}, with its method, rank, alpha, targets" in said
    config = read_patch(out).config
    assert (config.rank, config.method) == (settings["rank"], settings.get("method", "lora"))
    assert read_patch(out).layers.keys() == read_patch(patch).layers.keys()


@pytest.mark.matrix
def test_the_first_loss_is_that_of_pefts_patch(recipe: Recipe, base: Path, tmp_path: Path) -> None:
    save_trained_peft(
        tmp_path / "peft", base, task_type="CAUSAL_LM", r=3, lora_alpha=5, target_modules=["q_proj", "up_proj"],
        rank_pattern={"up_proj": 2}, layers_to_transform=[0], lora_dropout=0.3,
    )  # fmt: skip

    config = tmp_path / "peft" / "adapter_config.json"
    values = json.loads(config.read_text())
    config.write_text(
        json.dumps(values | {"rank_pattern": values["rank_pattern"] | {"absent": 7}})
    )  # which PEFT allows

    out, said = train(start(recipe, tmp_path / "peft", train={"steps": 3}))

    assert first_loss(out) == pytest.approx(loss_of(tmp_path / "peft", base, recipe, tmp_path), rel=1e-5)
    assert "holds no digest of its base" in said


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_copies_of_the_base_that_peft_saves_beside_an_embedding_are_left_out(
    recipe: Recipe, base: Path, tmp_path: Path
) -> None:
    save_trained_peft(tmp_path / "peft", base, task_type="CAUSAL_LM", r=3, target_modules=["embed_tokens", "q_proj"])
    assert read_patch(tmp_path / "peft").full_shapes

    out, _ = train(start(recipe, tmp_path / "peft", train={"steps": 3}))

    assert not read_patch(out).full_shapes


def test_a_run_from_a_run_begins_with_the_loss_at_which_that_one_ended_and_names_it(
    recipe: Recipe, tmp_path: Path
) -> None:
    first, _ = train(recipe(output=str(tmp_path / "first")))
    path = start(recipe, first, output=str(tmp_path / "second"), train={"steps": 4, "learning_rate": 1e-3})

    second, said = train(path)

    ended = [line["eval_loss"] for line in read_metrics(first / "metrics.jsonl") if "eval_loss" in line][-1]
    assert first_loss(second) == ended  # to the bit
    origin = {"name": "first", "digest": read_patch(first).identity, "step": 12}
    run, patch = json.loads((second / "run.json").read_text()), read_patch(second)
    assert run["start"] == patch.metadata["start"] == origin
    assert run["recipe"]["adapter"]["rank"] == 4
    assert patch.metadata["results"]["eval_loss_start"] == ended
    assert "at the start" in said
    assert str(tmp_path / "first").encode() not in (second / "adapter_model.safetensors").read_bytes()
    assert str(tmp_path / "first") not in (second / "README.md").read_text()


@pytest.mark.matrix
def test_a_start_on_a_base_that_is_quantised_in_another_way_gets_a_note(recipe: Recipe, tmp_path: Path) -> None:
    first, _ = train(recipe(base={"quantize": "nf4"}, train={"steps": 3}, output=str(tmp_path / "first")))

    for number, (quantize, noted) in enumerate((("nf4", False), ("none", True))):
        path = start(recipe, first, base={"quantize": quantize}, train={"steps": 3}, output=str(tmp_path / f"{number}"))
        _, said = train(path)
        assert ("was trained on a base quantised as nf4, and this one is in floats" in said) is noted


@pytest.mark.matrix
def test_the_seed_draws_nothing_of_the_start(recipe: Recipe, base: Path, tmp_path: Path) -> None:
    patch = make_patch(base, tmp_path / "patch")
    outs = [
        train(start(recipe, patch, train={"steps": 3, "seed": seed}, output=str(tmp_path / f"{seed}")))[0]
        for seed in (1, 2)
    ]

    assert first_loss(outs[0]) == first_loss(outs[1])


@pytest.mark.matrix
def test_tokens_that_the_recipe_names_in_another_order_get_their_own_rows(
    recipe: Recipe, base: Path, tmp_path: Path
) -> None:
    patch = make_patch(base, tmp_path / "patch", targets=["q_proj"], trainable_tokens=[9, 5])

    outs = [
        train(start(recipe, patch, adapter=tokens, train={"steps": 3}, output=str(tmp_path / f"{number}")))[0]
        for number, tokens in enumerate(({}, {"trainable_tokens": [5, 9]}))
    ]

    assert first_loss(outs[0]) == first_loss(outs[1])
    with pytest.raises(PatchError, match=r"rows of tokens \[5, 9\], the adapter's \[5, 6\]"):
        train(start(recipe, patch, adapter={"trainable_tokens": [5, 6]}), fresh=True)


@pytest.mark.matrix
def test_settings_that_are_not_the_patchs_are_refused_with_both_values_and_a_way_out(
    recipe: Recipe, base: Path, tmp_path: Path
) -> None:
    patch = make_patch(base, tmp_path / "patch", rank=4, alpha=6)

    with pytest.raises(RecipeError) as caught:
        train(start(recipe, patch, adapter={"rank": 8, "alpha": 6.5, "method": "dora", "init": "pissa"}))

    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"adapter.method: dora, and the patch {patch} has lora; leave the key out")
    assert lines[1].startswith(f"adapter.rank: 8, and the patch {patch} has 4; leave the key out, or make a patch of")
    assert lines[2].startswith(f"adapter.alpha: 6.5, and the patch {patch} has 6.0;")
    assert lines[3].startswith("adapter.init: pissa")
    for settings in ({"rank": 4, "alpha": 6.0, "method": "lora_fa", "targets": "all-linear", "dropout": 0.2}, {}):
        train(start(recipe, patch, adapter=settings, train={"steps": 3}), fresh=True)
    assert read_patch(tmp_path / "out").config.dropout == 0


@pytest.mark.matrix
@pytest.mark.parametrize("rank", [2, 6])
def test_the_commands_of_the_message_about_the_rank_make_a_patch_that_a_run_can_start_from(
    recipe: Recipe, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    patch = make_patch(base, tmp_path / "patch", rank=4)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        train(start(recipe, patch, adapter={"rank": rank}))

    for command in str(caught.value).partition("start from it: ")[2].split(", then "):
        assert main(shlex.split(command)[1:]) == 0
    out, _ = train(start(recipe, tmp_path / "NEW", adapter={"rank": rank}, train={"steps": 3}))

    assert {layer.rank for layer in read_patch(out).layers.values()} == {rank}


def test_targets_that_select_other_layers_than_the_patch_are_refused(
    recipe: Recipe, base: Path, tmp_path: Path
) -> None:
    patch = make_patch(base, tmp_path / "patch", targets=["q_proj", "v_proj"])

    with pytest.raises(
        PatchError, match=r"2 parts are not in the adapter: .*v_proj.*Leave targets, exclude, layers out of"
    ):
        train(start(recipe, patch, adapter={"targets": ["q_proj"]}))
    with pytest.raises(PatchError, match="10 layers of the adapter are not in it"):
        train(start(recipe, patch, adapter={"targets": "all-linear"}))
    train(start(recipe, patch, adapter={"targets": ".*self_attn.[qv]_proj"}, train={"steps": 3}))


def test_a_patch_of_another_base_is_refused(recipe: Recipe, tokenizer: Any, tmp_path: Path) -> None:
    patch = make_patch(make_base(tmp_path / "other", tokenizer, seed=5), tmp_path / "patch")

    with pytest.raises(PatchError, match=r"adapter.start_from: .*trained on another base") as caught:
        train(start(recipe, patch))
    assert "--allow" not in str(caught.value)  # there is no such option
    assert not (tmp_path / "out" / "run.json").exists()


def test_a_missing_patch_and_one_in_the_runs_own_output_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(LorakitError, match=r"adapter.start_from: .*no such folder"):
        train(start(recipe, tmp_path / "absent"))
    train(recipe(train={"steps": 3}))
    with pytest.raises(RecipeError, match="is in this run's own output; choose another output"):
        train(start(recipe, tmp_path / "out" / "checkpoints" / "step-00000003"), fresh=True)


@pytest.mark.matrix
def test_a_run_that_goes_on_does_not_read_its_start_again(
    recipe: Recipe, base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    patch = make_patch(base, tmp_path / "patch")
    whole, _ = train(start(recipe, patch, output=str(tmp_path / "whole")))
    path = start(recipe, patch)
    stop_at(monkeypatch, {4})
    with pytest.raises(TemporaryFailure):
        train(path)
    shutil.rmtree(patch)

    parts, said = train(path)

    assert "resuming   after step 4" in said
    name = "adapter_model.safetensors"
    assert (parts / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.matrix
def test_a_start_that_changed_or_is_gone_before_the_first_checkpoint_is_refused(
    recipe: Recipe, base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    patch = make_patch(base, tmp_path / "patch")
    path = start(recipe, patch)
    stop_at(monkeypatch, {1})
    with pytest.raises(TemporaryFailure):
        train(path)
    shutil.rmtree(tmp_path / "out" / "checkpoints")  # as if the process had been killed before it
    shutil.rmtree(patch)

    with pytest.raises(PatchError, match="no such folder"):
        train(path)
    make_patch(base, patch, seed=1)
    with pytest.raises(PatchError, match=r"has changed since this run began; put it back"):
        train(path)
    shutil.rmtree(patch)
    make_patch(base, patch)
    train(path)


def test_check_and_plan_read_the_settings_of_the_start(
    recipe: Recipe, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patch = make_patch(base, tmp_path / "patch", rank=2, targets=["q_proj"])
    path = str(start(recipe, patch))

    assert main(["check", path]) == 0
    out = capsys.readouterr().out
    assert f"start from {patch}, with its method, rank, alpha, targets" in out
    assert "trainable  256 parameters" in out
    assert main(["check", path, "adapter.targets=[k_proj]"]) == 2
    assert "adapter.start_from: " in capsys.readouterr().err
    assert main(["plan", path]) == 0
    assert "adapter      256 parameters" in capsys.readouterr().out


@pytest.mark.matrix
def test_a_run_that_starts_from_one_that_trained_b_alone_trains_b_alone(recipe: Recipe, tmp_path: Path) -> None:
    train(recipe(adapter={"method": "lora_fa"}, train={"steps": 3}, output=str(tmp_path / "first")))

    def factors(folder: Path) -> dict[str, Any]:
        opened = open_tensors(folder / "adapter_model.safetensors")
        return {name: opened.read(name) for name in opened.entries if "lora_A" in name}

    for method, same in (({}, True), ({"method": "lora"}, False)):
        out = tmp_path / f"next-{same}"
        path = start(recipe, tmp_path / "first", train={"steps": 3}, adapter=method, output=str(out))
        _, said = train(path)
        before, after = factors(tmp_path / "first"), factors(out)
        assert all(torch.equal(after[name], before[name]) == same for name in before)
        assert before
        assert ("with its method" in said) == same
