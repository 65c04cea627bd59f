"""The parts of a packed line are together the line."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from lorakit.data.batch import IGNORE_INDEX, Batch


def line(lengths: list[int], *, weighted: bool) -> Batch:
    ids = torch.arange(sum(lengths))[None] + 7
    labels = torch.where(ids % 3 == 0, IGNORE_INDEX, ids)
    row_labels = tuple(int((row != IGNORE_INDEX).sum()) for row in labels[0].split(lengths))
    weights = torch.arange(len(lengths)).float() if weighted else torch.ones(len(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    own = ids % 5 + 0.5 if weighted else None
    return Batch(
        ids, labels, positions, None, tuple(range(len(lengths))), sum(lengths), row_labels, weights, tuple(lengths), own
    )  # fmt: skip


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.lists(st.integers(0, 36), max_size=3), st.booleans())
def test_parts_are_together_the_line(lengths: list[int], cuts: list[int], weighted: bool) -> None:
    whole = line(lengths, weighted=weighted)
    bounds = sorted({0, sum(lengths), *(cut for cut in cuts if cut < sum(lengths))})

    parts = [whole.part(start, stop) for start, stop in itertools.pairwise(bounds)]

    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts], 1), getattr(whole, name))
    assert torch.equal(torch.cat([part.rows_of_tokens() for part in parts]), whole.rows_of_tokens())
    assert [sum(counts) for counts in zip(*(part.row_labels for part in parts), strict=True)] == [*whole.row_labels]
    assert [sum(part.num_tokens for part in parts), sum(part.num_label_tokens for part in parts)] == [
        whole.num_tokens, whole.num_label_tokens,
    ]  # fmt: skip
    if weighted:
        cpu = torch.device("cpu")
        weights, *of_parts = [batch.to(cpu).label_weights.tolist() for batch in (whole, *parts)]  # type: ignore[union-attr]
        assert [*itertools.chain(*of_parts)] == weights
        assert sum(part.sum_of_weights() for part in parts) == whole.sum_of_weights()


def test_a_line_gets_the_tokens_that_it_lacks_as_a_row_without_labels() -> None:
    short = line([2, 1], weighted=True)

    longer = short.with_tokens(5)

    assert longer.sum_of_weights() == short.sum_of_weights() > 0
    assert longer.row_lengths == (2, 1, 2)
    assert longer.position_ids.tolist() == [[0, 1, 0, 0, 1]]
    assert longer.labels[0, 3:].tolist() == [IGNORE_INDEX] * 2
    assert (longer.num_tokens, longer.num_label_tokens) == (short.num_tokens, short.num_label_tokens)
    assert [longer.part(3, 5).num_tokens, longer.part(2, 5).num_tokens] == [0, 1]
    assert short.with_tokens(3) is short
