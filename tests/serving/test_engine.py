"""Requests join and leave a running batch, and each gets the tokens that Python gives it alone."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
)

import lorakit
from lorakit.errors import LorakitError
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving import engine as engine_module
from lorakit.serving.engine import ServingEngine
from lorakit.serving.sampling import SamplingSettings
from tests.helpers.patches import make_patch

SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.3, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}  # fmt: skip


@pytest.fixture(scope="module")
def patches(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("patches")
    return {name: make_patch(base, folder / name, seed=seed) for seed, name in enumerate(("a", "b", "c"))}


@pytest.fixture
def model(base: Path, patches: dict[str, Path]) -> AdaptedModel:
    return lorakit.load(base, patches, dtype="float32")


@pytest.fixture
def engine(model: AdaptedModel) -> Iterator[ServingEngine]:
    opened = ServingEngine(model, max_rows=3)
    yield opened
    opened.close()


def prompts(number: int, longest: int = 30) -> list[list[int]]:
    chooser = random.Random(0)
    return [[chooser.randrange(5, 3000) for _ in range(chooser.randint(1, longest))] for _ in range(number)]


def alone(model: AdaptedModel, prompt: list[int], adapter: str | None, max_tokens: int) -> list[int]:
    return model.generate_ids([prompt], adapter, max_new_tokens=max_tokens)[0]


def test_requests_that_come_and_go_get_the_tokens_that_python_gives_alone(
    model: AdaptedModel, engine: ServingEngine
) -> None:
    chooser = random.Random(1)
    requests = [(prompt, chooser.choice(["a", "b", "c", None]), chooser.randint(1, 12)) for prompt in prompts(24)]
    generations = []
    for prompt, adapter, max_tokens in requests:
        generations.append(engine.submit(prompt, adapter, SamplingSettings(max_tokens=max_tokens)))
        time.sleep(chooser.choice([0, 0, 0.01]))

    answers = [generation.ids() for generation in generations]

    assert answers == [alone(model, *request) for request in requests]
    assert {generation.reason for generation in generations} <= {"stop", "length"}
    assert engine.counts() | {"kv_bytes": 0} == {"decoding": 0, "prefilling": 0, "waiting": 0, "kv_bytes": 0}


def test_a_long_prompt_is_computed_in_parts_beside_rows_that_decode(
    model: AdaptedModel, engine: ServingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 7)
    long = [7 * index % 3000 for index in range(5, 105)]
    first = engine.submit([5, 6, 7], "a", SamplingSettings(max_tokens=40))
    second = engine.submit(long, "b", SamplingSettings(max_tokens=6))

    assert second.ids() == alone(model, long, "b", 6)
    assert first.ids() == alone(model, [5, 6, 7], "a", 40)


def test_a_request_keeps_the_adapter_that_had_the_name_when_it_came(
    model: AdaptedModel, engine: ServingEngine, patches: dict[str, Path]
) -> None:
    expected = {name: alone(model, [9, 8, 7], name, 60) for name in "ab"}
    before = engine.submit([9, 8, 7], "a", SamplingSettings(max_tokens=60))
    model.load_adapter("a", patches["b"], replace=True)
    after = engine.submit([9, 8, 7], "a", SamplingSettings(max_tokens=60))
    model.unload_adapter("a")

    assert before.ids() == expected["a"]
    assert after.ids() == expected["b"]
    with pytest.raises(LorakitError, match="adapter 'a' is not loaded"):
        engine.submit([9], "a")


def test_a_cancelled_request_frees_its_slot_and_changes_no_other(model: AdaptedModel, engine: ServingEngine) -> None:
    generations = [engine.submit(prompt, "a", SamplingSettings(max_tokens=100)) for prompt in prompts(6)]
    next(iter(generations[0]))
    for cancelled in (generations[0], generations[4]):
        cancelled.cancel()

    answers = [generation.ids() for generation in generations]

    assert [generations[index].reason for index in (0, 4)] == ["cancelled", "cancelled"]
    assert len(answers[0]) < 100
    for index in (1, 2, 3, 5):
        assert answers[index] == alone(model, prompts(6)[index], "a", 100)


def test_a_seed_gives_the_same_tokens_in_any_company(model: AdaptedModel, engine: ServingEngine) -> None:
    settings = SamplingSettings(max_tokens=12, temperature=1.0, top_p=0.9, seed=3)
    own = engine.submit([5, 6, 7], "b", settings).ids()

    crowd = [
        engine.submit(prompt, "a", SamplingSettings(max_tokens=20, min_tokens=1, temperature=1.0))
        for prompt in prompts(2)
    ]
    among = engine.submit([5, 6, 7], "b", settings)
    other = engine.submit([5, 6, 7], "b", SamplingSettings(max_tokens=12, temperature=1.0, top_p=0.9, seed=4))

    assert among.ids() == own
    assert other.ids() != own
    assert all(generation.ids() for generation in crowd)


def test_a_request_that_fails_ends_alone(
    model: AdaptedModel, engine: ServingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = engine.submit([5, 6, 7], "a", SamplingSettings(max_tokens=60))
    next(iter(others))
    forward = model.run

    def failing(route: Any, **inputs: Any) -> Any:
        if inputs["input_ids"].shape[1] == 5:
            raise RuntimeError("out of memory")
        return forward(route, **inputs)

    monkeypatch.setattr(model, "run", failing)
    with pytest.raises(LorakitError, match="the request failed: RuntimeError: out of memory"):
        engine.submit([1, 2, 3, 4, 5], "b").ids()
    assert len(others.ids()) == 59


def test_what_does_not_fit_is_refused_and_what_fits_later_waits(model: AdaptedModel) -> None:
    engine = ServingEngine(model, max_rows=8, max_positions=128)
    with pytest.raises(LorakitError, match="need 256 positions; the engine has 128"):
        engine.submit([5] * 100, None, SamplingSettings(max_tokens=60))
    with pytest.raises(LorakitError, match="at most 256 fit this base"):
        engine.submit([5] * 300, None)
    requests = [engine.submit([5, index], None, SamplingSettings(max_tokens=50)) for index in range(5, 10)]

    assert [len(request.ids()) for request in requests] == [len(alone(model, [5, n], None, 50)) for n in range(5, 10)]
    layer = model.model.config.num_hidden_layers
    assert engine.counts()["kv_bytes"] <= 128 * 2 * 8 * 4 * 2 * layer  # positions x heads x width x float32 x k and v
    waiting = engine.submit([5], None, SamplingSettings(max_tokens=60))
    engine.close()
    assert waiting.ids() is not None
    with pytest.raises(LorakitError, match="the engine is closed"):
        engine.submit([5], None, SamplingSettings(max_tokens=5))


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SIZE, vocab_size=300, sliding_window=8),
        Qwen3Config(**SIZE, vocab_size=300, head_dim=8, use_sliding_window=True, sliding_window=8, max_window_layers=1),
        Gemma3TextConfig(**SIZE, vocab_size=300, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
        MixtralConfig(**SIZE, vocab_size=300, num_local_experts=4),
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=300, initializer_range=0.3, bos_token_id=1, eos_token_id=2),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_bases_of_other_kinds_answer_the_same(config: Any) -> None:
    torch.manual_seed(0)
    model = AdaptedModel(AutoModelForCausalLM.from_config(config).eval(), None, None)
    engine = ServingEngine(model, max_rows=4)
    requests = [[number % 295 + 5 for number in prompt] for prompt in prompts(6, longest=25)]

    generations = [engine.submit(prompt, None, SamplingSettings(max_tokens=10)) for prompt in requests]

    assert [one.ids() for one in generations] == [alone(model, prompt, None, 10) for prompt in requests]
    engine.close()


def test_a_base_whose_state_is_no_keys_and_values_is_refused_by_name() -> None:
    model = AutoModelForCausalLM.from_config(MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=300)).eval()
    with pytest.raises(LorakitError, match="MambaForCausalLM"):
        ServingEngine(AdaptedModel(model, None, None))
