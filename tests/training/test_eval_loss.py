"""`lorakit score --measure loss`: the held-out loss of training, of any adapter, the base, and a merged model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lorakit
from lorakit.cli import main
from lorakit.data.row_settings import RowSettings
from lorakit.errors import DataError
from lorakit.run.display import row_progress
from lorakit.run.metrics import read_metrics
from lorakit.training.eval_loss import EvalLoss, eval_losses
from tests.helpers.rows import chat, write_rows

Recipe = Callable[..., Path]


def trained(recipe: Recipe, **sections: Any) -> tuple[Path, list[dict[str, Any]]]:
    """Train six steps; return the output folder, and its evaluations before the first step and after the last."""
    sections["train"] = {"steps": 6, "eval_every_steps": 6, **sections.get("train", {})}
    result = lorakit.train(recipe(**sections))
    return result.folder, [line for line in read_metrics(result.folder / "metrics.jsonl") if "eval_loss" in line]


def measured(base: Path, folder: Path, rows: Path) -> list[EvalLoss]:
    """Return what `score` measures of the base and of an adapter on it."""
    model = lorakit.load(base, {"a": folder}, dtype="float32")
    losses = eval_losses(model, {str(rows): [None, "a"]}, row_progress, RowSettings())
    return [losses[str(rows), None], losses[str(rows), "a"]]


ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dora": {"adapter": {"method": "dora"}},
    "head in full": {"adapter": {"modules_to_save": ["lm_head"]}},
    "adapted head": {"adapter": {"targets": ["q_proj", "lm_head"]}},
    "rows of the embedding": {"adapter": {"trainable_tokens": ["<|user|>"]}},
    "every token": {"data": {"loss_on": "all"}},
    "cut rows": {"data": {"max_tokens": 12, "on_long_rows": "truncate"}},
    "smoothed labels": {"train": {"label_smoothing": 0.3}},
}
ONCE = ("plain", "head in full", "every token", "cut rows")


@pytest.mark.parametrize(
    "sections",
    [pytest.param(ADAPTERS[name], marks=[] if name in ONCE else [pytest.mark.matrix]) for name in ADAPTERS],
    ids=ADAPTERS,
)
def test_the_loss_is_that_of_the_runs_own_evaluation(
    recipe: Recipe, base: Path, rows: Path, sections: dict[str, Any]
) -> None:
    folder, evaluations = trained(recipe, **sections)

    for line, (report, _) in zip(evaluations, measured(base, folder, rows), strict=True):
        assert report.loss == pytest.approx(line["eval_loss"], rel=2e-6)
        assert report.metrics["accuracy"] == pytest.approx(line["eval_accuracy"], abs=1e-6)
    assert evaluations[1]["eval_loss"] < evaluations[0]["eval_loss"]


@pytest.mark.parametrize("name", ["dpo", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("ipo", "simpo"))])
def test_the_loss_and_ranks_of_pairs_are_those_of_the_runs_own_evaluation(
    recipe: Recipe, base: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [{"prompt": f"say {i}", "chosen": f" yes {i}", "rejected": " no" * (1 + i % 3)} for i in range(14)]
    rows = write_rows(tmp_path / "pairs.jsonl", pairs)
    data = {"train": str(rows), "eval": str(rows)}
    folder, evaluations = trained(recipe, data=data, objective={"name": name, "beta": 0.2})

    for line, (report, _) in zip(evaluations, measured(base, folder, rows), strict=True):
        assert report.loss == pytest.approx(line["eval_loss"], rel=1e-5)
        for metric, value in report.metrics.items():
            assert value == pytest.approx(line[f"eval_{metric}"], rel=1e-5, abs=1e-5), metric
    assert evaluations[1]["eval_rewards/accuracies"] == 1
    assert main(["score", str(base), "--adapter", f"a={folder}", "--measure", "loss", "--data", str(rows)]) == 0
    said = capsys.readouterr().out
    assert "rewards/accuracies  rewards/margins  pairs" in said
    later, _ = trained(
        recipe, data=data, objective={"name": name}, output=str(tmp_path / "later"), adapter={"start_from": str(folder)}
    )
    if name == "simpo":  # which compares with nothing
        measured(base, later, rows)
    else:
        with pytest.raises(DataError, match="a was trained from another patch, with which its loss compares"):
            measured(base, later, rows)


def test_rows_with_new_tokens_are_read_by_the_adapters_tokenizer(recipe: Recipe, base: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "new.jsonl", [chat(f"say {i}", f"<|tool|>so {i}") for i in range(12)])
    data = {"train": str(rows), "eval": str(rows)}
    folder, evaluations = trained(recipe, adapter={"new_tokens": ["<|tool|>"]}, data=data)

    model = lorakit.load(base, {"a": folder}, dtype="float32")
    report, _ = eval_losses(model, {str(rows): ["a"]}, row_progress, RowSettings())[str(rows), "a"]

    assert report.loss == pytest.approx(evaluations[1]["eval_loss"], rel=2e-6)


def test_a_merged_model_has_the_loss_of_its_adapter(recipe: Recipe, base: Path, rows: Path, tmp_path: Path) -> None:
    folder, evaluations = trained(recipe)
    assert main(["merge", str(base), str(folder), "--out", str(tmp_path / "merged")]) == 0

    model = lorakit.load(tmp_path / "merged", dtype="float32")
    report, _ = eval_losses(model, {str(rows): [None]}, row_progress, RowSettings())[str(rows), None]

    assert report.loss == pytest.approx(evaluations[1]["eval_loss"], rel=1e-5)


def test_the_command_prints_loss_and_perplexity_and_answers_no_row(
    recipe: Recipe, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "text.jsonl", [{"text": f"it is {i}, so it is"} for i in range(6)])
    folder, evaluations = trained(recipe, data={"train": str(rows), "eval": str(rows)})
    command = ["score", str(base), "--adapter", f"a={folder}", "--data", str(rows), "--dtype", "float32"]
    capsys.readouterr()

    assert main([*command, "--measure", "loss"]) == 0

    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "held-out loss"
    for line, name, evaluation in zip(lines, ("base", "a"), evaluations, strict=True):
        cells = line.split()
        assert cells[:3] == [str(rows), name, f"{evaluation['eval_loss']:.4f}"]
        assert float(cells[3]) == pytest.approx(evaluation["eval_perplexity"], abs=1e-3)
        assert cells[5] == "6"
    assert main([*command, "--measure", "loss", "--max-tokens", "4"]) == 2
    assert "Here data.max_tokens is --max-tokens" in capsys.readouterr().err
    assert main([*command, "--max-tokens", "4"]) == 2
    assert "--max-tokens: goes with --measure loss" in capsys.readouterr().err


@pytest.mark.matrix
def test_adapters_whose_labels_differ_are_not_compared(recipe: Recipe, base: Path, rows: Path, tmp_path: Path) -> None:
    one, _ = trained(recipe, output=str(tmp_path / "one"))
    two, _ = trained(recipe, output=str(tmp_path / "two"), data={"loss_on": "all"})
    model = lorakit.load(base, {"one": one, "two": two}, dtype="float32")

    with pytest.raises(DataError, match=r"one was trained with data.loss_on: answer, two with all, so their losses"):
        eval_losses(model, {str(rows): [None, "one", "two"]}, row_progress, RowSettings())
    apart = write_rows(tmp_path / "apart.jsonl", [chat("say", "so it is")])
    losses = eval_losses(model, {str(rows): ["one"], str(apart): ["two"]}, row_progress, RowSettings())
    assert losses[str(apart), "two"][1].counts.label_tokens > 8
