"""Runs side by side: figures, differences of recipe, data and base, and what does not compare."""

import json
from pathlib import Path
from typing import Any

import pytest

from lorakit.cli import main
from lorakit.errors import LorakitError
from lorakit.files.text import duration
from lorakit.inspection.compare import compare_runs
from lorakit.run.lock import is_locked, locked
from tests.helpers.runs import change_metrics, copy_run, interrupted_copy


class Said(list[str]):
    """The printed lines."""

    def __call__(self, text: str) -> None:
        self.append(text)

    def row(self, start: str) -> list[str]:
        """Return the words of the only line that begins with ``start``."""
        (line,) = (text for text in self if text.startswith(f"{start} "))
        return line.split()


@pytest.fixture
def said() -> Said:
    return Said()


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_metrics_that_lack_steps_of_a_finished_run_are_named(finished_run: Path, tmp_path: Path, said: Said) -> None:
    cut = copy_run(finished_run, tmp_path / "cut")
    lines = (cut / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] < 3]
    (cut / "metrics.jsonl").write_text("".join(kept) + '{"step": 3, "lo')

    notes = compare_runs([finished_run, cut], said)["notes"]
    assert "cut: metrics.jsonl lacks 4 of 6 steps" in notes


def test_the_figures_of_a_run_are_those_of_its_metrics_and_record(
    finished_run: Path, tmp_path: Path, said: Said
) -> None:
    other = copy_run(finished_run, tmp_path / "second")
    first = compare_runs([finished_run, other], said)["runs"][0]

    lines = metrics(finished_run)
    steps = [line for line in lines if "loss" in line]
    held_out = [line["eval_loss"] for line in lines if "eval_loss" in line]
    record = json.loads((finished_run / "run.json").read_text())
    assert (first["state"], first["step"], first["total_steps"]) == ("finished", 6, 6)
    assert (first["tokens"], first["label_tokens"]) == (record["tokens"], record["label_tokens"])
    assert first["loss"] == steps[-1]["loss"]
    assert first["lowest_loss"] == min(line["loss"] for line in steps)
    assert (first["eval_loss_at_start"], first["eval_loss"]) == (held_out[0], record["results"]["eval_loss"])
    assert first["best_eval_loss"] == min(held_out[1:])
    assert first["peak_memory_bytes"] == record["peak_memory_bytes"]
    assert first["seconds"] == pytest.approx(sum(s["tokens"] / s["tokens_per_second"] for s in steps), abs=0.01)
    assert said.row("first")[:5] == ["first", "finished", "6", "of", "6"]
    assert f"{steps[-1]['loss']:.4f}" in said.row("first")
    assert "recipe: the same" in said
    assert "data: the same" in said
    assert "base: the same" in said


def test_recipes_data_and_bases_are_compared_key_by_key(finished_run: Path, tmp_path: Path, said: Said) -> None:
    def change(record: dict[str, Any]) -> None:
        record["recipe"]["train"]["learning_rate"] = 0.5
        record["recipe"]["output"] = "elsewhere"
        record["data"]["train"] |= {"digest": "f" * 64, "rows": 11}
        first = next(iter(record["base"]["weights"]))
        record["base"]["weights"][first] = "other"
        record["base"]["config"] = "other"
        record["base"]["config_values"]["rms_norm_eps"] = 0.5

    found = compare_runs([finished_run, copy_run(finished_run, tmp_path / "second", change)], said)

    assert found["recipe"] == {"train.learning_rate": [0.01, 0.5]}
    assert found["data"]["train.rows"] == [12, 11]
    assert set(found["data"]) == {"train.rows", "train.digest"}
    eps = json.loads((finished_run / "run.json").read_text())["base"]["config_values"]["rms_norm_eps"]
    weights, config = found["base"]["second"]
    assert weights.startswith("the weights of 1 of ")
    assert config == f"config (rms_norm_eps: {eps} in first, 0.5 in second)"
    assert f"base of second is not first's: {weights} and {config}" in said
    assert said.row("train.learning_rate") == ["train.learning_rate", "0.01", "0.5"]
    assert any("`loss` and `lowest` are of other rows" in note for note in found["notes"])


def test_counts_of_nothing_are_no_difference(finished_run: Path, tmp_path: Path, said: Said) -> None:
    def extend(record: dict[str, Any]) -> None:
        record["starts"].append({**record["starts"][0], "total_steps": 9})
        del record["data"]["train"]["bad"]
        record["data"]["train"]["split"] = 2

    found = compare_runs([finished_run, copy_run(finished_run, tmp_path / "longer", extend)], said)

    assert found["data"] == {"train.split": [0, 2]}


def test_held_out_losses_of_other_rows_are_not_ranked(finished_run: Path, tmp_path: Path, said: Said) -> None:
    same = copy_run(finished_run, tmp_path / "same")
    change_metrics(same, lambda line: line.update({"eval_loss": line["eval_loss"] / 2} if "eval_loss" in line else {}))
    (best,) = compare_runs([finished_run, same], said)["notes"]
    assert best.startswith("the lowest held-out loss is same's, ")

    with (same / "metrics.jsonl").open("a") as file:
        file.write("\n")
    (_, note) = sorted(compare_runs([finished_run, same], said)["notes"], key=len, reverse=True)
    assert note == "same: metrics.jsonl is not what the run wrote"

    other = copy_run(finished_run, tmp_path / "other", lambda record: record["data"]["eval"].update(digest="0"))
    (note,) = compare_runs([finished_run, other], said)["notes"]
    assert note == "the held-out rows differ, so `held out` and `best` do not compare"


def test_layers_that_one_run_adapts_and_another_does_not_are_no_difference_of_bases(
    finished_run: Path, tmp_path: Path, said: Said
) -> None:
    other = copy_run(finished_run, tmp_path / "second", lambda record: record["base"]["weights"].popitem())
    assert compare_runs([finished_run, other], said)["base"] == {}


def test_runs_that_have_not_ended_are_compared_as_far_as_they_are(
    finished_run: Path, tmp_path: Path, said: Said
) -> None:
    half, running = (interrupted_copy(finished_run, tmp_path / name, 3) for name in ("half", "running"))
    with locked(running):
        found = compare_runs([finished_run, half, running], said)

    assert [run["state"] for run in found["runs"]] == ["finished", "interrupted", "running"]
    assert [run["step"] for run in found["runs"]] == [6, 3, 3]
    assert found["runs"][1]["peak_memory_bytes"] is None
    assert found["runs"][1]["tokens"] == sum(line.get("tokens", 0) for line in metrics(half))
    assert said.row("half")[1:5] == ["interrupted", "3", "of", "6"]
    assert found["notes"][-1].endswith("; not finished: half, running")


def test_a_run_before_its_first_step_and_one_without_metrics_are_shown(
    finished_run: Path, tmp_path: Path, said: Said
) -> None:
    begun = interrupted_copy(finished_run, tmp_path / "begun", -1)
    (begun / "metrics.jsonl").unlink()
    found = compare_runs([finished_run, begun], said, picture=tmp_path / "both.png")
    assert said.row("begun") == ["begun", "interrupted", "0", "of", "6", *["-"] * 9]
    assert found["notes"] == []


def test_looking_at_a_lock_neither_takes_it_nor_writes(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path):
        assert is_locked(tmp_path)
    before = (tmp_path / ".lock").read_bytes()
    assert not is_locked(tmp_path)
    assert (tmp_path / ".lock").read_bytes() == before


def test_runs_of_one_name_are_told_apart_by_their_folders(finished_run: Path, tmp_path: Path, said: Said) -> None:
    runs = [copy_run(finished_run, tmp_path / name / "out") for name in ("a", "b")]
    assert [run["name"] for run in compare_runs(runs, said)["runs"]] == ["a/out", "b/out"]


def test_the_command_draws_a_picture_and_writes_every_figure(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = copy_run(finished_run, tmp_path / "$^$")
    picture, figures = tmp_path / "compare.png", tmp_path / "compare.json"
    command = ["compare", finished_run, second, "--out", picture, "--json", figures]
    assert main([str(word) for word in command]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(figures.read_text())["runs"][1]["name"] == "$^$"
    assert f"drawn in {picture}" in capsys.readouterr().out


def test_what_is_no_run_is_refused(finished_run: Path, tmp_path: Path, said: Said) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    damaged = copy_run(finished_run, tmp_path / "damaged")
    (damaged / "run.json").write_text("{")
    foreign = copy_run(finished_run, tmp_path / "foreign", lambda record: record.clear())
    for runs, message in (
        ([finished_run], "1 run; name at least two"),
        ([finished_run, finished_run / "."], "this run is named twice"),
        ([finished_run, tmp_path / "absent"], "absent: no such folder"),
        ([finished_run, empty], "empty: holds no run.json"),
        ([finished_run, tmp_path], f"There are runs inside: {damaged}, {foreign}"),
        ([finished_run, damaged], "not valid JSON"),
        ([finished_run, foreign], "not the record of a run"),
    ):
        with pytest.raises(LorakitError) as caught:
            compare_runs(runs, said)
        assert message in str(caught.value)
    with pytest.raises(LorakitError, match="the picture is a PNG"):
        compare_runs([finished_run, finished_run], said, picture="loss.jpg")
    assert said == []


def test_a_duration_is_read_at_a_glance() -> None:
    assert [duration(seconds) for seconds in (0.42, 41.2, 59.6, 725, 12000)] == [
        "0.4 s", "41 s", "1 min 0 s", "12 min 5 s", "3 h 20 min",
    ]  # fmt: skip
