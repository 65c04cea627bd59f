"""Embeddings: a text's vector is near those of its own texts, and far from all others of a step. InfoNCE (1807.03748).

    sim(i, d) = cos(anchor i, text d) / temperature, d of the positives and negatives of all rows of the step
    loss of row i = -log of (exp sim(i, positive i) / sum of exp sim(i, d)); loss = sum of weight x f / sum of weights
    with Matryoshka dims, f is the sum of it over the first values of the vectors and over all of them (2205.13147)

A text with the tokens of the anchor or of its positive is no negative of it: it would be pushed away from itself.

Invariant: the loss is that of the full step, however its rows are cut or spread: the first pass computes all vectors,
and with them the loss and its gradient with respect to each; the second one multiplies by that (GradCache, 2101.06983).
Held-out rows are compared with the texts of all held-out rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from lorakit.data.batch import Batch
from lorakit.files.progress import report_progress
from lorakit.objectives.objective import FirstPass, Objective, Scores

BLOCK: Final = 1024  # anchors that are compared at once


@dataclass(frozen=True)
class Texts:
    """The texts of a micro-batch, in groups: an anchor, its positive, its negatives."""

    indices: tuple[int, ...]  # of rows, in their data set
    tokens: list[bytes]
    vectors: Tensor  # (texts, width) float32, on the CPU
    weights: Tensor  # (texts,) float32


def build_embed(settings: Mapping[str, Any]) -> Objective:
    """Return the objective, which knows all vectors after its first pass. settings: as in recipe/objective.py."""
    size = 2 + settings["negatives"]

    def given(parts: list[Texts]) -> Objective:
        step = Retrieval(parts, size, settings["temperature"], settings["matryoshka_dims"])

        def terms(scores: Scores) -> tuple[Tensor, ...]:
            assert scores.states is not None
            positions = [step.positions[index] for index in scores.row_indices]
            linear = (scores.states * step.gradients[positions].to(scores.states.device)).sum()
            return (linear - linear.detach() + float(step.losses[positions].sum()),)

        def metric(values: Tensor, scores: Scores) -> tuple[Tensor, float]:
            own = values[[step.positions[index] for index in scores.row_indices[::size]]]
            return own.sum().to(scores.losses.device), float(len(own))

        return Objective(
            counts=lambda batch: (float(batch.row_weights[::size].sum()),),
            terms=terms,
            metrics={
                "accuracy": lambda scores, batch: metric((step.ranks == 1).float(), scores),
                "mrr": lambda scores, batch: metric(1 / step.ranks, scores),
            },
            per="row",
            group_size=size,
            measures=("accuracy", "mrr"),
            reads_states=True,
            first_pass=FirstPass(_collect, given),
        )

    return given([])


def _collect(scores: Scores, batch: Batch) -> Texts:
    assert scores.states is not None
    return Texts(batch.row_indices, batch.tokens_of_rows(), scores.states.detach().cpu(), batch.row_weights)


class Retrieval:
    """The losses of rows among each other's texts, and their gradients. A row that comes several times is there once.

    positions: index of a row -> that in the tensors. losses: (texts,), weighted, 0 but for anchors. ranks: (texts,),
    of each anchor the rank of its positive among all texts by similarity, from 1. gradients: (texts, width), of the
    sum of losses with respect to each vector, divided by how often it comes.
    """

    def __init__(self, parts: Sequence[Texts], size: int, temperature: float, dims: Sequence[int]) -> None:
        rows = {
            index: (tokens, vector, weight)
            for part in parts
            for index, tokens, vector, weight in zip(part.indices, part.tokens, part.vectors, part.weights, strict=True)
        }
        order = sorted(rows)
        self.positions = {index: position for position, index in enumerate(order)}
        self.losses = torch.zeros(len(order))
        self.ranks = torch.ones(len(order))
        self.gradients = torch.zeros(len(order), 1)
        if not order:
            return
        times = torch.bincount(torch.tensor([self.positions[index] for part in parts for index in part.indices]))
        numbers: dict[bytes, int] = {}
        texts = torch.tensor([numbers.setdefault(rows[index][0], len(numbers)) for index in order]).view(-1, size)
        weights = torch.stack([rows[index][2] for index in order])[::size]
        vectors = torch.stack([rows[index][1] for index in order]).requires_grad_(torch.is_grad_enabled())
        groups = vectors.view(-1, size, vectors.shape[1])
        others = texts[:, 1:].flatten()
        for block in torch.arange(len(groups)).split(BLOCK):
            report_progress()
            own = block * (size - 1)  # position of each positive among the candidates
            excluded = (others == texts[block, :1]) | (others == texts[block, 1:2])
            excluded = excluded.scatter(1, own[:, None], False)
            losses = torch.zeros(len(block))
            for dim in sorted({*dims, vectors.shape[1]}):
                near = F.normalize(groups[block, 0, :dim], dim=-1)
                candidates = F.normalize(groups[:, 1:, :dim].flatten(0, 1), dim=-1)
                similar = (near @ candidates.T / temperature).masked_fill(excluded, -torch.inf)
                losses = losses + F.cross_entropy(similar, own, reduction="none")
            losses = losses * weights[block]
            if losses.requires_grad:
                (losses * times[::size][block]).sum().backward()
            self.losses[block * size] = losses.detach()
            positive = similar.detach().gather(1, own[:, None])
            self.ranks[block * size] = (similar >= positive).sum(1).float()  # equal ones count as nearer
        self.gradients = torch.zeros_like(vectors) if vectors.grad is None else vectors.grad / times[:, None]
