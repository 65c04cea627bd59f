"""Answer requests for what hidden states say: embeddings, and the labels or rewards of adapters with a head."""

import asyncio
import base64
import json
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from lorakit.decoding.embedding import LAST
from lorakit.errors import BaseModelError
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.inference.classify import as_classification, head_for
from lorakit.inference.token_texts import encode
from lorakit.patch.own_head import OwnHead
from lorakit.serving.engine import ServingEngine
from lorakit.serving.errors import RequestError
from lorakit.serving.pooling import MODULES, Pooling, read_pooling
from lorakit.serving.request_log import Log, record_of, unless_client_leaves
from lorakit.serving.requests import EmbeddingRequest, HeadRequest, as_list
from lorakit.serving.served_models import ServedModels

LAST_STATE: Final = Pooling(LAST, normalize=False, max_tokens=None, dimensions=())


@final
class EmbeddingRoutes:
    """The routes of embeddings and heads. A base without embeddings is served; requests for them get the reason."""

    def __init__(self, engine: ServingEngine, models: ServedModels, log: Log) -> None:
        self._engine = engine
        self._models = models
        self._pooling, self._refusal = _pooling_of(models.model, log)

    async def embed(self, request: Request, body: EmbeddingRequest) -> Response:
        record = record_of(request)
        name = self._models.begin(request, body.model, body.input)
        if self._pooling is None:
            raise RequestError(self._refusal, param="model")
        allowed = self._pooling.dimensions
        if body.dimensions is not None and body.dimensions not in allowed:
            words = f"one of {', '.join(map(str, allowed))}"
            if not allowed:
                words = "this base's config.json allows no cut (is_matryoshka or matryoshka_dimensions); leave it out"
            elif isinstance(allowed, range):
                words = f"from 1 to {allowed[-1]}"
            raise RequestError(f"dimensions: {words}, got {body.dimensions}")
        rows, futures = await run_in_threadpool(self._start, body, name, self._pooling, record.client)
        record.num_prompt_tokens = sum(map(len, rows))
        vectors = await unless_client_leaves(request, _results(futures))
        content = await run_in_threadpool(_reply, vectors, self._pooling, body, record.num_prompt_tokens)
        return Response(content, media_type="application/json")

    def _start(
        self, body: EmbeddingRequest, name: str | None, pooling: Pooling, client: str | None
    ) -> tuple[list[list[int]], list[Future[Tensor]]]:
        adapter = self._models.pool.adapter(name)
        tokenizer = self._models.model.codec(adapter).tokenizer
        # with all special tokens, because an end token may be pooled
        inputs: list[str | list[int]] = as_list(body.input)
        rows = [encode(tokenizer, one, add_special_tokens=True) if isinstance(one, str) else one for one in inputs]
        return rows, self._engine.embed(rows, pooling, adapter, client)

    async def classify(self, request: Request, body: HeadRequest) -> Response:
        return await self._reply_of_head(request, body, "classify")

    async def pool(self, request: Request, body: HeadRequest) -> Response:
        return await self._reply_of_head(request, body, None)

    async def _reply_of_head(self, request: Request, body: HeadRequest, objective: str | None) -> Response:
        record = record_of(request)
        name = self._models.begin(request, body.model, body.input or body.rows[0])
        head, futures, num_tokens = await run_in_threadpool(self._start_of_head, body, name, objective, record.client)
        record.num_prompt_tokens = num_tokens
        states = await unless_client_leaves(request, _results(futures))
        data = [{"index": index, **_shown(head, head.weight @ own, objective)} for index, own in enumerate(states)]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
        reply = {"object": "list", "created": int(time.time()), "model": body.model, "data": data, "usage": usage}
        return JSONResponse(reply)

    def _start_of_head(
        self, body: HeadRequest, name: str | None, objective: str | None, client: str | None
    ) -> tuple[OwnHead, Sequence[Future[Tensor]], int]:
        """Queue the inputs; return the adapter's head, their states after the last token, and the number of tokens."""
        adapter = self._models.pool.adapter(name)
        codec = self._models.model.codec(adapter)
        head = head_for(codec.head, objective)
        rows = [codec.row_ids(row) for row in body.rows]
        return head, self._engine.embed(rows, LAST_STATE, adapter, client), sum(map(len, rows))


def _pooling_of(model: AdaptedModel, log: Log) -> tuple[Pooling | None, str]:
    """Return how a base pools; or None and the reason, which is logged if the base is laid out for embeddings."""
    folder = model.folder
    if folder is None:
        return None, "a merged copy in memory has no embeddings; save it, and serve the folder"
    try:
        if model.model.base_model is model.model:
            raise BaseModelError(f"{type(model.model).__name__} has no part without a head, so it has no embeddings")
        return read_pooling(folder), ""
    except BaseModelError as problem:
        reason = str(problem)
    if (folder / MODULES).is_file():
        log({"event": "no embeddings", "error": reason})
    return None, reason.replace(f"{folder}/", "")  # clients need not know where it is


async def _results(futures: Sequence[Future[Tensor]]) -> list[Tensor]:
    results = await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
    for one in results:
        if isinstance(one, asyncio.CancelledError):  # by the end of the engine, because nobody here did
            raise RequestError("the server ended before the answer; ask again", status=503)
        if isinstance(one, BaseException):
            raise RequestError(f"the engine failed on this request: {type(one).__name__}", status=500)
    return [one for one in results if isinstance(one, Tensor)]


def _reply(vectors: Sequence[Tensor], pooling: Pooling, body: EmbeddingRequest, num_tokens: int) -> bytes:
    """Return the body of a reply, vector by vector, because one call for all may hold the interpreter for seconds."""
    rows = []
    embeddings = torch.stack([vector[: body.dimensions] for vector in vectors])
    if pooling.normalize:  # after they are cut
        embeddings = F.normalize(embeddings, dim=-1)
    for index, embedding in enumerate(embeddings):
        value: Any = embedding.tolist()
        if body.encoding_format == "base64":
            value = base64.b64encode(embedding.numpy().astype("<f4").tobytes()).decode()
        rows.append(json.dumps({"object": "embedding", "index": index, "embedding": value}))
    rest = json.dumps({"model": body.model, "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}})
    return f'{{"object": "list", "data": [{", ".join(rows)}], {rest[1:]}'.encode()


def _shown(head: OwnHead, values: Tensor, objective: str | None) -> dict[str, Any]:
    """Return the label of a head's values, or for no objective the values as they are, such as a reward."""
    if objective is None:
        return {"object": "pooling", "data": values.tolist()}
    answer = as_classification(head.labels, values)
    probs = list(answer.probabilities.values())
    return {"label": answer.label, "probs": probs, "num_classes": len(probs)}
