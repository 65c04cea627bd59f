"""Callbacks of `lorakit.train`, and what it returns."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import lorakit
from lorakit.data.batch import Batch
from lorakit.errors import LorakitError, RecipeError, RunError
from lorakit.objectives.objective import SFT, Scores
from lorakit.patch import read_patch
from lorakit.run.record import RECORD
from tests.helpers.rows import write_uneven_rows

Recipe = Callable[..., Path]


class Diary(lorakit.Callback):
    """Writes down every event of a run."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def on_start(self, run: Any) -> None:
        self.events.append(("start", (run.step, run.total_steps)))

    def on_step(self, step: Any) -> None:
        self.events.append(("step", step.number))
        self.last = step

    def on_evaluation(self, evaluation: Any) -> None:
        self.events.append(("evaluation", evaluation.step))

    def on_checkpoint(self, folder: Path) -> None:
        assert read_patch(folder).layers
        self.events.append(("checkpoint", folder.name))

    def on_end(self, result: Any) -> None:
        self.events.append(("end", result.status))


def write(recipe: Recipe, **sections: Any) -> dict[str, Any]:
    """Return the content of a recipe of four steps."""
    train = {"steps": 4, "batch_size": 4, "warmup_steps": 0, "eval_every_steps": 2, **sections.pop("train", {})}
    content: dict[str, Any] = json.loads(recipe(train=train, **sections).read_text())
    return content


def tensors(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def test_a_callback_hears_of_every_event_in_order_and_changes_nothing(recipe: Recipe, tmp_path: Path) -> None:
    alone = lorakit.train(write(recipe, output=str(tmp_path / "alone")))
    diary = Diary()
    result = lorakit.train(write(recipe), callbacks=[diary])

    assert diary.events == [
        ("start", (0, 4)), ("evaluation", 0), ("step", 1), ("step", 2), ("evaluation", 2),
        ("checkpoint", "step-00000002"), ("step", 3), ("checkpoint", "step-00000003"), ("step", 4), ("evaluation", 4),
        ("checkpoint", "step-00000004"), ("end", "finished"),
    ]  # fmt: skip
    assert diary.last.loss == result.losses[-1]
    assert diary.last.label_tokens > 0
    assert tensors(result.folder) == tensors(alone.folder)


def test_the_result_holds_losses_evaluations_and_folders(recipe: Recipe) -> None:
    result = lorakit.train(write(recipe, train={"learning_rate": 1e-30}))
    folder = result.folder

    assert (result.status, result.steps, result.total_steps, result.stopped) == ("finished", 4, 4, None)
    assert len(result.losses) == 4
    assert [line["step"] for line in result.evaluations] == [0, 2, 4]
    best = min(result.evaluations[1:], key=lambda line: line["eval_loss"])["step"]
    assert best == 2  # a rate that changes nothing: the first of equal losses is the best
    assert (result.patch, result.best, result.last) == (folder, folder / "best", folder)
    assert result.checkpoint == folder / "checkpoints" / "step-00000004"
    assert repr(result).startswith(f"TrainResult('{folder}': finished, 4 of 4 steps, loss ")


@pytest.mark.matrix
def test_a_callback_stops_a_run_with_a_checkpoint_and_the_next_call_goes_on(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Patience(lorakit.Callback):
        def on_step(self, step: Any) -> None:
            if step.number == 3:
                raise lorakit.StopTraining("it is enough")

    full = lorakit.train(write(recipe, output=str(tmp_path / "full")))
    content = write(recipe)
    stopped = lorakit.train(content, callbacks=[Patience()])

    why = "after step 3 of 4: by Patience.on_step: it is enough"
    assert (stopped.status, stopped.steps, stopped.stopped) == ("stopped", 3, why)
    assert f"stopped    {why}" in capsys.readouterr().out
    assert stopped.checkpoint == stopped.folder / "checkpoints" / "step-00000003"
    assert read_patch(stopped.folder).metadata["step"] == 3
    ended = lorakit.train(content)
    assert (ended.status, ended.steps, ended.stopped) == ("finished", 4, None)
    assert tensors(ended.folder) == tensors(full.folder)


def test_a_run_that_is_stopped_before_its_first_step_has_no_patch(recipe: Recipe) -> None:
    class Never(lorakit.Callback):
        def on_start(self, run: Any) -> None:
            assert isinstance(run.model, torch.nn.Module)
            raise lorakit.StopTraining("not today")

    result = lorakit.train(write(recipe), callbacks=[Never()])

    assert (result.status, result.steps, result.patch, result.checkpoint) == ("stopped", 0, None, None)


@pytest.mark.parametrize("event", ["on_start", "on_step", "on_checkpoint", "on_end"])
def test_an_error_in_a_callback_ends_the_run_as_itself_once_the_state_is_saved(
    recipe: Recipe, tmp_path: Path, event: str
) -> None:
    def fail(self: Any, value: Any) -> None:
        raise KeyError("mine")

    content = write(recipe, train={"save_every_steps": 2})
    with pytest.raises(KeyError, match="mine") as caught:
        lorakit.train(content, callbacks=[type("Broken", (lorakit.Callback,), {event: fail})()])

    assert f"raised by Broken.{event}, a callback" in caught.value.__notes__[0]
    assert caught.traceback[-1].name == "fail"
    status = json.loads((tmp_path / "out" / RECORD).read_text())["status"]
    assert status == ("finished" if event == "on_end" else "running")
    saved = sorted(path.name for path in (tmp_path / "out" / "checkpoints").glob("step-*"))
    newest = {"on_step": "step-00000001", "on_checkpoint": "step-00000002", "on_end": "step-00000004"}
    assert saved == ([newest[event]] if event in newest else [])


def test_a_method_of_an_unknown_event_is_refused_where_its_class_is_defined() -> None:
    with pytest.raises(LorakitError, match=r"Typo.on_evaluate would never be called; .* Nearest: 'on_evaluation'"):
        type("Typo", (lorakit.Callback,), {"on_evaluate": lambda self, x: None, "on_step": lambda self, x: None})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"callbacks": "on_step"}, "callbacks: a list of objects of classes .* got 'on_step'"),
        ({"callbacks": Diary()}, "callbacks: a list of objects"),
        (
            {"callbacks": [print]},
            r"callbacks: .* objects of classes .*lorakit.Callback, got \[<built-in function print>\]",
        ),
        ({"callbacks": [Diary]}, "callbacks: a list of objects of classes"),
        ({"metrics": [len]}, "metrics: a mapping of names to functions"),
        ({"metrics": {"length": 3}}, "metrics: a mapping of names to functions"),
        ({"objective": "dpo"}, "objective: a lorakit.Objective, got 'dpo'"),
        ({"fresh": "yes"}, "fresh: True or False, got 'yes'"),
    ],
)
def test_an_argument_of_a_wrong_type_is_one_line(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(LorakitError, match=said) as caught:
        lorakit.train("missing.yaml", **arguments)
    assert "\n" not in str(caught.value)


def test_objects_that_cannot_reach_launched_processes_are_refused_with_the_remedy(recipe: Recipe) -> None:
    several = write(recipe, parallel={"backend": "ddp", "processes": 2}, train={"eval_generate": 1})
    with pytest.raises(
        RunError, match=r"callbacks, objective, metrics: .* start 2 others .*torchrun --nproc-per-node 2"
    ):
        lorakit.train(several, callbacks=[Diary()], objective=SFT, metrics={"a": lambda one, two: 1.0})


def test_an_objective_of_ones_own_is_minimised_recorded_and_needed_to_go_on(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    double = lorakit.Objective(SFT.counts, lambda scores: (2 * scores.losses.sum(),), {})
    usual = lorakit.train(write(recipe, train={"steps": 2}, output=str(tmp_path / "usual")))
    content = write(recipe, train={"steps": 2})
    own = lorakit.train(content, objective=double)
    assert "objective  the caller's own" in capsys.readouterr().out

    assert own.losses[0] == pytest.approx(2 * usual.losses[0])
    assert "accuracy" not in own.evaluations[0]
    assert json.loads((own.folder / RECORD).read_text())["own_objective"] is True
    assert read_patch(own.folder).metadata["own_objective"] is True
    with pytest.raises(RunError, match="began with objective=... of lorakit.train, and goes on with the recipe's"):
        lorakit.train(content | {"train": content["train"] | {"steps": 4}})


@pytest.mark.parametrize(
    ("terms", "problem"),
    [
        (lambda scores: (scores.losses.sum(), scores.hits.sum()), "`terms` gives 2, and `counts` 1"),
        (lambda scores: scores.losses.sum(), "`terms` gives a Tensor, and `counts` 1"),
        (lambda scores: (scores.losses,), "a term is a scalar tensor, such as scores.losses.sum(), got shape"),
        (lambda scores: (scores.losses.sum().item(),), "a term is a scalar tensor, such as scores.losses.sum(), got "),
        (lambda scores: (scores.losses.detach().sum(),), "no term has a gradient"),
    ],
)
def test_an_objective_whose_terms_cannot_be_minimised_is_refused(recipe: Recipe, terms: Any, problem: str) -> None:
    with pytest.raises(RunError, match=re.escape(f"objective: {problem}")):
        lorakit.train(write(recipe), objective=lorakit.Objective(SFT.counts, terms, {}))


def test_an_objective_of_pairs_reads_the_sums_of_rows(recipe: Recipe) -> None:
    """The first answer of each two rows is to become likelier than the second."""
    seen: list[tuple[int, ...]] = []

    def ranked(scores: Scores) -> tuple[torch.Tensor]:
        margins = scores.losses.view(-1, 2).diff(dim=1)
        return (F.softplus(-0.1 * margins).sum(),)

    def pairs(batch: Batch) -> tuple[float]:
        seen.append(batch.row_indices)
        return (len(batch.row_indices) / 2,)

    objective = lorakit.Objective(pairs, ranked, {}, per="row", group_size=2)
    content = write(recipe, train={"batch_size": 4, "micro_batch_size": 2, "steps": 6})
    result = lorakit.train(content, objective=objective)

    assert all(first % 2 == 0 and second == first + 1 for first, second in seen)
    assert result.evaluations[-1]["eval_loss"] < result.evaluations[0]["eval_loss"]


@pytest.mark.parametrize("wrong", [{"per": "rows"}, {"group_size": 0}])
def test_an_objective_with_a_wrong_declaration_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RunError, match=f"objective: {next(iter(wrong))} is"):
        lorakit.Objective(SFT.counts, SFT.terms, {}, **wrong)


@pytest.mark.matrix
def test_a_callback_may_switch_the_model_to_evaluation(recipe: Recipe, tmp_path: Path) -> None:
    class Evaluates(lorakit.Callback):
        def on_start(self, run: Any) -> None:
            self.model = run.model
            self.model.eval()

        def on_step(self, step: Any) -> None:
            self.model.eval()

    content = write(recipe, adapter={"dropout": 0.5})
    usual = lorakit.train(content | {"output": str(tmp_path / "usual")})
    assert lorakit.train(content, callbacks=[Evaluates()]).losses == usual.losses


def test_a_dict_may_hold_paths_and_numbers_of_numpy(recipe: Recipe, tmp_path: Path) -> None:
    content = write(recipe) | {"output": tmp_path / "own"}
    content["train"] |= {"steps": np.int64(2), "learning_rate": np.float32(0.5)}
    assert (lorakit.train(content).folder / RECORD).exists()
    with pytest.raises(RecipeError, match=r"lists and mappings: got '\{1\}', a set"):
        lorakit.train(content | {"train": {"steps": {1}}})


def test_a_dict_with_a_mistake_names_the_key(recipe: Recipe, tmp_path: Path) -> None:
    content = write(recipe, data={"train": str(write_uneven_rows(tmp_path / "more.jsonl", 8))})
    with pytest.raises(RecipeError, match="override 'train.stpes=3': train.stpes: unknown key"):
        lorakit.train(content, **{"train.stpes": 3})
