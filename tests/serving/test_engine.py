"""Requests join and leave a running batch, and each gets the tokens that Python gives it alone."""

import gc
import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen3Config,
    RwkvConfig,
)

from lorakit.decoding import batch as batch_module
from lorakit.decoding.generation import Item
from lorakit.decoding.sampling import SamplingSettings
from lorakit.errors import LorakitError
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.engine import ServingEngine
from tests.helpers.models import bare_model
from tests.helpers.serving import alone, paused, prompts, wait_until
from tests.serving.conftest import three_adapters

model = three_adapters

SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.3, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}  # fmt: skip


@pytest.fixture
def engine(model: AdaptedModel) -> Iterator[ServingEngine]:
    opened = ServingEngine(model, max_rows=3)
    yield opened
    opened.close()


def test_requests_that_come_and_go_get_the_tokens_that_python_gives_alone(
    model: AdaptedModel, engine: ServingEngine
) -> None:
    chooser = random.Random(1)
    requests = [(prompt, chooser.choice(["a", "b", "c", None]), chooser.randint(1, 12)) for prompt in prompts(24)]
    generations = []
    for prompt, adapter, max_tokens in requests:
        generations.append(engine.submit(prompt, adapter, SamplingSettings(max_tokens=max_tokens)))
        if chooser.random() < 0.3:
            wait_until(lambda: generations[len(generations) // 2].reason is not None)  # so that later ones join others

    answers = [generation.ids() for generation in generations]

    assert answers == [alone(model, *request) for request in requests]
    assert {generation.reason for generation in generations} <= {"stop", "length"}
    counts = engine.counts()
    assert {counts[name] for name in ("decoding", "prefilling", "waiting", "kv_bytes")} == {0}
    assert engine.totals["failed_steps"] == 0


def test_a_long_prompt_is_computed_in_parts_beside_rows_that_decode(
    model: AdaptedModel, engine: ServingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "PREFILL_TOKENS", 7)
    long = [7 * index % 3000 for index in range(5, 105)]
    first = engine.submit([5, 6, 7], "a", SamplingSettings(max_tokens=40))
    second = engine.submit(long, "b", SamplingSettings(max_tokens=6))

    assert second.ids() == alone(model, long, "b", 6)
    assert first.ids() == alone(model, [5, 6, 7], "a", 40)


def test_many_short_requests_come_between_few_tokens_of_a_stream(model: AdaptedModel, engine: ServingEngine) -> None:
    stream = None
    waited: list[int] = []  # tokens of the stream before each short answer

    def note(item: Item) -> None:
        if item is None and stream is not None:
            waited.append(len(stream.tokens))

    with paused(engine):
        stream = engine.submit([5], "a", SamplingSettings(max_tokens=200, min_tokens=200))
        for number in range(300):
            engine.submit([6 + number], "b", SamplingSettings(max_tokens=1), note)
    wait_until(lambda: len(waited) == 300)
    stream.cancel()
    assert max(map(waited.count, waited)) < 100


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


def test_an_unloaded_adapter_leaves_the_memory_when_its_requests_have_ended(
    model: AdaptedModel, engine: ServingEngine
) -> None:
    adapter = weakref.ref(model.adapter("a"))

    together = [engine.submit([9, 8, 7], name, SamplingSettings(max_tokens=4)) for name in ("a", "b", "a")]
    for generation in together:
        generation.ids()
    del together, generation
    model.unload_adapter("a")
    engine.submit([9, 8, 7], "c", SamplingSettings(max_tokens=1)).ids()  # its step begins when theirs have ended

    gc.collect()
    assert adapter() is None


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
    forward = model.model.forward

    def failing(**inputs: Any) -> Any:
        if inputs["input_ids"].shape[1] == 5:
            raise RuntimeError("out of memory")
        return forward(**inputs)

    monkeypatch.setattr(model.model, "forward", failing)
    failed = engine.submit([1, 2, 3, 4, 5], "b")
    with pytest.raises(LorakitError, match="the request failed: RuntimeError: out of memory"):
        failed.ids()
    assert len(others.ids()) == 59
    assert (failed.reason, engine.finished["error"]) == ("error", 1)


def test_a_row_that_fails_in_a_batch_fails_alone(model: AdaptedModel, engine: ServingEngine) -> None:
    bad = model.adapter("b")
    layer = model.model.get_submodule("model.layers.0.mlp.down_proj")

    def fail(module: nn.Module, args: Any, output: Tensor) -> None:
        route = model._route.get()
        if output.shape[1] == 1 and route is not None and bad in route.adapters:  # its decode steps
            raise RuntimeError("a broken adapter")

    expected = alone(model, [5, 6, 7], "a", 40)
    hook = layer.register_forward_hook(fail)
    with paused(engine):
        others = [engine.submit([5, 6, 7], "a", SamplingSettings(max_tokens=40)) for _ in range(2)]
        broken = engine.submit([5, 6, 7], "b", SamplingSettings(max_tokens=40, min_tokens=2))
    with pytest.raises(LorakitError, match="a broken adapter"):
        broken.ids()
    hook.remove()

    assert [one.ids() for one in others] == [expected] * 2
    assert engine.submit([5, 6, 7], "b", SamplingSettings(max_tokens=8)).ids() == alone(model, [5, 6, 7], "b", 8)


def test_an_error_that_happens_once_in_a_batch_changes_no_answer(model: AdaptedModel, engine: ServingEngine) -> None:
    errors = [RuntimeError("out of memory")]

    def fail_once(module: nn.Module, args: Any, output: Tensor) -> None:
        if len(output) == 3 and errors:
            raise errors.pop()

    expected = [alone(model, [5, 6, n], "abc"[n % 3], 40) for n in (7, 8, 9)]
    hook = model.model.get_submodule("model.layers.1.mlp.down_proj").register_forward_hook(fail_once)
    with paused(engine):
        requests = [engine.submit([5, 6, n], "abc"[n % 3], SamplingSettings(max_tokens=40)) for n in (7, 8, 9)]

    assert [request.ids() for request in requests] == expected
    assert (errors, engine.totals["failed_steps"]) == ([], 1)
    hook.remove()


def test_logits_that_are_not_numbers_fail_their_row_and_leave_nothing_in_its_slot(
    model: AdaptedModel, engine: ServingEngine
) -> None:
    def spoil(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if output.shape[:2] == (2, 60):  # both long prompts, the second one padded
            output[1] = float("nan")
        return output

    expected = alone(model, [5, 6, 7], "a", 9)
    hook = model.model.get_submodule("model.layers.0.self_attn.v_proj").register_forward_hook(spoil)
    with paused(engine):
        other = engine.submit([6] * 60, "b", SamplingSettings(max_tokens=60, min_tokens=60))  # so that slots stay
        spoiled = engine.submit([5] * 50)
        next_in_its_slot = engine.submit([5, 6, 7], "a", SamplingSettings(max_tokens=9))
    with pytest.raises(LorakitError, match="the logits are not numbers"):
        spoiled.ids()
    assert next_in_its_slot.ids() == expected
    assert len(other.ids()) == 60
    hook.remove()


def test_a_caller_that_cannot_take_tokens_harms_no_other(model: AdaptedModel, engine: ServingEngine) -> None:
    def closed(item: Item) -> None:
        raise RuntimeError("the event loop is closed")

    engine.submit([5, 6, 7], "a", SamplingSettings(max_tokens=50, min_tokens=50), closed)

    assert engine.submit([5, 6], "b", SamplingSettings(max_tokens=9)).ids() == alone(model, [5, 6], "b", 9)
    wait_until(lambda: engine.finished.total() == 2)
    assert engine.finished["cancelled"] == 1


def test_an_error_of_the_engine_itself_fails_its_requests_and_not_the_later_ones(
    model: AdaptedModel, engine: ServingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(engine._batch, "_make_room", lambda: 1 / 0)
        with pytest.raises(LorakitError, match="ZeroDivisionError"):
            engine.submit([5, 6, 7], "a").ids()

    assert engine.submit([5, 6], "b", SamplingSettings(max_tokens=9)).ids() == alone(model, [5, 6], "b", 9)


def test_what_does_not_fit_is_refused_and_what_fits_later_waits(model: AdaptedModel) -> None:
    engine = ServingEngine(model, max_rows=8, max_positions=128)
    with pytest.raises(
        LorakitError, match=r"need keys and values of 160 tokens, 40,960 bytes; the server has memory for 128"
    ):
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
    model = bare_model(AutoModelForCausalLM.from_config(config).eval())
    engine = ServingEngine(model, max_rows=4)
    requests = [[number % 295 + 5 for number in prompt] for prompt in prompts(6, longest=25)]

    generations = [engine.submit(prompt, None, SamplingSettings(max_tokens=10)) for prompt in requests]

    assert [one.ids() for one in generations] == [alone(model, prompt, None, 10) for prompt in requests]
    engine.close()


def test_a_base_whose_state_is_no_keys_and_values_is_refused_by_name() -> None:
    model = AutoModelForCausalLM.from_config(RwkvConfig(hidden_size=32, num_hidden_layers=2, vocab_size=300)).eval()
    with pytest.raises(LorakitError, match="RwkvForCausalLM"):
        ServingEngine(bare_model(model))


def test_layers_with_a_window_of_their_own_are_refused_by_name_and_python_answers_beyond_it() -> None:
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 300, "initializer_range": 0.3}
    config = GPTNeoConfig(**small, attention_types=[[["global", "local"], 1]], window_size=16, eos_token_id=2)
    model = bare_model(AutoModelForCausalLM.from_config(config).eval())
    with pytest.raises(LorakitError, match="GPTNeoForCausalLM has layers of the kind local"):
        ServingEngine(model)

    requests = [[number % 295 + 5 for number in prompt] for prompt in prompts(4, longest=25)]
    assert model.generate_ids(requests, max_new_tokens=6) == [alone(model, prompt, None, 6) for prompt in requests]


def test_no_row_is_so_long_that_it_would_change_the_positions_of_others() -> None:
    rope = {"rope_type": "longrope", "long_factor": [4.0] * 4, "short_factor": [1.0] * 4}
    config = Phi3Config(**SIZE, vocab_size=300, rope_parameters=rope, max_position_embeddings=256, original_max_position_embeddings=64)  # fmt: skip
    torch.manual_seed(0)
    model = bare_model(AutoModelForCausalLM.from_config(config).eval())
    engine = ServingEngine(model)
    with pytest.raises(LorakitError, match="40 tokens and max_tokens 25 are more than 64; beyond, this"):
        engine.submit([5] * 40, None, SamplingSettings(max_tokens=25))

    generations = [engine.submit([5, n] * 20, None, SamplingSettings(max_tokens=24)) for n in (6, 7)]

    assert [one.ids() for one in generations] == [alone(model, [5, n] * 20, None, 24) for n in (6, 7)]
    engine.close()
