"""Whole runs over several processes: started, stopped, killed, gone on with elsewhere; and every fault in words."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorakit.base.load import load_skeleton
from lorakit.files.safetensors import open_tensors
from lorakit.planning.process_overhead import measure_process_bytes
from lorakit.run.metrics import read_metrics
from tests.conftest import make_base

pytestmark = pytest.mark.spread

Recipe = Callable[..., Path]
ROOT = Path(__file__).parents[2]
STEPS = 40


def command(recipe: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "lorakit.cli", "train", str(recipe), *overrides]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def train(recipe: Path, *overrides: str, code: int = 0) -> str:
    done = subprocess.run(
        command(recipe, *overrides), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def interrupted(
    recipe: Path, *overrides: str, at: int, how: Callable[[subprocess.Popen[str]], None]
) -> tuple[int, str]:
    """Start a run, do something to it once step ``at`` is recorded, and wait for its end."""
    out = Path(json.loads(recipe.read_text())["output"])
    process = subprocess.Popen(
        command(recipe, *overrides), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    until = time.monotonic() + 120
    while max((line["step"] for line in read_metrics(out / "metrics.jsonl")), default=0) < at:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.02)
    how(process)
    said = process.communicate(timeout=120)[0]
    return process.returncode, said


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The run's workers by rank."""
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    ranks = {}
    for pid in found:
        told = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ranks.update({int(item[5:]): int(pid) for item in told if item.startswith(b"RANK=")})
    return [ranks[rank] for rank in sorted(ranks)]


def kill_rank(rank: int, number: int = signal.SIGKILL) -> Callable[[subprocess.Popen[str]], None]:
    return lambda process: os.kill(workers_of(process)[rank], number)


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
        "adapter": {"dropout": 0.0, "rank": 3, "alpha": 6.0},
    }
    return recipe(**sections)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["zero3", "fsdp2"])
def test_a_killed_run_goes_on_bit_identical(long_recipe: Path, tmp_path: Path, backend: str) -> None:
    whole = tmp_path / "whole"
    train(long_recipe, *parallel(backend, 2), f"output={whole}")
    out = tmp_path / "out"

    code, said = interrupted(long_recipe, *parallel(backend, 2), at=9, how=kill_rank(1))

    assert code == 75, said
    assert "rank 1 was killed by SIGKILL" in said
    assert not (out / "adapter_model.safetensors").exists()
    said = train(long_recipe, *parallel(backend, 2))
    assert "resuming   after step" in said
    assert (out / "adapter_model.safetensors").read_bytes() == (whole / "adapter_model.safetensors").read_bytes()
    assert losses(out) == losses(whole)


@pytest.mark.slow
def test_a_run_goes_on_with_other_backends_and_numbers_of_processes(long_recipe: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    train(long_recipe, f"output={whole}")

    for layout, at in (
        (("single", 1), 5), (("zero2", 2), 12), (("fsdp2", 4), 18), (("ddp", 2), 24), (("zero3", 2), 30),
    ):  # fmt: skip
        code, said = interrupted(
            long_recipe, *parallel(*layout), at=at, how=lambda process: process.send_signal(signal.SIGTERM)
        )
        assert code == 75, said
        assert "SIGTERM: saved after step" in said
    train(long_recipe)

    found, expected = losses(out), losses(whole)
    assert found.keys() == expected.keys()
    for step in expected:
        assert found[step][1:] == expected[step][1:]  # the same rows
        assert found[step][0] == pytest.approx(expected[step][0], rel=1e-5), step
    one, other = (open_tensors(folder / "adapter_model.safetensors") for folder in (out, whole))
    for name in other.entries:
        assert (one.read(name) - other.read(name)).norm() <= 1e-3 * other.read(name).norm()
    layouts = [start["parallel"]["backend"] for start in json.loads((out / "run.json").read_text())["starts"]]
    assert layouts == ["single", "zero2", "fsdp2", "ddp", "zero3", "single"]


@pytest.mark.slow
def test_a_run_restarts_by_itself(long_recipe: Path, tmp_path: Path) -> None:
    code, said = interrupted(long_recipe, *parallel("ddp", 2, max_restarts=1), at=9, how=kill_rank(0))

    assert code == 0, said
    assert len(losses(tmp_path / "out")) == STEPS


@pytest.mark.slow
def test_a_stop_by_signal_saves_and_goes_on(long_recipe: Path, tmp_path: Path) -> None:
    code, said = interrupted(
        long_recipe, *parallel("zero2", 2), at=6, how=lambda process: process.send_signal(signal.SIGINT)
    )

    assert code == 75
    assert said.count("saved after step") == 1
    train(long_recipe, *parallel("zero2", 2))
    assert len(losses(tmp_path / "out")) == STEPS


def test_problems_are_said_once_and_by_name(recipe: Recipe, tmp_path: Path) -> None:
    said = train(recipe(adapter={"targets": ["qproj"]}), *parallel("ddp", 2), code=2)

    assert said.count("'qproj' matches none of the 15 linear layers") == 1
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_step_that_is_not_finite_on_one_rank_ends_all_and_names_the_rows(recipe: Recipe, rows: Path) -> None:
    said = train(recipe(train={"learning_rate": 1e30, "max_grad_norm": None}), *parallel("ddp", 2), code=2)

    assert said.count("nothing was updated") == 1
    assert f"Rows in it: {rows}:" in said


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
def test_the_shipped_recipe_of_a_backend_runs(backend: str, tmp_path: Path) -> None:
    overrides = ("train.steps=3", "train.warmup_steps=0", "data.eval=null", f"output={tmp_path / 'out'}")

    said = train(ROOT / "recipes" / f"{backend}.yaml", *overrides)

    assert f"engine     {backend} on cpu" in said
    assert "2 processes through gloo" in said
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["status"] == "finished"
    assert run["engine"]["backend"] == backend
    assert len(run["ranks"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "more"), [("zero3", {"prefetch_mb": 1}), ("fsdp2", {})])
def test_no_process_ever_holds_the_base(
    backend: str, more: dict[str, Any], recipe: Recipe, rows: Path, tmp_path: Path, tokenizer: Any
) -> None:
    """Loading, training, saving: two processes stay below what the base alone takes."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 12,
             "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
    folder = make_base(tmp_path / "base", tokenizer, **sizes)
    path = recipe(
        base={"model": str(folder)}, data={"eval": None},
        train={"steps": 2, "batch_size": 2, "micro_batch_size": 1, "warmup_steps": 0, "save_every_steps": 1},
    )  # fmt: skip

    train(path, *parallel(backend, 2, **more))

    record = json.loads((tmp_path / "out" / "run.json").read_text())
    base = 4 * sum(parameter.numel() for parameter in load_skeleton(folder).parameters())
    assert base > 500_000_000
    for rank in (record["engine"], *record["ranks"]):
        assert rank["base_bytes"] == pytest.approx(base / 2, rel=0.01)
        assert rank["peak_memory_bytes"] - measure_process_bytes(folder, "float32", None) < base
