"""Tokens are drawn as transformers' processors say, and text comes in pieces that are never wrong."""

import math
import random
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lorakit.decoding.sampling import NUCLEUS_TOKENS, Sampler, SamplingSettings, draw_tokens
from lorakit.errors import LorakitError

NUMBER = 4_000


def drawn_token(sampler: Sampler, logits: torch.Tensor) -> int:
    (item,) = draw_tokens([sampler], [logits])
    return item[0]


def shares(logits: torch.Tensor, **values: Any) -> torch.Tensor:
    """Share of each token in many draws, each of a new request."""
    counts = torch.zeros(len(logits))
    sampler = Sampler(SamplingSettings(temperature=values.pop("temperature", 1.0), seed=1, **values), [], frozenset())
    for _ in range(NUMBER):
        counts[drawn_token(sampler, logits)] += 1
    return counts / NUMBER


@pytest.mark.parametrize(
    ("values", "processors"),
    [
        pytest.param({"temperature": 0.5}, [TemperatureLogitsWarper(0.5)], marks=pytest.mark.matrix),
        pytest.param({"top_k": 3}, [TopKLogitsWarper(3)], marks=pytest.mark.matrix),
        pytest.param({"top_k": -1}, [], marks=pytest.mark.matrix),
        pytest.param({"top_p": 0.7}, [TopPLogitsWarper(0.7)], marks=pytest.mark.matrix),
        ({"min_p": 0.3}, [MinPLogitsWarper(0.3)]),
        ({"temperature": 2.0, "top_k": 5, "top_p": 0.8}, [TemperatureLogitsWarper(2.0), TopKLogitsWarper(5), TopPLogitsWarper(0.8)]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_tokens_are_drawn_from_the_distribution_of_transformers_processors(
    values: dict[str, Any], processors: list[Any]
) -> None:
    logits = torch.linspace(-2, 2, 8)[torch.randperm(8, generator=torch.Generator().manual_seed(0))]
    expected = logits[None].clone()
    for processor in processors:
        expected = processor(torch.zeros(1, 0, dtype=torch.int64), expected)
    expected = expected.softmax(-1)[0]

    drawn = shares(logits, **values)

    assert not drawn[expected == 0].any()
    assert drawn[expected > 0.01].all()
    assert (drawn - expected).abs().max() < 4 * math.sqrt(0.25 / NUMBER)


def test_a_request_draws_the_same_tokens_in_any_company() -> None:
    chooser = random.Random(0)
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        rows = [3 * torch.randn(2000 + 8 * chooser.randrange(2), generator=generator) for _ in range(6)]
        settings = [
            SamplingSettings(
                temperature=chooser.choice([0.0, 0.7, 5.0]), top_p=chooser.choice([1.0, 0.9, 0.999]), min_p=chooser.choice([0.0, 0.01]),
                top_k=chooser.choice([0, 1, 40, 3000]), seed=seed, min_tokens=chooser.randrange(2),
            )
            for _ in rows
        ]  # fmt: skip
        alone = [drawn_token(Sampler(one, [], frozenset({7})), row) for one, row in zip(settings, rows, strict=True)]

        together = draw_tokens([Sampler(one, [], frozenset({7})) for one in settings], rows)

        assert [item[0] for item in together] == alone


@pytest.mark.parametrize(
    "spread", [pytest.param(0.0, marks=pytest.mark.matrix), 0.1, 5.0]
)  # in the first two, the nucleus has more tokens than are sorted first
def test_a_nucleus_is_the_least_number_of_tokens_with_its_share(spread: float) -> None:
    logits = spread * torch.randn(3 * NUCLEUS_TOKENS, generator=torch.Generator().manual_seed(0))
    probabilities, order = logits.double().softmax(-1).sort(descending=True)
    inside = set(order[probabilities.cumsum(-1) - probabilities < 0.8].tolist())
    settings = SamplingSettings(temperature=1.0, top_p=0.8, seed=1)
    sampler = Sampler(settings, [], frozenset())

    drawn = {drawn_token(sampler, logits) for _ in range(2000)}

    assert spread == 0 or drawn <= inside
    assert len(drawn) > min(1000, 0.3 * len(inside))


def test_a_request_without_a_token_left_fails_alone() -> None:
    ends = Sampler(SamplingSettings(min_tokens=1, temperature=1.0), [], frozenset({0, 1}))
    other = Sampler(SamplingSettings(), [], frozenset())

    failed, (token, *_) = draw_tokens([ends, other], [torch.zeros(2), torch.tensor([0.0, 1.0])])

    assert "no token is left" in str(failed)
    assert token == 1


def test_a_row_without_a_token_left_beside_one_of_a_larger_vocabulary_fails_by_name() -> None:
    settings = SamplingSettings(temperature=1.0, seed=1)
    samplers = [Sampler(settings, [], frozenset()) for _ in range(2)]

    failed, (token, *_) = draw_tokens(samplers, [torch.full((10,), -math.inf), torch.zeros(14)])

    assert "no token is left" in str(failed)
    assert 0 <= token < 14


def test_a_row_without_a_nucleus_sorts_no_more_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_tokens = []
    usual = torch.Tensor.topk

    def counted(tensor: torch.Tensor, number: int) -> Any:
        sorted_tokens.append(number)
        return usual(tensor, number)

    monkeypatch.setattr(torch.Tensor, "topk", counted)
    samplers = [Sampler(SamplingSettings(temperature=1.0, top_p=top_p), [], frozenset()) for top_p in (0.5, 1.0)]

    draw_tokens(samplers, [torch.arange(5000.0), torch.zeros(5000)])

    assert sorted_tokens == [NUCLEUS_TOKENS]


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-40, 5e-324])
@pytest.mark.parametrize("values", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
def test_a_temperature_near_0_is_greedy(temperature: float, values: dict[str, Any]) -> None:
    logits = torch.linspace(-20, 20, 8)[torch.randperm(8, generator=torch.Generator().manual_seed(0))]
    sampler = Sampler(SamplingSettings(temperature=temperature, **values), [], frozenset())
    assert {drawn_token(sampler, logits) for _ in range(20)} == {int(logits.argmax())}


def test_penalties_and_bias_change_greedy_tokens_as_openai_and_transformers_say() -> None:
    logits = torch.tensor([1.0, 0.9, 0.5, -0.5])

    def tokens(prompt: list[int], **values: Any) -> list[int]:
        sampler = Sampler(SamplingSettings(**values), prompt, frozenset({0}))
        return [drawn_token(sampler, logits) for _ in range(4)]

    assert tokens([]) == [0, 0, 0, 0]
    assert tokens([], presence_penalty=0.2) == [0, 1, 0, 0]  # 0.8, 0.7 after both have come
    assert tokens([], frequency_penalty=0.2) == [0, 1, 0, 1]
    assert tokens([], logit_bias={2: 100}) == [2, 2, 2, 2]
    assert tokens([], min_tokens=2) == [1, 1, 0, 0]
    for prompt in ([], [0], [0, 1, 1]):
        penalty, seen = RepetitionPenaltyLogitsProcessor(1.5), list(prompt)
        for token in tokens(prompt, repetition_penalty=1.5):
            ids = torch.tensor([seen], dtype=torch.int64)
            assert token == int(penalty(ids, logits[None].clone()).argmax())
            seen.append(token)


def test_logprobs_are_those_of_the_softmax() -> None:
    logits = torch.tensor([1.0, 0.5, 2.0])
    ((token, logprob, top),) = draw_tokens([Sampler(SamplingSettings(logprobs=2), [], frozenset())], [logits])

    assert token == 2
    assert logprob == pytest.approx(float(logits.log_softmax(-1)[2]))
    assert [number for number, _ in top] == [2, 0]


@pytest.mark.parametrize(
    "values",
    [{"temperature": -1}, {"temperature": math.nan}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -2}, {"min_p": 2}, {"max_tokens": 0},
     {"min_tokens": 9, "max_tokens": 8}, {"presence_penalty": 3}, {"repetition_penalty": 0}, {"logit_bias": {99: 1.0}},
     {"logit_bias": {1: 101.0}}, {"stop": ("",)}, {"seed": 2**63}, {"logprobs": -1}],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(LorakitError, match=f"^{next(iter(values))}: "):
        SamplingSettings(**values).check(50)
