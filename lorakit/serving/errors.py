"""Errors of requests, and OpenAI's body for each, so that a client's library raises the exception that it documents."""

import re
from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lorakit.decoding.request_queue import QueueFullError
from lorakit.errors import AdapterNotLoadedError, ContextLengthError, LorakitError
from lorakit.serving.engine import EngineClosedError

MAX_MESSAGE: Final = 2000  # characters of an error's message, which may quote the request
FIELD: Final = re.compile(r"(?!prompts)([a-z_]+): ")  # that a message begins with
RETRY_SECONDS: Final = 1  # after which a client may send a request again that was refused because the queue was full


class RequestError(LorakitError):
    """A request that cannot be answered. param: OpenAI's; None is the field that the message begins with."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


STATUSES: Final[Mapping[type, int]] = {AdapterNotLoadedError: 404, QueueFullError: 429, EngineClosedError: 503}
"""of errors from below; an adapter may be unloaded after its name was read"""
TOO_LONG: Final = "context_length_exceeded"
CODES: Final[Mapping[type, str]] = {AdapterNotLoadedError: "model_not_found", ContextLengthError: TOO_LONG}
"""OpenAI's codes of them"""


def error_body(problem: Exception) -> dict[str, Any]:
    status = status_of(problem)
    is_unloaded = isinstance(problem, AdapterNotLoadedError)
    message = str(problem)
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]}..."
    kind = "authentication_error" if status == 401 else "invalid_request_error" if status < 500 else "server_error"
    named = FIELD.match(message)
    param = "model" if is_unloaded else getattr(problem, "param", None) or (named and named[1])
    code = CODES.get(type(problem)) or getattr(problem, "code", None)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def status_of(problem: Exception) -> int:
    return problem.status if isinstance(problem, RequestError) else STATUSES.get(type(problem), 400)


async def explain(request: Request, problem: Exception) -> Response:
    headers = {"Retry-After": str(RETRY_SECONDS)} if isinstance(problem, QueueFullError) else None
    return JSONResponse(error_body(problem), status_of(problem), headers)


async def explain_no_route(request: Request, problem: Exception) -> Response:
    status = getattr(problem, "status_code", 404)
    reply = await explain(request, RequestError(f"{request.method} {request.url.path}: no such route", status=status))
    reply.headers.update(getattr(problem, "headers", None) or {})  # Allow: the methods of the path
    return reply


async def explain_bug(request: Request, problem: Exception) -> Response:
    """Reply to an unexpected error. Its text is in the log alone, because it may name files."""
    return await explain(request, RequestError(f"internal error: {type(problem).__name__}", status=500))
