"""Runs of objectives that read pairs: the reference is the run's start, however often a run goes on."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import lorakit
from lorakit.cli import main
from lorakit.data.row_settings import RowSettings
from lorakit.errors import RecipeError, RunError, TemporaryFailure
from lorakit.recipe import load_recipe
from lorakit.run.display import row_progress
from lorakit.run.metrics import read_metrics
from lorakit.training.eval_loss import eval_losses
from lorakit.training.trainer import REFERENCES
from tests.helpers.patches import make_patch
from tests.helpers.rows import write_rows
from tests.helpers.training import losses, stop_at, train, train_through_stops

Recipe = Callable[..., Path]
TRAIN = {"steps": 6, "batch_size": 4, "micro_batch_size": 2, "eval_every_steps": 2, "save_every_steps": 2}


@pytest.fixture
def pairs(recipe: Recipe, tmp_path: Path) -> Recipe:
    """A recipe of twenty pairs, four of them held out."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"say {number}"}],
            "chosen": [{"role": "assistant", "content": f"gladly, {number}" + " please" * (number % 3)}],
            "rejected": [{"role": "assistant", "content": f"no {number}"}],
        }
        for number in range(20)
    ]
    data = {
        "train": str(write_rows(tmp_path / "pairs.jsonl", rows[:16])),
        "eval": str(write_rows(tmp_path / "held-out.jsonl", rows[16:])),
    }

    def write(name: str = "recipe.yaml", **sections: Any) -> Path:
        settings = {"train": {**TRAIN, **sections.pop("train", {})}, "data": data, "objective": {"name": "dpo"}}
        return recipe(name, **{**settings, **sections})

    return write


@pytest.fixture
def judged(pairs: Recipe, tmp_path: Path) -> Recipe:
    """A recipe of KTO with twenty rows, four of them held out; every third answer is undesirable."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"say {number}"}],
            "completion": [{"role": "assistant", "content": f"gladly, {number}" if number % 3 else f"no {number}"}],
            "label": number % 3 > 0,
        }
        for number in range(20)
    ]
    data = {
        "train": str(write_rows(tmp_path / "judged.jsonl", rows[:16])),
        "eval": str(write_rows(tmp_path / "judged-held-out.jsonl", rows[16:])),
    }
    return partial(pairs, data=data, objective={"name": "kto"})


@pytest.mark.parametrize("objective", ["dpo", pytest.param("reward", marks=pytest.mark.matrix)])
def test_the_prompt_of_a_pair_is_computed_once(pairs: Recipe, tmp_path: Path, objective: str) -> None:
    """In training and evaluation, and the log p at the run's start too; dropout has other zeros for each row."""
    prompt = "say it once more, and then again, as often as you can, until the numbers are all used up: "
    rows = [{"prompt": f"{prompt}{n} ", "chosen": f"gladly, {n}", "rejected": "no" * (1 + n % 3)} for n in range(12)]
    file = str(write_rows(tmp_path / "long.jsonl", rows))
    write = partial(pairs, data={"train": file, "eval": file}, objective={"name": objective})
    outs = {}
    for name, dropout, packing in (("shared", 0.0, "auto"), ("padded", 0.0, False), ("noisy", 0.1, "auto")):
        path = write(output=str(tmp_path / name), adapter={"dropout": dropout})
        outs[name], _ = train(path, f"data.packing={json.dumps(packing)}")
    facts = {name: json.loads((out / "run.json").read_text()) for name, out in outs.items()}
    assert {name: own.get("shares_prompts") for name, own in facts.items()} == {
        "shared": True, "padded": None, "noisy": None,
    }  # fmt: skip
    assert losses(outs["shared"]) == pytest.approx(losses(outs["padded"]), rel=2e-4)
    for one, other in zip(evals(outs["shared"]), evals(outs["padded"]), strict=True):
        assert one == pytest.approx(other, rel=2e-3, abs=1e-4)


def evals(out: Path) -> list[dict[str, float]]:
    return [line for line in read_metrics(out / "metrics.jsonl") if "eval_loss" in line]


def tensors(out: Path) -> bytes:
    return (out / "adapter_model.safetensors").read_bytes()


def test_a_run_begins_as_the_base_and_learns_what_is_chosen(pairs: Recipe) -> None:
    out, said = train(pairs())

    first, *_, last = evals(out)
    assert first["eval_loss"] == pytest.approx(0.693147, rel=1e-5)  # -log sigmoid(0)
    assert first["eval_rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert last["eval_rewards/accuracies"] == 1
    assert last["eval_loss"] < first["eval_loss"]
    assert "eval_perplexity" not in first
    assert "rows       16 pairs" in said
    assert "computing log p of 40 answers once" in said
    assert "perplexity" not in said
    results = json.loads((out / "run.json").read_text())["results"]
    assert results["eval_rewards/accuracies"] == 1


@pytest.mark.parametrize(
    "steps", [{1}, *(pytest.param(steps, marks=pytest.mark.matrix) for steps in ({3}, {2, 5}))], ids=str
)
def test_a_run_that_was_stopped_ends_in_the_same_bytes(
    pairs: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: set[int]
) -> None:
    whole, _ = train(pairs(output=str(tmp_path / "whole")))
    out, said = train_through_stops(pairs(), monkeypatch, steps)

    assert "computing log p" not in said  # they are of the start, and the model is no longer that
    assert tensors(out) == tensors(whole)
    assert evals(out)[-1]["eval_loss"] == evals(whole)[-1]["eval_loss"]


@pytest.mark.parametrize("steps", [{1}, pytest.param({2, 5}, marks=pytest.mark.matrix)], ids=str)
def test_a_run_of_kto_learns_what_is_desirable_also_when_it_was_stopped(
    judged: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: set[int]
) -> None:
    whole, said = train(judged(output=str(tmp_path / "whole")))
    out, said_later = train_through_stops(judged(), monkeypatch, steps)

    assert "computing log p of 40 answers once" in said  # of 20 rows, and as many with others' answers
    assert "computing log p" not in said_later
    assert tensors(out) == tensors(whole)
    first, *_, last = evals(whole)
    assert first["eval_loss"] == pytest.approx(0.5, rel=1e-5)  # sigmoid(0)
    assert first["eval_kl"] == pytest.approx(0, abs=1e-5)
    assert last["eval_loss"] == evals(out)[-1]["eval_loss"] < first["eval_loss"]
    assert last["eval_rewards/chosen"] > last["eval_rewards/rejected"]


def test_check_counts_answers_that_are_undesirable(judged: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(judged())]) == 0
    assert "train: label: 6 of 16 answers are undesirable" in capsys.readouterr().out


def test_one_row_alone_is_refused_before_a_finished_run_is_discarded(
    judged: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = train(judged())
    file = tmp_path / "judged-held-out.jsonl"
    file.write_text(file.read_text().splitlines()[0])
    for command in (["check"], ["train", "--fresh"]):
        assert main([*command, str(judged())]) == 2
        assert "judged-held-out.jsonl:1: is the only row, and objective kto compares" in capsys.readouterr().err
    assert (out / "adapter_model.safetensors").exists()


@pytest.mark.matrix
def test_the_loss_of_kto_is_that_of_the_runs_own_evaluation(
    judged: Recipe, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = train(judged())
    rows = str(tmp_path / "judged-held-out.jsonl")
    model = lorakit.load(base, {"a": out}, dtype="float32")
    losses = eval_losses(model, {rows: [None, "a"]}, row_progress, RowSettings())
    first, *_, last = evals(out)
    for name, line in ((None, first), ("a", last)):
        report, _ = losses[rows, name]
        assert report.loss == pytest.approx(line["eval_loss"], rel=2e-6)
        assert report.metrics["kl"] == pytest.approx(line["eval_kl"], rel=1e-4, abs=1e-5)

    command = ["score", str(base), "--adapter", f"a={out}", "--data", rows, "--measure", "loss"]
    assert main(command) == 0
    assert "rewards/accuracies  rewards/margins  rows" in capsys.readouterr().out
    started, _ = train(judged(output=str(tmp_path / "more"), adapter={"start_from": str(out)}))
    assert main([*command[:3], f"a={started}", *command[4:]]) == 2
    assert "a was trained from another patch, with which its loss compares" in capsys.readouterr().err


def test_a_run_whose_references_are_gone_does_not_go_on_with_others(
    pairs: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pairs()
    stop_at(monkeypatch, {3})
    with pytest.raises(TemporaryFailure):
        train(path)
    out = Path(load_recipe(path).output)
    (out / "checkpoints" / REFERENCES).unlink()

    with pytest.raises(RunError, match="no longer that of the run's start; start over"):
        train(path)
    train(path, fresh=True)


def test_the_reference_of_a_run_that_starts_from_a_patch_is_the_patch(
    pairs: Recipe, base: Path, tmp_path: Path
) -> None:
    patch = make_patch(base, tmp_path / "patch", rank=4, alpha=6)
    path = pairs()
    content = json.loads(path.read_text()) | {"adapter": {"start_from": str(patch)}}
    path.write_text(json.dumps(content))
    plain, _ = train(pairs("plain.yaml", output=str(tmp_path / "plain")))

    out, _ = train(path)

    first = evals(out)[0]
    assert first["eval_loss"] == pytest.approx(0.693147, rel=1e-5)
    assert first["eval_logps/chosen"] != pytest.approx(evals(plain)[0]["eval_logps/chosen"], rel=1e-3)


@pytest.mark.parametrize("name", ["simpo", "orpo", "cpo"])
def test_objectives_without_a_reference_compute_none(pairs: Recipe, name: str) -> None:
    out, said = train(pairs(objective={"name": name}))

    assert "computing log p" not in said
    assert not (out / "checkpoints" / REFERENCES).exists()
    assert evals(out)[-1]["eval_loss"] < evals(out)[0]["eval_loss"]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"objective": {"name": "dpo", "gamma": 1.0}}, "objective: gamma: goes with focal, simpo, got objective dpo"),
        ({"objective": {"name": "sft", "beta": 0.1}}, "beta: goes with dpo, ipo"),
        ({"objective": {"name": "dpo", "beta": 0}}, "objective: beta: is above 0, and of distill from 0 to 1, got 0"),
        ({"objective": {"name": "kto", "beta": 0}}, "objective: beta: is above 0"),
        ({"objective": {"name": "dpo", "desirable_weight": 1}}, "desirable_weight: goes with kto, got objective dpo"),
        ({"objective": {"name": "kto", "sft_weight": 1}}, "sft_weight: goes with dpo, ipo"),
        ({"data": {"train": "a", "loss_on": "all"}}, "data.loss_on: all: goes with objective sft, got dpo"),
        (
            {"data": {"train": "a", "loss_on": "all"}, "objective": {"name": "kto"}},
            "data.loss_on: all: goes with objective sft, got kto, which reads labels",
        ),
        ({"data": {"train": "a", "on_long_rows": "fill"}}, "data.on_long_rows: fill: goes with objective sft"),
        ({"train": {"label_smoothing": 0.1}}, "train.label_smoothing: 0.1: goes with objective sft"),
    ],
    ids=str,
)
def test_keys_that_the_objective_does_not_read_are_refused(
    pairs: Recipe, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(pairs(**sections))
    assert message in str(caught.value)


def test_the_learning_rate_of_pairs_is_their_own_where_none_is_given(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("base: {model: builtin:tiny}\ndata: {train: a}\nobjective: {name: orpo}\noutput: out\n")
    assert load_recipe(path).train.learning_rate == 1e-5
    assert load_recipe(path, ("train.learning_rate=2e-4",)).train.learning_rate == 2e-4
    assert load_recipe(path, ("objective.name=sft",)).train.learning_rate == 1e-3


def test_check_shows_both_answers_of_a_pair(pairs: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(pairs())]) == 0

    said = capsys.readouterr().out
    assert "first row, chosen" in said
    assert "[[gladly, 0<|end|>]]" in said
    assert "first row, rejected" in said
    assert "[[no 0<|end|>]]" in said
