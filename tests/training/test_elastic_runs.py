"""Runs that lose workers: who is left goes on, new ones join, and the adapter is that of a run that lost none."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lorakit.base.find import find_base
from lorakit.base.load import load_tokenizer
from lorakit.errors import RunError
from lorakit.files.safetensors import open_tensors
from lorakit.launch.environment import World
from lorakit.parallel.setup import distributed_engine
from lorakit.recipe import load_recipe
from lorakit.run.metrics import read_metrics
from lorakit.training.checkpoint import Checkpoints
from tests.helpers.bases import make_base
from tests.helpers.fork_server import ROOT, run_python
from tests.helpers.rows import write_uneven_rows

pytestmark = [pytest.mark.spread, pytest.mark.slow, pytest.mark.xdist_group("elastic")]

STEPS, ROWS, BATCH = 16, 30, 10
LAUNCH = """
import json, sys
from lorakit.launch.elastic import launch_elastically
command = [sys.executable, "-m", "tests.helpers.elastic_worker", *sys.argv[1:4]]
raise SystemExit(launch_elastically(command, command, **json.loads(sys.argv[4])))
"""


class Run(NamedTuple):
    """A run of a faulty launch: its folder, its exit code and what it printed."""

    folder: Path
    code: int
    printed: str

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.out / "run.json").read_text())
        return record


def write_recipe(folder: Path, base: Path, **parallel: Any) -> Path:
    folder.mkdir(exist_ok=True)
    rows = str(write_uneven_rows(folder.parent / "rows.jsonl", ROWS))
    recipe = {
        "base": {"model": str(base), "dtype": "float32"},
        "adapter": {"rank": 4, "dropout": 0.1},
        "data": {"train": rows, "eval": rows, "max_tokens": 64},
        "train": {
            "steps": STEPS, "batch_size": BATCH, "micro_batch_size": 2, "learning_rate": 0.003, "warmup_steps": 2,
            "schedule": "constant",            "save_every_steps": 5, "eval_every_steps": 4,
        },
        "parallel": parallel,
        "output": str(folder / "out"),
    }  # fmt: skip
    (folder / "recipe.json").write_text(json.dumps(recipe))
    return folder / "recipe.json"


def train_alone(folder: Path, base: Path, *overrides: str) -> Path:
    """Train in one process; return the output folder."""
    recipe = write_recipe(folder, base, backend="single")
    ended = run_python("-m", "lorakit.cli", "train", recipe, *overrides, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return folder / "out"


def train_faulty(folder: Path, base: Path, plan: dict[str, Any], *, fewest: int, max_replaced: int) -> Run:
    """Run three workers that fail as planned."""
    silence = {"silent_seconds": 1.0, "stuck_seconds": 60.0}
    section = {"backend": "ddp", "processes": 3, "elastic": {"min": fewest}, "max_restarts": max_replaced, **silence}
    recipe = write_recipe(folder, base, **section)
    (folder / "plan.json").write_text(json.dumps(plan))
    settings = {"processes": 3, "fewest": fewest, "max_replaced": max_replaced, **silence}
    ended = run_python("-c", LAUNCH, folder, "train", recipe, json.dumps(settings), cwd=ROOT)
    return Run(folder, ended.returncode, ended.stdout + ended.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


@pytest.fixture(scope="module")
def small_base(folder: Path) -> Path:
    return make_base(folder / "base", load_tokenizer(find_base("builtin:tiny")))


@pytest.fixture(scope="module")
def alone(folder: Path, small_base: Path) -> Path:
    """The output of one process that nothing happened to."""
    return train_alone(folder / "alone", small_base)


@pytest.fixture(scope="module")
def lossy(folder: Path, small_base: Path) -> Run:
    """A run that loses workers in every part of a step: before and after its message, and while one joins."""
    pytest.importorskip("torchft.coordination")
    plan = {
        "1": [[2, "before the sum", "kill"]],
        "3": [[None, "shared", "kill"]],  # the first that joins, while it gets its state
        "0": [[6, "after the sum", "kill"]],  # the one with the output folder
        "2": [[9, "after the sum", "lose"]],  # the others have counted this step
    }
    return train_faulty(folder / "lossy", small_base, plan, fewest=1, max_replaced=4)


def adapter_difference(first: Path, second: Path) -> float:
    """The largest difference of two adapters, as a part of their largest value."""
    files = [open_tensors(path / "adapter_model.safetensors") for path in (first, second)]
    one, two = ({name: file.read(name) for name in file.entries} for file in files)
    assert one.keys() == two.keys()
    largest = max(float(tensor.abs().max()) for tensor in one.values())
    return max(float((one[name] - two[name]).abs().max()) for name in one) / largest


def test_a_run_that_loses_workers_ends_as_one_that_loses_none(lossy: Run, alone: Path) -> None:
    assert lossy.code == 0, lossy.printed
    assert adapter_difference(lossy.out, alone) < 1e-4
    lines, expected = (read_metrics(path / "metrics.jsonl") for path in (lossy.out, alone))
    numbers = [[(line["step"], line.get("loss", line.get("eval_loss"))) for line in run] for run in (lines, expected)]
    assert [step for step, _ in numbers[0]] == [step for step, _ in numbers[1]]
    assert [loss for _, loss in numbers[0]] == pytest.approx([loss for _, loss in numbers[1]], rel=1e-4)
    assert "Traceback" not in lossy.printed


def test_each_row_counts_once_an_epoch_whoever_computes_it(lossy: Run) -> None:
    sums: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for path in lossy.folder.glob("worker-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            sums[line["step"]][line["group"]].append(line)
    assert sorted(sums) == list(range(STEPS))

    per_epoch: Counter[tuple[int, int]] = Counter()
    for step, groups in sums.items():
        last = groups[max(groups)]  # an earlier group's sum was lost with it
        assert len(last) == last[0]["size"]
        per_epoch.update((step * BATCH // ROWS, row) for line in last for row in line["rows"])

    assert set(per_epoch.values()) == {1}
    assert len(per_epoch) == STEPS * BATCH


def test_the_record_says_who_left_and_who_joined_at_which_step(lossy: Run) -> None:
    changes = lossy.record()["elastic"]

    left = {worker: change["step"] for change in changes for worker in change["left"]}
    joined = {worker: change["step"] for change in changes for worker in change["joined"]}
    assert left[1] == 2
    assert left[0] in (6, 7)  # before or after the update of the others
    assert joined.keys() <= {3, 4, 5}
    there = {0, 1, 2}
    for change in changes:
        there = there - set(change["left"]) | set(change["joined"])
        assert change["processes"] == len(there)
    assert 2 in there
    assert lossy.record()["status"] == "finished"
    assert lossy.printed.count("was killed by SIGKILL") == 3
    assert "[rank 2] " in lossy.printed  # which reports once rank 0 is gone


def test_too_few_workers_stop_with_a_checkpoint_and_any_backend_goes_on(
    folder: Path, small_base: Path, alone: Path
) -> None:
    pytest.importorskip("torchft.coordination")
    own = folder / "few"
    train_alone(own, small_base, "train.steps=5")
    plan = {"0": [[10, "before the sum", "kill"]], "2": [[8, "begun", "kill"]]}

    run = train_faulty(own, small_base, plan, fewest=2, max_replaced=0)

    assert run.code == 75, run.printed
    assert "1 of 3 processes left, fewer than parallel.elastic.min: 2" in run.printed
    newest = Checkpoints(run.out / "checkpoints", 1).newest()
    assert newest is not None
    assert newest[0].step == 10
    train_alone(own, small_base)
    assert adapter_difference(run.out, alone) < 1e-4


def test_another_launcher_is_refused_because_it_ends_all_processes_together(recipe: Callable[..., Path]) -> None:
    loaded = load_recipe(recipe(parallel={"backend": "ddp", "processes": 2, "elastic": {}}))
    world = World(0, 2, 0, 2, "torchrun", "127.0.0.1", 29500)

    with (
        pytest.raises(RunError, match=r"parallel.elastic: torchrun started this process"),
        distributed_engine(loaded, world, lambda: None),
    ):
        pass


def test_without_torchft_the_error_names_the_extra(
    recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    from lorakit.training.start import run_or_launch

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    path = recipe(parallel={"backend": "ddp", "processes": 2, "elastic": {}})

    with pytest.raises(
        RunError, match=r"needs torchft \(Linux on x86-64, Python 3.11 to 3.13\): pip install 'lorakit\[elastic\]'"
    ):
        run_or_launch(load_recipe(path), path, (), fresh=False)
