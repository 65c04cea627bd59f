"""serve: answer OpenAI's HTTP API with a base and its adapters."""

import argparse
import importlib.util
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from lorakit.cli.arguments import AddCommand, add_repeated, parse_named, picked, port_number, positive_int
from lorakit.cli.generate import add_model_arguments, load_model
from lorakit.errors import LorakitError


def add_serve_commands(add_command: AddCommand) -> None:
    serve = add_command("serve", _serve, "serve a base and its adapters over OpenAI's HTTP API")
    add_model_arguments(serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    serve.add_argument("--port", type=port_number, default=8000)
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
    serve.add_argument("--max-batch", type=positive_int, default=16, help="requests that are computed together")
    resident = "adapters in memory; others are read from disk when a request names them (default: all)"
    serve.add_argument("--max-adapters", type=positive_int, metavar="N", help=resident)
    add_repeated(serve, "--pin", "NAME", "adapter that stays in memory, with --max-adapters")
    memory = "memory for keys and values, of running requests and common prefixes (default: half of what is free)"
    serve.add_argument("--kv-memory", type=float, metavar="GB", help=memory)
    positions = "the same in tokens; the lower limit holds"
    serve.add_argument("--kv-positions", type=positive_int, metavar="N", help=positions)


def _serve(options: argparse.Namespace) -> None:
    if any(importlib.util.find_spec(package) is None for package in ("starlette", "uvicorn", "prometheus_client")):
        raise LorakitError("serve needs Starlette, uvicorn and prometheus-client: pip install 'lorakit[serve]'")
    adapters = parse_named(options.adapter, "--adapter")
    # of a folder, whose path means nothing to clients
    name = options.name or (Path(options.base).resolve().name if Path(options.base).is_dir() else options.base)
    if name in adapters:
        raise LorakitError(f"--adapter {name}: is the base's name too; choose another with --name")
    api_keys = _api_keys(options)
    _check_hosts(options, api_keys)
    if options.admin_key is not None and options.admin_key in api_keys:
        raise LorakitError("--admin-key: is also an API key, so every client could load adapters; choose another")
    if options.adapter_root is not None and options.admin_key is None:
        raise LorakitError("--adapter-root: goes with --admin-key, which the routes that load adapters need")
    for option, root in (("--adapter-root", options.adapter_root), ("--adapters-dir", options.adapters_dir)):
        if root is not None and not root.is_dir():
            raise LorakitError(f"{option}: no folder {root.absolute()}")
    if options.kv_memory is not None and not 0 < options.kv_memory < math.inf:
        raise LorakitError(f"--kv-memory: gigabytes above 0, got {options.kv_memory}")
    _check_pins(list(dict.fromkeys(options.pin)), options.max_adapters)
    from lorakit.patch.find import find_patch

    model = load_model(options, {}, prompted_as=adapters.values())
    from lorakit.planning.machine import GB, free_memory
    from lorakit.serving.adapter_pool import AdapterPool
    from lorakit.serving.app import serve
    from lorakit.serving.engine import ServingEngine

    pool = AdapterPool(model, options.max_adapters, options.pin)
    for adapter, path in adapters.items():
        pool.load(adapter, find_patch(path), allow=options.allow)
        if note := pool.sources()[adapter].note:
            print(note, file=sys.stderr)
    device = next(model.model.parameters()).device
    kv_memory = free_memory(device) // 2 if options.kv_memory is None else int(options.kv_memory * GB)
    settings = picked(
        options, "host", "port", "admin_key", "adapter_root", "adapters_dir", "max_logprobs", "log_prompts"
    )
    engine = ServingEngine(
        model, max_rows=options.max_batch, kv_memory_bytes=kv_memory, max_positions=options.kv_positions
    )
    serve(model, pool, engine, name, api_keys=api_keys, allowed_hosts=options.allowed_host, **settings)


def _check_pins(names: Sequence[str], max_adapters: int | None) -> None:
    if names and max_adapters is None:
        raise LorakitError("--pin: goes with --max-adapters; without it all adapters stay in memory")
    if max_adapters is not None and len(names) > max_adapters:
        raise LorakitError(
            f"--pin: {len(names)} adapters, {', '.join(names)}, and --max-adapters is {max_adapters}; pin fewer, or"
            " have more in memory"
        )


def _api_keys(options: argparse.Namespace) -> list[str]:
    if "" in [*options.api_key, options.admin_key]:
        raise LorakitError("--api-key, --admin-key: an empty key, which every request has; give another")
    return [*options.api_key, *(_read_keys(options.api_key_file) if options.api_key_file else [])]


def _check_hosts(options: argparse.Namespace, api_keys: Sequence[str]) -> None:
    from lorakit.serving.routes import LOOPBACK

    if options.allowed_host and (api_keys or options.host not in LOOPBACK):
        raise LorakitError("--allowed-host: only without keys and with --host 127.0.0.1; others answer under any name")


def _read_keys(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise LorakitError(f"--api-key-file {path}: cannot be read: {problem}") from None
    keys = [line.strip() for line in lines]
    for number, key in enumerate(keys, 1):
        if len(key.split()) > 1:
            raise LorakitError(f"--api-key-file {path}:{number}: a key has no spaces; write one key a line")
    if not any(keys):  # a server without keys answers everybody
        raise LorakitError(f"--api-key-file {path}: has no key; write one a line")
    return [key for key in keys if key]
