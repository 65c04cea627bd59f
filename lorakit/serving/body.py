"""Read the JSON body of a request, up to a size, and its fields."""

import json
import re
from typing import Any, Final

from starlette.requests import Request

from lorakit.serving.openai_requests import RequestError

MAX_BODY_BYTES: Final = 8_000_000
MAX_DEPTH: Final = 100
"""of lists and objects in each other; chat templates and grammars recurse into them"""
SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""half of a character in JSON's escapes, which no text has without its other half"""


async def read_body(request: Request) -> Any:
    """Return the parsed body.

    Raises:
        RequestError: 413, it is too large; 400, it is not JSON, a text in it cannot be encoded, or it is too deep.
    """
    size, parts = 0, []
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise RequestError(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413)
        parts.append(part)
    content = b"".join(parts)
    try:
        body = json.loads(content)
        if SURROGATE.search(content):
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as problem:
        raise RequestError(f"the body is not JSON: {problem}") from None
    if content.count(b"[") + content.count(b"{") > MAX_DEPTH and _depth(body) > MAX_DEPTH:
        raise RequestError(f"the body has more than {MAX_DEPTH} levels of lists and objects")
    return body


def _depth(body: Any) -> int:
    """Return the levels of lists and objects, without recursion."""
    depth, level = 0, [body]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


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
