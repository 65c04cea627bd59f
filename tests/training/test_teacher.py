"""Runs that learn from a teacher: what it says is computed once, of the teacher that the recipe names and no other."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import lorakit
from lorakit.cli import main
from lorakit.errors import BaseModelError, DataError, LorakitError, PatchError, RecipeError, RunError, TemporaryFailure
from lorakit.files.atomic import cache_folder
from lorakit.patch import read_patch
from lorakit.recipe import load_recipe
from lorakit.run.metrics import read_metrics
from lorakit.training import teacher
from tests.helpers.bases import make_base
from tests.helpers.patches import make_head_patch, make_patch
from tests.helpers.rows import write_rows
from tests.helpers.training import losses, stop_at, train, train_in_two_processes, train_through_stops

Recipe = Callable[..., Path]


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    for folder in cache_folder("tokens").glob("teacher-*"):
        shutil.rmtree(folder)


@pytest.fixture
def patch(base: Path, tmp_path: Path) -> Path:
    return make_patch(base, tmp_path / "teacher", rank=4, alpha=40)


@pytest.fixture
def distill(recipe: Recipe, patch: Path) -> Recipe:
    """A recipe of rank 2 that learns from a patch of rank 4."""

    def write(name: str = "recipe.yaml", **sections: Any) -> Path:
        own = {"objective": {"name": "distill", "teacher": str(patch)}, "adapter": {"rank": 2, "dropout": 0.0}}
        return recipe(name, **{**own, **sections})

    return write


def evals(out: Path) -> list[float]:
    return [line["eval_loss"] for line in read_metrics(out / "metrics.jsonl") if "eval_loss" in line]


def divergence(model: lorakit.AdaptedModel, ids: torch.Tensor, one: str, other: str | None) -> float:
    """KL(one || other) at every token."""
    with torch.no_grad():
        q, p = (model(ids, adapters=[name]).logits.double().log_softmax(-1) for name in (one, other))
    return float((q.exp() * (q - p)).sum(-1).mean())


def test_a_student_of_lower_rank_comes_near_its_teacher(distill: Recipe, base: Path, patch: Path) -> None:
    out, said = train(distill(train={"steps": 60, "learning_rate": 0.02}))

    assert "teacher    teacher, its 64 likeliest tokens at each label" in said
    assert "perplexity" not in said
    assert evals(out)[-1] < 0.5 * evals(out)[0]
    record = json.loads((out / "run.json").read_text())
    assert record["teacher"]["name"] == "teacher"
    metadata = read_patch(out).metadata
    assert metadata["recipe"]["objective"]["teacher"] == "teacher"  # no path of this machine
    assert metadata["teacher"] == record["teacher"]
    model = lorakit.load(base, {"teacher": patch, "student": out})
    ids = torch.tensor([model.prompts.tokenizer("say 3 so so so so 3")["input_ids"]])
    assert divergence(model, ids, "teacher", "student") < 0.9 * divergence(model, ids, "teacher", None)


def taught_rows(base: Path, patch: Path, top_k: int) -> list[dict[str, Any]]:
    """Rows of tokens with what the teacher says at their labels, in the form of vLLM and in the plain one."""
    model = lorakit.load(base, {"teacher": patch}, dtype="float32")
    rows = []
    for number in range(8):
        ids = [5 + number, *range(9, 20 + number), 4]
        log_p = model(torch.tensor([ids]), adapters=["teacher"]).logits[0].float().log_softmax(-1)
        best = [one.topk(top_k) for one in log_p[2:-1]]  # of the tokens that follow the third one and later ones
        name = "token_id:{}" if number % 2 else "{}"
        said = [dict(zip(map(name.format, one.indices.tolist()), one.values.tolist(), strict=True)) for one in best]
        rows.append({"input_ids": ids, "labels": [*[-100] * 3, *ids[3:]], "teacher_logprobs": said})
    return rows


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_rows_bring_what_a_teacher_said(distill: Recipe, base: Path, patch: Path, tmp_path: Path, beta: float) -> None:
    rows = taught_rows(base, patch, top_k=16)
    train_file, file = (str(write_rows(tmp_path / f"{name}.jsonl", rows)) for name in ("train", "taught"))
    settings = {"name": "distill", "top_k": 12, "beta": beta}
    write = partial(distill, data={"train": train_file, "eval": file})
    asked, _ = train(write(objective={**settings, "teacher": str(patch)}, output=str(tmp_path / "asked")))
    told, said = train(write(objective=settings, output=str(tmp_path / "told")))
    assert "teacher    teacher_logprobs, its 12 likeliest tokens at each label" in said
    assert losses(told) == pytest.approx(losses(asked), rel=1e-4)
    assert evals(told) == pytest.approx(evals(asked), rel=1e-4)

    rows[0]["teacher_logprobs"][0] = rows[1]["teacher_logprobs"][0]
    other = str(write_rows(tmp_path / "other.jsonl", rows))
    changed, _ = train(distill(objective=settings, data={"train": other, "eval": other}, output=str(tmp_path / "new")))
    assert losses(changed) != losses(told)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: row.pop("teacher_logprobs"), "one object for each of its 10 label tokens expected, got none"),
        (lambda row: row["teacher_logprobs"].pop(), "10 label tokens expected, got 9 entries"),
        (lambda row: row["teacher_logprobs"].insert(2, {"5": -1.0}), "10 label tokens expected, got 11 entries"),
        (
            lambda row: row["teacher_logprobs"].__setitem__(1, {"5": -1.0}),
            "entry 2: 1 tokens, and objective.top_k is 4",
        ),
        (lambda row: row["teacher_logprobs"].__setitem__(1, [1]), "entry 2: an object of token ids and log p expected"),
        (lambda row: row["teacher_logprobs"][0].update({"the": -9.0}), "entry 1: an object of token ids"),
        (lambda row: row["teacher_logprobs"][0].update({"99999": -9.0}), "entry 1: 99999: -9.0: no token of"),
        (lambda row: row["teacher_logprobs"][0].update({"7": 0.5}), "entry 1: 7: 0.5: no token of"),
        (lambda row: row["teacher_logprobs"][0].update({"7": -9.0, "token_id:7": -9.0}), "entry 1: an object of token"),
        (lambda row: row["teacher_logprobs"][0].update({"7": 10**400}), "entry 1: an object of token ids"),
        (lambda row: row["teacher_logprobs"][0].update({"7": 0.0, "8": 0.0}), "add up to more than 1"),
    ],
)
def test_what_rows_bring_is_refused_by_its_place(
    distill: Recipe,
    base: Path,
    patch: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], Any],
    said: str,
) -> None:
    rows = taught_rows(base, patch, top_k=4)[:2]
    change(rows[0])
    file = str(write_rows(tmp_path / "taught.jsonl", rows))
    settings = {"objective": {"name": "distill", "top_k": 4}, "data": {"train": file, "eval": file}}
    path = distill(**settings)
    assert main(["check", str(path)]) == 2
    shown = capsys.readouterr().err
    assert "taught.jsonl:1: teacher_logprobs: " in shown
    assert said in shown


def test_the_same_adapter_diverges_from_itself_by_nothing(distill: Recipe, patch: Path) -> None:
    path = distill(train={"steps": 1, "learning_rate": 1e-30, "warmup_steps": 0, "eval_every_steps": 1})
    content = json.loads(path.read_text()) | {"adapter": {"start_from": str(patch)}}
    path.write_text(json.dumps(content))

    out, _ = train(path)

    assert evals(out)[0] == pytest.approx(0, abs=1e-6)


@pytest.mark.matrix
def test_a_teacher_is_loaded_once_for_all_runs_with_the_same_rows(
    distill: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loads = []
    original = teacher.load
    monkeypatch.setattr(teacher, "load", lambda *args, **kwargs: loads.append(args) or original(*args, **kwargs))

    first, _ = train(distill(output=str(tmp_path / "first")))
    second, _ = train(distill(output=str(tmp_path / "second")))
    train(
        distill(
            output=str(tmp_path / "third"),
            objective={"name": "distill", "teacher": loads[0][1]["teacher"], "beta": 1.0},
        )
    )
    assert len(loads) == 1
    assert (first / "adapter_model.safetensors").read_bytes() == (second / "adapter_model.safetensors").read_bytes()
    train(
        distill(
            output=str(tmp_path / "fourth"),
            objective={"name": "distill", "teacher": loads[0][1]["teacher"], "top_k": 3},
        )
    )
    assert len(loads) == 2

    assert main(["cache"]) == 0
    assert "teacher teacher" in capsys.readouterr().out


@pytest.mark.parametrize("steps", [{1}, pytest.param({2, 5}, marks=pytest.mark.matrix)], ids=str)
def test_a_run_that_was_stopped_ends_in_the_same_bytes(
    distill: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: set[int]
) -> None:
    full, _ = train(distill(output=str(tmp_path / "full")))
    out, _ = train_through_stops(distill(), monkeypatch, steps)

    assert (out / "adapter_model.safetensors").read_bytes() == (full / "adapter_model.safetensors").read_bytes()


@pytest.mark.matrix
def test_a_run_does_not_go_on_with_another_teacher(
    distill: Recipe, base: Path, patch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = distill()
    stop_at(monkeypatch, {3})
    with pytest.raises(TemporaryFailure):
        train(path)
    shutil.rmtree(patch)
    make_patch(base, patch, rank=4, alpha=40, seed=1)

    with pytest.raises(RunError, match="objective.teacher: teacher changed since this run began"):
        train(path)
    train(path, fresh=True)


@pytest.mark.matrix
def test_a_base_teaches_with_or_without_an_adapter(distill: Recipe, tokenizer: Any, tmp_path: Path) -> None:
    """A head with rows that stand for no token is one of the same tokens, as of Qwen's smaller and larger models."""
    larger = make_base(tmp_path / "larger", tokenizer, hidden_size=48, vocab_size=len(tokenizer) + 40)
    adapter = make_patch(larger, tmp_path / "of-larger", rank=4, alpha=6)
    plain = {"name": "distill", "teacher_base": str(larger)}
    firsts = []
    for number, objective in enumerate([plain, plain | {"teacher": str(adapter)}]):
        out, _ = train(distill(objective=objective, output=str(tmp_path / str(number))))
        assert read_patch(out).metadata["recipe"]["objective"]["teacher_base"] == "larger"  # no path of this machine
        assert evals(out)[-1] < evals(out)[0]
        firsts.append(evals(out)[0])
    assert firsts[0] != pytest.approx(firsts[1], rel=1e-3)


@pytest.mark.matrix
@pytest.mark.spread
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.backend=zero3",),
        ("parallel.backend=ddp", "parallel.sequence=2"),
        ("parallel.backend=fsdp2",),
        ("parallel.backend=ddp", "parallel.tensor=2"),
        ("parallel.backend=ddp", "parallel.pipeline=2"),
    ],
    ids=" ".join,
)
def test_two_processes_learn_what_one_does(distill: Recipe, tmp_path: Path, layout: tuple[str, ...]) -> None:
    alone, _ = train(distill(output=str(tmp_path / "alone")))
    assert losses(train_in_two_processes(distill(), *layout)) == pytest.approx(losses(alone), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"teacher": "a", "beta": 1.5}, "objective: beta: is above 0, and of distill from 0 to 1, got 1.5"),
        ({"teacher": "a", "top_k": 0}, "objective.top_k: Input should be greater than or equal to 1"),
        ({"teacher": "a", "gamma": 1.0}, "objective: gamma: goes with focal, simpo, got objective distill"),
        ({"name": "sft", "teacher": "a"}, "objective: teacher: goes with distill, got objective sft"),
    ],
    ids=str,
)
def test_keys_that_do_not_go_together_are_refused(distill: Recipe, objective: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(distill(objective={"name": "distill", **objective}))
    assert message in str(caught.value)


def test_what_cannot_teach_is_refused_before_a_step(
    distill: Recipe, base: Path, tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(problem: type[LorakitError], message: str, **objective: str) -> None:
        path = distill(objective={"name": "distill", **objective})
        with pytest.raises(problem, match=message):
            train(path)
        assert not (tmp_path / "out" / "checkpoints").exists()

    refused(PatchError, "objective.teacher: .*nowhere", teacher=str(tmp_path / "nowhere"))
    assert main(["check", str(tmp_path / "recipe.yaml")]) == 2
    assert "objective.teacher" in capsys.readouterr().err
    refused(BaseModelError, "nowhere", teacher_base=str(tmp_path / "nowhere"))
    assert main(["check", str(tmp_path / "recipe.yaml")]) == 2
    assert "nowhere" in capsys.readouterr().err
    refused(RecipeError, "has labels or rewards", teacher=str(make_head_patch(base, tmp_path / "head", 1)))
    other = make_base(tmp_path / "other", tokenizer, hidden_size=48)
    refused(PatchError, "objective.teacher: ", teacher=str(make_patch(other, tmp_path / "of-other")))
    words = json.loads((other / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    (one, first), (two, second) = list(vocabulary.items())[300:302]
    vocabulary |= {one: second, two: first}
    (other / "tokenizer.json").write_text(json.dumps(words))
    refused(RecipeError, f"its tokens are others: '({one}|{two})' is ({first}|{second}) here", teacher_base=str(other))
    refused(RecipeError, "in this run's own output", teacher=str(tmp_path / "out"))


def test_a_teacher_whose_numbers_are_not_finite_is_named_with_the_row(
    distill: Recipe, base: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    model.model.norm.weight.data.fill_(3e38)
    model.save_pretrained(tmp_path / "broken")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / file, tmp_path / "broken" / file)

    with pytest.raises(LorakitError, match="rows.jsonl:1|not numbers|finite"):
        train(distill(objective={"name": "distill", "teacher_base": str(tmp_path / "broken")}))


@pytest.mark.matrix
def test_a_damaged_table_is_named(distill: Recipe, tmp_path: Path) -> None:
    train(distill(output=str(tmp_path / "first")))
    (file,) = next(cache_folder("tokens").glob("teacher-*")).glob("teacher_log_probs.bin")
    file.write_bytes(file.read_bytes()[:-4])

    with pytest.raises(DataError, match="the token cache is damaged"):
        train(distill())


def test_its_loss_is_measured_by_a_run_alone(
    distill: Recipe, base: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = train(distill())
    assert main(["score", str(base), "--adapter", f"a={out}", "--data", str(rows), "--measure", "loss"]) == 2
    assert "a was trained with objective distill, whose loss reads a teacher too" in capsys.readouterr().err
