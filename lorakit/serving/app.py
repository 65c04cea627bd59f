"""OpenAI's HTTP API over the serving engine, as a Starlette application: every route in one table."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lorakit.errors import LorakitError
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving import page
from lorakit.serving.adapter_admin import LOAD_PATH, UNLOAD_PATH, AdapterAdmin
from lorakit.serving.adapter_pool import AdapterPool
from lorakit.serving.completion_routes import CompletionRoutes
from lorakit.serving.embedding_routes import EmbeddingRoutes
from lorakit.serving.engine import ServingEngine
from lorakit.serving.error_replies import explain, explain_bug, explain_no_route
from lorakit.serving.keys import KeyCheck
from lorakit.serving.metrics import RequestMetrics
from lorakit.serving.openai_requests import RequestError
from lorakit.serving.openapi import openapi_document
from lorakit.serving.request_log import Log, RequestLog
from lorakit.serving.served_models import ServedModels
from lorakit.serving.token_routes import TokenRoutes
from lorakit.version import VERSION

STUCK_SECONDS: Final = 300.0
"""of one step of the engine, after which it counts as stuck"""


@final
class OpenAIServer:
    """The routes of one base and its adapters.

    name: the base's, in requests. admin_key: of the routes that load and unload; without one there are none.
    adapter_root: the folder whose patches may be loaded. pool: None is one in which all are resident. failed_adapters:
    those of a watched folder that are refused. log: writes a line for each request; None: nothing does. log_lines_lost:
    those that it could not write so far. log_prompts: the lines have the prompts too.
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
    ) -> None:
        self._engine = engine
        pool = pool or AdapterPool(model)
        self._metrics = RequestMetrics(name, lambda: pool.names, engine.counts, log_lines_lost)
        models = ServedModels(model, pool, name, self._metrics.num_requests, failed_adapters)
        completions, tokens = CompletionRoutes(model, pool, engine, models), TokenRoutes(model, pool, models)
        embeddings = EmbeddingRoutes(model, pool, engine, models, log)
        routes = [
            Route("/health", self._health), Route("/version", self._version), Route("/metrics", self._report_metrics),
            Route("/openapi.json", self._describe),
            Route("/v1/models", models.list), Route("/v1/models/{name:path}", models.one),
            Route("/v1/adapters", models.adapters),
            Route("/v1/chat/completions", completions.chat, methods=["POST"]),
            Route("/v1/completions", completions.text, methods=["POST"]),
            Route("/v1/embeddings", embeddings.embed, methods=["POST"]),
            Route("/tokenize", tokens.tokenize, methods=["POST"]),
            Route("/detokenize", tokens.detokenize, methods=["POST"]),
        ]  # fmt: skip
        if admin_key is not None:
            admin = AdapterAdmin(pool, name, adapter_root)
            routes += [
                Route(LOAD_PATH, admin.load, methods=["POST"]), Route(UNLOAD_PATH, admin.unload, methods=["POST"])
            ]  # fmt: skip
        self._paths = [route.path for route in routes]
        routes += page.ROUTES
        self.app = Starlette(
            routes=routes,
            middleware=[
                Middleware(RequestLog, metrics=self._metrics, log=log, log_prompts=log_prompts),
                Middleware(KeyCheck, api_keys=api_keys, admin_key=admin_key),
            ],
            exception_handlers={
                RequestError: explain, LorakitError: explain, 404: explain_no_route, 405: explain_no_route,
                Exception: explain_bug,
            },
        )  # fmt: skip

    async def _health(self, request: Request) -> Response:
        works = self._engine.is_alive and self._engine.step_seconds() < STUCK_SECONDS
        return Response(status_code=200 if works else 503)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def _report_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _describe(self, request: Request) -> Response:
        return JSONResponse(openapi_document(self._paths))
