"""Keys and values stay within their memory, and no answer depends on how much there is."""

from collections.abc import Iterator
from contextlib import closing

import pytest
from starlette.testclient import TestClient

from lorakit.decoding import batch as batch_module
from lorakit.decoding.sampling import SamplingSettings
from lorakit.errors import LorakitError
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from tests.helpers.serving import alone, paused, prompts, wait_until
from tests.serving.conftest import three_adapters

model = three_adapters


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows join while there is memory for one more token."""
    monkeypatch.setattr(batch_module, "HEADROOM_TOKENS", 1)


@pytest.fixture
def roomy(model: AdaptedModel) -> Iterator[ServingEngine]:
    """An engine with memory for all."""
    with closing(ServingEngine(model)) as engine:
        yield engine


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "positions",
    [
        pytest.param(54, marks=pytest.mark.matrix),  # of one row of 30 + 24 tokens
        90,  # of about two
    ],
)
def test_rows_that_memory_cannot_hold_together_get_the_tokens_that_they_get_alone(
    model: AdaptedModel, roomy: ServingEngine, positions: int
) -> None:
    greedy = SamplingSettings(max_tokens=24)
    drawn = SamplingSettings(max_tokens=24, temperature=1.0, top_p=0.95, seed=7, presence_penalty=0.5)
    requests = [(prompt, "abc"[number % 3]) for number, prompt in enumerate(prompts(4))]
    expected = [roomy.submit(*request, drawn).ids() for request in requests]
    with closing(ServingEngine(model, max_positions=positions)) as engine:
        with paused(engine):
            both = [[engine.submit(*request, settings) for request in requests] for settings in (greedy, drawn)]
        most = 0
        answers = []
        for generations in both:
            for generation in generations:
                answers.append([token.id for token in generation])
                counts = engine.counts()
                most = max(most, counts["kv_bytes"] + counts["prefix_bytes"])

        assert answers == [alone(model, *request, 24) for request in requests] + expected
        assert engine.totals["preemptions"] > 0
        assert most <= engine.counts()["kv_limit_bytes"]
        assert engine.counts()["kv_bytes"] == 0


@pytest.mark.usefixtures("eager")
def test_the_oldest_row_is_never_preempted(model: AdaptedModel) -> None:
    order: list[int] = []
    settings = SamplingSettings(max_tokens=40, min_tokens=40)
    with closing(ServingEngine(model, max_positions=100)) as engine:
        with paused(engine):
            generations = [
                engine.submit([5, 6, 7], "a", settings, lambda item, number=number: order.append(number))  # type: ignore[misc]
                for number in range(5)
            ]
        wait_until(lambda: all(generation.reason is not None for generation in generations))
        assert engine.totals["preemptions"] > 0
    ends = [max(index for index, one in enumerate(order) if one == number) for number in range(5)]
    assert ends == sorted(ends)


def test_memory_too_small_for_any_request_is_refused(model: AdaptedModel) -> None:
    with pytest.raises(LorakitError, match="keys and values of 1 tokens of this base, 256 bytes each; .* need 17"):
        ServingEngine(model, kv_memory_bytes=500)


def test_the_limit_in_bytes_is_the_one_of_a_request(model: AdaptedModel) -> None:
    with closing(ServingEngine(model, kv_memory_bytes=256 * 20)) as engine:
        assert engine.max_positions == 20
        with pytest.raises(LorakitError, match=r"need keys and values of 21 tokens, 5,376 bytes; .* for 20 tokens"):
            engine.submit([5], None, SamplingSettings(max_tokens=20))
        assert engine.submit([5], None, SamplingSettings(max_tokens=19)).ids() == alone(model, [5], None, 19)


def test_a_chat_that_does_not_say_how_long_is_as_long_as_memory_allows(model: AdaptedModel) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "min_tokens": 20}
    with closing(ServingEngine(model, max_positions=60)) as engine:
        app = OpenAIServer(model, engine, "tiny").app
        usage = TestClient(app).post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["completion_tokens"] >= 20
    assert usage["total_tokens"] <= 60
