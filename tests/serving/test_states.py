"""Bases whose layers have states, such as Qwen 3.5: each row's are its own, whatever happens to the rows beside it."""

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import lorakit
from lorakit.decoding import batch as batch_module
from lorakit.decoding.sampling import SamplingSettings
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.ops.encoder_head import LAST
from lorakit.patch.pooling import Pooling
from lorakit.serving import engine as engine_module
from lorakit.serving.completion_routes import prompt_tokens
from lorakit.serving.engine import ServingEngine
from tests.helpers.patches import make_patch
from tests.helpers.serving import alone, paused, prompts, wait_until

SIZE: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2, "eos_token_id": 2,
    "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": LINEAR,
    "lfm2": {"full_attn_idxs": [1, 3]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "mamba_d_head": 16},
    "qwen3_next": {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 32},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 16, "n_mamba_heads": 4, "num_mem_blocks": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, **EXPERTS, "num_dense_layers": 1},
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "mamba2": {"state_size": 16, "num_heads": 8, "n_groups": 1},
    "jamba": {
        **EXPERTS, "mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False, "attn_layer_period": 2,
        "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    },
}  # fmt: skip
IN_MATRIX = ("falcon_h1", "qwen3_next", "bamba", "zamba2", "lfm2_moe", "falcon_mamba", "mamba2")


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], AdaptedModel]:
    """Make a base of a family, and load it with two patches whose tensors are all random."""

    def load(family: str) -> AdaptedModel:
        torch.manual_seed(0)
        config = CONFIG_MAPPING[family](**{**SIZE, **FAMILIES[family]})
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
        patches = {name: make_patch(tmp_path / "base", tmp_path / name, seed=seed) for seed, name in enumerate("ab")}
        return lorakit.load(tmp_path / "base", patches, dtype="float32")

    return load


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.matrix if name in IN_MATRIX else []) for name in FAMILIES]
)
def test_rows_that_come_and_go_get_the_tokens_of_a_row_alone(
    family: str, load: Callable[[str], AdaptedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "PREFILL_TOKENS", 7)  # so that prompts are computed in parts
    monkeypatch.setattr(batch_module, "HEADROOM_TOKENS", 4)  # so that rows are admitted that must leave again
    model = load(family)
    draw = random.Random(1)
    requests = [
        ([token % 295 + 5 for token in prompt], draw.choice(["a", "b", None]), draw.randint(1, 12))
        for prompt in prompts(14, longest=25)
    ]
    states = ServingEngine(model, max_rows=1)._memory._state_positions
    with contextlib.closing(ServingEngine(model, max_rows=3, max_positions=2 * (37 + states))) as engine:
        generations = []
        for prompt, adapter, max_tokens in requests:
            generations.append(engine.submit(prompt, adapter, SamplingSettings(max_tokens=max_tokens)))
            if draw.random() < 0.3:
                wait_until(lambda: generations[len(generations) // 2].reason is not None)
        cancelled = engine.submit([5, 6, 7], "a", SamplingSettings(max_tokens=30))
        cancelled.cancel()
        answers = [generation.ids() for generation in generations]
        assert engine.totals["failed_steps"] == 0
        assert all(generation.cached_tokens == 0 for generation in generations if generation.reason != "cancelled")
        assert engine.counts()["kv_bytes"] == 0

    assert answers == [alone(model, *request) for request in requests]


def test_a_forward_that_fails_changes_no_state(load: Callable[[str], AdaptedModel]) -> None:
    model = load("qwen3_5_text")
    requests = [([5 + number] * 9, adapter, 10) for number, adapter in enumerate(("a", "b", None))]
    forwards = []

    def fail(module: nn.Module, args: Any, output: Any) -> None:
        forwards.append(len(args[0]))
        if len(args[0]) > 1 and len(forwards) % 2:
            raise RuntimeError("broken")

    last = model.model.get_submodule("model.norm")
    with contextlib.closing(ServingEngine(model)) as engine:
        hook = last.register_forward_hook(fail)
        with paused(engine):
            generations = [engine.submit(ids, name, SamplingSettings(max_tokens=n)) for ids, name, n in requests]
        answers = [generation.ids() for generation in generations]
        hook.remove()
        assert engine.totals["failed_steps"] > 2

    assert answers == [alone(model, *request) for request in requests]


def test_samples_of_one_prompt_share_its_forward(load: Callable[[str], AdaptedModel]) -> None:
    model = load("lfm2")
    sizes = []
    hook = model.model.base_model.register_forward_pre_hook(  # type: ignore[union-attr]
        lambda module, args, kwargs: sizes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    with contextlib.closing(ServingEngine(model)) as engine:
        with paused(engine):
            sizes.clear()
            for number in range(3):
                engine.submit([7] * 40, "a", SamplingSettings(max_tokens=2, temperature=1.0, seed=number))
        wait_until(lambda: not engine.counts()["decoding"] and len(sizes) > 1)
    hook.remove()
    assert (3, 40) in sizes


@pytest.mark.parametrize("family", ["lfm2", "mamba", "mamba2", "jamba"])
def test_long_inputs_are_embedded_and_echoed_as_in_one_forward(
    family: str, load: Callable[[str], AdaptedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 7)
    model = load(family)
    ids = [5 + 3 * number % 290 for number in range(40)]
    adapter = model.adapter("a")
    pooling = Pooling(LAST, normalize=False, max_tokens=None, dimensions=())
    with contextlib.closing(ServingEngine(model)) as engine, torch.no_grad():
        (vector,) = engine.embed([ids], pooling, "a")
        width = 7 if engine.takes_parts else len(ids)
        echoed = prompt_tokens(model, adapter, ids, 2, width)
        with model.using("a"):
            output = model.model(torch.tensor([ids]), output_hidden_states=True)
            states = model.model.base_model(torch.tensor([ids])).last_hidden_state  # type: ignore[union-attr, operator]
        torch.testing.assert_close(vector.result(), states[0, -1], rtol=1e-4, atol=1e-4)
    logprobs = output.logits[0].float().log_softmax(-1)
    expected = [float(logprobs[number, token]) for number, token in enumerate(ids[1:])]
    assert [token.logprob for token in echoed[1:]] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("family", ["lfm2", "mamba"])
def test_python_generates_and_embeds_with_states_as_alone(family: str, load: Callable[[str], AdaptedModel]) -> None:
    model = load(family)
    inputs = [[5 + number] * size for number, size in enumerate((3, 30, 9))]
    adapters = ["a", None, "b"]
    answers = model.generate_ids(inputs, adapters, max_new_tokens=8)
    assert answers == [alone(model, ids, name, 8) for ids, name in zip(inputs, adapters, strict=True)]

    pooling = Pooling(LAST, normalize=False, max_tokens=None, dimensions=())
    with contextlib.closing(ServingEngine(model)) as engine, torch.no_grad():
        with paused(engine):
            vectors = [engine.embed([ids], pooling, name)[0] for ids, name in zip(inputs, adapters, strict=True)]
        for ids, name, vector in zip(inputs, adapters, vectors, strict=True):
            with model.using(name):
                states = model.model.base_model(torch.tensor([ids])).last_hidden_state  # type: ignore[union-attr, operator]
            torch.testing.assert_close(vector.result(), states[0, -1], rtol=1e-4, atol=1e-4)
