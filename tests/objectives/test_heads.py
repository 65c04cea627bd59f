"""Heads of the adapter's own, with transformers' classifiers under PEFT and TRL's trainer of rewards as oracles."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import lorakit
from lorakit.data.dataset import TokenDataset
from lorakit.data.row_settings import RowSettings
from lorakit.lora.inject import adapter_tensors
from lorakit.lora.own_head import OWN_HEAD, add_own_head
from lorakit.objectives.pairs import build_objective
from lorakit.recipe.objective import ObjectiveSection, ProblemType
from tests.helpers.rows import tokenize_rows, write_rows
from tests.helpers.steps import prepare_step

LABELS = ("weather", "music", "timer")
CENTER = 0.3
TOLERANCE = 5e-6  # of gradients, as a share of a tensor's largest value
LAYOUTS = {"packed": (12, True), "row by row": (2, True), "padded": (4, False)}
"""name -> rows of a micro-batch, and whether they are packed"""
SECTIONS = {"reward": ObjectiveSection(name="reward", center_rewards_coefficient=CENTER)}


def labelled_rows() -> list[dict[str, Any]]:
    return [{"text": f"row {number}" + " of it" * (number % 4), "label": LABELS[number % 3]} for number in range(7)]


def pair_rows() -> list[dict[str, Any]]:
    return [
        {"prompt": f"what is {number}?", "chosen": " it is" + " so" * (number % 3), "rejected": f" {number}"}
        for number in range(1, 7)
    ]


def adapted(base: Path, num_values: int) -> Any:
    """A model with an adapter and a head whose values are not those of a start."""
    model = AutoModelForCausalLM.from_pretrained(base)
    lorakit.inject(model, rank=4, alpha=8)
    add_own_head(model, num_values, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in adapter_tensors(model).items():
            if "lora_B" in name or OWN_HEAD in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return model


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.grad.clone() for name, tensor in adapter_tensors(model).items()}


def ours(model: Any, rows: TokenDataset, section: ObjectiveSection, *, size: int, packing: bool) -> tuple[Any, ...]:
    """Loss, metrics and gradients of a step of all rows, in micro-batches of so many."""
    objective = build_objective(section.name, section.settings)
    engine, batches = prepare_step(model, rows, objective, size=size, packing=packing)
    report = engine.accumulate(batches.step(0))
    return report.loss, report.metrics, gradients(model)


def in_peft(base: Path, model: Any, folder: Path, num_values: int) -> Any:
    """The same adapter as PEFT reads it onto transformers' classifier of the base."""
    lorakit.save_patch(model, folder)
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=num_values)
    assert classifier.config.pad_token_id is not None
    return PeftModel.from_pretrained(classifier, folder, is_trainable=True)


def peft_gradients(peft: Any, names: list[str]) -> dict[str, torch.Tensor]:
    parameters = {
        name.removeprefix("base_model.model.").replace(".default", "").replace(".modules_to_save", ""): parameter
        for name, parameter in peft.named_parameters()
        if parameter.requires_grad
    }
    assert parameters.keys() == {f"{name}.weight" if "lora_" in name else name for name in names}
    return {name: parameters[f"{name}.weight" if "lora_" in name else name].grad for name in names}


def padded(rows: list[list[int]], pad: int) -> dict[str, torch.Tensor]:
    tensors = [torch.tensor(ids) for ids in rows]
    ids = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=pad)
    masks = [torch.ones(len(ids), dtype=torch.int64) for ids in rows]
    return {"input_ids": ids, "attention_mask": torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)}


def relative_errors(wanted: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> list[float]:
    return [float((got[name] - tensor).abs().max() / tensor.abs().max()) for name, tensor in wanted.items()]


def labels_of(number: int, kind: ProblemType) -> Any:
    """The label of a row as files have it, and as transformers takes it."""
    if kind == "regression":
        return [-2.5, 0, 1 / 3, "1e3", 7][number % 5], float([-2.5, 0, 1 / 3, 1e3, 7][number % 5])
    own = [LABELS[index] for index in range(3) if (number + 1) >> index & 1]
    if kind == "multi_label_classification":
        return own[::-1], [float(label in own) for label in LABELS]
    return LABELS[number % 3], number % 3


def right(values: torch.Tensor, labels: torch.Tensor, kind: ProblemType) -> dict[str, Any]:
    if kind == "regression":
        return {}
    is_right = values.argmax(-1) == labels if kind.startswith("single") else ((values > 0) == (labels > 0)).all(1)
    return {"accuracy": pytest.approx(float(is_right.float().mean()))}


@pytest.mark.parametrize("kind", get_args(ProblemType))
def test_a_classifiers_loss_and_gradients_are_transformers_however_a_step_is_cut(
    base: Path, tokenizer: Any, tmp_path: Path, kind: ProblemType
) -> None:
    names = None if kind == "regression" else LABELS
    section = ObjectiveSection(name="classify", labels=names, problem_type=kind)
    given = [row | {"label": labels_of(number, kind)[0]} for number, row in enumerate(labelled_rows())]
    file = write_rows(tmp_path / "rows.jsonl", given)
    rows = tokenize_rows(str(file), "train", tokenizer, RowSettings(64, **section.row_settings))
    model = adapted(base, section.num_values)
    peft = in_peft(base, model, tmp_path / "patch", section.num_values)
    peft.config.problem_type = kind
    texts = [tokenizer(row["text"])["input_ids"] for row in labelled_rows()]
    labels = torch.tensor([labels_of(number, kind)[1] for number in range(len(texts))])
    output = peft(**padded(texts, peft.config.pad_token_id), labels=labels)
    output.loss.backward()
    wanted = peft_gradients(peft, list(adapter_tensors(model)))

    for layout, (size, packing) in LAYOUTS.items():
        loss, metrics, got = ours(adapted(base, section.num_values), rows, section, size=size, packing=packing)
        assert loss == pytest.approx(output.loss.item(), rel=2e-6), layout
        assert metrics == right(output.logits, labels, kind)
        assert max(relative_errors(wanted, got)) < TOLERANCE, layout


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_rewards_loss_and_gradients_are_trls_however_a_step_is_cut(
    base: Path, tokenizer: Any, tmp_path: Path
) -> None:
    from trl import RewardConfig, RewardTrainer

    file = write_rows(tmp_path / "pairs.jsonl", pair_rows())
    rows = tokenize_rows(str(file), "train", tokenizer, RowSettings(64, pairs=True, labels=()))
    model = adapted(base, 1)
    peft = in_peft(base, model, tmp_path / "patch", 1)
    settings = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "bf16": False}
    trainer = RewardTrainer(
        model=peft, args=RewardConfig(**settings, center_rewards_coefficient=CENTER), processing_class=tokenizer,
        train_dataset=Dataset.from_list(pair_rows()),
    )  # fmt: skip
    texts = [
        [tokenizer(row["prompt"] + row[answer])["input_ids"] for row in pair_rows()]
        for answer in ("chosen", "rejected")
    ]
    peft.eval()
    loss = trainer.compute_loss(peft, padded([*texts[0], *texts[1]], peft.config.pad_token_id))
    loss.backward()
    wanted = peft_gradients(peft, list(adapter_tensors(model)))

    for layout, (size, packing) in LAYOUTS.items():
        our_loss, metrics, got = ours(adapted(base, 1), rows, SECTIONS["reward"], size=size, packing=packing)
        assert our_loss == pytest.approx(loss.item(), rel=2e-6), layout
        assert metrics["rewards/accuracies"] == pytest.approx(trainer._metrics["eval"]["accuracy"][0])
        assert metrics["rewards/margins"] == pytest.approx(trainer._metrics["eval"]["margin"][0], rel=2e-5)
        assert max(relative_errors(wanted, got)) < TOLERANCE, layout
