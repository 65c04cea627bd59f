"""The models of a server: the base and its adapters, what is known of each, and how adapters are loaded and unloaded.

Invariant: a folder outside the root is never read. Requests under way keep the adapter that they began with.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from lorakit.errors import AdapterNotLoadedError, LorakitError
from lorakit.files.text import check_name
from lorakit.inference.bind import PatchSource
from lorakit.serving.adapter_pool import AdapterPool
from lorakit.serving.errors import RequestError, request_error
from lorakit.serving.request_log import record_of
from lorakit.serving.requests import LoadRequest, UnloadRequest


@final
class ServedModels:
    """The base under ``name``, and its adapters. root: of patches to load over HTTP. num_requests: of each adapter."""

    def __init__(self, pool: AdapterPool, name: str, root: Path | None, num_requests: Mapping[str, int]) -> None:
        self.model = pool.model
        self.pool = pool
        self.name = name
        limit = self.model.prompts.limit
        self.max_tokens = None if limit == math.inf else int(limit)  # of the longest prompt with its answer
        self._root = root
        self._num_requests = num_requests
        self._started = int(time.time())

    def adapter_name(self, model: str) -> str | None:
        """Return the adapter of a model, None for the base by name or folder. Raises AdapterNotLoadedError."""
        if model == self.name:
            return None
        if model not in self.pool:
            if model == str(self.model.folder):
                return None
            known = ", ".join([self.name, *self.pool.names])
            raise AdapterNotLoadedError(f"model {model!r} is not here; there are {known}")
        return model

    def begin(self, request: Request, model: str | None, prompt: Any = None) -> str | None:
        """Note what a request is about; return its adapter as `adapter_name`, and None without a model."""
        record = record_of(request)
        record.prompt = prompt
        name = None if model is None else self.adapter_name(model)
        record.served = name or (self.name if model else "")
        return name

    def list(self, request: Request) -> Response:
        adapters = [self._card(name, source) for name, source in self.pool.sources().items()]
        return JSONResponse({"object": "list", "data": [self._card(None, None), *adapters]})

    async def one(self, request: Request) -> Response:
        name = self.adapter_name(request.path_params["name"])
        return JSONResponse(self._card(name, None if name is None else self.pool.sources().get(name)))

    def adapters(self, request: Request) -> Response:
        """Reply with the state of every adapter: those that are loaded, and those whose last load failed."""
        loaded = self.pool.sources()
        failed = dict(self.pool.failed)  # which another thread changes
        facts = [self._facts(name, source) for name, source in loaded.items()]
        facts += [{"name": name, "state": "failed", "error": failed[name]} for name in failed if name not in loaded]
        return JSONResponse({"object": "list", "data": facts})

    def load(self, request: Request, body: LoadRequest) -> Response:
        """Load ``lora_path`` under ``lora_name``; with ``load_inplace`` it replaces the adapter of that name."""
        name = body.lora_name
        check_name(name, "lora_name", RequestError)
        if name == self.name:
            raise RequestError(f"lora_name: is the base's name, {name!r}")
        if name in self.pool and not body.load_inplace:
            raise RequestError("lora_name: is taken by an adapter; choose another, or send load_inplace: true")
        folder = self._below_root(body.lora_path)
        try:
            self.pool.load(name, folder, replace=bool(body.load_inplace))
        except LorakitError as problem:  # clients need not know where the root is
            message = str(problem).replace(str(folder), body.lora_path)
            raise RequestError(f"lora_path: {message}", status=request_error(problem).status) from None
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    def unload(self, request: Request, body: UnloadRequest) -> Response:
        """Unload ``lora_name``; requests that began with it are answered with it."""
        name = body.lora_name
        if name not in self.pool:
            raise RequestError(f"lora_name: no adapter is called {name!r}", status=404, code="not_found")
        self.pool.remove(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def _below_root(self, path: str) -> Path:
        if self._root is None:
            raise RequestError("lora_path: nothing may be loaded; start the server with --adapter-root DIR", status=403)
        root = self._root.resolve()
        try:
            folder = (root / path).resolve()
            files = folder.iterdir() if folder.is_dir() else ()
            is_below = all(path.resolve().is_relative_to(root) for path in (folder, *files))
        except (OSError, ValueError, RuntimeError) as problem:  # a long name, a NUL, links in a circle
            raise RequestError(f"lora_path: {problem}".replace(f"{root}/", "")) from None
        if not is_below:
            raise RequestError("lora_path: is outside the server's --adapter-root", status=403)
        return folder

    def _card(self, name: str | None, source: PatchSource | None) -> dict[str, Any]:
        root = self.name if name is None else source and source.identity
        return {
            "id": name or self.name, "object": "model", "created": self._started, "owned_by": "lorakit",
            "max_model_len": self.max_tokens, "root": root, "parent": None if name is None else self.name,
        }  # fmt: skip

    def _facts(self, name: str, source: PatchSource) -> dict[str, Any]:
        state = "loaded" if self.pool.model.is_loaded(name) else "on disk"
        return {
            "name": name, "state": state, "pinned": name in self.pool.pinned, "digest": source.identity,
            "rank": source.rank, "bytes": source.num_bytes, "requests": self._num_requests[name],
            "error": self.pool.failed.get(name), "prompting": asdict(source.form),
        }  # fmt: skip
