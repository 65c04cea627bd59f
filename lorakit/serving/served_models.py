"""Name the models of a server: the base and its adapters, and what is known of each."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lorakit.inference.adapted_model import AdaptedModel
from lorakit.inference.bind import PatchSource
from lorakit.serving.adapter_pool import AdapterPool
from lorakit.serving.errors import RequestError


@final
class ServedModels:
    """The base under ``name``, and its adapters under theirs.

    num_requests: of an adapter so far. failed: adapter -> why it could not be loaded from the watched folder.
    """

    def __init__(
        self,
        model: AdaptedModel,
        pool: AdapterPool,
        name: str,
        num_requests: Callable[[str], int],
        failed: Callable[[], Mapping[str, str]],
    ) -> None:
        self._model = model
        self._pool = pool
        self.name = name
        self._num_requests = num_requests
        self._failed = failed
        self._started = int(time.time())

    def adapter_name(self, model: str) -> str | None:
        """Return the adapter that a request's model is, or None for the base.

        Raises:
            RequestError: 404, no such model.
        """
        if model == self.name:
            return None
        if model not in self._pool.names:
            known = ", ".join([self.name, *self._pool.names])
            raise RequestError(
                f"model {model!r} is not here; there are {known}", status=404, param="model", code="model_not_found"
            )
        return model

    @property
    def max_tokens(self) -> int | None:
        """Tokens of the longest prompt with its answer; None: there is no limit."""
        limit = self._model.prompts.limit
        return None if limit == math.inf else int(limit)

    async def list(self, request: Request) -> Response:
        """Reply with the base and its adapters."""
        adapters = [self._card(name, source) for name, source in self._pool.sources().items()]
        return JSONResponse({"object": "list", "data": [self._card(None, None), *adapters]})

    async def one(self, request: Request) -> Response:
        """Reply with one of them."""
        name = self.adapter_name(request.path_params["name"])
        return JSONResponse(self._card(name, None if name is None else self._pool.sources().get(name)))

    async def adapters(self, request: Request) -> Response:
        """Reply with the state of every adapter: those that are loaded, and those whose last load failed."""
        loaded = self._pool.sources()
        failed = self._failed()
        facts = [self._facts(name, source) for name, source in loaded.items()]
        facts += [{"name": name, "state": "failed", "error": failed[name]} for name in failed if name not in loaded]
        return JSONResponse({"object": "list", "data": facts})

    def _card(self, name: str | None, source: PatchSource | None) -> dict[str, Any]:
        card = {
            "id": name or self.name, "object": "model", "created": self._started, "owned_by": "lorakit",
            "max_model_len": self.max_tokens,
        }  # fmt: skip
        if name is None:
            return {**card, "root": self.name, "parent": None}
        return {**card, "root": source.identity if source else None, "parent": self.name}

    def _facts(self, name: str, source: PatchSource) -> dict[str, Any]:
        state = "loaded" if self._pool.is_resident(name) else "on disk"
        return {
            "name": name, "state": state, "pinned": self._pool.is_pinned(name), "digest": source.identity,
            "rank": source.rank, "bytes": source.num_bytes, "requests": self._num_requests(name),
            "error": self._failed().get(name), "prompting": asdict(source.form),
        }  # fmt: skip
