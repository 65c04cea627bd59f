"""What `lorakit show` says of a run: finished, interrupted, under way, or damaged since."""

import json
from pathlib import Path

import pytest

from lorakit.cli import main
from lorakit.run.record import locked
from tests.helpers.runs import copy_run, interrupted_copy


def shown(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["show", str(run)]) == 0
    return capsys.readouterr().out


def test_a_finished_run(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(finished_run, capsys)
    assert "status       finished\nsteps        6 of 6\n" in said
    assert "peak memory" in said
    assert "damaged" not in said


@pytest.mark.parametrize("kept", [3, 6])
def test_metrics_that_are_not_the_runs_own_are_named(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: int
) -> None:
    cut = copy_run(finished_run, tmp_path / "cut")
    lines = (cut / "metrics.jsonl").read_text().splitlines(keepends=True)
    left = "".join(line for line in lines if json.loads(line)["step"] < kept).replace('"loss": ', '"loss":  ')
    (cut / "metrics.jsonl").write_text(left + '{"step": 6, "lo')
    assert f"damaged      metrics.jsonl lacks {7 - kept} of 6 steps" in shown(cut, capsys)


def test_changed_metrics_are_named(finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = copy_run(finished_run, tmp_path / "changed")
    text = (changed / "metrics.jsonl").read_text()
    (changed / "metrics.jsonl").write_text(text.replace('"loss": ', '"loss":  ', 1))
    assert "damaged      metrics.jsonl is not what the run wrote" in shown(changed, capsys)


def test_a_run_that_has_not_ended(finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = interrupted_copy(finished_run, tmp_path / "half", 3)
    assert "interrupted, saved after step 6 of 6; lorakit train goes on" in shown(half, capsys)
    with locked(half):
        assert "running, saved after step 6 of 6\n" in shown(half, capsys)


def test_a_record_that_no_run_writes_is_refused(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = copy_run(finished_run, tmp_path / "foreign", lambda record: record.update(ranks=7))
    assert main(["show", str(foreign)]) == 2
    assert "has a value that no run writes" in capsys.readouterr().err
