"""OpenAI's HTTP API over the serving engine, as a Starlette application: every route is one row of a table.

uvicorn runs it until a signal ends it. Requests under way are answered first.
"""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from inspect import iscoroutinefunction
from pathlib import Path
from types import FrameType
from typing import Any, Final, final

import uvicorn
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from lorakit.errors import TemporaryFailure
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving import requests as bodies
from lorakit.serving.adapter_pool import AdapterPool
from lorakit.serving.completion_routes import MAX_LOGPROBS, CompletionRoutes
from lorakit.serving.connections import TimedProtocol
from lorakit.serving.engine import ServingEngine
from lorakit.serving.prometheus import RequestMetrics
from lorakit.serving.request_log import LineLog, Log
from lorakit.serving.routes import EXPLANATIONS, ApiRoute, RequestGate, openapi_document
from lorakit.serving.served_models import ServedModels
from lorakit.serving.state_routes import StateRoutes
from lorakit.version import VERSION

STUCK_SECONDS: Final = 300.0  # of one step of the engine, after which it counts as stuck
ACCEPTED_AT_ONCE: Final = 8  # connections, before any is closed because they are too many: of the 64 files left free
PAGE_FOLDER: Final = Path(__file__).parent.parent / "assets" / "page"
PAGE_FILES: Final = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js"}
"""path -> file of the page, which compares the base and its adapters side by side"""
PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",  # a new version of the package has another page under the same address
}


@final
class OpenAIServer:
    """The routes of one base and its adapters.

    name: the base's, in requests. admin_key: of the routes that load and unload; without one there are none.
    adapter_root: the folder whose patches may be loaded. pool: None is a new one with that log. log: writes a line for
    each request. log_lines_lost: those that it could not write so far. log_prompts: the lines have the prompts too.
    allowed_hosts: names of this server; None: any. max_logprobs: that a request may ask for at each token.
    """

    def __init__(
        self,
        model: AdaptedModel,
        engine: ServingEngine,
        name: str,
        api_keys: Sequence[str] = (),
        admin_key: str | None = None,
        adapter_root: Path | None = None,
        *,
        pool: AdapterPool | None = None,
        log: Log = lambda content: None,
        log_lines_lost: Callable[[], int] = int,
        log_prompts: bool = False,
        allowed_hosts: Collection[str] | None = None,
        max_logprobs: int = MAX_LOGPROBS,
    ) -> None:
        pool = pool or AdapterPool(model, log=log)
        self._engine = engine
        self._log = log
        self._is_ending = False
        self._metrics = RequestMetrics(name, pool, engine.counts, engine.totals, log_lines_lost)
        models = ServedModels(pool, name, adapter_root, self._metrics.num_requests)
        chats = CompletionRoutes(engine, models, max_logprobs)
        states = StateRoutes(engine, models, log)
        classify = partial(states.head, objective="classify")
        rerank = states.rerank, "Order documents for a query.", bodies.RerankRequest
        get = partial(ApiRoute, "GET")
        post = partial(ApiRoute, "POST")
        counted = partial(post, is_counted=True)
        self.routes = [
            get("/health", self._health, "200 if the engine works, else 503.", key="none", is_quiet=True),
            get("/version", self._version, "lorakit's version.", key="none"),
            get("/metrics", self._report_metrics, "Metrics in Prometheus' text format.", is_quiet=True),
            get("/openapi.json", self._describe, "This document."),
            get("/v1/models", models.list, "The base and its adapters.", key="either"),
            get("/v1/models/{name:path}", models.one, "One of them."),
            get("/v1/adapters", models.adapters, "The state of every adapter.", key="either"),
            counted("/v1/chat/completions", chats.complete, "Answer messages.", bodies.ChatRequest),
            counted("/v1/completions", chats.complete, "Continue texts.", bodies.TextRequest),
            counted("/v1/embeddings", states.embed, "Embed texts.", bodies.EmbeddingRequest),
            counted("/classify", classify, "Labels of texts.", bodies.HeadRequest),
            counted("/pooling", states.head, "Values of an adapter's head.", bodies.HeadRequest),
            counted("/score", states.score, "How well texts belong together.", bodies.ScoreRequest),
            counted("/rerank", *rerank),
            counted("/v1/rerank", *rerank),
            counted("/v2/rerank", *rerank),
            post("/tokenize", chats.tokenize, "The tokens of a text or of messages.", bodies.TokenizeRequest),
            post("/detokenize", chats.detokenize, "The text of tokens.", bodies.DetokenizeRequest),
        ]
        if admin_key is not None:
            self.routes += [
                post("/v1/load_lora_adapter", models.load, "Load an adapter.", bodies.LoadRequest, "admin"),
                post("/v1/unload_lora_adapter", models.unload, "Unload one.", bodies.UnloadRequest, "admin"),
            ]
        self.routes += [get(path, _page_file, "The page.", key="none") for path in PAGE_FILES]
        self._few_at_a_time = asyncio.Semaphore(2)  # handlers in threads, so that they do not take those of answers
        reader = bodies.BodyReader()
        by_path = {route.path: route for route in self.routes}
        admin_keys = [] if admin_key is None else [admin_key]
        either = [*api_keys, *admin_keys] if api_keys else []
        by_kind = {"none": [], "api": api_keys, "admin": admin_keys, "either": either}
        keys = {kind: [key.encode() for key in own] for kind, own in by_kind.items()}
        hosts = None if allowed_hosts is None else {host.lower() for host in allowed_hosts}
        self.app = Starlette(
            routes=[Route(route.path, self._endpoint(route, reader), methods=[route.method]) for route in self.routes],
            middleware=[Middleware(RequestGate, by_path, self._metrics, log, log_prompts, keys, hosts)],
            exception_handlers=EXPLANATIONS,
        )

    def _endpoint(self, route: ApiRoute, reader: bodies.BodyReader) -> Callable[[Request], Any]:
        """Return the function that Starlette calls: it reads the body by the route's model."""
        model = route.body
        if model is None:
            return route.handler  # in a thread, unless it is a coroutine

        async def read_and_handle(request: Request) -> Response:
            if self._is_ending:
                raise TemporaryFailure("the server is ending; ask again")
            body = await reader.read(request, model)
            if iscoroutinefunction(route.handler):
                return await route.handler(request, body)
            async with self._few_at_a_time:
                return await run_in_threadpool(route.handler, request, body)

        return read_and_handle

    async def drain(self, seconds: float) -> float:
        """Refuse what has no token yet and all that comes, answer the rest for so many seconds; return those left."""
        ends = time.monotonic() + seconds
        self._is_ending = True
        under_way = [record for record in self._metrics.under_way if record.is_counted]
        waiting = [record for record in under_way if not record.has_begun]
        for record in waiting:
            record.abandon()
        self._log({"event": "draining", "running": len(under_way) - len(waiting), "waiting": len(waiting)})
        while any(record.is_counted and not record.is_abandoned for record in self._metrics.under_way):
            if time.monotonic() >= ends:
                await run_in_threadpool(self._engine.close)
                break
            await asyncio.sleep(0.05)
        return max(0.0, ends - time.monotonic())

    async def _health(self, request: Request) -> Response:
        works = not self._is_ending and self._engine.is_alive and self._engine.step_seconds() < STUCK_SECONDS
        return Response(status_code=200 if works else 503)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    def _report_metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics), media_type="text/plain; version=0.0.4")

    async def _describe(self, request: Request) -> Response:
        return JSONResponse(openapi_document([route for route in self.routes if route.path not in PAGE_FILES]))


async def _page_file(request: Request) -> Response:
    return FileResponse(PAGE_FOLDER / PAGE_FILES[request.url.path], headers=PAGE_HEADERS)


def serve(
    server: OpenAIServer, log: LineLog, bound: socket.socket, host: str, models: Sequence[str], drain_timeout: float
) -> None:
    """Answer at an address until SIGTERM or Ctrl-C, and drain. host: the name of ``bound``. models: for the log."""
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio")]
    for logger in loggers:
        logger.addHandler(log)
    bound.listen()
    address = f"[{host}]" if ":" in host else host
    url = f"http://{address}:{bound.getsockname()[1]}/v1"
    log({"event": "ready", "url": url, "models": models})
    config = uvicorn.Config(server.app, http=TimedProtocol, log_config=None, log_level="warning", access_log=False)
    config.backlog = ACCEPTED_AT_ONCE
    DrainingServer(config, partial(server.drain, drain_timeout)).run([bound])
    for logger in loggers:
        logger.removeHandler(log)


@final
class DrainingServer(uvicorn.Server):
    """A server that drains after the first signal, and dies of the second one."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], Awaitable[float]]) -> None:
        super().__init__(config)
        self._drain = drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(2048)  # in the kernel; asyncio set it to the number that it accepts at once

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self.should_exit = True  # without uvicorn's list of signals, which it raises once more at the end

    async def on_tick(self, counter: int) -> bool:
        if not await super().on_tick(counter):
            return False
        seconds = await self._drain()  # not in a signal's handler, which may find locks held
        self.config.timeout_graceful_shutdown = max(1, int(seconds))  # for clients that read slowly
        return True
