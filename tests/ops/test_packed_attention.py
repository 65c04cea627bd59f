"""Packed rows attend row by row: outputs are those of each row alone, and no mask over the line is formed."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lorakit.ops.packed_attention import RowLengths, disable_packed_attention, enable_packed_attention
from tests.helpers.packed_rows import LENGTHS, MORE, model_of, packed_line

CAUSAL = ["llama", "qwen3", "mistral", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "mixtral"]


class Squares(TorchDispatchMode):
    """Counts the computed tensors whose last two sides are as long as a line."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side, self.squares = side, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.squares += sum(
            isinstance(t, torch.Tensor) and t.shape[-2:] == (self.side, self.side) for t in tree_leaves(results)
        )
        return results


@pytest.mark.parametrize("architecture", [*CAUSAL, *MORE])
def test_packed_rows_give_the_outputs_and_gradients_that_they_give_alone(architecture: str) -> None:
    model = model_of(architecture)
    inputs = packed_line()
    each = zip(*(inputs[key].split(LENGTHS, dim=1) for key in ("input_ids", "position_ids")), strict=True)
    alone = torch.cat([model(input_ids=i, position_ids=p, use_cache=False).logits for i, p in each], 1)
    gradients = torch.autograd.grad(alone.square().sum(), list(model.parameters()), allow_unused=True)

    assert enable_packed_attention(model)
    rows = RowLengths(LENGTHS)
    logits = model(**inputs, use_cache=False, row_lengths=rows).logits
    assert rows.was_used

    torch.testing.assert_close(logits, alone, rtol=1e-5, atol=1e-5)
    packed_gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()), allow_unused=True)
    for one, other in zip(packed_gradients, gradients, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3_text", "phi3", "gpt2", "mixtral"])
def test_rows_that_share_their_beginning_give_the_outputs_and_gradients_that_they_give_alone(
    architecture: str, attention: str
) -> None:
    """Two rows after the first 9 of 20 tokens, one of their own, and one after it; windows are shorter than a row."""
    model = model_of(architecture)
    model.set_attn_implementation(attention)
    own, shared = (20, 7, 12, 11, 4), (0, 9, 9, 0, 10)
    ids = [torch.randint(3, 64, (1, length)) for length in own]
    firsts = [0, 0, 0, 3, 3]
    full = [torch.cat([ids[first][:, :count], one], 1) for first, count, one in zip(firsts, shared, ids, strict=True)]
    outputs = [model(input_ids=one, use_cache=False).logits[:, n:] for one, n in zip(full, shared, strict=True)]
    alone = torch.cat(outputs, 1)
    gradients = torch.autograd.grad(alone.square().sum(), list(model.parameters()), allow_unused=True)

    assert enable_packed_attention(model)
    positions = [torch.arange(count, count + length) for count, length in zip(shared, own, strict=True)]
    line = {"input_ids": torch.cat(ids, 1), "position_ids": torch.cat(positions)[None]}
    logits = model(**line, use_cache=False, row_lengths=RowLengths(own, shared=shared)).logits

    torch.testing.assert_close(logits, alone, rtol=1e-5, atol=1e-5)
    packed_gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()), allow_unused=True)
    for one, other in zip(packed_gradients, gradients, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2"])
def test_no_mask_over_a_full_line_is_formed(architecture: str) -> None:
    model = model_of(architecture)
    ids = torch.randint(3, 64, (1, 60))
    positions = torch.arange(20).repeat(3)[None]
    with Squares(side=60) as as_before, torch.no_grad():
        model(input_ids=ids, position_ids=positions, use_cache=False)
    enable_packed_attention(model)
    with Squares(side=60) as now, torch.no_grad():
        model(input_ids=ids, position_ids=positions, use_cache=False, row_lengths=RowLengths((20, 20, 20)))

    assert as_before.squares > 0
    assert now.squares == 0


def test_padded_rows_and_a_cache_are_attended_as_before() -> None:
    model = model_of("mistral")
    ids = torch.randint(3, 64, (2, 10))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    before = model(input_ids=ids, attention_mask=mask).logits
    answer = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)

    enable_packed_attention(model)

    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False), answer)


def test_a_line_without_row_lengths_is_attended_as_before() -> None:
    model = model_of("mistral")
    before = model(**packed_line()).logits

    enable_packed_attention(model)

    assert torch.equal(model(**packed_line()).logits, before)


def test_it_can_be_undone() -> None:
    model = model_of("llama")
    before = model(**packed_line()).logits

    enable_packed_attention(model)
    disable_packed_attention(model)

    assert torch.equal(model(**packed_line()).logits, before)
    assert model.config._attn_implementation == "sdpa"


def test_a_wrapper_attends_around_the_rows_attention_of_each_layer() -> None:
    model = model_of("llama")
    enable_packed_attention(model)
    expected = model(**packed_line(), use_cache=False, row_lengths=RowLengths(LENGTHS)).logits
    seen: list[tuple[int, ...]] = []

    def attend(attend_rows: Any, module: Any, heads: Any, masks: Any, rows: RowLengths) -> torch.Tensor:
        seen.append(rows.lengths)
        output: torch.Tensor = attend_rows(module, heads, masks)
        return output

    rows = RowLengths(LENGTHS)
    rows.wrapper = attend
    assert torch.equal(model(**packed_line(), use_cache=False, row_lengths=rows).logits, expected)
    assert seen == [tuple(LENGTHS)] * model.config.num_hidden_layers
