"""Follow each request from its first byte to its last: its id, its log line, and its part in the metrics."""

import contextlib
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorakit.serving.prometheus import RequestMetrics
from lorakit.serving.request_record import CLIENT_LEFT, RECORD_KEY, RequestRecord
from lorakit.serving.routes import ApiRoute

_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")

Log = Callable[[Mapping[str, Any]], None]
"""writes one line"""


@final
class RequestLog:
    """Gives every request an id, and logs and counts it when its answer has ended. routes: by path."""

    def __init__(
        self,
        app: ASGIApp,
        routes: Mapping[str, ApiRoute],
        metrics: RequestMetrics,
        log: Log | None,
        log_prompts: bool,
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


def json_line(content: Mapping[str, Any]) -> str:
    """Return an event and its time as one line of JSON; what clients wrote cannot begin another line."""
    time_now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": time_now, **content}, ensure_ascii=True) + "\n"


@final
class LineLog:
    """Writes events as lines to a file descriptor. A line that cannot be written, as on a full disk, stops nothing.

    num_lost: lines that could not be written. The first of them in a row is reported on standard output. The next line
    that can be written comes after a line with their number.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._writing = threading.Lock()
        self.num_lost = 0
        self._num_unreported = 0
        """lines that were lost since the last one that was written"""
        self._is_cut = False

    def __call__(self, content: Mapping[str, Any]) -> None:
        with self._writing:
            if self._num_unreported and self._write(
                json_line({"event": "log lines lost", "lines": self._num_unreported})
            ):
                self._num_unreported = 0
            if self._num_unreported == 0 and self._write(json_line(content)):
                return
            self.num_lost += 1
            self._num_unreported += 1

    def _write(self, line: str) -> bool:
        """Write a line; return False if the end of it could not be written."""
        left = ("\n" * self._is_cut + line).encode()  # so that what is there of a cut line is a line of its own
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
                self._is_cut = bool(left)
        except OSError as problem:
            if self._num_unreported == 0:
                event = {"event": "the log cannot be written", "error": str(problem)}
                with contextlib.suppress(OSError):
                    os.write(1, json_line(event).encode())
            return False
        return True
