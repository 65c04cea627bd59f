"""Errors of requests, and OpenAI's body for each, so that a client's library raises the exception that it documents."""

import re
from collections.abc import Mapping
from typing import Any, Final

from lorakit.decoding.generation import QueueFullError
from lorakit.errors import AdapterNotLoadedError, ContextLengthError, LorakitError, TemporaryFailure

MAX_MESSAGE: Final = 2000  # characters of an error's message, which may quote the request
FIELD: Final = re.compile(r"([a-z_0-9]+): ")  # that a message begins with
MAX_LOGGED: Final = 200  # characters of a text in a line of the log
QUOTED: Final = re.compile(r"(?<!\w)['\"]|got [\[{(]")
"""the beginning of a value in a message, which may be text of a prompt"""


class RequestError(LorakitError):
    """A request that cannot be answered. param: OpenAI's; None is the field that the message begins with."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        named = FIELD.match(message)
        self.status = status
        self.param = param or (named and named[1])
        self.code = code


TOO_LONG: Final = "context_length_exceeded"
KNOWN: Final[Mapping[type, Mapping[str, Any]]] = {
    AdapterNotLoadedError: {"status": 404, "param": "model", "code": "model_not_found"},  # after its name was read
    ContextLengthError: {"code": TOO_LONG},
    QueueFullError: {"status": 429, "code": "rate_limit_exceeded"},
    TemporaryFailure: {"status": 503},  # an adapter whose files are damaged, or the end of the engine
}
"""error from below -> what a request's error is with it; of others it is 400"""
TYPES: Final[Mapping[int, str]] = {401: "authentication_error", 429: "requests"}
"""status -> OpenAI's type; of 429 it is what there are too many of"""


def request_error(problem: Exception, prompts: str = "prompts") -> RequestError:
    """Return an error as the one of a request. prompts: their field. The text of a bug is left out."""
    if isinstance(problem, RequestError):
        return problem
    if isinstance(problem, LorakitError):
        return RequestError(re.sub("^prompts:", f"{prompts}:", str(problem)), **KNOWN.get(type(problem), {}))
    return RequestError(f"internal error: {type(problem).__name__}", status=500)


def error_body(problem: RequestError) -> dict[str, Any]:
    kind = TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    message = str(problem)[:MAX_MESSAGE] + "..." * (len(str(problem)) > MAX_MESSAGE)
    return {"error": {"message": message, "type": kind, "param": problem.param, "code": problem.code}}


def logged_error(problem: RequestError) -> str:
    """Return an error for the log: its code or field, and its message as far as that quotes nothing of the request."""
    name = problem.code or problem.param or ""
    message = QUOTED.split(str(problem))[0].strip()
    return (message if message.startswith(name) else f"{name}: {message}")[:MAX_LOGGED]
