"""Objectives of preference pairs, with TRL as the oracle."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

import lorakit
from lorakit.data.dataset import TeacherTable, TokenDataset
from lorakit.data.row_settings import RowSettings
from lorakit.lora.inject import adapter_tensors
from lorakit.objectives.objective import Scores
from lorakit.objectives.pairs import build_objective
from lorakit.recipe.objective import ObjectiveSection
from tests.helpers.rows import tokenize_rows, write_rows
from tests.helpers.steps import prepare_step

NUM_PAIRS = 6
BETA = 0.3
TOLERANCE = 5e-6  # of gradients, as a share of a tensor's largest value
ORACLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dpo": ({"loss_type": ["sigmoid"]}, {}),
    "ipo": ({"loss_type": ["ipo"]}, {}),
    "robust_dpo": ({"loss_type": ["robust"], "label_smoothing": 0.2}, {"label_smoothing": 0.2}),
    "hinge": ({"loss_type": ["hinge"]}, {}),
    "sigmoid_norm": ({"loss_type": ["sigmoid_norm"]}, {}),
    "dpo and sft": ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}, {"sft_weight": 0.5}),
    "cpo": ({"loss_type": "sigmoid", "cpo_alpha": 0.8}, {"sft_weight": 0.8}),
    "simpo": ({"loss_type": "simpo", "simpo_gamma": 0.7, "cpo_alpha": 0.0}, {"gamma": 0.7}),
    "orpo": ({}, {"sft_weight": 0.0}),
}
"""case -> settings of TRL's trainer, and keys of the recipe's `objective` besides beta"""
LAYOUTS = {
    "packed": (12, True, False), "shared": (12, True, True), "pair by pair": (2, True, True), "padded": (4, False, False),
}  # fmt: skip
"""name -> answers of a micro-batch, whether they are packed, and whether those of a pair share their prompt"""


def pair_rows() -> list[dict[str, Any]]:
    """Pairs of uneven lengths."""
    return [
        {
            "prompt": f"what is {number} plus {number * 3}?" + " please" * (number % 3),
            "chosen": f" it is {number * 4}" + " and that is that" * (number % 2),
            "rejected": f" {number}" + " or so" * (number % 4),
        }
        for number in range(1, NUM_PAIRS + 1)
    ]


@pytest.fixture
def pairs(tmp_path: Path, tokenizer: Any) -> TokenDataset:
    file = write_rows(tmp_path / "pairs.jsonl", pair_rows())
    return tokenize_rows(str(file), "train", tokenizer, RowSettings(64, pairs=True))


def adapted(base: Path, dropout: float = 0.0) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base)
    lorakit.inject(model, rank=4, alpha=8, dropout=dropout)
    return model


def fill(model: Any) -> None:
    """Give B values, as training would."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in adapter_tensors(model).items():
            if "lora_B" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.grad.clone() for name, tensor in adapter_tensors(model).items()}


def ours(
    base: Path,
    rows: TokenDataset,
    section: ObjectiveSection,
    *,
    size: int,
    packing: bool,
    teacher: TeacherTable | None = None,
    shares: bool = False,
) -> tuple[Any, ...]:
    """Loss, metrics and gradients of a step of all rows, in micro-batches of so many."""
    model, objective = adapted(base), build_objective(section.name, section.settings)
    engine, batches = prepare_step(model, rows, objective, size=size, packing=packing, teacher=teacher, shares=shares)
    fill(model)
    report = engine.accumulate(batches.step(0))
    return report.loss, report.metrics, gradients(model)


def theirs(base: Path, tokenizer: Any, pairs: TokenDataset, case: str, folder: Path) -> tuple[Any, ...]:
    """Loss, metrics and gradients of TRL's trainer for the same tokens, all pairs in one batch."""
    from trl import DPOConfig, DPOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    model = adapted(base)
    fill(model)
    name = case.split()[0]
    kinds = {"cpo": (CPOTrainer, CPOConfig), "simpo": (CPOTrainer, CPOConfig), "orpo": (ORPOTrainer, ORPOConfig)}
    trainer_type, config = kinds.get(name, (DPOTrainer, DPOConfig))
    settings = {"output_dir": str(folder), "beta": BETA, "report_to": [], "use_cpu": True, "bf16": False}
    trainer = trainer_type(
        model=model, args=config(**settings, **ORACLES[case][0]), processing_class=tokenizer,
        train_dataset=Dataset.from_list(pair_rows()),
        **({"ref_model": AutoModelForCausalLM.from_pretrained(base)} if trainer_type is DPOTrainer else {}),
    )  # fmt: skip
    model.eval()
    both = [(pairs.ids(row).tolist(), int(pairs.label_mask(row).argmax())) for row in range(len(pairs))]
    couples = list(zip(both[::2], both[1::2], strict=True))
    if trainer_type is DPOTrainer:
        keys = "prompt_ids", "chosen_ids", "rejected_ids"
        examples = [(chosen[:start], chosen[start:], rejected[start:]) for (chosen, start), (rejected, _) in couples]
        loss = trainer.compute_loss(
            model, trainer.data_collator([dict(zip(keys, each, strict=True)) for each in examples])
        )
        metrics = {key: values[0] for key, values in trainer._metrics["eval"].items()}
    else:
        batch = {
            f"{answer}_{key}": torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=padding)
            for answer, rows in zip(("chosen", "rejected"), zip(*couples, strict=True), strict=True)
            for key, padding, values in (
                ("input_ids", 0, [torch.tensor(ids) for ids, _ in rows]),
                ("attention_mask", 0, [torch.ones(len(ids), dtype=torch.int64) for ids, _ in rows]),
                ("labels", -100, [torch.tensor([-100] * start + ids[start:]) for ids, start in rows]),
            )
        }
        loss, metrics = trainer.get_batch_loss_metrics(model, batch, train_eval="train")
        if trainer_type is ORPOTrainer:  # without its cross-entropy, which is of the prompt too
            loss = -trainer.odds_ratio_loss(*trainer.concatenated_forward(model, batch)[:2])[0].mean()
        metrics = {key: float(value) for key, value in metrics.items()}
    loss.backward()
    return loss.item(), metrics, gradients(model)


def section_of(case: str) -> ObjectiveSection:
    return ObjectiveSection(name=case.split()[0], beta=BETA, **ORACLES[case][1])  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("case", ORACLES)
def test_loss_metrics_and_gradients_are_trls_however_a_step_is_cut(
    base: Path, tokenizer: Any, pairs: TokenDataset, tmp_path: Path, case: str
) -> None:
    loss, metrics, wanted = theirs(base, tokenizer, pairs, case, tmp_path)
    for layout, (size, packing, shares) in LAYOUTS.items():
        our_loss, our_metrics, got = ours(base, pairs, section_of(case), size=size, packing=packing, shares=shares)
        assert our_loss == pytest.approx(loss, rel=2e-6, abs=1e-6), layout
        for name in our_metrics:
            assert our_metrics[name] == pytest.approx(metrics[name], rel=2e-5, abs=2e-5), (layout, name)
        assert max(relative_errors(wanted, got)) < TOLERANCE, layout


def relative_errors(wanted: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> list[float]:
    return [float((got[name] - tensor).abs().max() / tensor.abs().max()) for name, tensor in wanted.items()]


def test_the_odds_of_a_certain_answer_are_finite() -> None:
    losses = torch.tensor([0.0, 1e-9, 2.0, 0.0], requires_grad=True)
    scores = Scores(losses, torch.zeros(4), lengths=torch.ones(4))
    (loss,) = build_objective("orpo", {"beta": 0.1, "sft_weight": 0.0}).terms(scores)
    loss.backward()
    assert loss.isfinite()
    assert losses.grad is not None
    assert losses.grad.isfinite().all()
    assert losses.grad[2] > 0  # the chosen one gets likelier
