"""The whole run: recipe in, patch out; stopped anywhere it goes on to the same bytes."""

import errno
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import lorakit
from lorakit import train as train_function
from lorakit.cli import main
from lorakit.errors import LorakitError, RecipeError, RunError, TargetError, TemporaryFailure
from lorakit.files.atomic import digest
from lorakit.inspection.show import show
from lorakit.ops import products
from lorakit.ops._internals import has_onednn_linear
from lorakit.parallel import LossReport
from lorakit.parallel.single import SingleEngine
from lorakit.patch import read_patch
from lorakit.recipe import load_recipe
from lorakit.run.metrics import read_metrics
from lorakit.run.record import LOOK_SECONDS, is_locked, locked
from lorakit.training.check import check
from lorakit.training.checkpoint import Checkpoints
from tests.helpers.fork_server import DEVNULL, PIPE, run_python, start_python
from tests.helpers.rows import chat, write_rows
from tests.helpers.training import stop_at, train

Recipe = Callable[..., Path]
PATCH_FILES = ("adapter_model.safetensors", "adapter_config.json", "lorakit.json", "README.md")


def patch_bytes(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in PATCH_FILES}


def test_a_recipe_becomes_a_patch_that_learnt_and_that_peft_reads(recipe: Recipe, base: Path) -> None:
    out, said = train(recipe(train={"steps": 30, "learning_rate": 0.02}))

    lines = read_metrics(out / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    evals = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert len(losses) == 30
    assert sorted(evals) == [0, 5, 10, 15, 20, 25, 30]
    assert evals[30] < 0.8 * evals[0]
    for part in (
        "14 of 15 linear layers",
        "rows       40",
        "30, with up to 6 rows each",
        "float32 (asked for)",
        "single on cpu",
    ):
        assert part in said, said
    run = json.loads((out / "run.json").read_text())
    assert run["status"] == "finished"
    assert run["engine"]["engine"] == "LlamaForCausalLM"
    assert (
        run["engine"]["adapter_bytes"] * 2 <= run["engine"]["optimizer_bytes"] <= run["engine"]["adapter_bytes"] * 2.1
    )
    assert run["label_tokens"] == sum(line["label_tokens"] for line in lines if "loss" in line)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000030"]  # the state to go on from

    ids = torch.arange(5, 30)[None]
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), out)
    ours = lorakit.load(base, {"x": out}, dtype="float32")
    assert torch.allclose(ours(ids, adapters="x").logits, peft(ids).logits, atol=1e-5)
    assert not torch.allclose(ours(ids).logits, peft(ids).logits, atol=1e-2)


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without its speed."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]


@pytest.mark.matrix
@pytest.mark.parametrize("packing", [True, False])
def test_a_run_stopped_anywhere_ends_in_the_same_bytes(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packing: bool
) -> None:
    whole, _ = train(recipe(output=str(tmp_path / "whole"), data={"packing": packing}))
    path = recipe(output=str(tmp_path / "parts"), data={"packing": packing})

    stop_at(monkeypatch, {1, 4, 5, 9, 11})  # before, between and at checkpoints and evaluations, across epochs
    stops = 0
    while True:
        try:
            parts, _ = train(path)
            break
        except TemporaryFailure as stopped:
            stops += 1
            assert "SIGTERM: saved after step" in str(stopped)
            assert stopped.exit_code == 75
            assert not (tmp_path / "parts" / "adapter_config.json").exists()

    assert stops == 5
    assert (parts / "adapter_model.safetensors").read_bytes() == (whole / "adapter_model.safetensors").read_bytes()
    assert numbers(parts) == numbers(whole)
    assert len(json.loads((parts / "run.json").read_text())["starts"]) == 6


@pytest.mark.matrix
@pytest.mark.skipif(not has_onednn_linear(), reason="this torch is built without oneDNN")
def test_a_run_goes_on_with_the_products_of_its_start(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(products, "MIN_NUMBERS", 0)
    folders = {}
    for chosen in ("onednn", "torch"):
        monkeypatch.setattr("lorakit.training.run.training_products", lambda *given, chosen=chosen: chosen)
        folders[chosen], _ = train(recipe(output=str(tmp_path / chosen), base={"dtype": "float32"}))
        assert json.loads((folders[chosen] / "run.json").read_text())["products"] == chosen
    evaluate = SingleEngine.evaluate

    def interrupted(self: SingleEngine, batches: Any, stop: Any) -> Any:
        monkeypatch.setattr(SingleEngine, "evaluate", evaluate)
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, batches, stop)

    path = recipe(output=str(tmp_path / "parts"), base={"dtype": "float32"})
    monkeypatch.setattr(SingleEngine, "evaluate", interrupted)
    monkeypatch.setattr("lorakit.training.run.training_products", lambda *given: "onednn")
    with pytest.raises(TemporaryFailure):
        train(path)
    monkeypatch.setattr("lorakit.training.run.training_products", lambda *given: "torch")
    parts, _ = train(path)

    assert (
        patch_bytes(parts)["adapter_model.safetensors"] == patch_bytes(folders["onednn"])["adapter_model.safetensors"]
    )
    assert patch_bytes(parts)["adapter_model.safetensors"] != patch_bytes(folders["torch"])["adapter_model.safetensors"]


@pytest.mark.matrix
@pytest.mark.parametrize(("evaluation", "step", "saved"), [(2, 5, 3), (4, 12, 10)])
def test_a_signal_during_evaluation_loses_nothing(
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    evaluation: int,
    step: int,
    saved: int,
) -> None:
    whole, _ = train(recipe(output=str(tmp_path / "whole")))
    evaluate, calls = SingleEngine.evaluate, []

    def interrupted(self: SingleEngine, batches: Any, stop: Any) -> Any:
        calls.append(1)
        if len(calls) == evaluation:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(self, batches, stop)

    monkeypatch.setattr(SingleEngine, "evaluate", interrupted)
    path = recipe(output=str(tmp_path / "parts"))
    with pytest.raises(TemporaryFailure, match=f"SIGINT: saved after step {step};"):
        train(path)
    assert (
        f"\nSIGINT: stopping after this step (Ctrl-C again: now, going on from step {saved})\n"
        in capfd.readouterr().err
    )
    parts, _ = train(path)

    assert patch_bytes(parts)["adapter_model.safetensors"] == patch_bytes(whole)["adapter_model.safetensors"]


@pytest.mark.spread
@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_in_the_same_bytes(recipe: Recipe, tmp_path: Path) -> None:
    whole, _ = train(recipe(output=str(tmp_path / "whole"), train={"steps": 60, "save_every_steps": 5}))
    path = recipe(output=str(tmp_path / "killed"), train={"steps": 60, "save_every_steps": 5})
    command = ("-m", "lorakit.cli", "train", path)
    moments, killed = random.Random(0), 0

    for _ in range(4):
        with start_python(*command, stdout=PIPE, stderr=DEVNULL) as process:
            assert process.stdout is not None
            while not process.stdout.readline().startswith("base "):  # the summary: training begins
                pass
            time.sleep(moments.uniform(0, 0.5))
            process.kill()
        killed += not (tmp_path / "killed" / "adapter_config.json").exists()
    ended = run_python(*command)

    assert ended.returncode == 0, ended.stderr
    assert killed > 0
    assert numbers(tmp_path / "killed") == numbers(whole)
    assert (
        patch_bytes(tmp_path / "killed")["adapter_model.safetensors"] == patch_bytes(whole)["adapter_model.safetensors"]
    )


@pytest.mark.matrix
def test_a_full_disk_ends_with_try_again_and_the_same_bytes_after_it(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole, _ = train(recipe(output=str(tmp_path / "whole")))
    path = recipe(output=str(tmp_path / "parts"))
    save, saved = Checkpoints.save, []

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def third_time_full(self: Checkpoints, engine: Any, patches: Any, progress: Any) -> None:
        saved.append(progress.step)
        with monkeypatch.context() as patch:
            if len(saved) == 3:
                patch.setattr(os, "fsync", full)
            save(self, engine, patches, progress)

    monkeypatch.setattr(Checkpoints, "save", third_time_full)
    with pytest.raises(TemporaryFailure, match="the disk is full"):
        train(path)
    assert sorted(p.name for p in (tmp_path / "parts" / "checkpoints").iterdir()) == ["step-00000003", "step-00000005"]
    parts, said = train(path)

    assert "after step 5" in said
    assert patch_bytes(parts)["adapter_model.safetensors"] == patch_bytes(whole)["adapter_model.safetensors"]


@pytest.mark.matrix
def test_a_signal_before_the_first_step_stops_at_once(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("loading went on")

    with monkeypatch.context() as patch:
        patch.setattr("lorakit.base.loading.load_base", slow)
        with pytest.raises(TemporaryFailure, match="stopped at once by SIGTERM"):
            train(recipe())
    train(recipe())


def test_a_damaged_checkpoint_is_passed_over(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole, _ = train(recipe(output=str(tmp_path / "whole")))
    path = recipe(output=str(tmp_path / "parts"))
    stop_at(monkeypatch, {8})
    with pytest.raises(TemporaryFailure):
        train(path)
    newest = tmp_path / "parts" / "checkpoints" / "step-00000008"
    data = bytearray((newest / "adapter_model.safetensors").read_bytes())
    data[-5] ^= 1
    (newest / "adapter_model.safetensors").write_bytes(data)

    parts, said = train(path)

    assert "after step 6" in said
    assert patch_bytes(parts)["adapter_model.safetensors"] == patch_bytes(whole)["adapter_model.safetensors"]


@pytest.mark.matrix
def test_a_finished_run_is_left_alone_and_fresh_trains_again(recipe: Recipe) -> None:
    out, _ = train(recipe())
    before = patch_bytes(out)

    _, said = train(recipe())
    assert "trained already" in said
    _, said = train(recipe(), fresh=True)
    assert "steps      12" in said
    assert patch_bytes(out) == before  # the same recipe gives the same patch


def test_another_recipe_or_other_data_in_the_same_folder_is_refused(
    recipe: Recipe, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe()
    stop_at(monkeypatch, {4})
    with pytest.raises(TemporaryFailure):
        train(path)

    with pytest.raises(RunError, match="train.seed: 0 before, 7 now"):
        train(path, "train.seed=7")
    rows.write_text(rows.read_text() + json.dumps(chat("more", "so")) + "\n")
    with pytest.raises(RunError, match="data has changed since this run began") as caught:
        train(path)
    assert "  data.eval.rows: 40 before, 41 now" in str(caught.value).splitlines()
    out, said = train(path, "train.seed=7", fresh=True)
    assert "resuming" not in said


def test_a_run_of_an_older_lorakit_goes_on(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its record lacks the keys that are newer, and did what their defaults say. It counted the same rows otherwise."""
    path = recipe()
    stop_at(monkeypatch, {4})
    with pytest.raises(TemporaryFailure):
        train(path)
    record = tmp_path / "out" / "run.json"
    values = json.loads(record.read_text())
    assert values["recipe"].pop("objective") == {"name": "sft"}
    assert values["recipe"]["data"].pop("ignore_keys") == []
    for newer in ("unread", "plain", "system", "zero_weight"):
        del values["data"]["train"][newer]
    values["data"]["eval"] |= {"dropped_long": 3, "notes": {"another": 2}}
    for newer in ("unadapted", "chat_template", "tokenizer_settings", "config_values"):
        del values["base"][newer]
    record.write_text(json.dumps(values))

    _, said = train(path)

    assert "resuming" in said


@pytest.mark.parametrize("output", ["file", "file/out"])
def test_check_and_train_refuse_an_output_that_cannot_be_written(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    (tmp_path / "file").write_text("mine")
    path = recipe(output=str(tmp_path / output))
    assert main(["check", str(path)]) == 2
    assert f"{tmp_path / 'file'} is a file or write-protected" in capsys.readouterr().err
    with pytest.raises(RunError, match=f"output: {tmp_path / output} cannot be written: "):
        train(path)


@pytest.mark.parametrize("inside", ["best", "last", "checkpoints/mine"])
def test_an_output_that_another_run_deletes_is_refused(recipe: Recipe, tmp_path: Path, inside: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("{}")
    with pytest.raises(RunError, match=r"is in a folder that the run in .*other deletes; choose another output"):
        train(recipe(output=str(tmp_path / "other" / inside)))


def test_fresh_discards_nothing_when_the_new_run_cannot_start_and_never_what_is_not_its_own(
    recipe: Recipe, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign"
    (foreign / "checkpoints").mkdir(parents=True)
    for name in ("checkpoints/model.pt", "thesis.md", "adapter_model.safetensors"):
        (foreign / name).write_text("mine")
    before = sorted(foreign.rglob("*"))
    with pytest.raises(RunError, match="holds other files"):
        train(recipe(output=str(foreign)), fresh=True)
    assert [path for path in sorted(foreign.rglob("*")) if path.name != ".lock"] == before

    out, _ = train(recipe(train={"log_to": ["tensorboard"], "steps": 3}))
    (out / "NOTES.txt").write_text("mine")
    whole = patch_bytes(out)
    with pytest.raises(LorakitError, match="looked for"):
        train(recipe(data={"train": "absent.jsonl"}), fresh=True)
    assert patch_bytes(out) == whole
    train(recipe(train={"steps": 4}), fresh=True)
    assert patch_bytes(out) != whole
    assert (out / "NOTES.txt").read_text() == "mine"


@pytest.mark.matrix
def test_a_finished_run_whose_patch_is_gone_or_damaged_is_not_believed(recipe: Recipe) -> None:
    out, _ = train(recipe())
    (out / "adapter_model.safetensors").write_bytes((out / "adapter_model.safetensors").read_bytes()[:-1])

    with pytest.raises(RunError, match="its patch is damaged; start over: `lorakit train RECIPE --fresh`"):
        train(recipe())
    train(recipe(), fresh=True)
    read_patch(out)


def test_what_a_killed_process_staged_is_swept_and_blocks_nothing(recipe: Recipe, tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    out = tmp_path / "out"
    out.mkdir()
    (out / f".run.json.tmp-{socket.gethostname()}-{dead.pid}-ab12").write_text("{")

    train(recipe())

    assert [path.name for path in out.iterdir() if ".tmp-" in path.name] == []


def test_a_held_out_loss_that_is_not_finite_stops_the_run(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, calls = SingleEngine.evaluate, []

    def broken(self: SingleEngine, batches: Any, stop: Any) -> Any:
        calls.append(1)
        return LossReport(math.nan, {}) if len(calls) == 2 else evaluate(self, batches, stop)

    monkeypatch.setattr(SingleEngine, "evaluate", broken)
    with pytest.raises(RunError, match="step 5: the held-out loss is nan"):
        train(recipe(train={"select": "best"}))


@pytest.mark.matrix
def test_bytes_that_are_no_text_in_the_metrics_do_not_stop_a_resume(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stop_at(monkeypatch, {4})
    with pytest.raises(TemporaryFailure):
        train(recipe())
    with open(tmp_path / "out" / "metrics.jsonl", "ab") as file:
        file.write(b"\xff\xfe{")
    train(recipe())


@pytest.mark.matrix
def test_warm_up_fits_short_runs_and_is_refused_when_it_cannot_end(recipe: Recipe) -> None:
    with pytest.raises(RecipeError, match="train: warmup_steps: 12 of 12 steps"):
        train(recipe(train={"warmup_steps": 12}))
    with pytest.raises(RunError, match="train.warmup_steps: 7 of 7 steps"):  # of 40 rows
        train(recipe(train={"warmup_steps": 7, "steps": None, "epochs": 1}))
    out, _ = train(recipe(train={"warmup_steps": None, "steps": 30, "batch_size": 4, "micro_batch_size": None}))

    rates = [line["learning_rate"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line]
    assert max(rates) == rates[2] == 0.01


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"adapter": {"targets": ["qproj"]}}, "'qproj' matches none"),
        ({"train": {"log_to": ["trackio"]}}, "trackio not installed"),
        ({"train": {"optimizer": "paged_adamw"}}, "train.optimizer: paged_adamw"),
    ],
    ids=["targets", "trackers", "optimizer"],
)
def test_mistakes_that_need_no_rows_are_found_before_rows_are_tokenised(
    recipe: Recipe, wrong: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(LorakitError, match=message):
        train(recipe(**wrong))
    assert not (tmp_path / "cache" / "lorakit").exists()


def test_a_recipe_that_is_a_dict_is_cited_as_one_and_not_as_a_file(recipe: Recipe) -> None:
    values = json.loads(recipe().read_text())
    values["adapter"]["rnak"] = 4
    with pytest.raises(RecipeError) as caught:
        lorakit.train(values)
    assert str(caught.value) == "recipe: adapter.rnak: unknown key. Nearest: 'rank'."


def test_a_patch_of_another_origin_is_not_overwritten(recipe: Recipe, tmp_path: Path) -> None:
    out, _ = train(recipe())
    before = patch_bytes(out)
    (out / "run.json").unlink()

    with pytest.raises(RunError, match="holds a patch that no run here made"):
        train(recipe())
    assert patch_bytes(out) == before


def test_checkpoints_without_the_record_of_their_run_are_not_trained_on(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, {7})
    with pytest.raises(TemporaryFailure):
        train(recipe())
    out, step = tmp_path / "out", tmp_path / "out/checkpoints/step-00000007"

    (out / "run.json").unlink()
    for fresh in (False, True):
        with pytest.raises(RunError, match=rf"checkpoints of a run and no run\.json, .*start_from: {step}\)"):
            train(recipe(), fresh=fresh)

    assert step.exists()
    started, _ = train(recipe(adapter={"start_from": str(step)}, train={"steps": 3}, output=str(tmp_path / "other")))
    assert json.loads((started / "run.json").read_text())["status"] == "finished"


def test_files_of_others_are_neither_trained_over_nor_removed(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("mine")

    for fresh in (False, True):
        with pytest.raises(RunError, match=r"out holds other files \(README.md\)"):
            train(recipe(), fresh=fresh)
    assert (tmp_path / "out" / "README.md").read_text() == "mine"


@pytest.mark.spread
def test_a_second_run_in_the_same_folder_is_refused_while_the_first_lives(recipe: Recipe, tmp_path: Path) -> None:
    with locked(tmp_path / "out"):
        ended = run_python("-m", "lorakit.cli", "train", recipe())
    assert ended.returncode == 2
    assert f"out is in use by process {os.getpid()} on " in ended.stderr
    train(recipe())


def test_a_loss_that_is_not_finite_stops_with_step_rows_and_the_last_checkpoint(recipe: Recipe, tmp_path: Path) -> None:
    path = recipe(train={"learning_rate": 1e25, "max_grad_norm": None, "warmup_steps": 0, "save_every_steps": 1})

    with pytest.raises(RunError) as caught:
        train(path)

    message = str(caught.value)
    assert "rows.jsonl:" in message
    assert "nothing was updated" in message
    step = int(message.split("step ")[1].split(":")[0])
    assert f"The checkpoint after step {step - 1} is kept" in message
    assert (tmp_path / "out" / "checkpoints" / f"step-{step - 1:08d}").is_dir()
    assert not (tmp_path / "out" / "adapter_config.json").exists()


def test_an_adapter_that_is_not_finite_is_not_saved_and_the_step_and_the_rate_are_named(
    recipe: Recipe, tmp_path: Path
) -> None:
    path = recipe(train={"learning_rate": 1e38, "max_grad_norm": None, "warmup_steps": 0, "save_every_steps": 1})

    with pytest.raises(
        RunError, match=r"step \d: .*lora_A holds values that are not finite.* lower train.learning_rate"
    ):
        train(path)
    for folder in (tmp_path / "out" / "checkpoints").iterdir():
        read_patch(folder)


def test_the_best_step_becomes_the_patch_when_asked_and_early_stopping_ends_the_run(recipe: Recipe) -> None:
    settings = {
        "steps": 200, "learning_rate": 0.3, "eval_every_steps": 2, "select": "best", "early_stopping_evals": 3,
        "schedule": "constant",
    }  # fmt: skip
    out, said = train(recipe(train=settings))

    evals = {line["step"]: line["eval_loss"] for line in read_metrics(out / "metrics.jsonl") if "eval_loss" in line}
    best = min((step for step in evals if step), key=lambda step: evals[step])
    patch = read_patch(out)
    assert max(evals) < 200
    assert max(evals) == best + 6
    assert patch.metadata["step"] == best
    assert patch.metadata["results"]["eval_loss"] == evals[best]
    assert f"(step {best} of 200)" in said
    why = f"after step {best + 6} of 200: the held-out loss was no better in the last 3 evaluations"
    assert f"stopped    {why}" in said
    assert json.loads((out / "run.json").read_text())["stopped_early"].startswith(why)
    lines: list[str] = []
    show(str(out), None, lines.append)
    assert any(f"stopped early: {why}" in line for line in lines)


@pytest.mark.matrix
def test_a_run_that_took_all_its_steps_did_not_stop_early(recipe: Recipe, tmp_path: Path) -> None:
    settings = {
        "steps": 100, "learning_rate": 1.0, "eval_every_steps": 1, "early_stopping_evals": 1, "schedule": "constant",
    }  # fmt: skip
    out, said = train(recipe(train=settings))
    steps = json.loads((out / "run.json").read_text())["steps"]
    assert f"stopped    after step {steps} of 100" in said

    out, said = train(recipe(train=settings | {"steps": steps}, output=str(tmp_path / "other")))  # the same steps
    assert "stopped " not in said
    assert "stopped_early" not in json.loads((out / "run.json").read_text())


def test_a_layer_that_is_never_reached_is_an_error(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    from lorakit.lora.linear import LoraLinear

    forward = LoraLinear.forward

    def some(self: LoraLinear, x: torch.Tensor) -> torch.Tensor:
        return self.kind.product(x, self.weight, self.bias) if self.in_features == 48 else forward(self, x)

    monkeypatch.setattr(LoraLinear, "forward", some)
    for _ in range(2):  # resuming does not get past it
        with pytest.raises(
            RunError, match=r"4 adapter tensors have had no gradient after 12 .*down_proj.*adapter.exclude"
        ):
            train(recipe(train={"save_every_steps": 5}))


def test_trackers_receive_the_numbers_and_a_missing_one_is_an_error(recipe: Recipe, tmp_path: Path) -> None:
    out, _ = train(recipe(train={"log_to": ["tensorboard"], "steps": 3}))
    assert [file.parent.relative_to(out) for file in out.rglob("*tfevents*")] == [Path("tensorboard")]  # one run

    with pytest.raises(LorakitError, match="train.log_to: wandb not installed: pip install wandb"):
        train(recipe(train={"log_to": ["tensorboard", "wandb"]}, output=str(tmp_path / "other")))


def test_the_python_door_takes_overrides(recipe: Recipe, tmp_path: Path) -> None:
    out = train_function(recipe(), **{"train.steps": 3, "output": tmp_path / "python"}).folder

    assert read_patch(out).metadata["recipe"]["train"]["steps"] == 3
    assert digest(out / "adapter_model.safetensors")


def test_a_recipe_may_be_a_mapping(recipe: Recipe, tmp_path: Path) -> None:
    settings = json.loads(recipe().read_text())
    settings["train"]["steps"] = 3
    settings["output"] = tmp_path / "python"
    assert train_function(settings).folder == tmp_path / "python"
    with pytest.raises(RecipeError, match="train.stpes: unknown key. Nearest: 'steps'"):
        train_function(settings | {"train": {"stpes": 3}})
    with pytest.raises(RecipeError, match="recipe: only text, numbers"):
        train_function(settings | {"data": {1, 2}})
    with pytest.raises(RecipeError, match="recipe: a file or a mapping of sections, got a int"):
        train_function(3)  # type: ignore[arg-type]


def test_a_patch_holds_no_absolute_path_of_its_data(recipe: Recipe, rows: Path) -> None:
    out, _ = train(recipe(data={"eval": [str(rows)]}, train={"steps": 3}))
    facts = read_patch(out).metadata
    assert facts["recipe"]["data"]["train"] == facts["data"]["train"]["sources"][0] == rows.name
    assert facts["recipe"]["data"]["eval"] == [rows.name]
    assert str(rows.parent) not in (out / "README.md").read_text()
    assert json.loads((out / "run.json").read_text())["recipe"]["data"]["train"] == str(rows)  # to resume


def test_every_missing_file_is_named_before_the_base_is_loaded(recipe: Recipe, tmp_path: Path) -> None:
    path = recipe(data={"train": "absent.jsonl", "eval": "missing.jsonl"})
    for end in (lambda: train(path), lambda: check(load_recipe(path))):
        with pytest.raises(LorakitError, match="(?s)absent.jsonl: no such file.*missing.jsonl: no such file"):
            end()


@pytest.mark.matrix
def test_held_out_rows_that_are_the_training_rows_get_a_note(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(train={"steps": 3})
    check(load_recipe(path))
    checked, trained = capsys.readouterr().out, train(path)[1]
    assert "held-out rows are training rows too" in trained.partition("held out ")[2].partition("\nbase alone")[2]
    for said in (checked, trained):
        assert (
            "held-out rows are training rows too (the same tokens), so their loss says nothing about new ones" in said
        )
    other = recipe(
        data={"eval": str(write_rows(tmp_path / "eval.jsonl", [chat("say", "it")]))}, output=str(tmp_path / "other")
    )
    check(load_recipe(other))
    assert "\nnote " not in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.matrix), "bfloat16"])
def test_training_in_either_dtype_keeps_float32_masters(recipe: Recipe, dtype: str) -> None:
    out, _ = train(recipe(base={"dtype": dtype}, train={"steps": 30, "learning_rate": 0.02}))

    lines = [line["loss"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line]
    assert sum(lines[-5:]) < 0.9 * sum(lines[:5])
    assert {t.dtype for layer in read_patch(out).layers.values() for t in layer.tensors.values()} == {torch.float32}


def test_bad_inputs_end_before_anything_is_written(recipe: Recipe, tmp_path: Path) -> None:
    bad = write_rows(tmp_path / "bad.jsonl", [{"q": 1}])
    for sections, message in [
        ({"data": {"train": str(bad)}}, "bad.jsonl:1: no row format has the keys"),
        ({"data": {"train": "absent.jsonl"}}, "looked for "),
        ({"base": {"model": "absent/folder/x"}}, "no folder"),
        ({"base": {"model": "builtin:tny"}}, "Nearest: 'builtin:tiny'"),
        ({"adapter": {"targets": ["qproj"]}}, "matches none of the 15 linear layers"),
    ]:
        with pytest.raises(LorakitError, match=message):
            train(recipe(**sections))
        assert not (tmp_path / "out" / "run.json").exists()


def test_a_run_that_is_refused_before_it_began_leaves_nothing(recipe: Recipe, tmp_path: Path) -> None:
    path = recipe(adapter={"targets": ["qproj"]})
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(TargetError):
        train(path)

    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_waits_for_a_refused_one_never_holds_a_lock_that_is_gone(tmp_path: Path) -> None:
    def second() -> str | bool:
        try:
            with locked(tmp_path / "out"):
                return is_locked(tmp_path / "out")
        except RunError as problem:
            return str(problem)

    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path / "out"):
            waiting = pool.submit(second)
            time.sleep(LOOK_SECONDS / 2)  # the second has the file open, and will look once more
        outcome = waiting.result()

    assert outcome is True or "is in use by" in str(outcome)
    assert not (tmp_path / "out").exists()
