"""Refuse requests without a key that their route needs. Keys are compared in constant time."""

import hmac
from collections.abc import Sequence
from typing import Final, final

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from lorakit.serving import page
from lorakit.serving.adapter_admin import LOAD_PATH, UNLOAD_PATH
from lorakit.serving.error_replies import error_body
from lorakit.serving.openai_requests import RequestError

OPEN_PATHS: Final = ("/health", "/version", *page.FILES)
"""paths that need no key; the page asks its reader for one"""


@final
class KeyCheck:
    """The check of every request but those for ``OPEN_PATHS``; without API keys there is none, but for the admin's."""

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
                await JSONResponse(error_body(problem), 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)
