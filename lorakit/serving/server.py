"""Run the HTTP application with uvicorn until a signal ends it. Requests under way are answered first."""

from collections.abc import Sequence
from pathlib import Path

import uvicorn

from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine


def serve(
    model: AdaptedModel,
    name: str,
    *,
    host: str,
    port: int,
    api_keys: Sequence[str] = (),
    admin_key: str | None = None,
    adapter_root: Path | None = None,
    max_rows: int = 16,
    max_positions: int = 1 << 16,
) -> None:
    """Serve a base under ``name`` and its adapters under theirs; returns after SIGTERM or Ctrl-C."""
    engine = ServingEngine(model, max_rows=max_rows, max_positions=max_positions)
    try:
        app = OpenAIServer(model, engine, name, api_keys, admin_key, adapter_root).app
        uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False)
    finally:
        engine.close()
