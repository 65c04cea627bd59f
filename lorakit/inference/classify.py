"""Compute what the heads of adapters say of texts: the label of a classifier, or a reward."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lorakit.decoding.slot_model import RoutedModel
from lorakit.errors import LorakitError
from lorakit.ops.batch_invariance import BatchSizes
from lorakit.patch.own_head import OwnHead
from lorakit.slots.routing import Adapter, Route

MAX_TOKENS: Final = 8192  # of a batch, padding included; a longer row comes alone


@dataclass(frozen=True)
class Classification:
    """The answer of a classifier. probabilities: of each label, in the order of the adapter's recipe."""

    label: str  # the one with the largest probability
    probabilities: dict[str, float]

    def __str__(self) -> str:
        return f"{self.label}  {self.probabilities[self.label]:.3f}"


def as_classification(labels: Sequence[str], values: Tensor) -> Classification:
    """Return the answer of a head with these labels. values: its logits, (labels,)."""
    probabilities = dict(zip(labels, values.softmax(0).tolist(), strict=True))
    return Classification(labels[int(values.argmax())], probabilities)


def head_for(head: OwnHead | None, objective: str | None) -> OwnHead:
    """Return the head of an adapter. Raises LorakitError: it has none, or not of this objective, where one is given."""
    if head is None:
        what = objective or "classify or reward"
        raise LorakitError(f"{what}: an adapter, or the base, has no head of its own; objective {what} trains one")
    if objective is not None and bool(head.labels) != (objective == "classify"):
        kind = "has labels (classify, /classify)" if head.labels else "gives a reward (reward, /pooling)"
        raise LorakitError(f"{objective}: this adapter {kind}")
    return head


@torch.no_grad()
def last_states(model: RoutedModel, rows: Sequence[list[int]], adapters: Sequence[Adapter | None]) -> list[Tensor]:
    """Return the hidden state of each row's last token, (width,) in float32 on the CPU.

    Rows are padded on the right, where no token of a causal model attends to.
    """
    sizes = BatchSizes.of(model.model)
    device = next(model.model.parameters()).device
    states: dict[int, Tensor] = {}
    for batch in _batches(rows):
        width = sizes.width(sizes.tokens(max(len(rows[index]) for index in batch)))
        ids = torch.tensor([rows[index] + [0] * (width - len(rows[index])) for index in batch], device=device)
        route = Route(tuple(adapters[index] for index in batch))
        output = model.run_without_head(route, ids, use_cache=False)
        for line, index in enumerate(batch):
            states[index] = output.last_hidden_state[line, len(rows[index]) - 1].float().cpu()
    return [states[index] for index in range(len(rows))]


def _batches(rows: Sequence[list[int]]) -> Iterator[list[int]]:
    """Yield the indices of rows that are computed together: of similar lengths, so that little is padded."""
    batch: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: len(rows[index])):
        if batch and len(rows[index]) * (len(batch) + 1) > MAX_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
