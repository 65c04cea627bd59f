"""What a route is, and what is derived from the table of routes in app.py: keys, log, metrics, the OpenAPI document."""

import hmac
import re
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final
from urllib.parse import urlsplit

from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorakit.errors import LorakitError, did_you_mean
from lorakit.serving.errors import MAX_LOGGED, RequestError, error_body, logged_error, request_error
from lorakit.serving.prometheus import RequestMetrics
from lorakit.serving.request_log import CLIENT_LEFT, RECORD_KEY, Log, RequestRecord, record_of
from lorakit.serving.requests import Body
from lorakit.version import VERSION

_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
REFERENCE: Final = "#/components/schemas/{model}"
RESPONSES: Final = {
    "200": {"description": "done"},
    "4XX": {"description": "refused; the message names the field", "content": {"application/json": {}}},
    "5XX": {"description": "failed"},
}
"""status -> what the OpenAPI document says of it, of every route"""
ADMIN_KEY: Final = "start the server with --admin-key KEY and --adapter-root DIR"
HINTS: Final = {
    "/v1/responses": "chats are answered at /v1/chat/completions (in openai-agents OpenAIChatCompletionsModel)",
    "/v1/load_lora_adapter": ADMIN_KEY,
    "/v1/unload_lora_adapter": ADMIN_KEY,
}
"""path that is no route -> what to do instead"""


@final
@dataclass(frozen=True)
class ApiRoute:
    """One route."""

    method: Literal["GET", "POST"]
    path: str
    handler: Callable[..., Any]
    """takes the request, and a body if there is one; then it runs in one of a few threads, unless it is a coroutine"""
    summary: str
    body: type[Body] | None = None  # its model; None: without a body
    key: Literal["none", "api", "admin", "either"] = "api"  # which one it needs
    is_counted: bool = False  # it has metrics
    is_quiet: bool = False  # its successes are not logged, because it is polled


def openapi_document(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    bodies = {route.body for route in routes if route.body is not None}
    schemas, models = models_json_schema([(body, "validation") for body in bodies], ref_template=REFERENCE)
    paths: dict[str, Any] = {}
    for route in routes:
        operation: dict[str, Any] = {"summary": route.summary, "responses": RESPONSES}
        if "{name" in route.path:
            operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        if route.body is not None:
            content = {"application/json": {"schema": schemas[route.body, "validation"]}}
            operation["requestBody"] = {"required": True, "content": content}
        paths[route.path.replace("{name:path}", "{name}")] = {route.method.lower(): operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "lorakit serve", "version": VERSION},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}, "schemas": models["$defs"]},
        "security": [{}, {"key": []}],
        "paths": paths,
    }


@final
@dataclass(frozen=True, eq=False)
class RequestGate:
    """Gives every request an id, refuses it unless it may come in, and logs and counts it when its answer has ended.

    Refused are requests without a key of their route's kind, those that a page of another host sends, and those that a
    proxy in front may have read otherwise. A client is who has a key, or without keys an address.
    """

    app: ASGIApp
    routes: Mapping[str, ApiRoute]  # by path
    metrics: RequestMetrics
    log: Log
    log_prompts: bool
    keys: Mapping[str, Sequence[bytes]]  # kind -> keys; a kind without keys is open
    allowed_hosts: Collection[str] | None
    """names of this server in small letters, to keep out pages whose own name leads here (DNS rebinding); None: any"""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        name = given if _ID.fullmatch(given) else uuid.uuid4().hex
        route = self.routes.get(scope["path"], NO_ROUTE)
        record = RequestRecord(name, scope["method"], scope["path"], route.is_counted, time.monotonic())
        scope[RECORD_KEY] = record
        self.metrics.under_way.add(record)
        has_ended = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_ended
            has_ended = message["type"] == "http.response.body" and not message.get("more_body")
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = record.id
                if message["status"] in (429, 503):
                    headers["Retry-After"] = str(self.metrics.retry_seconds())
                record.status = message["status"]
            await send(message)

        try:
            self._check_sender(Headers(scope=scope))
            self._check_key(scope, route.key)
            await self.app(scope, receive, send_with_id)
        except RequestError as problem:  # of the checks; what follows may be the rest of this request
            reply = await explain(Request(scope), problem, {"Connection": "close"})
            await reply(scope, receive, send_with_id)
        except ClientDisconnect:
            pass  # nobody reads a reply
        except Exception as problem:  # a bug, which is answered outside of here
            record.error = request_error(problem)
            raise
        finally:
            if not has_ended and record.error is None:
                record.status = CLIENT_LEFT
            record.abandon()  # also where the client left before the first event, or a prompt was refused
            record.seconds = time.monotonic() - record.began
            self.metrics.observe(record)
            if not (route.is_quiet and record.status < 400):
                self.log(self._line(record))

    def _line(self, record: RequestRecord) -> dict[str, Any]:
        first = record.first_token_seconds
        line = {
            "id": record.id, "method": record.method, "path": record.path[:MAX_LOGGED], "status": record.status,
            "model": None if record.model is None else record.model[:MAX_LOGGED],
            "prompt_tokens": record.num_prompt_tokens, "completion_tokens": record.num_tokens,
            "seconds": round(record.seconds, 4), "ttft": None if first is None else round(first, 4),
        }  # fmt: skip
        line |= {} if record.error is None else {"error": logged_error(record.error)}
        return line | ({"prompt": record.prompt} if self.log_prompts else {})

    def _check_sender(self, headers: Headers) -> None:
        if "content-length" in headers and "transfer-encoding" in headers:  # RFC 9112, 6.1
            raise RequestError("Content-Length: not with Transfer-Encoding")
        if self.allowed_hosts is None:
            return
        host = headers.get("host", "")
        origin = headers.get("origin")
        try:
            name = urlsplit(f"//{host}").hostname
            page = host if origin is None else urlsplit(origin).netloc
        except ValueError:  # such as half of an IPv6 address
            raise RequestError(f"Host or Origin is no address: {host[:200]!r}, {(origin or '')[:200]!r}") from None
        if name not in self.allowed_hosts:
            raise RequestError(f"Host: {name!r} is no name of this server; start it with --allowed-host", status=403)
        if page != host:
            raise RequestError(f"Origin: {origin!r:.200} is another page; start the server with --api-key", status=403)

    def _check_key(self, scope: Scope, kind: str) -> None:
        keys = self.keys[kind]
        scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        matches = [hmac.compare_digest(given.strip(), key) for key in keys]  # all, so that the time is the same
        is_known = scheme.lower() == b"bearer" and any(matches)
        peer = scope.get("client")
        scope[RECORD_KEY].client = f"key {matches.index(True)}" if is_known else peer[0] if peer else None
        if keys and not is_known:
            raise RequestError("a valid key is required: Authorization: Bearer KEY", status=401, code="invalid_api_key")


async def explain(request: Request, problem: Exception, headers: Mapping[str, str] | None = None) -> Response:
    """Return the reply to a request that failed, whose line in the log has the reason."""
    record = record_of(request)
    error = record.error = request_error(problem, record.prompt_field)
    return JSONResponse(error_body(error), error.status, headers)


async def explain_no_route(request: Request, problem: Exception) -> Response:
    path = request.url.path
    headers = getattr(problem, "headers", None) or {}  # Allow: the methods of the path
    if "Allow" in headers:
        reason = f"{'POST' if 'POST' in headers['Allow'] else 'GET'} only"
    else:
        near = did_you_mean(path, [route.path for route in request.app.routes])
        reason = f"no such route; {HINTS[path]}" if path in HINTS else f"no such route.{near}"
    status = getattr(problem, "status_code", 404)
    return await explain(request, RequestError(f"{request.method} {path}: {reason}", status=status), headers)


NO_ROUTE: Final = ApiRoute("GET", "", explain_no_route, "What a path gets that is no route.")
EXPLANATIONS: Final = {LorakitError: explain, 404: explain_no_route, 405: explain_no_route, Exception: explain}
"""error or status -> what Starlette answers it with"""
