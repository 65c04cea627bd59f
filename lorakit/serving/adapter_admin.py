"""Load, replace and unload adapters while requests are answered, by vLLM's two routes.

Invariant: a folder outside the root is never read. Requests under way keep the adapter that they began with.
"""

from pathlib import Path
from typing import final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from lorakit.serving.adapter_pool import AdapterPool
from lorakit.serving.body import read_body, read_fields
from lorakit.serving.openai_requests import RequestError, typed_field

LOAD_PATH = "/v1/load_lora_adapter"
UNLOAD_PATH = "/v1/unload_lora_adapter"


@final
class AdapterAdmin:
    """The routes that change the adapters of a server. root: the folder whose patches may be loaded; None: none."""

    def __init__(self, pool: AdapterPool, base_name: str, root: Path | None) -> None:
        self._pool, self._base_name, self._root = pool, base_name, root

    async def load(self, request: Request) -> Response:
        """Load ``lora_path`` under ``lora_name``; with ``load_inplace`` it replaces the adapter of that name."""
        body = read_fields(await read_body(request), ("lora_name", "lora_path", "load_inplace"))
        name, path = typed_field(body, "lora_name", str), typed_field(body, "lora_path", str)
        replace = typed_field(body, "load_inplace", bool, default=False)
        if name == self._base_name:
            raise RequestError(f"lora_name: {name!r} is the base's name", param="lora_name")
        folder = self._below_root(path)
        await run_in_threadpool(self._pool.load, name, folder, replace=replace)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Unload ``lora_name``; requests that began with it are answered with it."""
        body = read_fields(await read_body(request), ("lora_name",))
        name = typed_field(body, "lora_name", str)
        if name not in self._pool.names:
            raise RequestError(f"lora_name: {name!r} is not loaded", status=404, param="lora_name", code="not_found")
        await run_in_threadpool(self._pool.remove, name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def _below_root(self, path: str) -> Path:
        """Return the folder of a patch, links resolved.

        Raises:
            RequestError: it is outside the root, or there is no root.
        """
        if self._root is None:
            raise RequestError("lora_path: nothing may be loaded; start the server with --adapter-root DIR", status=403)
        root = self._root.resolve()
        try:
            folder = (root / path).resolve()
        except (OSError, ValueError, RuntimeError) as problem:  # a NUL, or links in a circle
            raise RequestError(f"lora_path: {problem}", param="lora_path") from None
        if not folder.is_relative_to(root):
            raise RequestError("lora_path: is outside the server's --adapter-root", status=403, param="lora_path")
        return folder
