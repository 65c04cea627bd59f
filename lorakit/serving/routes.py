"""What a route is, and what is derived from the table of routes in app.py: keys, log, metrics, the OpenAPI document."""

import hmac
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorakit.serving.errors import RequestError, error_body
from lorakit.serving.messages import Body
from lorakit.serving.prometheus import RequestMetrics
from lorakit.serving.request_log import CLIENT_LEFT, RECORD_KEY, Log, RequestRecord
from lorakit.version import VERSION

_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
DEFINITIONS: Final = "#/components/schemas/{model}"


@final
@dataclass(frozen=True)
class ApiRoute:
    """One route.

    handler: takes the request, and the body if there is one; with a body it runs in a thread, unless it is a coroutine.
    body: its model; None: without a body. key: which one it needs. is_counted: it has metrics. is_quiet: its successes
    are not logged, because it is polled. is_documented: False for the files of the page.
    """

    method: Literal["GET", "POST"]
    path: str
    handler: Callable[..., Any]
    summary: str
    body: type[Body] | None = None
    key: Literal["none", "api", "admin"] = "api"
    is_counted: bool = False
    is_quiet: bool = False
    is_documented: bool = True


def openapi_document(routes: Iterable[ApiRoute]) -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for route in routes:
        if route.is_documented:
            path = route.path.replace("{name:path}", "{name}")
            paths[path] = {route.method.lower(): _operation(route, schemas)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "lorakit serve", "version": VERSION},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}, "schemas": schemas},
        "security": [{}, {"key": []}],
        "paths": paths,
    }


def _operation(route: ApiRoute, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return a route's operation, and add the models that its body refers to."""
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {
            "200": {"description": "done"},
            "4XX": {"description": "refused; the message names the field", "content": {"application/json": {}}},
            "5XX": {"description": "failed"},
        },
    }
    if "{name" in route.path:
        parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [parameter]
    if route.body is not None:
        schema = route.body.model_json_schema(ref_template=DEFINITIONS)
        schemas.update(schema.pop("$defs", {}))
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


@final
class RequestLog:
    """Gives every request an id, and logs and counts it when its answer has ended. routes: by path."""

    def __init__(
        self, app: ASGIApp, routes: Mapping[str, ApiRoute], metrics: RequestMetrics, log: Log | None, log_prompts: bool
    ) -> None:
        self._app = app
        self._routes = routes
        self._metrics = metrics
        self._log = log
        self._log_prompts = log_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        name = given if _ID.fullmatch(given) else uuid.uuid4().hex
        route = self._routes.get(scope["path"])
        is_counted = route is not None and route.is_counted
        is_quiet = route is not None and route.is_quiet
        record = RequestRecord(name, scope["method"], scope["path"], is_counted, time.monotonic())
        scope[RECORD_KEY] = record
        self._metrics.begin(record)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = record.id
                if record.status != CLIENT_LEFT:
                    record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            record.seconds = time.monotonic() - record.began
            self._metrics.observe(record)
            if self._log is not None and not (is_quiet and record.status < 400):
                self._log(self._line(record))

    def _line(self, record: RequestRecord) -> dict[str, Any]:
        first = record.first_token_seconds
        line = {
            "id": record.id, "method": record.method, "path": record.path, "status": record.status,
            "model": record.model,
            "prompt_tokens": record.num_prompt_tokens, "completion_tokens": record.num_tokens,
            "seconds": round(record.seconds, 4), "ttft": None if first is None else round(first, 4),
        }  # fmt: skip
        return line | ({"prompt": record.prompt} if self._log_prompts else {})


@final
class KeyCheck:
    """Refuses requests without a key of their route's kind. A path that is no route needs an API key.

    keys: kind -> keys, compared in constant time; a kind without keys is open.
    """

    def __init__(self, app: ASGIApp, routes: Mapping[str, ApiRoute], keys: Mapping[str, Sequence[str]]) -> None:
        self._app = app
        self._routes = routes
        self._keys = {kind: [key.encode() for key in own] for kind, own in keys.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            route = self._routes.get(scope["path"])
            keys = self._keys["api" if route is None else route.key]
            given = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
            num_matches = sum(hmac.compare_digest(given, key) for key in keys)  # all, so that the time is the same
            if keys and not num_matches:
                problem = RequestError(
                    "a valid key is required: Authorization: Bearer KEY", status=401, code="invalid_api_key"
                )
                await JSONResponse(error_body(problem), 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)
