"""`generate` answers each prompt as transformers' own `generate` answers it alone, whatever else is in the call."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPTNeoConfig, Phi3Config, RobertaConfig

import lorakit
from lorakit.decoding import batch as batch_module
from lorakit.decoding import slot_model
from lorakit.errors import LorakitError
from lorakit.inference.adapted_model import AdaptedModel
from tests.helpers.models import bare_model
from tests.helpers.patches import make_patch
from tests.helpers.serving import alone, prompts

SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300,
        "num_key_value_heads": 2, "initializer_range": 0.3, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}  # fmt: skip


@pytest.fixture(scope="module")
def model(base: Path, tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    folder = tmp_path_factory.mktemp("patches")
    patches = {name: make_patch(base, folder / name, seed=seed) for seed, name in enumerate("ab")}
    return lorakit.load(base, patches, dtype="float32")


def small(config: Any) -> AdaptedModel:
    torch.manual_seed(0)
    return bare_model(AutoModelForCausalLM.from_config(config).eval())


def local_config(vocab_size: int) -> GPTNeoConfig:
    """Return a config with a layer whose window counts from the end of a cache."""
    return GPTNeoConfig(
        vocab_size=vocab_size, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=4, max_position_embeddings=128, eos_token_id=2, bos_token_id=1, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def without_slots() -> AdaptedModel:
    return small(local_config(300))


def numbers(count: int, longest: int = 12) -> list[list[int]]:
    """Prompts of tokens below 300."""
    return [[number % 295 + 5 for number in prompt] for prompt in prompts(count, longest)]


def test_more_prompts_than_a_batch_has_rows_get_the_answers_that_each_gets_alone(
    model: AdaptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "MAX_ROWS", 4)
    asked, adapters = prompts(14), ["a", None, "b", "a", None, "b", "b"] * 2
    batches: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, inputs: batches.append(len(inputs["input_ids"])), with_kwargs=True
    )

    answers = model.generate_ids(asked, adapters, max_new_tokens=9)

    hook.remove()
    assert max(batches) == 4
    assert answers == [alone(model, prompt, adapter, 9) for prompt, adapter in zip(asked, adapters, strict=True)]
    assert model.slots is not None
    assert model.slots.cache.num_bytes() == 0


@pytest.mark.parametrize("which", ["model", "without_slots"])
def test_an_answer_is_drawn_with_its_own_seed_in_any_company(which: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(which)
    asked = numbers(5)

    together = model.generate_ids(asked, max_new_tokens=8, temperature=1.5, seed=7)
    one_by_one = [
        model.generate_ids([prompt], max_new_tokens=8, temperature=1.5, seed=7 + number)[0]
        for number, prompt in enumerate(asked)
    ]

    assert together == one_by_one
    assert len({tuple(answer) for answer in model.generate_ids(asked[:1] * 4, temperature=1.5, max_new_tokens=8)}) > 1


def test_a_base_without_slots_answers_as_it_does_alone(without_slots: AdaptedModel) -> None:
    asked = numbers(6)

    assert without_slots.generate_ids(asked, max_new_tokens=8) == [
        alone(without_slots, prompt, None, 8) for prompt in asked
    ]
    assert without_slots.slots is None


def test_a_base_without_slots_answers_beside_rows_with_new_tokens(tmp_path: Path, tokenizer: Any) -> None:
    size = len(tokenizer)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(local_config(size)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    patch = make_patch(tmp_path / "base", tmp_path / "new", targets=["q_proj"], new_tokens={"<new>": size})
    model = lorakit.load(tmp_path / "base", {"new": patch}, dtype="float32")
    asked = [[5, 6, 7], [8, 9, 10]]  # of one length, so that one call answers both

    together = model.generate_ids(asked, ["new", None], max_new_tokens=6)

    assert together == [
        model.generate_ids([prompt], [name], max_new_tokens=6)[0]
        for prompt, name in zip(asked, ("new", None), strict=True)
    ]
    assert model.slots is None


def test_rows_beyond_the_steady_positions_are_answered_beside_shorter_ones() -> None:
    rope = {"rope_type": "longrope", "long_factor": [4.0] * 4, "short_factor": [1.0] * 4}
    model = small(Phi3Config(**SIZE, rope_parameters=rope, max_position_embeddings=256, original_max_position_embeddings=64))  # fmt: skip
    asked = [[5, 6] * 5, [5, 7] * 30, [5, 8] * 30, [9] * 3]

    assert model.generate_ids(asked, max_new_tokens=8) == [alone(model, prompt, None, 8) for prompt in asked]
    assert model.slots is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["model", "without_slots"])
def test_logits_that_are_not_numbers_are_an_error(which: str, value: float, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(which)
    assert model.generate_ids([[5]], max_new_tokens=1)  # the slots are there
    head = model.model.get_output_embeddings()

    def spoil(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output[..., 3] = value
        return output

    hook = head.register_forward_hook(spoil)
    with pytest.raises(LorakitError, match="the logits are not numbers"):
        model.generate_ids([[5, 6]], max_new_tokens=2)
    hook.remove()


def test_calls_of_two_threads_have_slots_of_their_own(model: AdaptedModel) -> None:
    asked, answers = prompts(6), {}

    def call(adapter: str) -> None:
        answers[adapter] = model.generate_ids(asked, adapter, max_new_tokens=12)

    threads = [threading.Thread(target=call, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert answers == {name: [alone(model, prompt, name, 12) for prompt in asked] for name in "ab"}


@pytest.fixture
def roberta() -> AdaptedModel:
    return small(RobertaConfig(**SIZE | {"num_hidden_layers": 1}, is_decoder=True, max_position_embeddings=40))


def test_a_base_whose_first_position_is_not_0_answers_as_its_forward_says(roberta: AdaptedModel) -> None:
    prompt = [5, 6, 7]
    for token in roberta.generate_ids([prompt], max_new_tokens=6)[0]:
        assert token == int(roberta.model(torch.tensor([prompt])).logits[0, -1].argmax())
        prompt.append(token)
    assert len(prompt) == 9


def test_answers_that_transformers_would_compute_otherwise_than_a_forward_are_refused(
    roberta: AdaptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_model, "first_position", lambda config: 0)  # so that it has no slots
    with pytest.raises(LorakitError, match="other logits than a forward"):
        roberta.generate_ids([[5, 6, 7]], max_new_tokens=2)
