"""OpenAI's HTTP API over the serving engine, as a Starlette application."""

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lorakit.errors import LorakitError
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.patch.prompting import PromptForm
from lorakit.serving.adapter_admin import LOAD_PATH, UNLOAD_PATH, AdapterAdmin
from lorakit.serving.body import read_body
from lorakit.serving.detokenizer import Detokenizer
from lorakit.serving.engine import ServingEngine
from lorakit.serving.generation import STOP, Generation, Item
from lorakit.serving.openai_requests import CompletionRequest, RequestError, parse_request
from lorakit.serving.sampling import TokenLogprobs
from lorakit.version import VERSION

DISCONNECT_SECONDS: Final = 0.5
"""between two looks if a client that waits for a full answer is still there"""
OPEN_PATHS: Final = ("/health", "/version")
"""paths that need no key"""


@dataclass(frozen=True)
class Piece:
    """Text that is certain after one more token. reason: why the answer ends here; None: it goes on."""

    text: str
    token: tuple[int, TokenLogprobs] | None = None
    reason: str | None = None


@final
class StreamedAnswer:
    """One choice of a request: its text in pieces, while its tokens come."""

    def __init__(
        self,
        engine: ServingEngine,
        model: AdaptedModel,
        ids: list[int],
        adapter: str | None,
        request: CompletionRequest,
    ) -> None:
        loop, self._items = asyncio.get_running_loop(), asyncio.Queue[Item]()
        self._detokenizer = Detokenizer(model.tokenizer, request.settings.stop)
        self.num_tokens = 0

        def put(item: Item) -> None:  # in the engine's thread
            loop.call_soon_threadsafe(self._items.put_nowait, item)

        self.generation: Generation = engine.submit(
            ids, adapter, request.settings_of(len(ids), model.prompts.limit), put
        )

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the text; the last piece has a reason. Leaving early frees the engine's row."""
        try:
            while (item := await self._items.get()) is not None:
                if isinstance(item, Exception):
                    raise RequestError(f"the engine failed on this request: {type(item).__name__}", status=500)
                self.num_tokens += 1
                text, stopped = self._detokenizer.add(item.id)
                token = None if item.logprobs is None else (item.id, item.logprobs)
                if stopped:
                    yield Piece(text, token, STOP)
                    return
                yield Piece(text, token)
            yield Piece(self._detokenizer.finish(), None, self.generation.reason)
        finally:
            self.generation.cancel()


@final
class OpenAIServer:
    """The routes of one base and its adapters.

    name: the base's, in requests. admin_key: of the routes that load and unload; without one there are none.
    adapter_root: the folder whose patches may be loaded.
    """

    def __init__(
        self,
        model: AdaptedModel,
        engine: ServingEngine,
        name: str,
        api_keys: Sequence[str] = (),
        admin_key: str | None = None,
        adapter_root: Path | None = None,
    ) -> None:
        self._model, self._engine, self._name, self._started = model, engine, name, int(time.time())
        routes = [
            Route("/health", self._health), Route("/version", self._version), Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/v1/chat/completions", partial(self._complete, "chat"), methods=["POST"]),
            Route("/v1/completions", partial(self._complete, "text"), methods=["POST"]),
        ]  # fmt: skip
        if admin_key is not None:
            admin = AdapterAdmin(model, name, adapter_root)
            routes += [
                Route(LOAD_PATH, admin.load, methods=["POST"]), Route(UNLOAD_PATH, admin.unload, methods=["POST"])
            ]  # fmt: skip
        self.app = Starlette(
            routes=routes,
            middleware=[Middleware(KeyCheck, api_keys=api_keys, admin_key=admin_key)],
            exception_handlers={RequestError: _explain, LorakitError: _explain, 404: _no_route, 405: _no_route},
        )

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self._engine.is_alive else 503)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(None), *map(self._card, self._model.adapters)]})

    async def _one_model(self, request: Request) -> Response:
        return JSONResponse(self._card(self._adapter_name(request.path_params["name"])))

    def _card(self, adapter: str | None) -> dict[str, Any]:
        card = {"id": adapter or self._name, "object": "model", "created": self._started, "owned_by": "lorakit"}
        if adapter is None:
            return {**card, "root": self._name, "parent": None}
        identity = self._model.adapter(adapter)
        return {**card, "root": identity.identity if identity else None, "parent": self._name}

    def _adapter_name(self, model: str) -> str | None:
        """Return the adapter that a request's model is, or None for the base.

        Raises:
            RequestError: 404, no such model.
        """
        if model == self._name:
            return None
        if model not in self._model.adapters:
            known = ", ".join([self._name, *self._model.adapters])
            raise RequestError(
                f"model {model!r} is not here; there are {known}", status=404, param="model", code="model_not_found"
            )
        return model

    async def _complete(self, kind: str, request: Request) -> Response:
        completion = parse_request(kind, await read_body(request))
        adapter = self._adapter_name(completion.model)
        form = PromptForm(raw=True)
        rows = [self._model.prompts.token_ids(prompt, form, completion.tools) for prompt in completion.prompts]
        answers = [
            StreamedAnswer(self._engine, self._model, ids, adapter, completion)
            for ids in rows
            for _ in range(completion.choices)
        ]
        reply = Reply(kind, completion, answers, sum(map(len, rows)), self._model.tokenizer)
        if completion.stream:
            return StreamingResponse(reply.events(), media_type="text/event-stream")
        return JSONResponse(await _unless_disconnected(request, reply.full()))


@final
class Reply:
    """The answers of one request in OpenAI's form."""

    def __init__(
        self, kind: str, request: CompletionRequest, answers: list[StreamedAnswer], prompt_tokens: int, tokenizer: Any
    ) -> None:
        self._kind, self._request, self._answers = kind, request, answers
        self._prompt_tokens, self._tokenizer = prompt_tokens, tokenizer
        self._head = {
            "id": f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model,
        }

    async def full(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        choices = await asyncio.gather(*(self._choice(index, answer) for index, answer in enumerate(self._answers)))
        name = "chat.completion" if self._kind == "chat" else "text_completion"
        return {**self._head, "object": name, "choices": choices, "usage": self._usage()}

    async def _choice(self, index: int, answer: StreamedAnswer) -> dict[str, Any]:
        pieces = [piece async for piece in answer.pieces()]
        text = "".join(piece.text for piece in pieces)
        said = (
            {"message": {"role": "assistant", "content": text, "refusal": None}}
            if self._kind == "chat"
            else {"text": text}
        )
        return {"index": index, **said, "logprobs": self._logprobs(pieces), "finish_reason": pieces[-1].reason}

    async def events(self) -> AsyncIterator[str]:
        """Yield the events of a stream: roles, texts as they come, reasons, then the usage if it is wanted."""
        name = "chat.completion.chunk" if self._kind == "chat" else "text_completion"
        extra: dict[str, Any] = {"usage": None} if self._request.include_usage else {}
        if self._kind == "chat":
            for index in range(len(self._answers)):
                role = {
                    "index": index,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
                yield _event({**self._head, "object": name, "choices": [role], **extra})
        pieces: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()
        tasks = [asyncio.create_task(_forward(index, answer, pieces)) for index, answer in enumerate(self._answers)]
        try:
            running = len(tasks)
            while running:
                index, piece = await pieces.get()
                if isinstance(piece, Exception):
                    yield _event(_error_body(piece))
                    return
                running -= piece.reason is not None
                if piece.text or piece.reason or piece.token:
                    yield _event({**self._head, "object": name, "choices": [self._chunk(index, piece)], **extra})
            if self._request.include_usage:
                yield _event({**self._head, "object": name, "choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()

    def _chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        said = (
            {"delta": {"content": piece.text} if piece.text else {}} if self._kind == "chat" else {"text": piece.text}
        )
        return {"index": index, **said, "logprobs": self._logprobs([piece]), "finish_reason": piece.reason}

    def _usage(self) -> dict[str, int]:
        completion = sum(answer.num_tokens for answer in self._answers)
        return {
            "prompt_tokens": self._prompt_tokens, "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
        }  # fmt: skip

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        """Return the log-probabilities of these pieces in OpenAI's form; None if they are not wanted."""
        tokens = [piece.token for piece in pieces if piece.token is not None]
        if not tokens:
            return None
        if self._kind == "chat":
            return {
                "content": [
                    self._entry(token, logprobs.token) | {"top_logprobs": [self._entry(*one) for one in logprobs.top]}
                    for token, logprobs in tokens
                ],
                "refusal": None,
            }
        return {
            "tokens": [self._text(token) for token, _ in tokens],
            "token_logprobs": [logprobs.token for _, logprobs in tokens],
            "top_logprobs": [{self._text(token): value for token, value in logprobs.top} for _, logprobs in tokens],
            "text_offset": [],
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


async def _forward(index: int, answer: StreamedAnswer, pieces: "asyncio.Queue[tuple[int, Piece | Exception]]") -> None:
    try:
        async for piece in answer.pieces():
            pieces.put_nowait((index, piece))
    except RequestError as problem:
        pieces.put_nowait((index, problem))


@final
class KeyCheck:
    """Refuse requests without a key that their route needs. Keys are compared in constant time."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], admin_key: str | None) -> None:
        self._app, self._keys = app, [key.encode() for key in api_keys]
        self._admin_keys = [] if admin_key is None else [admin_key.encode()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            keys = self._admin_keys if scope["path"] in (LOAD_PATH, UNLOAD_PATH) else self._keys
            given = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
            matches = sum(hmac.compare_digest(given, key) for key in keys)  # all, so that the time tells nothing
            if keys and not matches:
                problem = RequestError(
                    "a valid key is required: Authorization: Bearer KEY", status=401, code="invalid_api_key"
                )
                await JSONResponse(_error_body(problem), 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Return the result of ``work``; cancel it when the client leaves."""
    task = asyncio.create_task(work)
    while not (await asyncio.wait({task}, timeout=DISCONNECT_SECONDS))[0]:
        if await request.is_disconnected():
            task.cancel()
            await asyncio.wait({task})
            return {}  # nobody reads it
    return task.result()


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _error_body(problem: Exception) -> dict[str, Any]:
    status = getattr(problem, "status", 400)
    kind = "authentication_error" if status == 401 else "invalid_request_error" if status < 500 else "server_error"
    return {
        "error": {
            "message": str(problem), "type": kind, "param": getattr(problem, "param", None),
            "code": getattr(problem, "code", None),
        }
    }  # fmt: skip


async def _explain(request: Request, problem: Exception) -> Response:
    return JSONResponse(_error_body(problem), getattr(problem, "status", 400))


async def _no_route(request: Request, problem: Exception) -> Response:
    status = getattr(problem, "status_code", 404)
    return JSONResponse(
        _error_body(RequestError(f"{request.method} {request.url.path}: no such route", status=status)), status
    )
