"""serve: answer OpenAI's HTTP API with a base and its adapters."""

import argparse
import importlib.util
import sys
from pathlib import Path

from lorakit.cli.arguments import AddCommand, parse_named, positive_int
from lorakit.cli.generate import add_model_arguments, load_model
from lorakit.errors import LorakitError


def add_serve_command(add_command: AddCommand) -> None:
    """Add `serve`."""
    serve = add_command("serve", _serve, "serve a base and its adapters over OpenAI's HTTP API")
    add_model_arguments(serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--name", help="the base's name in requests (default: BASE)")
    serve.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="key that requests need; may be repeated"
    )
    serve.add_argument("--admin-key", metavar="KEY", help="key of the routes that load and unload adapters")
    serve.add_argument("--adapter-root", metavar="DIR", help="folder whose patches may be loaded over HTTP")
    serve.add_argument("--max-batch", type=positive_int, default=16, help="requests that are computed together")
    serve.add_argument(
        "--kv-positions", type=positive_int, default=1 << 16, help="tokens whose keys and values fit, of all requests"
    )


def _serve(options: argparse.Namespace) -> int:
    if any(importlib.util.find_spec(package) is None for package in ("starlette", "uvicorn")):
        raise LorakitError("serve needs Starlette and uvicorn: pip install 'lorakit[serve]'")
    adapters = parse_named(options.adapter, "--adapter")
    name = options.name or options.base
    if name in adapters:
        raise LorakitError(f"--adapter {name}: is the base's name too; choose another with --name")
    if options.admin_key is not None and options.admin_key in options.api_key:
        raise LorakitError("--admin-key: is also an --api-key, so every client could load adapters; choose another")
    if options.adapter_root is not None and options.admin_key is None:
        raise LorakitError("--adapter-root: goes with --admin-key, which the routes that load adapters need")
    if options.adapter_root is not None and not Path(options.adapter_root).is_dir():
        raise LorakitError(f"--adapter-root: no folder {Path(options.adapter_root).absolute()}")
    model = load_model(options, adapters)
    from lorakit.serving.server import serve

    print(f"http://{options.host}:{options.port}/v1  {', '.join([name, *adapters])}", file=sys.stderr)
    serve(
        model, name, host=options.host, port=options.port, api_keys=options.api_key, admin_key=options.admin_key,
        adapter_root=None if options.adapter_root is None else Path(options.adapter_root), max_rows=options.max_batch,
        max_positions=options.kv_positions,
    )  # fmt: skip
    return 0
