"""Divergence from a teacher: TRL as the oracle, and a float64 formula where some tokens are counted as one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lorakit.data.dataset import TeacherTable, TokenDataset, write_teacher
from lorakit.data.row_settings import RowSettings
from lorakit.objectives import cross_entropy
from lorakit.objectives.cross_entropy import LogitTransform, LossHead
from lorakit.objectives.divergence import SMALLEST, Divergence, with_others
from lorakit.recipe.objective import ObjectiveSection
from tests.helpers.rows import tokenize_rows, write_rows
from tests.objectives.test_pairs import TOLERANCE, adapted, fill, gradients, ours, relative_errors

NUM_ROWS = 6
LAYOUTS = {"packed": (6, True), "row by row": (1, True), "padded": (4, False)}
BETAS = [0.0, 0.3, 1.0]


def teacher_logits(base: Path, dataset: TokenDataset) -> list[Tensor]:
    """Logits at the labels of each row, (labels, vocabulary), of a base with other weights."""
    model = AutoModelForCausalLM.from_pretrained(base)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * 0.3)
        return [
            model(input_ids=torch.tensor(dataset.ids(row).tolist())[None]).logits[0, :-1][label_mask(dataset, row)]
            for row in range(len(dataset))
        ]


def label_mask(dataset: TokenDataset, row: int) -> Tensor:
    return torch.tensor(dataset.label_mask(row)[1:])


def table(folder: Path, dataset: TokenDataset, logits: list[Tensor], top_k: int) -> TeacherTable:
    folder.mkdir()
    likeliest = [(log_q, log_q.topk(top_k).indices) for log_q in (each.log_softmax(-1) for each in logits)]
    parts = [(tokens, with_others(log_q, tokens)) for log_q, tokens in likeliest]
    write_teacher(folder, len(dataset), "a test", parts)
    return TeacherTable(folder, dataset)


def formula(student: Tensor, teacher: Tensor, beta: float, top_k: int) -> Tensor:
    """The sum of divergences in float64, with the probability of all but the teacher's likeliest added up."""
    likeliest = teacher.topk(top_k).indices

    def lumped(logits: Tensor) -> Tensor:
        p = logits.double().softmax(-1)
        rest = torch.ones_like(p).scatter(1, likeliest, 0.0)
        others = (p * rest).sum(1, keepdim=True).clamp(min=SMALLEST)
        return torch.cat([p.gather(1, likeliest).clamp(min=1e-300), others], 1)

    p, q = lumped(student), lumped(teacher)
    m = beta * q + (1 - beta) * p
    if beta in (0, 1):
        one, other = (q, p) if beta == 0 else (p, q)
        return (one * (one / other).log()).sum()
    return (beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("top_k", [8, None], ids=["top 8", "all tokens"])
@pytest.mark.parametrize(("beta", "sft_weight"), [(0.0, 0.0), (0.0, 0.4), (0.3, 0.0), (1.0, 0.7)])
def test_loss_and_gradients_are_the_formulas_however_a_step_is_cut(
    base: Path, tokenizer: Any, tmp_path: Path, beta: float, sft_weight: float, top_k: int | None
) -> None:
    from trl.experimental.gkd import GKDTrainer

    rows = [{"prompt": f"say {number}", "completion": " yes" * (number + 1)} for number in range(NUM_ROWS)]
    dataset = tokenize_rows(str(write_rows(tmp_path / "r.jsonl", rows)), "train", tokenizer, RowSettings(64))
    teacher = teacher_logits(base, dataset)
    model = adapted(base)
    fill(model)
    total = torch.zeros((), dtype=torch.float64)
    for row, wanted in enumerate(teacher):
        ids = torch.tensor(dataset.ids(row).tolist())
        mask = label_mask(dataset, row)
        own = model(input_ids=ids[None]).logits[0, :-1][mask]
        if top_k is None:
            total = total + GKDTrainer.generalized_jsd_loss(own, wanted, beta=beta, reduction="sum").double()
        else:
            total = total + formula(own, wanted, beta, top_k)
        total = total + sft_weight * nn.functional.cross_entropy(own, ids[1:][mask], reduction="sum")
    loss = total / sum(map(len, teacher))
    loss.backward()
    known = table(tmp_path / "table", dataset, teacher, top_k or teacher[0].shape[1])
    section = ObjectiveSection(name="distill", teacher="t", beta=beta, sft_weight=sft_weight)

    for layout, (size, packing) in LAYOUTS.items():
        our_loss, metrics, got = ours(base, dataset, section, size=size, packing=packing, teacher=known)
        assert our_loss == pytest.approx(loss.item(), rel=1e-5), layout
        assert 0 <= metrics["accuracy"] <= 1
        assert max(relative_errors(gradients(model), got)) < TOLERANCE, layout


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("sharpness", [0.1, 3.0, 40.0])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_the_chunked_loss_is_the_plain_one(
    monkeypatch: pytest.MonkeyPatch, beta: float, sharpness: float, cap: float | None
) -> None:
    """Also where one token has nearly all of the probability, of which the others' share is no digit of 1 - p."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", {"cpu": 4 * 50 * 4})  # four labels
    generator = torch.Generator().manual_seed(0)
    hidden, other = (torch.randn(9, 16, generator=generator) for _ in range(2))
    head = nn.Linear(16, 50, bias=False).requires_grad_(False)
    head.weight.normal_(std=sharpness / 4, generator=generator)
    labels = torch.randint(50, (9,), generator=generator)

    def logits(of: Tensor) -> Tensor:
        z = of.to(head.weight.dtype) @ head.weight.T
        return z if cap is None else cap * torch.tanh(z / cap)

    log_q = logits(other).log_softmax(-1)
    tokens = log_q.topk(7).indices
    teacher = tokens, with_others(log_q, tokens)
    plain = hidden.clone().requires_grad_()
    ours = hidden.clone().requires_grad_()

    losses, hits = LossHead(head, LogitTransform(cap=cap))(ours, labels, None, 0.0, Divergence(beta, 0.2), teacher)
    wanted = Divergence(beta, 0.2).of_logits(logits(plain), labels, teacher)

    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5)
    weights = torch.rand(9, generator=generator)
    (got,), (expected,) = (torch.autograd.grad((w * weights).sum(), of) for w, of in ((losses, ours), (wanted, plain)))
    assert (got - expected).abs().max() < 1e-4 * expected.abs().max()
    assert torch.equal(hits.bool(), logits(hidden).argmax(-1) == labels)
    double = formula(logits(hidden), logits(other), beta, 7)
    sft = 0.2 * nn.functional.cross_entropy(logits(hidden), labels, reduction="sum")
    torch.testing.assert_close(losses.sum().double() - sft, double, rtol=1e-3, atol=1e-3)
