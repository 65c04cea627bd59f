"""A checksum of the experts that were chosen differs where one token has another expert."""

import pytest
import torch
from torch import nn

from lorakit.parallel.tensor.axis import ExpertChoices


def checksum(*chosen: torch.Tensor) -> float:
    choices = ExpertChoices()
    for each in chosen:
        choices.before_experts(nn.Identity(), (torch.zeros(len(each), 4), each, torch.ones(each.shape)))
    total = choices.take()
    assert choices.take() == 0  # taken once
    return float(total)


def test_another_choice_of_one_token_is_another_checksum() -> None:
    chosen = torch.arange(600).view(300, 2) % 8
    same = checksum(chosen, chosen)
    assert same == checksum(chosen.clone(), chosen.clone())
    assert same == int(same) < 2**16  # so that its sum over ranks is exact in float32
    for token in (0, 17, 299):
        for layer in (0, 1):
            other = [chosen.clone(), chosen.clone()]
            other[layer][token] = other[layer][token].flip(0)
            assert checksum(*other) != same


def test_experts_that_are_called_otherwise_are_refused() -> None:
    with pytest.raises(RuntimeError, match="without the indices of those that were chosen"):
        ExpertChoices().before_experts(nn.Identity(), (torch.zeros(3, 4), torch.ones(3, 2)))
