"""Compute what the heads of adapters say of texts: the label of a classifier, or a reward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from lorakit.decoding.embedding import Embedder, EmbeddingInput
from lorakit.decoding.slot_model import RoutedModel
from lorakit.errors import LorakitError
from lorakit.patch.own_head import OwnHead
from lorakit.patch.pooling import Pooling
from lorakit.slots.routing import Adapter

MAX_TOKENS: Final = 8192  # of a batch, padding included, unless a row is longer


@dataclass(frozen=True)
class Classification:
    """The answer of a classifier. probabilities: of each label, in the order of the adapter's recipe."""

    label: str  # the one with the largest probability
    probabilities: dict[str, float]
    labels: tuple[str, ...]  # this one; where a row may have several, all with a probability above 1/2

    def __str__(self) -> str:
        return ", ".join(f"{label}  {self.probabilities[label]:.3f}" for label in self.labels) or "no label"


def as_classification(head: OwnHead, values: Tensor) -> Classification:
    """Return the answer of a head with labels. values: its logits, (labels,)."""
    of_each = values.sigmoid() if head.has_several else values.softmax(0)
    probabilities = dict(zip(head.labels, of_each.tolist(), strict=True))
    label = head.labels[int(values.argmax())]
    above = (name for name, value in zip(head.labels, values.tolist(), strict=True) if value > 0)
    return Classification(label, probabilities, tuple(above) if head.has_several else (label,))


def head_for(head: OwnHead | None, objective: str | None) -> OwnHead:
    """Return the head of an adapter. Raises LorakitError: it has none, or not of this objective, where one is given."""
    if head is None:
        what = objective or "classify or reward"
        raise LorakitError(f"{what}: an adapter, or the base, has no head of its own; objective {what} trains one")
    if objective is not None and bool(head.labels) != (objective == "classify"):
        kind = "has labels (classify, /classify)" if head.labels else "gives a number (reward, /pooling)"
        raise LorakitError(f"{objective}: this adapter {kind}")
    return head


def pooled_states(
    model: RoutedModel, rows: Sequence[list[int]], adapters: Sequence[Adapter | None], poolings: Sequence[Pooling]
) -> list[Tensor]:
    """Return the pooled hidden states of each row, (width,) in float32 on the CPU."""
    inputs = list(map(EmbeddingInput, rows, adapters, poolings))
    embedder = Embedder(model)
    embedder.waiting.add(*sorted(inputs, key=lambda one: len(one.ids)))  # so that little is padded
    budget = max([MAX_TOKENS, *map(len, rows)])  # each row in one step
    while len(embedder):
        embedder.step(budget)
    return [one.vector.result() for one in inputs]
