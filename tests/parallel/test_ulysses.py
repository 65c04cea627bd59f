"""Heads that cannot be shared are refused by name, before any message. What is shared: tests/parallel/test_sequence.py."""

from typing import Any

import pytest
import torch
from torch import nn

from lorakit.errors import RunError
from lorakit.parallel.group import Group, Mesh, even_counts
from lorakit.parallel.sequence.axis import SequenceAxis


class Attention(nn.Module):
    num_key_value_groups = 2


def heads(num_heads: int, num_kv_heads: int) -> Any:
    return tuple(torch.zeros(1, number, 5, 4) for number in (num_heads, num_kv_heads, num_kv_heads))


@pytest.mark.parametrize(("size", "num_heads", "num_kv_heads"), [(3, 4, 2), (4, 6, 3), (8, 4, 4)])
def test_heads_that_do_not_divide_are_refused(size: int, num_heads: int, num_kv_heads: int) -> None:
    axis = SequenceAxis(Mesh(Group(), Group(), sequence=Group(0, size)), Group(0, size), torch.device("cpu"))
    with pytest.raises(RunError, match=f"{size} processes cannot share the {num_heads} heads of Attention"):
        axis.to_heads(Attention(), heads(num_heads, num_kv_heads), 10)


@pytest.mark.parametrize(("num_tokens", "counts"), [(7, [3, 2, 2]), (6, [2, 2, 2]), (3, [1, 1, 1])])
def test_every_rank_has_neighbouring_tokens(num_tokens: int, counts: list[int]) -> None:
    assert even_counts(num_tokens, 3) == counts
