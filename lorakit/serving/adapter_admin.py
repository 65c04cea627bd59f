"""Load, replace and unload adapters while requests are answered, by vLLM's two routes.

Invariant: a folder outside the root is never read. Requests under way keep the adapter that they began with.
"""

from pathlib import Path
from typing import final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from lorakit.serving.adapter_pool import AdapterPool
from lorakit.serving.errors import RequestError
from lorakit.serving.requests import LoadRequest, UnloadRequest


@final
class AdapterAdmin:
    """The routes that change the adapters of a server. root: the folder whose patches may be loaded; None: none."""

    def __init__(self, pool: AdapterPool, base_name: str, root: Path | None) -> None:
        self._pool = pool
        self._base_name = base_name
        self._root = root

    async def load(self, request: Request, body: LoadRequest) -> Response:
        """Load ``lora_path`` under ``lora_name``; with ``load_inplace`` it replaces the adapter of that name."""
        name = body.lora_name
        if name == self._base_name:
            raise RequestError(f"lora_name: {name!r} is the base's name", param="lora_name")
        folder = self._below_root(body.lora_path)
        await run_in_threadpool(self._pool.load, name, folder, replace=bool(body.load_inplace))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request, body: UnloadRequest) -> Response:
        """Unload ``lora_name``; requests that began with it are answered with it."""
        name = body.lora_name
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
