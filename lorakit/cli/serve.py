"""serve: answer OpenAI's HTTP API with a base and its adapters."""

import argparse
import contextlib
import gc
import importlib.util
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lorakit.cli.arguments import AddCommand, add_repeated, parse_named, picked, port_number, positive_int, refuse
from lorakit.cli.generate import add_model_arguments, load_model
from lorakit.errors import LorakitError, translate_error
from lorakit.files.text import check_name
from lorakit.ops.openmp import limit_spinning

STANDARD_ERROR: Final = 2
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


def add_serve_commands(add_command: AddCommand) -> None:
    serve = add_command("serve", _serve, "serve a base and its adapters over OpenAI's HTTP API")
    add_model_arguments(serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    port = "port to listen on (default: 8000; 0: any free one)"
    serve.add_argument("--port", type=port_number, default=8000, help=port)
    serve.add_argument("--name", help="the base's name in requests (default: BASE, of a folder its last part)")
    add_repeated(serve, "--api-key", "KEY", "key that requests need")
    serve.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with such keys, one a line")
    hosts = "further name of this machine, for clients without keys (default: localhost and its addresses)"
    add_repeated(serve, "--allowed-host", "NAME", hosts)
    serve.add_argument("--admin-key", metavar="KEY", help="key of the routes that load and unload adapters")
    serve.add_argument("--adapter-root", type=Path, metavar="DIR", help="folder whose patches may be loaded over HTTP")
    watched = "folder of patches: each sub-folder is served, and watched for changes"
    serve.add_argument("--adapters-dir", type=Path, metavar="DIR", help=watched)
    logprobs = "log-probabilities that a request may have at each token (default: 20)"
    serve.add_argument("--max-logprobs", type=positive_int, default=20, metavar="N", help=logprobs)
    serve.add_argument("--log-prompts", action="store_true", help="write prompts into the log of requests too")
    batch = "requests that are computed together (default: 16)"
    serve.add_argument("--max-batch", type=positive_int, default=16, metavar="N", help=batch)
    queue = "requests that may wait, half of them of one client (default: 2048); further ones get 429"
    serve.add_argument("--max-queue", type=positive_int, default=2048, metavar="N", help=queue)
    drain = "after a signal, for the requests that have begun (default: 30); then they are cut"
    serve.add_argument("--drain-timeout", type=float, default=30.0, metavar="SECONDS", help=drain)
    resident = "adapters in memory; others are read from disk when a request names them (default: all)"
    serve.add_argument("--max-adapters", type=positive_int, metavar="N", help=resident)
    add_repeated(serve, "--pin", "NAME", "adapter that stays in memory, with --max-adapters")
    memory = "memory for keys and values, of running requests and common prefixes (default: half of what is free)"
    serve.add_argument("--kv-memory", type=float, metavar="GB", help=memory)
    positions = "the same in tokens; the lower limit holds"
    serve.add_argument("--kv-positions", type=positive_int, metavar="N", help=positions)
    copies = "no copies of the weights in the CPU's own order, made where half of the free memory holds them"
    serve.add_argument("--no-prepack", action="store_true", help=copies)


def _serve(options: argparse.Namespace) -> None:
    if any(importlib.util.find_spec(package) is None for package in ("starlette", "uvicorn", "prometheus_client")):
        raise LorakitError("serve needs Starlette, uvicorn and prometheus-client: pip install 'lorakit[serve]'")
    adapters = parse_named(options.adapter, "--adapter")
    # of a folder, whose path means nothing to clients
    if options.name is not None:
        check_name(options.name, "--name")
    name = options.name or (Path(options.base).resolve().name if Path(options.base).is_dir() else options.base)
    if name in adapters:
        raise LorakitError(f"--adapter {name}: is the base's name too; choose another with --name")
    api_keys = [*options.api_key, *(_read_keys(options.api_key_file) if options.api_key_file else [])]
    if any(len(key.split()) != 1 for key in [*api_keys, options.admin_key] if key is not None):
        raise LorakitError("--api-key, --api-key-file, --admin-key: a key is empty or has spaces; give another")
    if options.admin_key in api_keys:
        raise LorakitError("--admin-key: is also an API key, so every client could load adapters; choose another")
    settings = picked(options, "admin_key", "adapter_root", "log_prompts", "max_logprobs")
    settings |= {"api_keys": api_keys, "allowed_hosts": _allowed_hosts(options, api_keys)}
    _check_adapters(options)
    if options.kv_memory is not None and not 0 < options.kv_memory < math.inf:
        raise LorakitError(f"--kv-memory: gigabytes above 0, got {options.kv_memory}")
    if not 0 <= options.drain_timeout < math.inf:
        raise LorakitError(f"--drain-timeout: seconds from 0, got {options.drain_timeout}")
    _load_and_serve(options, adapters, name, settings)


def _load_and_serve(options: argparse.Namespace, adapters: dict[str, str], name: str, settings: dict[str, Any]) -> None:
    from lorakit.serving.connections import bound_socket

    limit_spinning()
    with contextlib.ExitStack() as open_parts:
        bound = open_parts.enter_context(bound_socket(options.host, options.port))  # before minutes of loading
        model = load_model(options, {}, prompted_as=adapters.values())
        from lorakit.patch.find import find_patch
        from lorakit.planning.machine import GB, free_memory
        from lorakit.serving.adapter_pool import AdapterFolder, AdapterPool
        from lorakit.serving.app import OpenAIServer, serve
        from lorakit.serving.engine import ServingEngine
        from lorakit.serving.request_log import LineLog

        gc.freeze()  # else collections go through all that torch imported: 250 ms for streams, seconds at the end
        log = LineLog(STANDARD_ERROR)
        open_parts.callback(log.close)
        device = next(model.model.parameters()).device
        if not options.no_prepack:
            model.prepack(free_memory(device) // 2)
        pool = AdapterPool(model, options.max_adapters, options.pin, log)
        model.expected_adapters = options.max_adapters or len(adapters)
        for adapter, path in adapters.items():
            pool.load(adapter, find_patch(path), allow=options.allow)
            if note := pool.sources()[adapter].note:
                log({"event": "note", "adapter": adapter, "note": note.removeprefix("note: ")})
        kv_memory = free_memory(device) // 2 if options.kv_memory is None else int(options.kv_memory * GB)
        limits = {"max_rows": options.max_batch, "max_positions": options.kv_positions, "max_queue": options.max_queue}
        engine = ServingEngine(model, kv_memory_bytes=kv_memory, **limits)
        open_parts.callback(engine.close)
        if engine.note:
            log({"event": "note", "note": engine.note})
        if options.adapters_dir is not None:
            folder = AdapterFolder(pool, options.adapters_dir, {name, *pool.names})
            open_parts.callback(folder.close)
            folder.start()
        pool.check_pinned()
        server = OpenAIServer(model, engine, name, pool=pool, log=log, log_lines_lost=lambda: log.num_lost, **settings)
        serve(server, log, bound, options.host, [name, *pool.names], options.drain_timeout)


def _allowed_hosts(options: argparse.Namespace, api_keys: Sequence[str]) -> tuple[str, ...] | None:
    """Return the names of a server that every program of this machine may ask, pages in its browser too; None: any."""
    if api_keys or options.host not in LOOPBACK:
        if options.allowed_host:
            raise LorakitError("--allowed-host: only without keys and with --host 127.0.0.1; others answer to any name")
        return None
    for host in options.allowed_host:
        if not re.fullmatch(r"[\w.-]+|[\da-fA-F.]*(:[\da-fA-F.]*){2,}", host):
            raise LorakitError(f"--allowed-host {host}: a name alone, without scheme, port and path; write NAME or ::1")
    return (*LOOPBACK, *options.allowed_host)


def _check_adapters(options: argparse.Namespace) -> None:
    """Refuse options about adapters that change nothing, or name a folder that is not there."""
    if options.adapter_root is not None and options.admin_key is None:
        raise LorakitError("--adapter-root: goes with --admin-key, which the routes that load adapters need")
    for option, root in (("--adapter-root", options.adapter_root), ("--adapters-dir", options.adapters_dir)):
        if root is not None and not root.is_dir():
            raise LorakitError(f"{option}: no folder {root.absolute()}")
    if not (options.adapter or options.adapters_dir or options.adapter_root):
        reason = "there is no adapter; name --adapter-root, --adapters-dir or --adapter"
        refuse(options, ("admin_key", "max_adapters"), reason)
    pinned = list(dict.fromkeys(options.pin))
    if pinned and options.max_adapters is None:
        raise LorakitError("--pin: goes with --max-adapters; without it all adapters stay in memory")
    if options.max_adapters is not None and len(pinned) > options.max_adapters:
        raise LorakitError(f"--pin: {len(pinned)} adapters, and --max-adapters is {options.max_adapters}; pin fewer")


def _read_keys(path: Path) -> list[str]:
    with translate_error((OSError, UnicodeDecodeError), LorakitError, f"--api-key-file {path}: cannot be read"):
        lines = path.read_text(encoding="utf-8").splitlines()
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:  # a server without keys answers everybody
        raise LorakitError(f"--api-key-file {path}: has no key; write one a line")
    return keys
