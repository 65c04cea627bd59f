"""The messages of a step along `pipeline`, `sequence` and `tensor`, by kind, as a rank's layers and tokens need them.

A plan reads them for a base that nobody has loaded, and a run compares what it sends with them. Bytes are those of the
larger of input and output, as `collectives` counts them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Messages:
    """Messages of one kind, and their bytes."""

    calls: float
    num_bytes: float


ByKind = Mapping[str, Messages]


@dataclass(frozen=True)
class StepWork:
    """What a rank computes in a step.

    num_tokens: over its micro-batches. token_bytes: of a token's hidden state. num_layers: of this rank. num_trained:
    those of them that gradients go through. recomputes: True if layers are recomputed in backward. sends_gradient,
    receives_gradient: to the stage before, from the stage after. trains_embedding: True if the embedding is trained,
    and here.
    """

    micro_batches: int
    num_tokens: float
    token_bytes: int
    num_layers: int
    num_trained: int
    recomputes: bool = False
    is_first: bool = True
    is_last: bool = True
    sends_gradient: bool = False
    receives_gradient: bool = False
    trains_embedding: bool = False


@dataclass(frozen=True)
class CutModel:
    """What is cut over `tensor`.

    num_blocks: with layers that are cut by outputs, whose input's gradient is summed. num_summed: layers that are cut by
    inputs, whose outputs are summed. embedding, head: True if cut, and here. uncut_bytes: of gradients that meet once a
    step.
    """

    num_blocks: int
    num_summed: int
    embedding: bool
    head: bool
    uncut_bytes: float


def pipeline_messages(work: StepWork) -> ByKind:
    """Return the hidden states of each micro-batch to the next stage, and their gradients to the one before."""
    size = work.num_tokens * work.token_bytes
    sent = (not work.is_last) + work.sends_gradient
    received = (not work.is_first) + work.receives_gradient
    return {
        kind: Messages(number * work.micro_batches, number * size)
        for kind, number in (("send", sent), ("receive", received))
        if number
    }


def sequence_messages(
    micro_batches: int, num_tokens: float, attentions: Iterable[tuple[int, bool]], *, recomputes: bool
) -> ByKind:
    """Return for each attention a message there and one back, the same in recomputation, and both in backward.

    attentions: bytes of a token in both messages of each, and whether gradients go through it.
    """
    times = [(size, 1 + has_gradient * (1 + recomputes)) for size, has_gradient in attentions]
    calls = 2 * micro_batches * sum(number for _, number in times)
    return {"all_to_all": Messages(calls, num_tokens * sum(size * number for size, number in times))}


def tensor_messages(work: StepWork, cut: CutModel) -> ByKind:
    """Return a sum of each block's output, and in backward of its input's gradient.

    A recomputed layer sums all outputs but the last once more, because nothing after that is saved. The input of the
    first layer through which gradients go needs none, unless a stage before waits for it. Once a step, gradients of
    what is not cut meet. Of a label two numbers are summed, here two messages for all labels.
    """
    # of layers through which gradients go
    blocks = cut.num_blocks * work.num_trained / work.num_layers
    summed = cut.num_summed * work.num_trained / work.num_layers
    recomputed = work.recomputes * (summed - work.num_trained)
    # the embedding's output has a gradient where it is trained or layers are recomputed
    enters = work.sends_gradient or work.trains_embedding or (work.is_first and work.recomputes)
    inputs = blocks - (not enters and work.num_trained > 0)
    size = work.num_tokens * work.token_bytes
    sums = cut.embedding + cut.num_summed + recomputed + inputs + cut.head
    return {"all_reduce": Messages((sums + 2 * cut.head) * work.micro_batches + 1, sums * size + cut.uncut_bytes)}


def bytes_that_leave(by_kind: ByKind, num_ranks: int) -> float:
    """Return the bytes that leave a rank, in a ring of so many."""
    shares = {"receive": 0.0, "send": 1.0, "all_reduce": 2 * (num_ranks - 1) / num_ranks}
    others = (num_ranks - 1) / num_ranks
    return sum(shares.get(kind, others) * messages.num_bytes for kind, messages in by_kind.items())
