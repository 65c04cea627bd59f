"""Embeddings, with the losses of sentence-transformers as the oracle of a step that is one batch."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lorakit.data.dataset import TokenDataset
from lorakit.data.row_settings import RowSettings
from lorakit.errors import DataError
from lorakit.objectives.embed import Retrieval, Texts
from lorakit.objectives.pairs import build_objective
from lorakit.recipe.objective import ObjectiveSection
from tests.helpers.rows import tokenize_rows, write_rows
from tests.helpers.steps import prepare_step
from tests.objectives.test_pairs import TOLERANCE, adapted, fill, gradients, relative_errors

LAYOUTS = {"packed": (8, True), "row by row": (1, True), "padded": (3, False)}
"""name -> groups of a micro-batch, and whether they are packed"""


def section(**settings: Any) -> ObjectiveSection:
    return ObjectiveSection.model_validate({"name": "embed", **settings})


def text_rows(num_negatives: int) -> list[dict[str, Any]]:
    """Texts of uneven lengths."""
    return [
        {
            "anchor": f"what is {number} plus {number * 3}?" + " please" * (number % 3),
            "positive": f"it is {number * 4}" + " and that is that" * (number % 2),
            "negative": [f"{number} or {other}" + " or so" * (other % 4) for other in range(num_negatives)],
        }
        for number in range(1, 9)
    ]


def read(folder: Path, tokenizer: Any, rows: list[dict[str, Any]], objective: ObjectiveSection) -> TokenDataset:
    file = write_rows(folder / "rows.jsonl", rows)
    return tokenize_rows(str(file), "train", tokenizer, RowSettings(64, **objective.row_settings))


def ours(
    base: Path, rows: TokenDataset, objective: ObjectiveSection, *, size: int, packing: bool, dropout: float = 0.0
) -> tuple[Any, ...]:
    """Loss, metrics and gradients of a step of all rows, in micro-batches of so many; and the loss as held-out rows."""
    model = adapted(base, dropout=dropout)
    settings = build_objective("embed", objective.settings)
    size *= objective.group_size
    engine, batches = prepare_step(model, rows, settings, size=size, packing=packing)
    fill(model)
    report = engine.accumulate(batches.step(0))
    held_out = engine.evaluate(batches.eval_micro_batches(), lambda: False)
    assert held_out is not None
    return report.loss, report.metrics, gradients(model), held_out.loss


class Embedding(torch.nn.Module):
    """An adapted model as sentence-transformers' losses call one: its embeddings are pooled hidden states."""

    def __init__(self, model: Any, pooling: str) -> None:
        super().__init__()
        self.model = model
        self.pooling = pooling

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        states = self.model.base_model(**features)[0]
        mask = features["attention_mask"][..., None]
        mean = (states * mask).sum(1) / mask.sum(1)
        last = states[torch.arange(len(states)), mask.sum(1)[:, 0] - 1]
        return features | {"sentence_embedding": mean if self.pooling == "mean" else last}

    def get_embedding_dimension(self) -> int:
        return int(self.model.config.hidden_size)


def theirs(base: Path, tokenizer: Any, rows: list[dict[str, Any]], objective: ObjectiveSection) -> tuple[Any, ...]:
    """Loss and gradients of sentence-transformers for the same texts, all rows in one batch."""
    from sentence_transformers.losses import MatryoshkaLoss, MultipleNegativesRankingLoss

    model = adapted(base).eval()
    fill(model)
    embedding: Any = Embedding(model, objective.row_settings["pooling"])
    loss: torch.nn.Module = MultipleNegativesRankingLoss(embedding, scale=1 / objective.settings["temperature"])
    if dims := objective.settings["matryoshka_dims"]:
        loss = MatryoshkaLoss(embedding, loss, [model.config.hidden_size, *dims])
    columns = [[row["anchor"] for row in rows], [row["positive"] for row in rows]]
    columns += [[row["negative"][number] for row in rows] for number in range(len(rows[0]["negative"]))]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    features = [dict(tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")) for texts in columns]
    for one in features:
        one.pop("token_type_ids", None)
    value = loss(features, torch.empty(0))
    value.backward()
    return value.item(), gradients(model)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pooling": "mean", "temperature": 0.2},
        {"negatives": 2},
        {"negatives": 1, "matryoshka_dims": (8, 16), "pooling": "mean"},
    ],
    ids=str,
)
def test_loss_and_gradients_are_sentence_transformers_however_a_step_is_cut(
    base: Path, tokenizer: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    objective = section(**settings)
    texts = text_rows(objective.settings["negatives"])
    rows = read(tmp_path, tokenizer, texts, objective)
    loss, wanted = theirs(base, tokenizer, texts, objective)
    for layout, (size, packing) in LAYOUTS.items():
        our_loss, metrics, got, held_out = ours(base, rows, objective, size=size, packing=packing)
        assert our_loss == pytest.approx(loss, rel=2e-6), layout
        assert held_out == pytest.approx(loss, rel=2e-6), layout
        assert 0 <= metrics["accuracy"] <= metrics["mrr"] <= 1
        assert max(relative_errors(wanted, got)) < TOLERANCE, layout


def test_dropout_is_the_same_in_both_passes_however_a_step_is_cut(base: Path, tokenizer: Any, tmp_path: Path) -> None:
    objective = section()
    rows = read(tmp_path, tokenizer, text_rows(0), objective)
    without = ours(base, rows, objective, size=8, packing=True)
    loss, _, wanted, held_out = ours(base, rows, objective, size=8, packing=True, dropout=0.3)
    assert abs(loss - without[0]) > 1e-3
    assert held_out == pytest.approx(without[3], rel=1e-6)
    for size, packing in LAYOUTS.values():
        other = ours(base, rows, objective, size=size, packing=packing, dropout=0.3)
        assert other[0] == pytest.approx(loss, rel=1e-6)
        assert max(relative_errors(wanted, other[2])) < TOLERANCE


def test_the_gradient_is_that_of_the_loss(base: Path, tokenizer: Any, tmp_path: Path) -> None:
    """With dropout there is no oracle but the loss itself: a step along the gradient changes it as the gradient says."""
    objective = section(negatives=1)
    rows = read(tmp_path, tokenizer, text_rows(1), objective)
    model = adapted(base, dropout=0.3)
    engine, batches = prepare_step(model, rows, build_objective("embed", objective.settings), size=6, packing=True)
    fill(model)
    micro_batches = batches.step(0)
    engine.accumulate(micro_batches)
    slopes = gradients(model)
    expected = sum(float(slope.double().square().sum()) for slope in slopes.values())
    losses = []
    for direction in (1, -1):
        with torch.no_grad():
            for name, tensor in engine.adapter.tensors.items():
                tensor += (direction if direction == 1 else -2) * 1e-4 * slopes[name]
        losses.append(engine.accumulate(micro_batches).loss)
    assert (losses[0] - losses[1]) / 2e-4 == pytest.approx(expected, rel=1e-2)


def test_a_row_counts_by_its_weight_and_each_time_that_it_comes() -> None:
    vectors = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    tokens = [bytes([number]) for number in range(6)]

    def found(indices: list[int], weights: list[float]) -> Retrieval:
        texts = Texts(tuple(indices), [tokens[i] for i in indices], vectors[indices], torch.tensor(weights))
        return Retrieval([texts], 2, 0.5, ())

    plain = found([0, 1, 2, 3, 4, 5], [1.0] * 6)
    weighted = found([0, 1, 2, 3, 4, 5], [1, 1, 3, 3, 1, 1])
    assert weighted.losses.tolist() == pytest.approx((plain.losses * torch.tensor([1, 1, 3, 3, 1, 1])).tolist())
    # twice in a step: the same candidates, and twice the loss, which is what two terms with its gradient add up to
    twice = found([0, 1, 2, 3, 4, 5, 2, 3], [1.0] * 8)
    assert twice.losses.tolist() == plain.losses.tolist()
    times = torch.tensor([1, 1, 2, 2, 1, 1])[:, None]
    doubled = found([0, 1, 2, 3, 4, 5], [1, 1, 2, 2, 1, 1])
    assert torch.allclose(twice.gradients * times, doubled.gradients, atol=1e-6)


def test_a_text_with_the_tokens_of_anchor_or_positive_is_no_negative() -> None:
    vectors = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    tokens = [b"a", b"same", b"b", b"same", b"c", b"a"]
    texts = Texts(tuple(range(6)), tokens, vectors, torch.ones(6))
    found = Retrieval([texts], 2, 0.5, ())
    near, own = (torch.nn.functional.normalize(part, dim=-1) for part in (vectors[::2], vectors[1::2]))
    similar = near @ own.T / 0.5
    similar[0, 1] = similar[1, 0] = -torch.inf  # the positive of the other row is the same text
    similar[0, 2] = -torch.inf  # the anchor itself
    wanted = torch.nn.functional.cross_entropy(similar, torch.arange(3), reduction="none")
    assert found.losses[::2].tolist() == pytest.approx(wanted.tolist(), rel=1e-6)


def test_blocks_of_anchors_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    texts = Texts(tuple(range(12)), [bytes([i]) for i in range(12)], vectors, torch.ones(12))
    full = Retrieval([texts], 3, 0.1, (2,))
    monkeypatch.setattr("lorakit.objectives.embed.BLOCK", 3)
    blocks = Retrieval([texts], 3, 0.1, (2,))
    assert torch.allclose(full.losses, blocks.losses)
    assert torch.allclose(full.gradients, blocks.gradients, atol=1e-6)
    assert torch.equal(full.ranks, blocks.ranks)


def test_equal_vectors_are_no_hit_and_held_out_rows_need_no_gradient() -> None:
    texts = Texts(tuple(range(6)), [bytes([i]) for i in range(6)], torch.ones(6, 4), torch.ones(6))
    with torch.no_grad():
        found = Retrieval([texts], 2, 0.1, ())
    assert found.ranks[::2].tolist() == [3, 3, 3]
    assert not found.gradients.any()


def test_numbered_negatives_are_read(tokenizer: Any, tmp_path: Path) -> None:
    listed = {"anchor": "a", "positive": "b", "negative": ["c", "d"]}
    numbered = {"anchor": "a", "positive": "b", "negative_1": "c", "negative_2": "d"}
    rows = read(tmp_path, tokenizer, [listed, numbered], section(negatives=2))
    assert [rows.ids(row).tolist() for row in range(4)] == [rows.ids(row).tolist() for row in range(4, 8)]
    assert rows.group_size == 4
    assert rows.counts.pairs == 2


def test_a_long_text_is_cut_and_still_embedded(tokenizer: Any, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"anchor": "so " * 50, "positive": "yes"}])
    for pooling, labels in (("lasttoken", 1), ("mean", 7)):
        settings = RowSettings(8, on_long_rows="truncate", **section(pooling=pooling).row_settings)
        rows = tokenize_rows(str(file), "train", tokenizer, settings)
        assert rows.lengths.tolist()[0] == 8
        assert rows.label_mask(0)[1:].sum() == labels


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "this has no anchor and no positive"),
        ({"anchor": "a"}, "this has no positive"),
        ({"anchor": "a", "positive": ""}, "this has no positive"),
        ({"anchor": "a", "positive": " "}, "anchor, positive and negative are texts, got ' '"),
        ({"anchor": "a", "positive": 3}, "anchor, positive and negative are texts, got 3"),
        ({"anchor": "a", "positive": "b", "negative": "c"}, "negative: has 1 texts, and objective.negatives is 0"),
        ({"anchor": "a", "positive": "b", "negative_1": "c"}, "negative_1: not a key that is read here"),
        ({"anchor": "a", "positive": "b", "label": True}, "label: whether the answer is good"),
        (["a", "b"], "this has no anchor and no positive"),
    ],
)
def test_rows_that_embed_cannot_read_are_refused(tokenizer: Any, tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        read(tmp_path, tokenizer, [row], section())


def test_a_negative_that_is_the_positive_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="negative: is the positive too"):
        read(tmp_path, tokenizer, [{"anchor": "a", "positive": "b", "negative": ["b"]}], section(negatives=1))
