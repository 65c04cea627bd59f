"""Connections of clients that are slow, silent or hostile: each wait has an end, and there are fewer than open files.

uvicorn limits only how long a connection may be idle after an answer. Here a request has to be complete some time after
its beginning, and a client has to read what it asked for.
"""

import asyncio
import errno
import resource
import socket
from typing import Final, final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lorakit.errors import LorakitError

READ_SECONDS: Final = 30.0  # from the beginning of a connection, or of a later request, to the end of the body
READ_BYTES: Final = 8192  # at a time, because h11 handles all chunks in them at once, 30 microseconds for each
SEND_SECONDS: Final = 60.0  # for which a client may read nothing of an answer that waits for it


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket of an address, to listen on later. Raises LorakitError: the address cannot be had."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else a port stays taken for a minute
    try:
        bound.bind((host, port))
    except OSError as problem:
        bound.close()
        if problem.errno == errno.EADDRINUSE:
            raise LorakitError(f"port {port} is taken by another program; choose another with --port") from None
        raise LorakitError(f"--host {host} --port {port}: {problem}; choose another") from None
    # accepted sockets inherit both; with Nagle's algorithm, a reply on a connection that stays open waits 40 ms
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # of Linux
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_SECONDS * 1000))
    return bound


def max_connections() -> int:
    """Return how many connections may be open, by the process's limit of open files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, limit - 64)  # of its own


@final
class TimedProtocol(H11Protocol):
    """HTTP/1.1 whose requests have to be complete after ``READ_SECONDS``. A connection too many is closed at once."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        if len(self.connections) > max_connections():
            transport.abort()
            return
        self._deadline = self.loop.call_later(READ_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._time_request()  # the next request may have come with this one, in part

    def _time_request(self) -> None:
        """Start or end the deadline of a request that is being received."""
        has_begun_headers = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not (has_begun_headers or self.conn.their_state is h11.SEND_BODY):
            self._end_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def shutdown(self) -> None:
        """End what waits for nothing, at the end of the server: an answer goes on, half a request does not."""
        if self._deadline is None:
            super().shutdown()
        else:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        super().connection_lost(exc)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
