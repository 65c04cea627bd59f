"""KTO, with TRL as the oracle of a step that is one batch; and its rows with others' answers."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from lorakit.data.dataset import MismatchedRows, TokenDataset
from lorakit.data.row_settings import RowSettings
from lorakit.errors import DataError
from lorakit.objectives.pairs import build_objective
from tests.helpers.rows import tokenize_rows, write_rows
from tests.helpers.steps import prepare_step
from tests.objectives.test_pairs import TOLERANCE, adapted, fill, gradients, relative_errors

SETTINGS = {"beta": 0.3, "desirable_weight": 1.0, "undesirable_weight": 1.5}
LAYOUTS = {"packed": (7, True), "row by row": (1, True), "padded": (3, False)}
"""name -> rows of a micro-batch, and whether they are packed"""


def judged_rows(labels: list[Any]) -> list[dict[str, Any]]:
    """Answers of uneven lengths with these labels."""
    return [
        {
            "prompt": f"what is {number} plus {number * 3}?" + " please" * (number % 3),
            "completion": f" it is {number * 4}" + " and that is that" * (number % 4),
            "label": label,
        }
        for number, label in enumerate(labels, 1)
    ]


def read(folder: Path, tokenizer: Any, rows: list[dict[str, Any]]) -> TokenDataset:
    file = write_rows(folder / "rows.jsonl", rows)
    return tokenize_rows(str(file), "train", tokenizer, RowSettings(64, verdicts=True))


def weights_of(rows: TokenDataset) -> list[float]:
    return rows.weights.tolist()


def ours(base: Path, rows: TokenDataset, *, size: int, packing: bool) -> tuple[Any, ...]:
    """Loss, metrics and gradients of a step of all rows, in micro-batches of so many; and the loss as held-out rows."""
    model = adapted(base)
    engine, batches = prepare_step(model, rows, build_objective("kto", SETTINGS), size=size, packing=packing)
    fill(model)
    report = engine.accumulate(batches.step(0))
    held_out = engine.evaluate(batches.eval_micro_batches(), lambda: False)
    assert held_out is not None
    return report.loss, report.metrics, gradients(model), held_out.loss


def theirs(base: Path, tokenizer: Any, rows: TokenDataset, labels: list[bool], folder: Path) -> tuple[Any, ...]:
    """Loss, metrics and gradients of TRL's trainer for the same tokens, all rows in one batch."""
    from trl import KTOConfig, KTOTrainer

    model = adapted(base)
    fill(model)
    config = KTOConfig(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=len(rows),
        **SETTINGS,
    )
    trainer = KTOTrainer(
        model=model, args=config, processing_class=tokenizer, train_dataset=Dataset.from_list(judged_rows(labels)),
        ref_model=AutoModelForCausalLM.from_pretrained(base),
    )  # fmt: skip
    model.eval()
    starts = [int(rows.label_mask(row).argmax()) for row in range(len(rows))]
    others = MismatchedRows(rows)
    examples = [
        {
            "prompt_ids": rows.ids(row)[:start].tolist(), "completion_ids": rows.ids(row)[start:].tolist(),
            "KL_completion_ids": others.ids(row)[start:].tolist(), "label": label,
        }
        for row, (start, label) in enumerate(zip(starts, labels, strict=True))
    ]  # fmt: skip
    loss = trainer.compute_loss(model, trainer.data_collator(examples))
    loss.backward()
    return loss.item(), {key: values[0] for key, values in trainer._metrics["eval"].items()}, gradients(model)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("labels", [[True, False, True, True, False, False, True], [True] * 7])
def test_loss_metrics_and_gradients_are_trls_however_a_step_is_cut(
    base: Path, tokenizer: Any, tmp_path: Path, labels: list[bool]
) -> None:
    rows = read(tmp_path, tokenizer, judged_rows(labels))
    loss, metrics, wanted = theirs(base, tokenizer, rows, labels, tmp_path)
    assert metrics["kl"] > 0.01
    for layout, (size, packing) in LAYOUTS.items():
        our_loss, our_metrics, got, held_out = ours(base, rows, size=size, packing=packing)
        assert our_loss == pytest.approx(loss, rel=2e-6), layout
        assert held_out == pytest.approx(loss, rel=2e-6), layout
        assert our_metrics.keys() - {"rewards/accuracies"} == {
            name for name in metrics if name == "kl" or name.startswith(("rewards", "logps"))
        }
        for name in our_metrics.keys() & metrics.keys():
            assert our_metrics[name] == pytest.approx(metrics[name], rel=2e-5, abs=2e-5), (layout, name)
        assert max(relative_errors(wanted, got)) < TOLERANCE, layout


def test_rows_count_by_their_weights(base: Path, tokenizer: Any, tmp_path: Path) -> None:
    """Rows that all weigh 2 give the step of rows that weigh 1: a weight counts in the loss and in its divisor."""
    labels = [True, False, False, True]
    plain = read(tmp_path, tokenizer, judged_rows(labels))
    weighted = read(tmp_path, tokenizer, [row | {"weight": 2} for row in judged_rows(labels)])
    one, other = (ours(base, rows, size=4, packing=True) for rows in (plain, weighted))
    assert weights_of(weighted) == [2, -2, -2, 2]
    assert other[0] == pytest.approx(one[0], rel=1e-6)
    assert max(relative_errors(one[2], other[2])) < 1e-6


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=2, max_size=30))
def test_every_prompt_has_the_answer_of_another_row(tokenizer: Any, sizes: list[tuple[int, int]]) -> None:
    """Tokens say whose prompt (even) or answer (odd) they are."""
    given_rows = [
        {
            "input_ids": [2 * row] * prompt + [2 * row + 1] * answer,
            "mask": [0] * prompt + [1] * answer,
            "label": bool(row % 2),
        }
        for row, (prompt, answer) in enumerate(sizes)
    ]
    with TemporaryDirectory() as folder:
        others = MismatchedRows(read(Path(folder), tokenizer, given_rows))
        longest = max(map(sum, sizes))
        answered = []
        for row, (prompt, _) in enumerate(sizes):
            ids, mask = others.ids(row), others.label_mask(row)
            assert others.lengths[row] == len(ids) == len(mask) <= longest
            assert ids[:prompt].tolist() == [2 * row] * prompt
            assert mask.tolist() == [False] * prompt + [True] * (len(ids) - prompt)
            (answer,) = set(ids[prompt:].tolist())
            assert len(ids) == min(prompt + sizes[answer // 2][1], longest)
            answered.append(answer // 2)
    assert all(row != answer for row, answer in enumerate(answered))
    assert sorted(answered) == list(range(len(sizes)))


@pytest.mark.parametrize("label", [True, "true", 1, "1", 1.0, "True", "TRUE"])
def test_a_label_is_a_truth_value_as_files_write_it(tokenizer: Any, tmp_path: Path, label: Any) -> None:
    rows = read(tmp_path, tokenizer, [*judged_rows([label]), *judged_rows([False])])
    assert weights_of(rows) == [1, -1]


def test_a_label_may_be_in_kto_tag(tokenizer: Any, tmp_path: Path) -> None:
    answers = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    rows = read(tmp_path, tokenizer, [{"messages": answers, "kto_tag": label} for label in (True, False)])
    assert weights_of(rows) == [1, -1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "hi", "completion": " yes"}, "label: true or false expected, got None"),
        ({"prompt": "hi", "completion": " yes", "label": "good"}, "label: true or false expected, got 'good'"),
        ({"prompt": "hi", "completion": " yes", "label": 2}, "label: true or false expected, got 2"),
        ({"text": "hi", "label": True}, "has no prompt, and objective kto compares answers to it"),
        ({"prompt": "hi", "chosen": " yes", "rejected": " no", "label": True}, "chosen: a preference pair"),
    ],
)
def test_rows_that_kto_cannot_read_are_refused(
    tokenizer: Any, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        read(tmp_path, tokenizer, [row])
