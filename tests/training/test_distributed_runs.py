"""Full runs over several processes: started, stopped, killed, resumed elsewhere; and every fault in words."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import lorakit
from lorakit.base.transformers_io import load_skeleton
from lorakit.files.safetensors import open_tensors
from lorakit.patch import read_patch
from lorakit.run.metrics import read_metrics
from tests.helpers.bases import make_base
from tests.helpers.fork_server import PIPE, ROOT, STDOUT, ForkedProcess, run_python, start_python
from tests.helpers.patches import make_patch
from tests.helpers.runs import workers_of

pytestmark = [pytest.mark.spread, pytest.mark.slow]

Recipe = Callable[..., Path]
Action = Callable[[ForkedProcess], None]
STEPS = 40


def train(recipe: Path, *overrides: str, code: int = 0) -> str:
    """Run `lorakit train` in forked processes; return what it printed."""
    return output_of(run_python("-m", "lorakit.cli", "train", recipe, *overrides, cwd=ROOT), code)


def train_for_real(*arguments: object) -> str:
    """Run ``python *arguments`` in processes that import everything anew, as a user's do."""
    command = [sys.executable, *map(str, arguments)]
    return output_of(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220), 0)


def output_of(ended: subprocess.CompletedProcess[str], code: int) -> str:
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def interrupted(recipe: Path, *overrides: str, at: int, action: Action) -> tuple[int, str]:
    """Start a run, do something to it once step ``at`` is recorded, and return its exit code and output."""
    out = Path(json.loads(recipe.read_text())["output"])
    with start_python("-m", "lorakit.cli", "train", recipe, *overrides, stdout=PIPE, stderr=STDOUT) as process:
        until = time.monotonic() + 100
        while max((line["step"] for line in read_metrics(out / "metrics.jsonl")), default=0) < at:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < until
            time.sleep(0.02)
        action(process)
        output = process.communicate(timeout=220)[0]
    return process.wait(), output


def kill_rank(rank: int) -> Action:
    return lambda process: os.kill(workers_of(process.pid)[rank], signal.SIGKILL)


def parallel(backend: str, processes: int, **more: Any) -> tuple[str, ...]:
    keys = {"backend": backend, "processes": processes, **more}
    return tuple(f"parallel.{key}={value}" for key, value in keys.items())


def losses(out: Path) -> dict[int, tuple[float, int, int]]:
    """step -> loss, tokens, label tokens."""
    lines = [line for line in read_metrics(out / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return {line["step"]: (line["loss"], line["tokens"], line["label_tokens"]) for line in lines}


@pytest.fixture
def long_recipe(recipe: Recipe) -> Path:
    sections: dict[str, Any] = {
        "train": {
            "steps": STEPS,
            "save_every_steps": 4,
            "batch_size": 7,
            "micro_batch_size": 2,
            "eval_every_steps": 20,
        },
        "adapter": {"dropout": 0.1, "rank": 3, "alpha": 6.0},
    }
    return recipe(**sections)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout",
    [
        parallel("zero3", 2),
        parallel("ddp", 2, tensor=2),
        parallel("ddp", 4, pipeline=2, tensor=2),
        parallel("fsdp2", 2),
        parallel("ddp", 2, sequence=2),
        parallel("fsdp2", 4, tensor=2),
    ],
    ids=" ".join,
)
def test_a_killed_run_goes_on_bit_identical(
    long_recipe: Path, base: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    full = tmp_path / "full"
    short = ("train.steps=14", *layout)
    train(long_recipe, *short, f"output={full}")
    out = tmp_path / "out"

    code, output = interrupted(long_recipe, *short, at=9, action=kill_rank(1))

    assert code == 75, output
    assert "rank 1 was killed by SIGKILL" in output
    assert not (out / "adapter_model.safetensors").exists()
    output = train(long_recipe, *short)
    assert "resuming   after step" in output
    assert (out / "adapter_model.safetensors").read_bytes() == (full / "adapter_model.safetensors").read_bytes()
    assert losses(out) == losses(full)
    ids = torch.arange(5, 25)[None]
    of_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), out)
    ours = lorakit.load(base, {"a": out}, dtype="float32")
    torch.testing.assert_close(ours(ids, adapters="a").logits, of_peft(ids).logits, rtol=1e-5, atol=1e-5)


LAYOUTS = (
    ("single", 1, 1, 1, 1), ("zero2", 2, 1, 1, 1), ("fsdp2", 4, 2, 1, 1), ("ddp", 4, 2, 2, 1), ("zero3", 2, 1, 1, 1),
    ("fsdp2", 4, 1, 2, 2),
)  # fmt: skip


@pytest.mark.matrix
def test_a_run_goes_on_with_other_backends_and_numbers_of_processes(long_recipe: Path, tmp_path: Path) -> None:
    full, out = tmp_path / "full", tmp_path / "out"
    train(long_recipe, f"output={full}")

    for number, (backend, processes, sequence, pipeline, tensor) in enumerate(LAYOUTS, 1):
        code, output = interrupted(
            long_recipe,
            *parallel(backend, processes, sequence=sequence, pipeline=pipeline, tensor=tensor),
            at=6 * number,
            action=lambda process: process.send_signal(signal.SIGTERM),
        )
        assert code == 75, output
        assert "SIGTERM: saved after step" in output
    train(long_recipe)

    resumed, expected = losses(out), losses(full)
    assert resumed.keys() == expected.keys()
    for step in expected:
        assert resumed[step][1:] == expected[step][1:]  # the same rows
        assert resumed[step][0] == pytest.approx(expected[step][0], rel=1e-5), step
    one, other = (open_tensors(folder / "adapter_model.safetensors") for folder in (out, full))
    for name in other.entries:
        assert (one.read(name) - other.read(name)).norm() <= 1e-3 * other.read(name).norm()
    backends = [start["parallel"]["backend"] for start in json.loads((out / "run.json").read_text())["starts"]]
    assert backends == [*(backend for backend, *_ in LAYOUTS), "single"]


@pytest.mark.matrix
@pytest.mark.parametrize(("backend", "pipeline"), [("ddp", 2), ("fsdp2", 1), ("zero3", 1)])
def test_a_run_of_several_processes_starts_from_a_patch_and_goes_on_longer(
    long_recipe: Path, base: Path, tmp_path: Path, backend: str, pipeline: int
) -> None:
    patch = make_patch(base, tmp_path / "patch", rank=3, method="dora")
    content = json.loads(long_recipe.read_text())
    content["adapter"] = {"start_from": str(patch)}
    content["train"] |= {"steps": 4, "schedule": "constant", "warmup_steps": 1}
    long_recipe.write_text(json.dumps(content))
    alone, out = tmp_path / "alone", tmp_path / "out"
    train(long_recipe, f"output={alone}")
    train(long_recipe, *parallel(backend, 2, pipeline=pipeline))
    shutil.rmtree(patch)

    for path, more in ((alone, ()), (out, parallel(backend, 2, pipeline=pipeline))):
        train(long_recipe, f"output={path}", "train.steps=6", *more)

    one, two = (
        [line.get("loss", line.get("eval_loss")) for line in read_metrics(p / "metrics.jsonl")] for p in (alone, out)
    )
    assert one == pytest.approx(two, rel=1e-5)
    assert len(one) == 9
    assert read_patch(out).metadata["start"] == read_patch(alone).metadata["start"]


@pytest.mark.matrix
def test_a_run_restarts_by_itself(long_recipe: Path, tmp_path: Path) -> None:
    code, output = interrupted(long_recipe, *parallel("ddp", 2, max_restarts=1), at=9, action=kill_rank(0))

    assert code == 0, output
    assert len(losses(tmp_path / "out")) == STEPS


@pytest.mark.matrix
def test_a_stop_by_signal_saves_and_goes_on(long_recipe: Path, tmp_path: Path) -> None:
    code, output = interrupted(
        long_recipe, *parallel("zero2", 2), at=6, action=lambda process: process.send_signal(signal.SIGINT)
    )

    assert code == 75
    assert output.count("saved after step") == 1
    train(long_recipe, *parallel("zero2", 2))
    assert len(losses(tmp_path / "out")) == STEPS


def test_problems_are_said_once_and_by_name(recipe: Recipe, tmp_path: Path) -> None:
    output = train(recipe(adapter={"targets": ["qproj"]}), *parallel("ddp", 2), code=2)

    assert output.count("'qproj' matches none of the 15 linear layers") == 1
    assert "Traceback" not in output


def test_a_step_that_is_not_finite_on_one_rank_ends_all_and_names_the_rows(recipe: Recipe, rows: Path) -> None:
    output = train(recipe(train={"learning_rate": 1e30, "max_grad_norm": None}), *parallel("ddp", 2), code=2)

    assert output.count("nothing was updated") == 1
    assert f"Rows in it: {rows}:" in output


def few_steps_of(backend: str, out: Path) -> tuple[str, ...]:
    """Arguments that take three steps of a backend's shipped recipe."""
    recipe = ROOT / "recipes" / f"{backend}.yaml"
    return str(recipe), "train.steps=3", "train.warmup_steps=0", "data.eval=null", f"output={out}"


def assert_finished(output: str, out: Path, backend: str) -> None:
    assert f"engine     {backend} on cpu" in output
    assert "2 processes through gloo" in output
    run = json.loads((out / "run.json").read_text())
    assert run["status"] == "finished"
    assert run["engine"]["backend"] == backend
    assert len(run["ranks"]) == 1


@pytest.mark.matrix
@pytest.mark.parametrize("backend", ["zero1", "zero2", "zero3", "fsdp2"])
def test_the_shipped_recipe_of_a_backend_runs(backend: str, tmp_path: Path) -> None:
    recipe, *overrides = few_steps_of(backend, tmp_path / "out")

    output = train(Path(recipe), *overrides)

    assert_finished(output, tmp_path / "out", backend)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(("cli.py",), id="lorakit"),
        pytest.param(
            ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lorakit.cli"),
            id="torchrun",
        ),
    ],
)  # fmt: skip
def test_a_run_starts_from_nothing(launcher: tuple[str, ...], tmp_path: Path) -> None:
    """Started as a user starts it: no process is a fork of the tests' own."""
    output = train_for_real(*launcher, "train", *few_steps_of("ddp", tmp_path / "out"))

    assert_finished(output, tmp_path / "out", "ddp")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "share"),
    [
        (parallel("zero3", 2, prefetch_mb=1), 1.0),
        (parallel("fsdp2", 2), 1.0),
        (parallel("ddp", 4, tensor=2, pipeline=2), 0.5),  # two that may take as much would not have the base
    ],
    ids=["zero3", "fsdp2", "ddp, four parts"],
)
def test_no_process_ever_has_the_full_base(
    layout: tuple[str, ...], share: float, recipe: Recipe, tmp_path: Path, tokenizer: Any
) -> None:
    """Loading, training, saving: eighteen layers more take each process a share of their bytes."""
    peaks, bases = [], []
    for layers in (2, 20):
        sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": layers, "num_attention_heads": 8,
                 "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
        folder, out = make_base(tmp_path / f"base{layers}", tokenizer, **sizes), tmp_path / f"out{layers}"
        path = recipe(
            base={"model": str(folder)}, data={"eval": None}, output=str(out),
            train={"steps": 1, "batch_size": 2, "micro_batch_size": 1, "warmup_steps": 0, "save_every_steps": 1},
        )  # fmt: skip

        train(path, *layout)

        record = json.loads((out / "run.json").read_text())
        bases.append(4 * sum(parameter.numel() for parameter in load_skeleton(folder).parameters()))
        ranks = (record["engine"], *record["ranks"])
        peaks.append(max(rank["peak_memory_bytes"] for rank in ranks))
        assert sum(rank["base_bytes"] for rank in ranks) == pytest.approx(bases[-1], rel=0.01)
        assert max(rank["base_bytes"] for rank in ranks) < 1.3 * bases[-1] / len(ranks)
    assert peaks[1] - peaks[0] < share * (bases[1] - bases[0])
