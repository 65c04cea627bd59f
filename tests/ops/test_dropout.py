"""Dropout's masks: their share and independence, and of what they are a function."""

from dataclasses import replace

import pytest
import torch

from lorakit.ops.dropout import BLOCK_ELEMENTS, DropoutMask, TokenKeys, column_keys, dropout_mask, use_token_keys

TOKENS, COLUMNS = 700, 900


def keys(row: int = 0, count: int = TOKENS) -> TokenKeys:
    return TokenKeys(torch.full((count,), 1234 + row), torch.arange(count), torch.full((count,), count))


def mask_of(layer: str = "layer", p: float = 0.2, row: int = 0, count: int = TOKENS) -> DropoutMask:
    with use_token_keys(keys(row, count)):
        return dropout_mask(torch.empty(count, COLUMNS), p, layer)


@pytest.mark.parametrize("p", [0.01, 0.2, 0.5, 0.9])
def test_a_mask_has_the_requested_share_of_zeros_in_every_row_and_column(p: float) -> None:
    dropped = mask_of(p=p).apply(torch.ones(TOKENS, COLUMNS))
    zeros = (dropped == 0).double()

    assert float(dropped.max()) == pytest.approx(1 / (1 - p))
    assert 2 * BLOCK_ELEMENTS["cpu"] < TOKENS * COLUMNS  # more than one block
    for share, count in ((zeros.mean(), TOKENS * COLUMNS), (zeros.mean(0), TOKENS), (zeros.mean(1), COLUMNS)):
        error = (share - p).abs().max() / (p * (1 - p) / count) ** 0.5
        assert error < 5, error


def test_rows_columns_layers_and_tokens_of_other_rows_have_unrelated_zeros() -> None:
    p = 0.3
    masks = [
        (mask_of(layer, p, row).apply(torch.ones(TOKENS, COLUMNS)) == 0).double() - p
        for layer, row in (("layer", 0), ("layer.1", 0), ("layer", 1))
    ]
    expected = p * (1 - p)
    for other in masks[1:]:
        assert abs(float((masks[0] * other).mean())) < 5 * expected / (TOKENS * COLUMNS) ** 0.5
    for matrix, count in ((masks[0] @ masks[0].T / COLUMNS, COLUMNS), (masks[0].T @ masks[0] / TOKENS, TOKENS)):
        between = matrix[~torch.eye(len(matrix), dtype=torch.bool)]
        assert float(between.abs().max()) < 6 * expected / count**0.5  # of 245,000 pairs and more
        assert float(between.std()) == pytest.approx(expected / count**0.5, rel=0.05)


def test_a_token_has_its_zeros_wherever_it_is() -> None:
    x = torch.randn(TOKENS, COLUMNS)
    together = mask_of().apply(x)
    order = torch.randperm(TOKENS)
    shuffled = TokenKeys(torch.full((TOKENS,), 1234), torch.arange(TOKENS)[order], torch.full((TOKENS,), TOKENS))
    with use_token_keys(shuffled):
        assert torch.equal(dropout_mask(x, 0.2, "layer").apply(x[order]), together[order])
    assert torch.equal(mask_of(count=5).apply(x[:5]), together[:5])
    assert torch.equal(mask_of().apply(x.view(2, -1, COLUMNS)).flatten(0, 1), together)
    assert not torch.equal(mask_of("other").apply(x), together)


def test_without_an_engine_masks_follow_torchs_generator() -> None:
    x = torch.randn(8, COLUMNS)

    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        with use_token_keys(keys()):  # of another number of tokens than x has
            return dropout_mask(x, 0.5, "layer").apply(x)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    first, second = (dropout_mask(x, 0.5, "layer").apply(x) for _ in range(2))
    assert not torch.equal(first, second)


def test_the_mask_of_some_columns_is_that_part_of_the_full_mask() -> None:
    """As a rank has it that reads some columns of a layer's input."""
    x = torch.ones(TOKENS, COLUMNS)
    with use_token_keys(keys()):
        full = dropout_mask(x, 0.2, "layer")
    assert isinstance(full, DropoutMask)
    part = replace(full, column_keys=column_keys("layer", range(300, COLUMNS), x.device))
    assert torch.equal(part.apply(x[:, 300:]), mask_of().apply(x)[:, 300:])
