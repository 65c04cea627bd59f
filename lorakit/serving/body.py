"""Read the JSON body of a request, up to a size, and its fields."""

import json
from typing import Any, Final

from starlette.requests import Request

from lorakit.serving.openai_requests import RequestError

MAX_BODY_BYTES: Final = 8_000_000


async def read_body(request: Request) -> Any:
    """Return the parsed body.

    Raises:
        RequestError: 413, it is too large; 400, it is not JSON.
    """
    size, parts = 0, []
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise RequestError(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413)
        parts.append(part)
    try:
        return json.loads(b"".join(parts))
    except (ValueError, RecursionError) as problem:
        raise RequestError(f"the body is not JSON: {problem}") from None


def read_fields(body: Any, known: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of a body, if all are known.

    Raises:
        RequestError: names the first that is not.
    """
    if not isinstance(body, dict):
        raise RequestError(f"the body is a JSON object, got a {type(body).__name__}")
    if unknown := sorted(set(body) - set(known)):
        raise RequestError(f"{unknown[0]}: not known here; there are {', '.join(known)}", param=unknown[0])
    return body
