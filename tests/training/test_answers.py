"""Evaluations that generate: what they measure, and that the run they look at does not notice them."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lorakit
from lorakit.cli import main
from lorakit.data.row_settings import RowSettings
from lorakit.errors import LorakitError, RecipeError
from lorakit.files.safetensors import open_tensors
from lorakit.inference.measures import load_metrics
from lorakit.inference.score import EvalRows, score
from lorakit.parallel.single import SingleEngine
from lorakit.recipe import load_recipe
from lorakit.recipe.schema import EvaluationSection
from lorakit.run.facts import read_result
from lorakit.run.metrics import read_metrics
from lorakit.run.record import read_samples
from lorakit.training.answers import Answers
from lorakit.training.checkpoint import EvaluationResult, Progress
from tests.helpers.fork_server import ROOT, run_python
from tests.helpers.rows import chat, write_rows

Recipe = Callable[..., Path]
METRIC = "def length(predicted, expected):\n    return len(predicted) / 100\n"


def write(recipe: Recipe, **sections: Any) -> dict[str, Any]:
    """Return the content of a recipe of four steps that answers eight rows at every evaluation."""
    train = {"steps": 4, "batch_size": 4, "warmup_steps": 0, "eval_every_steps": 2, "eval_generate": 1}
    sections["train"] = {**train, **sections.get("train", {})}
    sections["evaluation"] = {"max_new_tokens": 20, "num_rows": 8, **sections.get("evaluation", {})}
    content: dict[str, Any] = json.loads(recipe(**sections).read_text())
    return content


def without(content: dict[str, Any], output: Path) -> dict[str, Any]:
    """Return the same recipe without answers."""
    train = {key: value for key, value in content["train"].items() if key != "eval_generate"}
    return {key: value for key, value in content.items() if key != "evaluation"} | {
        "train": train,
        "output": str(output),
    }


def tensors(file: Path) -> dict[str, torch.Tensor]:
    opened = open_tensors(file)
    return {name: opened.read(name) for name in opened.entries}


def assert_same_state(one: Path, two: Path) -> None:
    """Assert that two runs have the same adapter and optimizer state, to the bit."""
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        first, second = (next(folder.glob(f"checkpoints/*/{name}")) for folder in (one, two))
        a, b = tensors(first), tensors(second)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)


class Watch(lorakit.Callback):
    """Notes what a step could depend on besides its rows."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def on_start(self, run: Any) -> None:
        self._model = run.model

    def on_step(self, step: Any) -> None:
        modes = [module.training for module in self._model.modules()]
        self.states.append((step.loss, step.grad_norm, torch.get_rng_state().tolist(), modes))


def test_a_run_is_the_same_to_the_bit_with_answers_and_without(recipe: Recipe, tmp_path: Path) -> None:
    content = write(recipe, adapter={"dropout": 0.3})
    watches = Watch(), Watch()
    with_answers = lorakit.train(content, callbacks=[watches[0]])
    alone = lorakit.train(without(content, tmp_path / "alone"), callbacks=[watches[1]])

    assert watches[0].states == watches[1].states
    assert_same_state(with_answers.folder, alone.folder)
    assert "eval_exact_match" in with_answers.evaluations[0]
    assert "eval_exact_match" not in alone.evaluations[0]


def test_the_answers_are_those_of_the_patch_and_the_measures_are_recorded_everywhere(
    recipe: Recipe, base: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, str]] = []

    def starts_alike(predicted: str, expected: str) -> float:
        seen.append((predicted, expected))
        return float(predicted[:1] == expected[:1])

    content = write(recipe, train={"learning_rate": 0.05}, evaluation={"measures": ["exact_match", "prefix"]})
    result = lorakit.train(content, metrics={"starts_alike": starts_alike})
    said = capsys.readouterr()

    asked = score(
        lorakit.load(base, {"a": result.folder}, dtype="float32"),
        {str(rows): [None, "a"]},
        RowSettings(on_bad_rows="skip", limit=8),
        max_new_tokens=20,
    ).answers
    for index, adapter in ((0, None), (2, "a")):
        expected = [(one.answer.text, one.row.expected) for one in asked[str(rows), adapter]]
        assert seen[index * len(expected) : (index + 1) * len(expected)] == expected
    last = result.evaluations[-1]
    assert {"eval_exact_match", "eval_prefix", "eval_starts_alike", "eval_accuracy"} <= last.keys()
    run = json.loads((result.folder / "run.json").read_text())
    assert run["answers"] == {"rows": len(asked[str(rows), "a"]), "left_out": 8 - len(asked[str(rows), "a"])}
    assert run["results"]["eval_starts_alike"] == last["eval_starts_alike"] > 0
    assert "eval_starts_alike" in (result.folder / "README.md").read_text()
    assert "held-out rows at every evaluation: exact_match, prefix, starts_alike; " in said.out
    assert re.search("perplexity +exact_match +prefix +starts_alike", said.out)
    assert "starts_alike 0." in said.err
    samples = json.loads((result.folder / "samples.json").read_text())
    answers = asked[str(rows), "a"]
    assert samples["step"] == last["step"]
    assert [(row["row"], row["expected"], row["predicted"]) for row in samples["rows"]] == [
        (one.row.location, one.row.expected, one.answer.text) for one in answers
    ]
    at_start = asked[str(rows), None]
    assert [row["predicted"] for row in samples["earlier"]["0"]] == [one.answer.text for one in at_start]


def test_only_every_nth_evaluation_generates_and_the_last(recipe: Recipe, tmp_path: Path) -> None:
    write(recipe, train={"eval_every_steps": 5, "eval_generate": 3})
    answers = Answers(load_recipe(tmp_path / "recipe.yaml"), Any, EvalRows([], {}, []), {}, {})  # type: ignore[arg-type]
    assert [step for step in range(0, 38, 5) if answers.are_due(step, 38)] == [0, 15, 30]
    assert answers.are_due(38, 38)


def test_sources_take_turns_and_have_measures_of_their_own(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = []
    for name, number in (("a", 3), ("b", 30)):
        path = write_rows(tmp_path / f"{name}.jsonl", [chat(f"{name} {i}", "so") for i in range(number)])
        sources.append({"path": str(path), "name": name})
    metrics = {"is_b": lambda predicted, expected: 0.0, "length": lambda predicted, expected: len(expected)}

    run = lorakit.train(write(recipe, data={"eval": sources}, evaluation={"num_rows": 8}), metrics=metrics)

    line = read_metrics(run.folder / "metrics.jsonl")[-1]
    assert (line["eval_length"], line["eval_length/a"], line["eval_length/b"]) == (2.0, 2.0, 2.0)
    samples = json.loads((run.folder / "samples.json").read_text())["rows"]
    assert [row["prompt"][0]["content"] for row in samples] == ["a 0", "b 0", "a 1", "b 1", "a 2", "b 2", "b 3", "b 4"]
    table = capsys.readouterr().out.rpartition("held out ")[2]
    assert re.search(r"^a, last step +\S+ +\S+ +0\.0% +0 +2$", table, re.MULTILINE), table


@pytest.mark.matrix
def test_a_signal_while_rows_are_answered_loses_nothing(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = lorakit.train(write(recipe, output=str(tmp_path / "full")))
    content = write(recipe)
    evaluate, calls = SingleEngine.evaluate, []

    def then_interrupted(self: SingleEngine, batches: Any, stop: Any) -> Any:
        report = evaluate(self, batches, stop)
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return report

    monkeypatch.setattr(SingleEngine, "evaluate", then_interrupted)
    with pytest.raises(LorakitError, match="saved after step 2"):
        lorakit.train(content)
    assert len(read_metrics(tmp_path / "out" / "metrics.jsonl")) == 3  # one evaluation and two steps
    result = lorakit.train(content)

    assert_same_state(result.folder, full.folder)
    assert result.evaluations == full.evaluations


@pytest.mark.matrix
@pytest.mark.spread
@pytest.mark.slow
def test_two_processes_answer_as_one(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(METRIC)
    command = ("-m", "lorakit.cli", "train", tmp_path / "recipe.yaml", "--metric", tmp_path / "own.py:length")
    shorter = {"train": {"steps": 2}, "evaluation": {"num_rows": 7}}
    one = lorakit.train(write(recipe, **shorter), metrics=load_metrics([f"{tmp_path}/own.py:length"]))
    content = write(recipe, parallel={"backend": "ddp", "processes": 2}, output=str(tmp_path / "two"), **shorter)
    ended = run_python(*command, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    two = read_result(tmp_path / "two")

    assert two.evaluations[0]["eval_length"] == one.evaluations[0]["eval_length"] > 0
    assert [line["step"] for line in two.evaluations] == [0, 2]
    (tmp_path / "recipe.yaml").write_text(json.dumps(without(content, tmp_path / "alone")))
    assert run_python(*command[:4], cwd=ROOT).returncode == 0
    assert_same_state(two.folder, tmp_path / "alone")

    write(recipe, parallel={"backend": "ddp", "processes": 2, "tensor": 2}, output=str(tmp_path / "parts"), **shorter)
    ended = run_python(*command, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    parts = read_result(tmp_path / "parts")
    assert [each["eval_length"] for each in parts.evaluations] == [each["eval_length"] for each in one.evaluations]
    samples = [json.loads((result.folder / "samples.json").read_text())["rows"] for result in (one, parts)]
    assert samples[0] == samples[1]
    assert len({row["predicted"] for row in samples[0]}) > 1


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"data": {"eval": None}}, "train.eval_generate needs held-out rows: set data.eval"),
        ({"parallel": {"backend": "fsdp2", "processes": 2}}, "train.eval_generate: backend fsdp2 shards .* backend single or ddp"),
        ({"parallel": {"backend": "zero2", "processes": 2}}, "backend zero2 shards"),
        ({"parallel": {"offload": "stream"}}, "offload: stream reads the base for every token"),
        ({"train": {"eval_generate": None}}, "evaluation: nothing is generated; set train.eval_generate"),
        ({"evaluation": {"measures": ["rouge"]}}, "evaluation.measures.*'rouge'"),
        ({"evaluation": {"measures": []}}, "measures: name at least one"),
        ({"evaluation": {"best": "prefix"}}, "best: prefix is not measured; add it to `measures`"),
        ({"evaluation": {"best": "exact_mach"}}, "best: 'exact_mach' is none of .* Nearest: 'exact_match'.* say lower_is_better"),
        ({"evaluation": {"best": "exact_match", "lower_is_better": True}}, "lower_is_better: goes with a measure of your own"),
    ],
)  # fmt: skip
def test_a_recipe_that_cannot_be_answered_is_refused(
    recipe: Recipe, tmp_path: Path, sections: dict[str, Any], said: str
) -> None:
    write(recipe, **sections)
    with pytest.raises(RecipeError, match=said):
        load_recipe(tmp_path / "recipe.yaml")


def test_check_counts_what_is_answered_and_names_what_is_not(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = {"messages": chat("say", "4")["messages"] + chat("say", "it is 5")["messages"]}
    data = write_rows(tmp_path / "eval.jsonl", [twice, chat("say", "nothing"), chat("say", "5 " * 30)])
    write(recipe, data={"eval": str(data)}, evaluation={"measures": ["numeric"]})
    assert main(["check", str(tmp_path / "recipe.yaml")]) == 0
    said = capsys.readouterr().out
    assert "answers    2 held-out rows at every evaluation: numeric; 1 left out (first" in said
    assert "; 2 of 3 answers are asked: the last of each conversation; " in said
    assert "; 1 of 2 expected answers are longer than evaluation.max_new_tokens 20: their answers are cut" in said
    assert "eval.jsonl:2: its answer has no number for numeric to compare" in said

    write(recipe, data={"eval": str(data)}, evaluation={"measures": ["json_fields"]})
    assert main(["check", str(tmp_path / "recipe.yaml")]) == 2
    assert "none of the 3 held-out rows can be answered" in capsys.readouterr().err


def test_functions_without_answers_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    content = without(write(recipe), tmp_path / "out")
    with pytest.raises(LorakitError, match="metrics: .* nothing is generated; set train.eval_generate"):
        lorakit.train(content, metrics={"mine": lambda one, two: 1.0})


def test_the_best_step_may_be_that_of_a_measure() -> None:
    progress = Progress()
    history = [
        (0, 3.0, {"prefix": 0.9}),
        (1, 2.0, {"prefix": 0.2}),
        (2, 1.0, {}),
        (3, 4.0, {"prefix": 0.5}),
        (4, 0.5, {"prefix": 0.5}),
    ]
    improved = []
    for progress.step, loss, measures in history:
        now = EvaluationResult(progress.step, loss, {}, measures)
        improved.append(progress.add_evaluation(now, EvaluationSection(measures=("prefix",), best="prefix")))

    assert improved == [False, True, False, True, False]
    assert progress.best == EvaluationResult(3, 4.0, {}, {"prefix": 0.5})
    assert progress.evals_without_gain == 1
    assert progress.results(3, started=False) == {"eval_loss_base": 3.0, "eval_loss": 4.0, "eval_prefix": 0.5}


@pytest.mark.matrix
@pytest.mark.parametrize(("lower_is_better", "best_step"), [(True, 2), (False, 4)])
def test_a_function_of_the_callers_may_decide_the_best_step(
    recipe: Recipe, lower_is_better: bool, best_step: int
) -> None:
    calls: list[int] = []

    def later_is_more(predicted: str, expected: str) -> float:
        calls.append(1)
        return float(len(calls))

    content = write(
        recipe, train={"select": "best"}, evaluation={"best": "later_is_more", "lower_is_better": lower_is_better}
    )
    with pytest.raises(LorakitError, match="evaluation.best: later_is_more is no metric of this call .there are: none"):
        lorakit.train(content)
    result = lorakit.train(content, metrics={"later_is_more": later_is_more})

    assert json.loads((result.folder / "run.json").read_text())["best_step"] == best_step
    assert result.evaluations[0]["eval_later_is_more"] < result.evaluations[1]["eval_later_is_more"]
    lorakit.train(content, metrics={"later_is_more": later_is_more})  # finished: the same recipe as its record's
    samples = read_samples(result.folder)
    assert {"0", str(best_step), "4"} <= samples.keys()
