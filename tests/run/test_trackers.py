"""Experiment trackers: what would fail is found before a run, and what fails later costs lines of the tracker alone."""

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lorakit.cli import main
from lorakit.errors import RunError
from lorakit.recipe.schema import TrainSection
from lorakit.run import trackers
from lorakit.run.metrics import read_metrics
from lorakit.run.trackers import TRACKERS, Trackers, check_trackers
from tests.helpers.training import train

Install = Callable[[str, str], None]
NEVER = "import threading\ndef hang(*a, **k): threading.Event().wait()\n"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Write a package of another program in the place of the real one."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def write(name: str, text: str) -> None:
        (folder / f"{name}.py").write_text(text)
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)  # of an earlier text of the same second
        importlib.invalidate_caches()
        sys.modules.pop(name, None)

    yield write
    for file in folder.glob("*.py"):
        sys.modules.pop(file.stem, None)


def trackio(start: str = "", log: str = "", finish: str = "") -> str:
    """trackio's own functions, of which the run's tracker calls these."""
    return f"""{NEVER}
config = {{}}
class Run:
    def log(self, values, step):
        {log or "pass"}
    def finish(self):
        {finish or "pass"}
def init(project):
    {start or "pass"}
    return Run()
"""


def test_a_tracker_that_is_not_installed_or_cannot_be_imported_is_named_with_the_remedy(
    install: Install, recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunError, match=r"^train\.log_to: trackio not installed: pip install trackio$"):
        check_trackers(["tensorboard", "trackio"])

    install("mlflow", "from google.protobuf import no_such_name\n")
    install("wandb", "import gradio_of_the_past\n")
    for command in ("check", "train"):
        assert main([command, str(recipe(train={"log_to": ["mlflow", "wandb"]}))]) == 2
        error = capsys.readouterr().err
        assert "train.log_to: mlflow is installed and cannot be imported: " in error
        assert "ModuleNotFoundError: No module named 'gradio_of_the_past'. pip install -U wandb" in error
        assert "Traceback" not in error
    assert main(["doctor"]) == 2
    assert "BROKEN" in (out := capsys.readouterr().out)
    assert "nothing is broken" not in out


def test_a_tracker_that_does_not_start_ends_the_run_before_its_first_step(
    install: Install, recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("trackio", trackio(start="raise OSError('the disk is full')"))
    with pytest.raises(RunError, match="^train.log_to: trackio: OSError: the disk is full$"):
        train(recipe(train={"log_to": ["tensorboard", "trackio"]}))

    install("trackio", trackio(start="hang()"))
    monkeypatch.setattr(trackers, "START_SECONDS", 0.1)
    with pytest.raises(RunError, match="trackio: no answer in"):
        train(recipe(train={"log_to": ["trackio"]}))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("text", "lost", "why"),
    [
        (trackio(log="if step > 1: raise OSError('no\\n route')"), 4, "OSError: no route"),
        (trackio(log="hang()"), 5, "it did not answer"),
        (trackio(finish="hang()"), 0, ""),
        (trackio(finish="raise OSError('no route')"), 0, ""),
    ],
    ids=["fails", "hangs", "hangs at the end", "fails at the end"],
)
def test_a_tracker_that_fails_later_loses_lines_and_the_run_ends_as_without_it(
    install: Install, recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    text: str, lost: int, why: str,
) -> None:  # fmt: skip
    install("trackio", text)
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.1)

    out, _ = train(recipe(data={"eval": None}, train={"log_to": ["trackio"], "steps": 5}))

    run = json.loads((out / "run.json").read_text())
    assert run["status"] == "finished"
    assert len(read_metrics(out / "metrics.jsonl")) == 5
    error = capsys.readouterr().err
    if lost:
        assert run["lost_lines_of_trackers"] == {"trackio": {"lines": lost, "of": 5, "why": why}}
        assert error.count(f"trackio has lost {lost} of 5 lines ({why}); metrics.jsonl has them all") == 1
    else:
        assert "lost_lines_of_trackers" not in run
        assert "lost" not in error


def test_lines_that_a_slow_tracker_has_no_space_for_are_counted(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("trackio", trackio(log="hang()"))
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.1)
    monkeypatch.setattr(trackers, "MAX_WAITING", 3)
    opened = Trackers(["trackio"], tmp_path, {})
    for step in range(50):
        opened.log({"loss": 1.0}, step)
    opened.close()

    assert opened.lost_lines()["trackio"] == {"lines": 50, "of": 50, "why": "it did not answer"}


def test_every_tracker_of_recipes_is_known_and_in_the_extra() -> None:
    names = str(TrainSection.model_fields["log_to"].annotation)
    assert all(f"'{name}'" in names for name in TRACKERS)
    extra = next(line for line in Path("pyproject.toml").read_text().splitlines() if line.startswith("log = "))
    for name in TRACKERS:
        assert all(f'"{package}>=' in extra for package in TRACKERS[name].split()), name
    pins = Path("constraints.txt").read_text().lower()
    for name in TRACKERS:
        assert all(f"\n{package}==" in pins for package in TRACKERS[name].split()), name
