"""Objectives of label tokens: dft with TRL as the oracle, focal with its formula, however a step is cut."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

import lorakit
from lorakit.data.row_settings import RowSettings
from lorakit.errors import RecipeError
from lorakit.objectives.objective import Scores
from lorakit.objectives.pairs import build_objective
from lorakit.recipe.objective import ObjectiveSection
from tests.helpers.rows import tokenize_rows, write_rows
from tests.objectives.test_pairs import TOLERANCE, adapted, fill, gradients, ours, relative_errors

NUM_ROWS = 6
LAYOUTS = {"packed": (6, True), "row by row": (1, True), "padded": (4, False)}
GAMMAS = {"dft": [None], "focal": [None, 0.5, 0.0, 3.0]}


def dft(base: Path, rows: list[tuple[torch.Tensor, torch.Tensor]], tokenizer: Any, folder: Path) -> Any:
    """The loss of TRL's trainer for these rows in one batch, and the gradients."""
    from trl import SFTConfig, SFTTrainer

    model = adapted(base)
    fill(model)
    args = SFTConfig(str(folder), loss_type="dft", report_to=[], use_cpu=True, bf16=False, max_length=None)
    trainer = SFTTrainer(
        model=model, args=args, processing_class=tokenizer, train_dataset=Dataset.from_list([{"text": "never read"}])
    )
    model.eval()
    batch = {
        key: torch.nn.utils.rnn.pad_sequence([row[index] for row in rows], batch_first=True, padding_value=padding)
        for key, index, padding in (("input_ids", 0, 0), ("labels", 1, -100))
    }
    batch["attention_mask"] = torch.nn.utils.rnn.pad_sequence([ids > -1 for ids, _ in rows], batch_first=True).long()
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    return loss.item(), gradients(model)


def focal(base: Path, rows: list[tuple[torch.Tensor, torch.Tensor]], gamma: float) -> Any:
    """The formula, with probabilities in float64."""
    model = adapted(base)
    fill(model)
    total = torch.zeros(())
    for ids, labels in rows:
        chosen = model(input_ids=ids[None]).logits[0, :-1].double().softmax(-1)
        chosen = chosen.gather(-1, labels[1:].clamp(min=0)[:, None])[:, 0][labels[1:] >= 0]
        total = total - ((1 - chosen) ** gamma * chosen.log()).sum()
    loss = total / sum(int((labels >= 0).sum()) for _, labels in rows)
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "gamma"), [(name, gamma) for name, gammas in GAMMAS.items() for gamma in gammas])
def test_loss_and_gradients_are_the_formulas_however_a_step_is_cut(
    base: Path, tokenizer: Any, tmp_path: Path, name: str, gamma: float | None
) -> None:
    rows = [{"prompt": f"say {number}", "completion": " yes" * (number + 1)} for number in range(NUM_ROWS)]
    dataset = tokenize_rows(str(write_rows(tmp_path / "r.jsonl", rows)), "train", tokenizer, RowSettings(64))
    section = ObjectiveSection(name=name, gamma=gamma)  # type: ignore[arg-type]
    tokens = [torch.tensor(dataset.ids(row).tolist()) for row in range(NUM_ROWS)]
    masks = [torch.tensor(dataset.label_mask(row)) for row in range(NUM_ROWS)]
    with_labels = [(ids, ids.masked_fill(~mask, -100)) for ids, mask in zip(tokens, masks, strict=True)]
    if name == "dft":
        loss, wanted = dft(base, with_labels, tokenizer, tmp_path)
    else:
        loss, wanted = focal(base, with_labels, 2.0 if gamma is None else gamma)

    for layout, (size, packing) in LAYOUTS.items():
        our_loss, metrics, got = ours(base, dataset, section, size=size, packing=packing)
        assert our_loss == pytest.approx(loss, rel=2e-6), layout
        assert metrics["cross_entropy"] == our_loss if gamma == 0 else metrics["cross_entropy"] > our_loss
        assert max(relative_errors(wanted, got)) < TOLERANCE, layout


def test_a_token_of_probability_1_has_a_finite_gradient() -> None:
    losses = torch.tensor([0.0, 1e-9, 2.0], requires_grad=True)
    (loss,) = build_objective("focal", {"gamma": 0.5}).terms(Scores(losses, torch.zeros(3)))
    loss.backward()
    assert losses.grad is not None
    assert losses.grad.isfinite().all()


def test_keys_of_other_objectives_are_refused(tmp_path: Path) -> None:
    def recipe(objective: dict[str, Any], **train: Any) -> dict[str, Any]:
        return {
            "base": {"model": "builtin:tiny"}, "data": {"train": "data/json/train.jsonl"}, "objective": objective,
            "train": {"steps": 1, **train}, "output": str(tmp_path / "out"),
        }  # fmt: skip

    with pytest.raises(RecipeError, match="gamma: goes with focal, simpo, got objective dft"):
        lorakit.train(recipe({"name": "dft", "gamma": 1.0}))
    with pytest.raises(RecipeError, match="label_smoothing: 0.1: goes with objective sft alone"):
        lorakit.train(recipe({"name": "dft"}, label_smoothing=0.1))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["dft", "focal"])
def test_a_run_learns_and_shows_no_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    lorakit.train({
        "base": {"model": "builtin:tiny"}, "objective": {"name": name}, "output": str(tmp_path / "out"),
        "data": {"train": "data/json/train.jsonl", "eval": "data/json/eval.jsonl"},
        "train": {"steps": 12, "batch_size": 8, "learning_rate": 5e-3, "warmup_steps": 2, "eval_every_steps": 4},
    })  # fmt: skip
    shown = capsys.readouterr().out
    assert "cross_entropy" in shown
    assert "perplexity" not in shown
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    entropies = [one["eval_cross_entropy"] for one in metrics if "eval_cross_entropy" in one]
    assert entropies[-1] < entropies[0] - 1
