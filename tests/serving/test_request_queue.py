"""Who waits is answered in turn: clients one after another, each client's requests as they came, all adapters alike."""

import contextlib
from collections.abc import Iterator
from contextlib import closing

import pytest

from lorakit.decoding.generation import Item, QueueFullError
from lorakit.decoding.sampling import SamplingSettings
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.engine import ServingEngine
from tests.helpers.serving import paused, wait_until
from tests.serving.conftest import three_adapters

model = three_adapters

ONE = SamplingSettings(max_tokens=1)


@pytest.fixture
def engine(model: AdaptedModel) -> Iterator[ServingEngine]:
    """Computes one request at a time, while twelve of one client may wait."""
    with closing(ServingEngine(model, max_rows=1, max_queue=24)) as opened:
        yield opened


def order_of_answers(engine: ServingEngine, requests: list[tuple[str, str | None]]) -> list[int]:
    """Return the numbers of (client, adapter) requests in the order of their answers."""
    order: list[int] = []

    def submit(number: int, client: str, adapter: str | None) -> None:
        def note(item: Item) -> None:
            if item is None:
                order.append(number)

        engine.submit([5, 6], adapter, ONE, note, client)

    with paused(engine):
        for number, request in enumerate(requests):
            submit(number, *request)
    wait_until(lambda: len(order) == len(requests))
    return order


def test_a_client_with_many_requests_does_not_hold_up_another(engine: ServingEngine) -> None:
    clients = "aaaabbc"
    order = order_of_answers(engine, [(client, None) for client in clients])
    assert "".join(clients[number] for number in order) == "abcabaa"


def test_requests_of_one_client_are_answered_as_they_came_whatever_their_adapters(engine: ServingEngine) -> None:
    adapters = ["a"] * 6 + ["b", "c", None] + ["a"] * 3
    assert order_of_answers(engine, [("x", adapter) for adapter in adapters]) == list(range(12))


def test_a_full_queue_refuses_and_has_room_again(engine: ServingEngine) -> None:
    with paused(engine):
        waiting = [engine.submit([5, 6], "a", ONE) for _ in range(12)]
        with pytest.raises(QueueFullError, match="12 requests wait, 12 of them yours"):
            engine.submit([5, 6], "a", ONE)
    assert [len(one.ids()) for one in waiting] == [1] * 12
    assert len(engine.submit([5, 6], "a", ONE).ids()) == 1


def test_no_number_of_greedy_clients_keeps_another_out(engine: ServingEngine) -> None:
    with paused(engine):
        shares = []
        for client in "abcd":
            number = 0
            with contextlib.suppress(QueueFullError):
                while True:
                    engine.submit([5, 6], "a", ONE, client=client)
                    number += 1
            shares.append(number)
    assert shares == [12, 6, 3, 2]


def test_a_request_that_is_cancelled_while_it_waits_leaves_the_queue(engine: ServingEngine) -> None:
    with paused(engine):
        waiting = engine.submit([5, 6], "a", SamplingSettings(max_tokens=50, min_tokens=50))
        waiting.cancel()
    assert waiting.ids() == []
    assert (waiting.reason, engine.counts()["waiting"]) == ("cancelled", 0)
