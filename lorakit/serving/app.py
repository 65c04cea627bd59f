"""OpenAI's HTTP API over the serving engine, as a Starlette application: every route is one row of a table.

uvicorn runs it until a signal ends it. Requests under way are answered first.
"""

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import iscoroutinefunction
from pathlib import Path
from types import FrameType
from typing import Any, Final, final

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lorakit.errors import LorakitError
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.inference.prompts import NO_TOKENIZER
from lorakit.serving.adapter_folder import AdapterFolder
from lorakit.serving.adapter_pool import AdapterPool
from lorakit.serving.completion_routes import MAX_LOGPROBS, CompletionRoutes
from lorakit.serving.connections import TimedProtocol, listen
from lorakit.serving.embedding_routes import EmbeddingRoutes
from lorakit.serving.engine import ServingEngine
from lorakit.serving.errors import explain, explain_bug, explain_no_route
from lorakit.serving.prometheus import RequestMetrics
from lorakit.serving.request_log import CLIENT_LEFT, LineLog, Log, record_of
from lorakit.serving.requests import (
    BodyReader,
    ChatRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    LoadRequest,
    TextRequest,
    TokenizeRequest,
    UnloadRequest,
)
from lorakit.serving.routes import LOOPBACK, ApiRoute, KeyCheck, RequestCheck, RequestLog, openapi_document
from lorakit.serving.served_models import ServedModels
from lorakit.version import VERSION

STANDARD_ERROR: Final = 2
STUCK_SECONDS: Final = 300.0  # of one step of the engine, after which it counts as stuck
PAGE_FOLDER: Final = Path(__file__).parent.parent / "assets" / "page"
PAGE_FILES: Final = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
"""path -> file of the page and its type; the page compares the base and its adapters side by side"""
PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",  # a new version of the package has another page under the same address
}


@final
class OpenAIServer:
    """The routes of one base and its adapters.

    name: the base's, in requests. admin_key: of the routes that load and unload; without one there are none.
    adapter_root: the folder whose patches may be loaded. pool: None is one in which all are resident. failed_adapters:
    those of a watched folder that are refused. log: writes a line for each request; None: there is no log.
    log_lines_lost: those that it could not write so far. log_prompts: the lines have the prompts too. allowed_hosts: by
    whose names the server may be asked; None: any. max_logprobs: that a request may ask for at each token.
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
        failed_adapters: Callable[[], Mapping[str, str]] = dict,
        log: Log | None = None,
        log_lines_lost: Callable[[], int] = int,
        log_prompts: bool = False,
        allowed_hosts: Collection[str] | None = None,
        max_logprobs: int = MAX_LOGPROBS,
    ) -> None:
        pool = pool or AdapterPool(model)
        self._engine = engine
        self._metrics = RequestMetrics(name, lambda: pool.names, engine.counts, log_lines_lost)
        models = ServedModels(model, pool, name, adapter_root, self._metrics.num_requests, failed_adapters)
        chats = CompletionRoutes(model, pool, engine, models, max_logprobs)
        embeddings = EmbeddingRoutes(model, pool, engine, models, log)
        self.routes = [
            ApiRoute("GET", "/health", self._health, "200 if the engine works, else 503.", key="none", is_quiet=True),
            ApiRoute("GET", "/version", self._version, "lorakit's version.", key="none"),
            ApiRoute("GET", "/metrics", self._report_metrics, "Metrics in Prometheus' text format.", is_quiet=True),
            ApiRoute("GET", "/openapi.json", self._describe, "This document."),
            ApiRoute("GET", "/v1/models", models.list, "The base and its adapters."),
            ApiRoute("GET", "/v1/models/{name:path}", models.one, "One of them."),
            ApiRoute("GET", "/v1/adapters", models.adapters, "The state of every adapter."),
            ApiRoute("POST", "/v1/chat/completions", chats.complete, "Answer messages.", ChatRequest, is_counted=True),
            ApiRoute("POST", "/v1/completions", chats.complete, "Continue texts.", TextRequest, is_counted=True),
            ApiRoute("POST", "/v1/embeddings", embeddings.embed, "Embed texts.", EmbeddingRequest, is_counted=True),
            ApiRoute("POST", "/tokenize", chats.tokenize, "The tokens of a text or of messages.", TokenizeRequest),
            ApiRoute("POST", "/detokenize", chats.detokenize, "The text of tokens.", DetokenizeRequest),
        ]  # fmt: skip
        if admin_key is not None:
            self.routes += [
                ApiRoute("POST", "/v1/load_lora_adapter", models.load, "Load an adapter.", LoadRequest, "admin"),
                ApiRoute("POST", "/v1/unload_lora_adapter", models.unload, "Unload one.", UnloadRequest, "admin"),
            ]  # fmt: skip
        self.routes += [
            ApiRoute("GET", path, _page_file, "The page.", key="none", is_documented=False) for path in PAGE_FILES
        ]
        bodies = BodyReader()
        by_path = {route.path: route for route in self.routes}
        keys = {"none": [], "api": api_keys, "admin": [] if admin_key is None else [admin_key]}
        self.app = Starlette(
            routes=[Route(route.path, _endpoint(route, bodies), methods=[route.method]) for route in self.routes],
            middleware=[
                Middleware(RequestLog, routes=by_path, metrics=self._metrics, log=log, log_prompts=log_prompts),
                Middleware(RequestCheck, allowed_hosts=allowed_hosts),
                Middleware(KeyCheck, routes=by_path, keys=keys),
            ],
            exception_handlers={
                LorakitError: explain,
                404: explain_no_route,
                405: explain_no_route,
                Exception: explain_bug,
            },
        )

    async def _health(self, request: Request) -> Response:
        works = self._engine.is_alive and self._engine.step_seconds() < STUCK_SECONDS
        return Response(status_code=200 if works else 503)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def _report_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _describe(self, request: Request) -> Response:
        return JSONResponse(openapi_document(self.routes))


def _endpoint(route: ApiRoute, bodies: BodyReader) -> Callable[[Request], Any]:
    """Return the function that Starlette calls: it reads the body by the route's model."""
    model = route.body
    if model is None:
        return route.handler

    async def read_and_handle(request: Request) -> Response:
        try:
            body = await bodies.read(request, model)
        except ClientDisconnect:
            record_of(request).status = CLIENT_LEFT
            return Response()  # nobody reads it
        if iscoroutinefunction(route.handler):
            reply: Response = await route.handler(request, body)
            return reply
        return await run_in_threadpool(route.handler, request, body)

    return read_and_handle


async def _page_file(request: Request) -> Response:
    name, media_type = PAGE_FILES[request.url.path]
    return Response((PAGE_FOLDER / name).read_bytes(), media_type=media_type, headers=PAGE_HEADERS)


def serve(
    model: AdaptedModel,
    pool: AdapterPool,
    engine: ServingEngine,
    name: str,
    *,
    host: str,
    port: int,
    api_keys: Sequence[str] = (),
    admin_key: str | None = None,
    adapter_root: Path | None = None,
    adapters_dir: Path | None = None,
    allowed_hosts: Sequence[str] = (),
    max_logprobs: int = MAX_LOGPROBS,
    log_prompts: bool = False,
) -> None:
    """Serve a base under ``name`` and its adapters under theirs; returns after SIGTERM or Ctrl-C.

    engine: is closed at the end. port: 0 is a free one. adapters_dir: a folder to watch, whose sub-folders are patches.
    allowed_hosts: further names under which a server of this machine alone and without keys is asked.
    Raises LorakitError: the address cannot be listened on, the base has no tokenizer, or a pinned name has no adapter.
    """
    with contextlib.ExitStack() as open_parts:
        open_parts.callback(engine.close)
        if model.tokenizer is None:
            raise LorakitError(f"serve: {NO_TOKENIZER}")
        listening = open_parts.enter_context(listen(host, port))
        log = LineLog(STANDARD_ERROR)
        open_parts.callback(log.close)
        for logger in map(logging.getLogger, ("uvicorn.error", "asyncio")):
            logger.addHandler(log.handler)
            open_parts.callback(logger.removeHandler, log.handler)
        folder = None
        if adapters_dir is not None:
            folder = AdapterFolder(pool, adapters_dir, {name, *pool.names}, log)
            open_parts.callback(folder.close)
            folder.start()
        pool.check_pinned()
        app = OpenAIServer(
            model, engine, name, api_keys, admin_key, adapter_root, pool=pool,
            failed_adapters=folder.failed if folder else dict,
            log=log, log_lines_lost=lambda: log.num_lost, log_prompts=log_prompts, max_logprobs=max_logprobs,
            # of a server that every program of this machine may ask, pages of other hosts in its browser too
            allowed_hosts=None if api_keys or host not in LOOPBACK else (*LOOPBACK, *allowed_hosts),
        ).app  # fmt: skip
        address = f"[{host}]" if ":" in host else host
        names = ", ".join([name, *pool.names])
        line = f"http://{address}:{listening.getsockname()[1]}/v1  {names}\n"
        with contextlib.suppress(OSError):  # a full disk stops no server
            os.write(STANDARD_ERROR, line.encode())
        config = uvicorn.Config(app, http=TimedProtocol, log_config=None, log_level="warning", access_log=False)
        _DrainingServer(config).run([listening])


class _DrainingServer(uvicorn.Server):
    """A server that answers what is under way after the first signal, and dies of the second one.

    uvicorn raises the first signal once more when it has ended, so that the process would end as if it were killed.
    """

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self.should_exit = True
