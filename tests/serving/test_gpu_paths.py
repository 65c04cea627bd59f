"""The engine on a pretended GPU: the tokens of the CPU, and as few waits for the device with many rows as with one."""

import random
from pathlib import Path
from typing import Any

import pytest

import lorakit
from lorakit.decoding.batch import answer_all
from lorakit.decoding.generation import Generation
from lorakit.decoding.sampling import SamplingSettings, Token
from lorakit.inference.adapted_model import AdaptedModel
from tests.helpers import pretend_gpu

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalised": {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {7: 2.0}, "min_tokens": 4},
    "reported": {"logprobs": 3},
    "restricted": {"response_format": {"type": "json_object"}},
}  # fmt: skip
MAX_TOKENS = 8


def answers(model: AdaptedModel, settings: list[SamplingSettings]) -> list[list[Token]]:
    """Return the tokens of one row for each settings, each with an adapter, a prompt and a seed of its own."""
    chooser = random.Random(0)
    codec = model.codec(None)
    rows = []
    for number, own in enumerate(settings):
        adapter = model.adapter(["a", "b", None][number % 3])
        prompt = [chooser.randrange(5, 3000) for _ in range(5)]
        rows.append(Generation(adapter, prompt, own, grammar=codec.grammars.compile(own.response_format)))
    answer_all(model, rows)
    return [list(row) for row in rows]


def test_rows_of_all_settings_get_the_tokens_of_the_cpu(base: Path, patches: dict[str, Path]) -> None:
    settings = [SamplingSettings(max_tokens=MAX_TOKENS, seed=seed, **one) for seed, one in enumerate(SETTINGS.values())]
    expected = answers(lorakit.load(base, patches, dtype="float32"), settings)
    with pretend_gpu.pretend_gpu():
        actual = answers(lorakit.load(base, patches, dtype="float32"), settings)
    for one, other in zip(actual, expected, strict=True):
        assert [token.id for token in one] == [token.id for token in other]
        assert [token.logprob for token in one] == pytest.approx([token.logprob for token in other], abs=1e-4)


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_a_step_waits_for_the_gpu_as_often_with_many_rows_as_with_one(
    kind: str, base: Path, patches: dict[str, Path]
) -> None:
    def waits(num_rows: int) -> int:
        pretend_gpu.SYNCS.clear()
        answers(
            model, [SamplingSettings(max_tokens=MAX_TOKENS, seed=seed, **SETTINGS[kind]) for seed in range(num_rows)]
        )
        assert not any("_to_copy" in place for place in pretend_gpu.SYNCS), "logits are sampled where they are"
        return pretend_gpu.SYNCS.total()

    with pretend_gpu.pretend_gpu():
        model = lorakit.load(base, patches, dtype="float32")
        assert model.slots is not None
        one = waits(1)
        assert waits(6) <= one
        assert one <= 3 * MAX_TOKENS
