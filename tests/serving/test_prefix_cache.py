"""A prefix that was computed is not computed again, and no answer shows whether it was."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig

from lorakit.decoding import batch as batch_module
from lorakit.decoding.kv_memory import BLOCK_TOKENS, PrefixCache, block_keys
from lorakit.decoding.sampling import SamplingSettings
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.engine import ServingEngine
from lorakit.slots.routing import Adapter
from tests.helpers.models import bare_model
from tests.helpers.serving import alone, paused
from tests.serving.conftest import three_adapters

model = three_adapters

LONG = [7 * index % 2000 + 5 for index in range(100)]
SETTINGS = SamplingSettings(max_tokens=8, logprobs=3)
SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.3, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}  # fmt: skip


@pytest.fixture
def engine(model: AdaptedModel) -> Iterator[ServingEngine]:
    with closing(ServingEngine(model)) as opened:
        yield opened


def answer(engine: ServingEngine, prompt: list[int], adapter: str | None = None) -> tuple[list[int], list[float], int]:
    """Return ids, log-probabilities, and the tokens that were in the cache."""
    generation = engine.submit(prompt, adapter, SETTINGS)
    tokens = list(generation)
    return [token.id for token in tokens], [token.logprob for token in tokens if token.logprob is not None], generation.cached_tokens  # fmt: skip


def test_a_cached_prefix_gives_the_same_answer_as_a_computed_one(engine: ServingEngine) -> None:
    ids, logprobs, cached = answer(engine, LONG, "a")
    again_ids, again_logprobs, again_cached = answer(engine, LONG, "a")

    assert (cached, again_cached) == (0, 96)
    assert again_ids == ids
    assert again_logprobs == pytest.approx(logprobs, abs=2e-6)  # the last tokens are computed in a smaller product


@pytest.mark.parametrize(
    ("length", "cached"), [(BLOCK_TOKENS, 0), (BLOCK_TOKENS + 1, BLOCK_TOKENS), (48, 32), (49, 48), (100, 96)]
)
def test_the_last_token_of_a_prompt_is_always_computed(
    model: AdaptedModel, engine: ServingEngine, length: int, cached: int
) -> None:
    answer(engine, LONG)
    ids, _, tokens = answer(engine, LONG[:length])
    assert (ids, tokens) == (alone(model, LONG[:length], None, 8), cached)


def test_a_conversation_goes_on_from_its_answer(model: AdaptedModel, engine: ServingEngine) -> None:
    first = engine.submit(LONG[:20], "a", SamplingSettings(max_tokens=40, min_tokens=40)).ids()
    prompt = LONG[:20] + first + LONG[50:60]
    ids, _, cached = answer(engine, prompt, "a")
    assert (ids, cached) == (alone(model, prompt, "a", 8), 48)  # 20 + 39 tokens have keys and values


@pytest.mark.parametrize("budget", [512, 24])  # tokens of prompts in a step, so that one takes a step, or several
def test_samples_of_one_prompt_share_it(engine: ServingEngine, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "PREFILL_TOKENS", budget)
    samples = [engine.submit(LONG, "b", SamplingSettings(max_tokens=5, temperature=1.0, seed=n)) for n in range(4)]
    own = [sample.ids() for sample in samples]
    assert [sample.cached_tokens for sample in samples] == [0, 96, 96, 96]
    assert own == [engine.submit(LONG, "b", sample.settings).ids() for sample in samples]


def test_no_adapter_reads_the_prefix_of_another_nor_of_an_earlier_one_of_its_name(
    model: AdaptedModel, engine: ServingEngine, patches: dict[str, Path]
) -> None:
    expected = {name: alone(model, LONG, name, 8) for name in ("a", "b", "c", None)}
    assert len({tuple(ids) for ids in expected.values()}) == 4

    for name, ids in expected.items():
        assert answer(engine, LONG, name)[::2] == (ids, 0)
    model.load_adapter("a", patches["b"], replace=True)
    assert answer(engine, LONG, "a")[::2] == (expected["b"], 96)  # the same adapter as b, by its digest
    model.unload_adapter("c")
    model.load_adapter("c", patches["a"])
    assert answer(engine, LONG, "c")[::2] == (expected["a"], 96)
    model.unload_adapter("b")
    model.load_adapter("b", patches["c"])
    assert answer(engine, LONG, "b")[::2] == (expected["c"], 96)


def test_an_adapter_without_a_digest_has_keys_that_no_other_gets() -> None:
    first, second = Adapter(1, {}), Adapter(2, {})
    assert block_keys(first, LONG) != block_keys(second, LONG)
    assert block_keys(first, LONG) == block_keys(Adapter(1, {}), LONG)
    assert not set(block_keys(first, LONG)) & set(block_keys(None, LONG))
    assert block_keys(None, LONG[:48]) == block_keys(None, LONG)[:3]
    assert not set(block_keys(None, [1, *LONG])) & set(block_keys(None, LONG))


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SIZE, vocab_size=2100, sliding_window=8),
        Gemma3TextConfig(**SIZE, vocab_size=2100, head_dim=8, sliding_window=24, layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_bases_with_a_sliding_window_have_right_prefixes_too(config: Any) -> None:
    torch.manual_seed(0)
    model = bare_model(AutoModelForCausalLM.from_config(config).eval())
    with closing(ServingEngine(model)) as engine:
        answer(engine, LONG)
        for prompt in (LONG, LONG[:40], [*LONG[:70], *LONG[:30]]):
            ids, _, cached = answer(engine, prompt)
            assert cached > 0
            assert ids == alone(model, prompt, None, 8)


def test_prefixes_leave_when_rows_need_their_memory(model: AdaptedModel) -> None:
    with closing(ServingEngine(model, max_positions=320)) as engine:
        answer(engine, LONG)
        assert engine.counts()["prefix_bytes"] == 96 * 256
        others = [
            engine.submit([5, number], "a", SamplingSettings(max_tokens=70, min_tokens=70)) for number in (6, 7, 8, 9)
        ]
        most = 0
        for generation in others:
            for _ in generation:
                counts = engine.counts()
                most = max(most, counts["kv_bytes"] + counts["prefix_bytes"])
        assert most <= engine.counts()["kv_limit_bytes"] == 320 * 256
        assert answer(engine, LONG)[::2] == (alone(model, LONG, None, 8), 0)


def test_the_block_that_was_used_last_stays_and_a_chain_loses_its_end_first() -> None:
    cache = PrefixCache()
    old, new = (block_keys(None, [number] * 48) for number in (1, 2))
    for keys in (old, new, old):
        cache.update({key: [] for key in keys})
        assert cache.use(keys) == []

    cache.shrink(4)

    assert (cache.use(old), cache.use(new)) == ([], new[1:])


def test_a_prefix_stays_as_it_was_when_another_row_has_its_slot(model: AdaptedModel) -> None:
    with closing(ServingEngine(model, max_rows=2)) as engine:
        with paused(engine):
            engine.submit([6] * 120, "b", SamplingSettings(max_tokens=100, min_tokens=100))  # so that slots stay
            generations = [engine.submit(prompt, "a", SETTINGS) for prompt in (LONG, LONG[::-1], LONG)]
        answers = [generation.ids() for generation in generations]
    assert answers == [alone(model, generation.prompt, "a", 8) for generation in generations]
    assert [generation.cached_tokens for generation in generations] == [0, 0, 96]


def test_an_adapter_that_was_unloaded_is_freed_while_its_prefixes_stay(
    model: AdaptedModel, engine: ServingEngine
) -> None:
    answer(engine, LONG, "a")
    slots = weakref.ref(next(iter(model.adapter("a").slots.values())).factors)  # type: ignore[union-attr]
    model.unload_adapter("a")
    answer(engine, LONG, "b")
    gc.collect()
    assert slots() is None
    assert engine.counts()["prefix_bytes"] > 0
