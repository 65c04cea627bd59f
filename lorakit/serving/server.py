"""Run the HTTP application with uvicorn until a signal ends it. Requests under way are answered first."""

import contextlib
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

import uvicorn

from lorakit.errors import LorakitError
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.inference.prompts import NO_TOKENIZER
from lorakit.serving.adapter_folder import AdapterFolder
from lorakit.serving.adapter_pool import AdapterPool
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from lorakit.serving.request_log import LineLog

STANDARD_ERROR: Final = 2


def serve(
    model: AdaptedModel,
    pool: AdapterPool,
    engine: ServingEngine,
    name: str,
    *,
    host: str,
    port: int,
    api_keys: Sequence[str] = (),
    admin_key: str | None = None,
    adapter_root: Path | None = None,
    adapters_dir: Path | None = None,
    log_prompts: bool = False,
) -> None:
    """Serve a base under ``name`` and its adapters under theirs; returns after SIGTERM or Ctrl-C.

    engine: is closed at the end. port: 0 is a free one. adapters_dir: a folder to watch, whose sub-folders are patches.
    Raises LorakitError: the address cannot be listened on, the base has no tokenizer, or a pinned name has no adapter.
    """
    with contextlib.ExitStack() as open_parts:
        open_parts.callback(engine.close)
        if model.tokenizer is None:
            raise LorakitError(f"serve: {NO_TOKENIZER}")
        listening = open_parts.enter_context(_listen(host, port))
        log = LineLog(STANDARD_ERROR)
        folder = None
        if adapters_dir is not None:
            folder = AdapterFolder(pool, adapters_dir, {name, *pool.names}, log)
            open_parts.callback(folder.close)
            folder.start()
        pool.check_pinned()
        app = OpenAIServer(
            model, engine, name, api_keys, admin_key, adapter_root, pool=pool,
            failed_adapters=folder.failed if folder else dict,
            log=log, log_lines_lost=lambda: log.num_lost, log_prompts=log_prompts,
        ).app  # fmt: skip
        address = f"[{host}]" if ":" in host else host
        names = ", ".join([name, *pool.names])
        print(f"http://{address}:{listening.getsockname()[1]}/v1  {names}", file=sys.stderr, flush=True)
        _DrainingServer(uvicorn.Config(app, log_level="warning", access_log=False)).run([listening])


class _DrainingServer(uvicorn.Server):
    """A server that answers what is under way after the first signal, and dies of the second one.

    uvicorn raises the first signal once more when it has ended, so that the process would end as if it were killed.
    """

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises LorakitError: the address cannot be listened on."""
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as problem:
        raise LorakitError(f"--host {host} --port {port}: {problem}; choose another") from None
    # accepted sockets inherit it; with Nagle's algorithm, a reply on a connection that stays open waits 40 ms
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
