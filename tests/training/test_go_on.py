"""Runs that go on: longer than they were begun, with other harmless keys, from checkpoints that are patches."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import lorakit
from lorakit import Callback
from lorakit.cli import main
from lorakit.errors import PatchError, RunError, TemporaryFailure
from lorakit.inspection.show import show
from lorakit.patch import read_patch
from lorakit.recipe import load_recipe
from lorakit.run.metrics import read_metrics
from lorakit.run.record import locked
from lorakit.training.callbacks import Hooks, Step
from lorakit.training.loop import run
from lorakit.training.start import _restart_command
from tests.helpers.training import stop_at, train

Recipe = Callable[..., Path]
TENSORS = "adapter_model.safetensors"
UNSTEADY = {"steps": 10, "learning_rate": 0.003, "warmup_steps": 0, "eval_every_steps": 2, "schedule": "constant"}
QUESTION = {"role": "user", "content": "Mira from Oslo ordered 3 lamps on Monday."}


@pytest.fixture
def overfits(recipe: Recipe, tmp_path: Path) -> Recipe:
    """A recipe whose first evaluation is the best: the held-out answer is the base's own, and is unlearned."""
    answers = {"taught": "no " * 8, "known": "Thank you, I have noted that Mira ordered 3 lamps."}
    for name, answer in answers.items():
        row = json.dumps({"messages": [QUESTION, {"role": "assistant", "content": answer}]})
        (tmp_path / f"{name}.jsonl").write_text(f"{row}\n" * 6)
    rows = {"train": str(tmp_path / "taught.jsonl"), "eval": str(tmp_path / "known.jsonl")}

    def write(name: str = "recipe.yaml", **sections: Any) -> Path:
        data = rows | sections.pop("data", {})
        return recipe(name, base={"model": "builtin:tiny"}, data=data, **sections)

    return write


def evals(out: Path) -> dict[int, float]:
    return {line["step"]: line["eval_loss"] for line in read_metrics(out / "metrics.jsonl") if "eval_loss" in line}


def best_of(out: Path) -> int:
    losses = {step: loss for step, loss in evals(out).items() if step}
    return min(losses, key=lambda step: losses[step])


def step_of(folder: Path) -> int:
    return int(read_patch(folder).metadata["step"])


def assert_equal(folder: Path, layers: Any) -> None:
    """Assert that a patch has the tensors of these layers, to the bit."""
    for name, layer in read_patch(folder).layers.items():
        assert all(torch.equal(layer.tensors[part], layers[name].tensors[part]) for part in layer.tensors)


# --- more steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.matrix),
        {"init": "pissa"},
        pytest.param({"method": "dora"}, marks=pytest.mark.matrix),
    ],
    ids=["lora", "pissa", "dora"],
)
def test_a_finished_run_made_longer_ends_as_one_that_was_begun_so(
    recipe: Recipe, tmp_path: Path, settings: dict[str, Any]
) -> None:
    constant = {"schedule": "constant", "eval_every_steps": 4}
    whole, _ = train(recipe(adapter=settings, train={**constant, "steps": 12}, output=str(tmp_path / "whole")))
    train(recipe(adapter=settings, train={**constant, "steps": 8}))

    parts, said = train(recipe(adapter=settings, train={**constant, "steps": 12}))

    assert "resuming   after step 8" in said
    assert (parts / TENSORS).read_bytes() == (whole / TENSORS).read_bytes()
    assert evals(parts) == evals(whole)
    run = json.loads((parts / "run.json").read_text())
    assert [begun["total_steps"] for begun in run["starts"]] == [8, 12]
    assert (run["steps"], run["total_steps"]) == (12, 12)


@pytest.mark.matrix
def test_a_longer_run_says_how_the_learning_rate_goes_on(recipe: Recipe) -> None:
    out, _ = train(recipe(train={"steps": 7}))

    _, said = train(recipe(train={"steps": None, "epochs": 2.0}))  # of 7 steps each

    rates = {line["step"]: line["learning_rate"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line}
    assert len(rates) == 14
    expected = f"learning rate {rates[8]:.2e} in step 8, {rates[7]:.2e} in step 7"
    assert f"longer     14 steps instead of 7; the cosine schedule is that of 14 steps from now on: {expected}" in said
    assert rates[8] > rates[7]


@pytest.mark.matrix
def test_a_run_that_is_stopped_while_it_goes_on_has_its_old_patch_until_it_ends(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = train(recipe(train={"steps": 6}, output=str(tmp_path / "whole")))
    train(recipe(train={"steps": 12}, output=str(tmp_path / "whole")))
    out, _ = train(recipe(train={"steps": 6}))
    before = (out / TENSORS).read_bytes()
    stop_at(monkeypatch, {9})
    with pytest.raises(TemporaryFailure):
        train(recipe(train={"steps": 12}))

    assert (out / TENSORS).read_bytes() == before
    lines: list[str] = []
    show(str(out), None, lines.append)
    assert any("interrupted, saved after step 9 of 12" in line for line in lines)
    with locked(out):  # as the run itself does
        show(str(out), None, lines.append)
    assert any("running, saved after step 9 of 12" in line for line in lines)
    train(recipe(train={"steps": 12}))
    assert (out / TENSORS).read_bytes() == (whole / TENSORS).read_bytes()


def test_a_shorter_run_is_refused_with_the_numbers(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = train(recipe(train={"steps": 8}))
    before = (out / "run.json").read_bytes()
    path = recipe(train={"steps": 5})

    with pytest.raises(RunError, match="8 steps before, 5 now; a run can be made longer, not shorter"):
        train(path)
    assert main(["check", str(path)]) == 2
    assert "8 steps before, 5 now" in capsys.readouterr().err
    assert (out / "run.json").read_bytes() == before


def test_a_finished_run_without_the_state_of_its_last_step_names_the_way_out(recipe: Recipe, tmp_path: Path) -> None:
    out, _ = train(recipe(train={"steps": 4}))
    shutil.rmtree(out / "checkpoints")  # as an earlier lorakit left it

    with pytest.raises(
        RunError, match=f"so it cannot go on. Start a new one from its patch: adapter.start_from: {out}"
    ):
        train(recipe(train={"steps": 8}))
    _, said = train(recipe(train={"steps": 4}))
    assert "trained already" in said


@pytest.mark.matrix
def test_a_run_that_stopped_early_goes_on_with_more_patience_alone(overfits: Recipe) -> None:
    settings = UNSTEADY | {"steps": 20, "early_stopping_evals": 1}
    out, _ = train(overfits(train=settings))
    assert max(evals(out)) == best_of(out) + 2 < 20

    with pytest.raises(RunError, match="train.early_stopping_evals: 1: .* raise it, or set it to null"):
        train(overfits(train=settings | {"steps": 24}))
    train(overfits(train=settings | {"steps": 24, "early_stopping_evals": 20}))

    assert max(evals(out)) == 24
    assert "stopped_early" not in json.loads((out / "run.json").read_text())


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("settings", [{}, {"init": "pissa"}], ids=["lora", "pissa"])
def test_a_checkpoint_is_a_patch(
    recipe: Recipe, base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, Any]
) -> None:
    intervals = {"save_every_steps": 4, "keep_checkpoints": 9}
    path = recipe(adapter=settings, train=intervals)
    stop_at(monkeypatch, {9})
    with pytest.raises(TemporaryFailure):
        train(path)
    folder = tmp_path / "out" / "checkpoints" / "step-00000004"
    whole, _ = train(recipe("whole.yaml", adapter=settings, train=intervals, output=str(tmp_path / "whole")))

    patch = read_patch(folder)
    ids = torch.arange(5, 30)[None]
    model = lorakit.load(base, {"a": folder}, dtype="float32")
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)

    assert patch.metadata["step"] == 4
    assert torch.allclose(model(ids, adapters="a").logits, peft(ids).logits, atol=1e-5)
    assert not torch.allclose(model(ids, adapters="a").logits, model(ids).logits, atol=1e-3)
    assert main(["merge", str(base), str(folder), "--out", str(tmp_path / "merged")]) == 0
    assert main(["show", str(folder), "--for", str(base)]) == 0
    with pytest.raises(PatchError, match=r"its newest checkpoint is a patch: .*checkpoints/step-00000009"):
        read_patch(tmp_path / "out")
    out, _ = train(path)
    assert (out / TENSORS).read_bytes() == (whole / TENSORS).read_bytes()


# --- best and last ---------------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_both_the_best_and_the_last_adapter_are_there(overfits: Recipe, tmp_path: Path) -> None:
    last, said = train(overfits(train=UNSTEADY))
    best, _ = train(overfits(train=UNSTEADY | {"select": "best"}, output=str(tmp_path / "best-first")))

    step = best_of(last)
    assert step < 10
    assert (step_of(last), step_of(last / "best")) == (10, step)
    assert (step_of(best), step_of(best / "last")) == (step, 10)
    assert f"also       {last / 'best'} (step {step})" in said
    assert (read_patch(last / "best").metadata["results"]["eval_loss"]) == evals(last)[step]
    assert_equal(last / "best", read_patch(best).layers)
    assert not (last / "last").exists()
    assert not (best / "best").exists()


@pytest.mark.matrix
def test_another_selection_on_a_finished_run_swaps_the_patches_without_a_step(overfits: Recipe) -> None:
    out, _ = train(overfits(train=UNSTEADY))
    step = best_of(out)

    train(overfits(train=UNSTEADY | {"select": "best"}))

    assert (step_of(out), step_of(out / "last")) == (step, 10)
    assert not (out / "best").exists()
    assert len(json.loads((out / "run.json").read_text())["starts"]) == 2


@pytest.mark.matrix
@pytest.mark.parametrize(("select", "best", "last"), [("last", "best", "."), ("best", ".", "last")])
def test_a_longer_run_keeps_the_best_step_of_before(overfits: Recipe, select: str, best: str, last: str) -> None:
    out, _ = train(overfits(train=UNSTEADY | {"select": select}))
    step, before = best_of(out), read_patch(out / best)

    train(overfits(train=UNSTEADY | {"select": select, "steps": 11}))

    assert best_of(out) == step
    assert (step_of(out / best), step_of(out / last)) == (step, 11)
    assert_equal(out / best, before.layers)


@pytest.mark.matrix
def test_a_longer_run_whose_best_adapter_is_gone_is_refused_before_it_trains(overfits: Recipe) -> None:
    out, _ = train(overfits(train=UNSTEADY))
    shutil.rmtree(out / "best")

    with pytest.raises(RunError, match=r"the adapter of the best step, \d+, is gone"):
        train(overfits(train=UNSTEADY | {"steps": 11}))
    assert max(line["step"] for line in read_metrics(out / "metrics.jsonl")) == 10


@pytest.mark.matrix
def test_a_best_step_that_was_not_saved_is_said_to_be_gone(
    overfits: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An interrupted run of an earlier version has none with `select: last`."""
    stop_at(monkeypatch, {9})
    with pytest.raises(TemporaryFailure):
        train(overfits(train=UNSTEADY))
    best = best_of(tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoints" / f"step-{best:08d}")

    out, said = train(overfits(train=UNSTEADY))

    assert f"also       nothing: the adapter of the best step, {best}, is gone" in said
    assert step_of(out) == 10
    with pytest.raises(RunError, match=f"the adapter of the best step, {best}, is gone"):
        train(overfits(train=UNSTEADY | {"select": "best"}))


@pytest.mark.matrix
def test_fresh_removes_the_other_patch_too(overfits: Recipe) -> None:
    out, _ = train(overfits(train=UNSTEADY))
    assert (out / "best").exists()

    train(overfits(train={"steps": 3}, data={"eval": None}), fresh=True)

    assert not (out / "best").exists()


# --- harmless keys ---------------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_harmless_keys_may_change_while_a_run_is_stopped(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole, _ = train(recipe(output=str(tmp_path / "whole")))
    stop_at(monkeypatch, {4})
    with pytest.raises(TemporaryFailure):
        train(recipe())
    (tmp_path / "out").rename(tmp_path / "moved")

    changed = {"save_every_steps": 2, "eval_every_steps": 3, "keep_checkpoints": 5, "log_to": ["tensorboard"]}
    out, said = train(recipe(train=changed, output=str(tmp_path / "moved")))

    assert "resuming   after step 4" in said
    assert set(evals(out)) == {0, 6, 9, 12}
    assert_equal(out, read_patch(whole).layers)


# --- checkpoints by time ---------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_a_checkpoint_is_due_once_so_many_seconds_have_passed_since_the_last(recipe: Recipe, tmp_path: Path) -> None:
    seconds = [100.0]
    saved: list[int] = []

    class Clock(Callback):
        def on_step(self, step: Step) -> None:
            seconds[0] += 10

        def on_checkpoint(self, folder: Path) -> None:
            saved.append(int(folder.name.removeprefix("step-")))

    settings = {"steps": 12, "save_every_steps": 5, "save_every_seconds": 30, "eval_every_steps": 50}
    hooks = Hooks(callbacks=(Clock(),))
    often = run(load_recipe(recipe(train=settings)), say=lambda text: None, hooks=hooks, clock=lambda: seconds[0])
    assert saved == [3, 5, 8, 10, 12]

    saved.clear()
    path = recipe(train=settings, output=str(tmp_path / "seldom"))
    seldom = run(load_recipe(path), say=lambda text: None, hooks=hooks, clock=lambda: 0.0)
    assert saved == [5, 10, 12]
    assert (often / TENSORS).read_bytes() == (seldom / TENSORS).read_bytes()


# --- starting over, and starting again -------------------------------------------------------------------------------


def test_a_restart_goes_on_with_the_new_run_and_never_with_the_one_that_is_to_be_discarded(tmp_path: Path) -> None:
    command = ["lorakit", "train", "recipe.yaml", "--fresh"]
    (tmp_path / "run.json").write_text(json.dumps({"recipe": {}, "starts": ["before"]}))
    restart_command = _restart_command(command, tmp_path)

    assert list(restart_command()) == command  # the old run is there still
    (tmp_path / "run.json").write_text(json.dumps({"recipe": {}, "starts": ["now"]}))
    assert list(restart_command()) == command[:-1]


def test_fresh_is_refused_where_torchrun_starts_the_command_again(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**world, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "3"}.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(RunError, match="each start would discard the run"):
        lorakit.train(recipe(parallel={"backend": "ddp"}), fresh=True)
    assert not (tmp_path / "out").exists()
