"""In bfloat16 every row is computed to the same bits in any company: rows, parts of a prompt, the prefix cache."""

import contextlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, Qwen2Config

import lorakit
from lorakit.decoding import batch as batch_module
from lorakit.decoding.sampling import SamplingSettings
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.ops.encoder_head import LAST, MEAN
from lorakit.patch.pooling import Pooling
from lorakit.serving.engine import ServingEngine
from tests.helpers.patches import make_patch
from tests.helpers.serving import paused

SIZE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 640, "max_position_embeddings": 2048, "initializer_range": 0.1}  # fmt: skip
CONFIGS = [
    LlamaConfig(**SIZE),
    Qwen2Config(**SIZE),
    Gemma3TextConfig(**SIZE, head_dim=64, sliding_window=32),
    GPT2Config(n_embd=192, n_layer=2, n_head=3, vocab_size=640, n_positions=2048, initializer_range=0.1),
]
ADAPTERS: dict[str, dict[str, Any]] = {
    "eight": {"rank": 8},
    "three": {"rank": 3},  # fewer ranks than a product needs
    "dora": {"rank": 8, "method": "dora"},
}


@pytest.fixture(
    params=[CONFIGS[0], *(pytest.param(config, marks=pytest.mark.matrix) for config in CONFIGS[1:])],
    ids=lambda config: config.model_type,
)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> AdaptedModel:
    torch.manual_seed(0)
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(request.param).to(torch.bfloat16).save_pretrained(base)
    folders = {
        name: make_patch(base, tmp_path / name, seed=seed, **options)
        for seed, (name, options) in enumerate(ADAPTERS.items())
    }
    return lorakit.load(base, folders, dtype="bfloat16", device="cpu")


def drawn_requests(longest: Sequence[int]) -> list[tuple[list[int], str | None, SamplingSettings]]:
    """Return a greedy or seeded request for each length; every third begins with the same 40 tokens."""
    chooser = random.Random(0)
    shared = [chooser.randrange(5, 600) for _ in range(40)]
    requests = []
    for number, length in enumerate(longest):
        prompt = [chooser.randrange(5, 600) for _ in range(length)]
        settings = SamplingSettings(max_tokens=6 + number, temperature=float(number % 2), seed=number, logprobs=3)
        name = chooser.choice([*ADAPTERS, None])
        requests.append(([*shared, *prompt] if number % 3 == 0 else prompt, name, settings))
    return requests


@pytest.mark.matrix
def test_tokens_and_log_probabilities_do_not_depend_on_company(
    model: AdaptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = drawn_requests([1, 5, 330, 60, 17, 230, 2, 640])

    def answers(engine: ServingEngine) -> list[Any]:
        generations = [engine.submit(*request) for request in requests]
        return [list(generation) for generation in generations]

    with contextlib.closing(ServingEngine(model, max_rows=1)) as engine:
        alone = answers(engine)
        assert answers(engine) == alone, "with prefixes in the cache"
    for rows, part in ((3, 512), (8, 37), (8, 256)):
        monkeypatch.setattr(batch_module, "PREFILL_TOKENS", part)
        with contextlib.closing(ServingEngine(model, max_rows=rows)) as engine:
            assert answers(engine) == alone, f"{rows} rows, parts of {part} tokens"
    for prompt, adapter, _ in requests[:3]:
        ids = model.generate_ids([prompt], adapter, max_new_tokens=6)[0]
        greedy = SamplingSettings(max_tokens=6)
        with contextlib.closing(ServingEngine(model)) as engine:
            beside = [engine.submit(prompt, adapter, greedy), *(engine.submit(*other) for other in requests[3:6])]
            assert beside[0].ids() == ids


@pytest.mark.parametrize("mode", [pytest.param(LAST, marks=pytest.mark.matrix), MEAN])
def test_embeddings_do_not_depend_on_company(model: AdaptedModel, mode: str) -> None:
    requests = drawn_requests([1, 5, 60, 9, 200])
    pooling = Pooling(mode, normalize=False, max_tokens=None, dimensions=())
    with contextlib.closing(ServingEngine(model)) as engine:
        with paused(engine):
            futures = [engine.embed([ids], pooling, name)[0] for ids, name, _ in requests]
        together = [future.result() for future in futures]
        for (ids, name, _), vector in zip(requests, together, strict=True):
            assert torch.equal(engine.embed([ids], pooling, name)[0].result(), vector)
