"""Each row has a slot of its own size, so a long one costs the others no memory, and no answer depends on sizes."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Gemma3TextConfig, GptOssConfig, LlamaConfig

import lorakit
from lorakit.decoding import batch as batch_module
from lorakit.decoding import kv_cache
from lorakit.decoding.generation import Generation, RequestQueue
from lorakit.decoding.kv_cache import SlotCache
from lorakit.decoding.sampling import SamplingSettings
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.engine import ServingEngine
from tests.helpers.patches import make_patch
from tests.helpers.serving import alone, paused, wait_until

SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300,
        "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.3, "eos_token_id": None,
        "bos_token_id": 1, "pad_token_id": 0}  # fmt: skip
BASES: dict[str, tuple[Any, bool]] = {  # config, and whether rows of one forward have slots of one size
    "llama": (LlamaConfig(**SIZE), False),
    "eager": (LlamaConfig(**SIZE, attn_implementation="eager"), False),
    "gemma3": (Gemma3TextConfig(**SIZE, head_dim=8, sliding_window=24), False),
    "gpt_oss": (GptOssConfig(**SIZE, head_dim=8, sliding_window=24, num_local_experts=4, num_experts_per_tok=2), False),
    # its attention computes keys from what the cache gives
    "deepseek_v3": (DeepseekV3Config(**{**SIZE, "num_key_value_heads": 4}, n_routed_experts=4, num_experts_per_tok=2,
                                     n_group=1, topk_group=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8,
                                     qk_nope_head_dim=8, v_head_dim=8, moe_intermediate_size=16), True),
}  # fmt: skip
LENGTHS = (3, 700, 60, 63, 190, 5, 330, 40)
"""tokens of prompts in slots of several sizes; some outgrow theirs while they are answered"""


@pytest.fixture(params=BASES)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[AdaptedModel, bool]:
    torch.manual_seed(0)
    config, one_size = BASES[request.param]
    implementation = config._attn_implementation
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    patches = {name: make_patch(tmp_path / "base", tmp_path / name, seed=seed) for seed, name in enumerate("ab")}
    model = lorakit.load(tmp_path / "base", patches, dtype="float32")
    if implementation:
        model.model.set_attn_implementation(implementation)  # type: ignore[operator]
    return model, one_size


@pytest.fixture
def llama(tmp_path: Path) -> AdaptedModel:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZE)).save_pretrained(tmp_path / "base")
    return lorakit.load(tmp_path / "base", dtype="float32")


@pytest.fixture
def num_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Collect the sizes of slots of each forward."""
    counts: list[int] = []
    commit = SlotCache.commit

    def counted(cache: SlotCache) -> None:
        counts.append(len(cache.parts))
        commit(cache)

    monkeypatch.setattr(SlotCache, "commit", counted)
    return counts


def drawn_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(5, 300) for _ in range(length)] for length in lengths]


def test_rows_in_slots_of_several_sizes_get_the_tokens_of_a_row_alone(
    base: tuple[AdaptedModel, bool], num_parts: list[int]
) -> None:
    model, one_size = base
    requests = [(prompt, "ab"[number % 2]) for number, prompt in enumerate(drawn_prompts(LENGTHS))]
    with contextlib.closing(ServingEngine(model)) as engine:
        num_parts.clear()
        with paused(engine):
            generations = [engine.submit(*request, SamplingSettings(max_tokens=12)) for request in requests]
        answers = [generation.ids() for generation in generations]
        assert engine.totals["failed_steps"] == 0
        assert engine.counts()["kv_bytes"] == 0
    assert max(num_parts) == (1 if one_size else 5)
    assert answers == [alone(model, *request, 12) for request in requests]


def test_a_long_row_makes_no_other_slot_longer(llama: AdaptedModel) -> None:
    lengths = (2000, *[50] * 15)
    with contextlib.closing(ServingEngine(llama)) as engine:
        with paused(engine):
            generations = [
                engine.submit(prompt, None, SamplingSettings(max_tokens=12)) for prompt in drawn_prompts(lengths)
            ]
        most = 0
        for generation in generations:
            for _ in generation:
                most = max(most, engine.counts()["kv_bytes"])
        needed = sum(lengths) * engine._memory.position_bytes
    assert needed < most <= 1.3 * needed


def test_the_row_that_is_computed_again_soonest_leaves(llama: AdaptedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[int] = []
    put_back = RequestQueue.put_back

    def counted(queue: RequestQueue[Generation], row: Generation) -> None:
        again.append(len(row.prompt))
        put_back(queue, row)

    monkeypatch.setattr(RequestQueue, "put_back", counted)
    with contextlib.closing(ServingEngine(llama, max_positions=460)) as engine:
        with paused(engine):
            generations = [
                engine.submit(prompt, None, SamplingSettings(max_tokens=90)) for prompt in drawn_prompts((20, 10, 200))
            ]
        wait_until(lambda: all(generation.reason is not None for generation in generations))
        answers = [generation.ids() for generation in generations]
    assert again
    assert set(again) == {10}
    assert answers == [alone(llama, one.prompt, None, 90) for one in generations]


def test_slots_that_cannot_be_had_change_no_row(llama: AdaptedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that ends while a row is admitted, at any layer, fails that row alone."""
    first, second = drawn_prompts((280, 60))
    resize = kv_cache._resized
    for layer in range(2 * SIZE["num_hidden_layers"]):  # type: ignore[operator]
        with contextlib.closing(ServingEngine(llama)) as engine:
            generation = engine.submit(first, None, SamplingSettings(max_tokens=20))
            tokens = [next(iter(generation)).id]
            num_left = [layer]

            def resized(*args: Any, num_left: list[int] = num_left) -> torch.Tensor:
                if args[2] == 64 and not num_left[0]:
                    raise MemoryError("no memory")
                num_left[0] -= args[2] == 64
                return resize(*args)

            with monkeypatch.context() as patched:
                patched.setattr(kv_cache, "_resized", resized)
                failed = engine.submit(second, None, SamplingSettings(max_tokens=4))
                wait_until(lambda failed=failed: failed.reason is not None)  # type: ignore[misc]
            assert failed.reason == "error"
            tokens += generation.ids()
            assert tokens == alone(llama, first, None, 20)
            assert engine.submit(second, None, SamplingSettings(max_tokens=4)).ids() == alone(llama, second, None, 4)


def test_rows_between_which_another_is_prefilled_are_computed_together(
    llama: AdaptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "PREFILL_TOKENS", 7)
    first, ends, second, long = drawn_prompts((5, 6, 7, 60))  # the last one moves into the slot of the one that ends
    requests = [(first, 40), (ends, 8), (second, 40), (long, 3)]
    with contextlib.closing(ServingEngine(llama)) as engine:
        with paused(engine):
            generations = [engine.submit(ids, None, SamplingSettings(max_tokens=number)) for ids, number in requests]
        answers = [generation.ids() for generation in generations]
        assert engine.totals["failed_steps"] == 0
    assert answers == [alone(llama, ids, None, number) for ids, number in requests]
