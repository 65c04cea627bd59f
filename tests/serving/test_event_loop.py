"""Work that grows with a request is done in threads, so that the event loop answers others meanwhile."""

import asyncio
import http.client
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

import lorakit
from lorakit.decoding.sampling import SamplingSettings, Token
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.inference.answer_form import AnswerPart
from lorakit.patch.own_head import OwnHead
from lorakit.serving.adapter_pool import AdapterPool
from lorakit.serving.answer import ChoiceStream, Deliveries, Delta
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from lorakit.serving.prometheus import RequestMetrics
from lorakit.serving.reply import Reply
from lorakit.serving.request_log import RequestRecord
from lorakit.serving.requests import ChatRequest, Message, TextRequest
from lorakit.serving.served_models import ServedModels
from tests.helpers import patient
from tests.helpers.http_server import serving
from tests.helpers.patches import make_head_patch
from tests.helpers.serving import held_forwards, wait_until

MESSAGES: Any = [{"role": "user", "content": "say hi"}]


class Held:
    """Work that waits until the test lets it go on."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.may_go_on = threading.Event()
        self.count = 0

    def wait(self) -> None:
        self.count += 1
        self.began.set()
        self.may_go_on.wait()


def answered_beside_another(held: Held, address: str, ask: Callable[[], httpx.Response]) -> httpx.Response:
    """Return the reply to a request, whose work is held until another request is answered."""
    replies: list[httpx.Response] = []
    client = threading.Thread(target=lambda: replies.append(ask()))
    client.start()
    held.began.wait()
    try:
        assert patient.get(f"{address}/version", timeout=60).status_code == 200
        assert not replies
    finally:
        held.may_go_on.set()
        client.join()
    return replies[0]


@pytest.fixture
def held(model: AdaptedModel) -> Iterator[Held]:
    """A hold on the tokenizer: on encoding, and on texts of single tokens, as log-probabilities have them."""
    held = Held()
    usual = type(model.tokenizer)

    class HeldTokenizer(usual):  # type: ignore[misc, valid-type]
        def __call__(self, *texts: Any, **options: Any) -> Any:
            held.wait()
            return super().__call__(*texts, **options)

        def decode(self, ids: Any, **options: Any) -> Any:
            if "skip_special_tokens" not in options:
                held.wait()
            return super().decode(ids, **options)

    model.tokenizer.__class__ = HeldTokenizer
    yield held
    held.may_go_on.set()
    model.tokenizer.__class__ = usual


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "a", "messages": MESSAGES}),
        ("/v1/chat/completions", {"model": "a", "messages": MESSAGES, "stream": True}),
        ("/v1/completions", {"model": "a", "prompt": ["hi", "there"]}),
        ("/v1/completions", {"model": "a", "prompt": [5, 6], "logprobs": 2}),
        ("/v1/completions", {"model": "a", "prompt": [5, 6], "logprobs": 2, "stream": True}),
        ("/v1/completions", {"model": "a", "prompt": "hi", "echo": True, "logprobs": 2}),
        ("/tokenize", {"messages": MESSAGES}),
        ("/tokenize", {"prompt": "hi", "add_special_tokens": False}),
        ("/detokenize", {"tokens": [5, 6]}),
    ],
)
def test_others_are_answered_while_a_request_is_encoded_or_decoded(
    model: AdaptedModel, engine: ServingEngine, held: Held, path: str, body: dict[str, Any]
) -> None:
    limit = {} if "tokenize" in path else {"max_tokens": 2}
    with serving(OpenAIServer(model, engine, "tiny").app) as address:
        reply = answered_beside_another(held, address, partial(patient.post, address + path, json=body | limit))
    assert reply.status_code == 200


def test_others_are_answered_while_messages_are_read_and_measured(
    model: AdaptedModel, engine: ServingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()
    usual = Message.for_template

    def wait_and_read(message: Message) -> Any:
        held.wait()
        return usual(message)

    monkeypatch.setattr(Message, "for_template", wait_and_read)
    with serving(OpenAIServer(model, engine, "tiny").app) as address:
        body = {"model": "a", "messages": MESSAGES, "max_tokens": 2}
        ask = partial(patient.post, f"{address}/v1/chat/completions", json=body)
        assert answered_beside_another(held, address, ask).status_code == 200


@pytest.mark.parametrize(
    ("kind", "method", "path", "body"),
    [
        (OwnHead, "values", "/classify", {"model": "labels", "input": "hi"}),
        (OwnHead, "values", "/pooling", {"model": "labels", "input": "hi"}),
        (OwnHead, "values", "/score", {"model": "labels", "text_1": "hi", "text_2": "you"}),
        (AdapterPool, "sources", "/v1/models", None),
        (AdapterPool, "sources", "/v1/adapters", None),
        (RequestMetrics, "collect", "/metrics", None),
    ],
)
def test_others_are_answered_while_a_list_is_made(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, method: str, path: str, body: Any
) -> None:
    model = lorakit.load(base, {"labels": make_head_patch(base, tmp_path / "labels", 2)}, dtype="float32")
    held = Held()
    usual = getattr(kind, method)

    def wait_and_make(*arguments: Any) -> Any:
        held.wait()
        return usual(*arguments)

    with (
        closing(ServingEngine(model)) as engine,
        serving(OpenAIServer(model, engine, "tiny").app) as address,
        patient.Client(base_url=address) as client,
    ):
        ask = partial(client.get, path) if body is None else partial(client.post, path, json=body)
        monkeypatch.setattr(kind, method, wait_and_make)
        assert answered_beside_another(held, address, ask).status_code == 200


@pytest.mark.parametrize("kind", ["chat", "text", "stream"])
def test_no_call_writes_the_log_probabilities_of_many_tokens(
    model: AdaptedModel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    written: list[str] = []
    usual = json.dumps

    def counted(content: Any, **options: Any) -> str:
        written.append(usual(content, **options))
        return written[-1]

    record = RequestRecord("id", "POST", "/v1/completions", is_counted=True, began=0.0)
    record.add(ChoiceStream([5], None, model.prompts, SamplingSettings(), offsets=[0] * 200))
    tokens = [Token(5), *[Token(6, -1.0, [(number, -1.0) for number in range(20)])] * 199]
    delta = Delta([AnswerPart("content", "hi")], tokens, reason="stop")
    body = TextRequest(model="tiny", prompt="hi", stream=kind == "stream")
    reply = Reply(ChatRequest(model="tiny", messages=MESSAGES) if kind == "chat" else body, record, Deliveries())
    monkeypatch.setattr("lorakit.serving.reply.json.dumps", counted)
    text = reply._chunks(0, delta)[0] if kind == "stream" else reply._full([[delta]]).decode()
    monkeypatch.undo()
    (choice,) = json.loads(text.removeprefix("data: "))["choices"]
    assert len(choice["logprobs"]["content" if kind == "chat" else "top_logprobs"]) == 200
    assert max(map(len, written)) < len(text) / 10


def test_a_client_that_leaves_ends_the_echoes_of_its_other_prompts(model: AdaptedModel, engine: ServingEngine) -> None:
    body = json.dumps({"model": "a", "prompt": [[5, 6]] * 500, "echo": True, "logprobs": 2, "max_tokens": 0})
    lines: list[Any] = []
    with (
        serving(OpenAIServer(model, engine, "tiny", log=lines.append).app) as address,
        held_forwards(model) as forwards,
    ):
        connection = http.client.HTTPConnection(address.removeprefix("http://"))
        connection.request("POST", "/v1/completions", body)
        forwards.allow(1)
        wait_until(lambda: forwards.num_allowed == 0)
        connection.close()
        forwards.allow(499)
        wait_until(lambda: bool(lines))
        assert lines[0]["status"] == 499
        assert forwards.num_allowed > 0


def test_a_full_queue_is_noticed_before_the_other_prompts_are_encoded(model: AdaptedModel, held: Held) -> None:
    held.may_go_on.set()
    body = {"model": "a", "prompt": ["hi"] * 500}
    with (
        closing(ServingEngine(model, max_rows=1, max_queue=1000)) as engine,
        serving(OpenAIServer(model, engine, "tiny").app) as address,
        held_forwards(model),
    ):
        for _ in range(500):
            engine.submit([5], client="127.0.0.1")
        assert patient.post(f"{address}/v1/completions", json=body).status_code == 429
    assert held.count <= 3  # one that runs, one that waits, one that is refused


def test_counting_a_request_that_ended_takes_as_long_whatever_its_tokens(
    model: AdaptedModel, engine: ServingEngine
) -> None:
    metrics = RequestMetrics("tiny", AdapterPool(model), engine.counts, engine.totals)
    num_calls = []
    for number in (20, 20, 80):  # the first time its labels are made
        settings = SamplingSettings(max_tokens=number, min_tokens=number)
        record = RequestRecord("id", "POST", "/v1/completions", is_counted=True, began=0.0, served="tiny")
        choice = ChoiceStream([5, 6], None, model.prompts, settings)
        choice.start(engine, lambda item: None)
        record.add(choice)
        wait_until(lambda choice=choice: choice.generation.reason is not None)  # type: ignore[misc]
        num_calls.append(_num_calls(partial(metrics.observe, record)))
    assert num_calls[1] == num_calls[2] > 0
    (between,) = [one for one in metrics.collect() if one.name == "lorakit_inter_token_seconds"]
    assert [sample.value for sample in between.samples if sample.name.endswith("_count")] == [19 + 19 + 79]


def _num_calls(work: Callable[[], object]) -> int:
    """Return how many functions a call calls, those of C too."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        work()
    finally:
        sys.setprofile(None)
    return sum(event.endswith("call") for event in events)


class HeldLock:
    """A lock that says when a thread comes for it, and lets it in later."""

    def __init__(self, lock: Any, held: Held) -> None:
        self._lock = lock
        self._held = held
        self.was_left = threading.Event()

    def __enter__(self) -> None:
        self._held.wait()
        self._lock.__enter__()

    def __exit__(self, *problem: Any) -> None:
        self._lock.__exit__(*problem)
        self.was_left.set()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "a", "prompt": "hi", "max_tokens": 200, "min_tokens": 200}),
        ("/tokenize", {"model": "a", "prompt": "hi"}),
    ],
)
def test_a_request_that_is_cancelled_while_it_waits_for_its_adapter_keeps_no_adapter_in_memory(
    base: Path, patches: dict[str, Path], path: str, body: dict[str, Any]
) -> None:
    model = lorakit.load(base, dtype="float32")
    pool = AdapterPool(model, max_resident=1)
    pool.load("a", patches["a"])
    with closing(ServingEngine(model)) as engine:
        app = OpenAIServer(model, engine, "tiny", pool=pool).app
        idle = engine.counts()
        usual = pool._changing
        held = Held()
        lock = HeldLock(usual, held)
        pool._changing = lock  # type: ignore[assignment]
        problem = asyncio.run(_cancelled_request(app, path, body, held))
        lock.was_left.wait()  # in a thread of its own
        wait_until(lambda: engine.counts() | {"prefix_bytes": 0} == idle)
        pool._changing = usual
        pool.load("b", patches["b"])
    assert model.adapters == ("b",)
    assert problem.__traceback__ is not None  # which keeps what the request held in memory, as a log does


async def _cancelled_request(app: Callable[..., Any], path: str, body: dict[str, Any], held: Held) -> BaseException:
    """Send a request to an application, and cancel it when it waits for the lock of the adapters; return the error."""
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": [],
        "http_version": "1.1", "scheme": "http", "server": ("test", 80), "client": ("test", 1), "root_path": "",
    }  # fmt: skip
    is_read = False

    async def receive() -> dict[str, Any]:
        nonlocal is_read
        if is_read:
            await asyncio.Event().wait()
        is_read = True
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None:
        pass

    request = asyncio.create_task(app(scope, receive, send))
    await asyncio.to_thread(held.began.wait)
    request.cancel()
    await asyncio.sleep(0)
    held.may_go_on.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await request
    return caught.value


class CountedName(str):
    """A name that counts how often it is looked up or compared."""

    uses = 0

    def __hash__(self) -> int:
        CountedName.uses += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        CountedName.uses += 1
        return super().__eq__(other)


def test_a_request_costs_as_much_whatever_the_number_of_adapters_and_a_list_grows_with_them(
    base: Path, patches: dict[str, Path]
) -> None:
    uses = []
    for number in (4, 8, 16):
        model = lorakit.load(base, dtype="float32")
        pool = AdapterPool(model)
        for index in range(number):
            pool.load(CountedName(f"adapter-{index}"), patches["a"])
        metrics = RequestMetrics("tiny", pool, lambda: dict.fromkeys(("decoding", "prefilling", "waiting"), 0), {})
        models = ServedModels(pool, "tiny", None, metrics.num_requests)
        record = RequestRecord("id", "POST", "/v1/completions", is_counted=True, began=0.0, served="adapter-1")
        metrics.observe(record)  # the first time its label is made
        own = []
        for work in (
            lambda: pool.adapter(models.adapter_name("adapter-1")),  # noqa: B023
            lambda: metrics.observe(record),  # noqa: B023
            lambda: list(metrics.collect()),  # noqa: B023
            lambda: models.adapters(None),  # type: ignore[arg-type] # noqa: B023
        ):
            CountedName.uses = 0
            work()  # type: ignore[no-untyped-call]
            own.append(CountedName.uses)
        uses.append(own)
    few, more, most = uses
    assert few[:2] == more[:2]
    assert [after - before for before, after in zip(more[2:], most[2:], strict=True)] == [
        2 * (after - before) for before, after in zip(few[2:], more[2:], strict=True)
    ]


class CountedText(str):
    """A text that counts the letters in front of it that are copied to append it."""

    copied = 0

    def __radd__(self, before: str) -> str:
        CountedText.copied += len(before)
        return before + str(self)


def test_the_parts_of_an_answer_are_joined_at_once(model: AdaptedModel) -> None:
    settings = SamplingSettings()
    record = RequestRecord("id", "POST", "/v1/chat/completions", is_counted=True, began=0.0)
    record.add(ChoiceStream([5], None, model.prompts, settings))
    reply = Reply(ChatRequest(model="tiny", messages=MESSAGES), record, Deliveries())
    pieces = [CountedText(number) for number in range(100)]
    parts = [AnswerPart("thought", piece) for piece in pieces] + [AnswerPart("content", piece) for piece in pieces]
    parts += [
        AnswerPart("call", name="f"),
        *(AnswerPart("call", piece) for piece in pieces),
        AnswerPart("call", name="g"),
    ]
    (choice,) = json.loads(reply._full([[*(Delta([part]) for part in parts), Delta(reason="stop")]]))["choices"]

    text = "".join(map(str, range(100)))
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (text, text)
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [
        {"name": "f", "arguments": text},
        {"name": "g", "arguments": ""},
    ]
    assert CountedText.copied == 0
