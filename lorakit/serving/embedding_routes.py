"""Answer requests for what hidden states say: embeddings, and the labels or rewards of adapters with a head."""

import asyncio
import base64
import json
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, final

import torch
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from lorakit.errors import BaseModelError
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.inference.classify import as_classification, head_for
from lorakit.patch.own_head import OwnHead
from lorakit.patch.pooling import MODULES, Pooling
from lorakit.serving.engine import ServingEngine
from lorakit.serving.errors import RequestError
from lorakit.serving.request_log import Log, record_of, unless_client_leaves
from lorakit.serving.requests import EmbeddingRequest, HeadRequest, as_list
from lorakit.serving.served_models import ServedModels
from lorakit.slots.routing import Adapter


@final
class EmbeddingRoutes:
    """The routes of embeddings and heads. A base without embeddings is served; requests for them get the reason."""

    def __init__(self, engine: ServingEngine, models: ServedModels, log: Log) -> None:
        self._engine = engine
        self._models = models
        model = models.model
        try:
            model.pooling(None)
        except BaseModelError as problem:
            if model.folder is not None and (model.folder / MODULES).is_file():  # it is laid out for embeddings
                log({"event": "no embeddings", "error": str(problem)})

    async def embed(self, request: Request, body: EmbeddingRequest) -> Response:
        record = record_of(request)
        name = self._models.begin(request, body.model, body.input)
        pooling, num_tokens, futures = await run_in_threadpool(self._start, body, name, record.client)
        record.num_prompt_tokens = num_tokens
        vectors = await unless_client_leaves(request, results(futures))
        content = await run_in_threadpool(_reply, vectors, pooling, body, num_tokens)
        return Response(content, media_type="application/json")

    def _start(
        self, body: EmbeddingRequest, name: str | None, client: str | None
    ) -> tuple[Pooling, int, list[Future[Tensor]]]:
        """Queue the inputs; return how they are pooled, the number of tokens, and their pooled states."""
        adapter = self._models.pool.adapter(name)
        model = self._models.model
        pooling = pooling_of(model, adapter)
        pooling.embedding(torch.empty(0), body.dimensions)  # refused before anything is computed
        inputs: list[str | list[int]] = as_list(body.input)
        rows = [model.codec(adapter).text_ids(one, pooling) for one in inputs]
        return pooling, sum(map(len, rows)), self._engine.embed(rows, pooling, adapter, client)

    async def head(self, request: Request, body: HeadRequest, *, objective: str | None = None) -> Response:
        """Reply with the label of each input for the objective `classify`, else with the values of the head."""
        record = record_of(request)
        name = self._models.begin(request, body.model, body.input or body.rows[0])
        head, futures, num_tokens = await run_in_threadpool(self._start_of_head, body, name, objective, record.client)
        record.num_prompt_tokens = num_tokens
        states = await unless_client_leaves(request, results(futures))
        data = [{"index": index, **_shown(head, head.values(own), objective)} for index, own in enumerate(states)]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
        reply = {"object": "list", "created": int(time.time()), "model": body.model, "data": data, "usage": usage}
        return JSONResponse(reply)

    def _start_of_head(
        self, body: HeadRequest, name: str | None, objective: str | None, client: str | None
    ) -> tuple[OwnHead, Sequence[Future[Tensor]], int]:
        """Queue the inputs; return the adapter's head, the states that it reads, and the number of tokens."""
        adapter = self._models.pool.adapter(name)
        codec = self._models.model.codec(adapter)
        head = head_for(codec.head, objective)
        rows = [codec.row_ids(row) for row in body.rows]
        return head, self._engine.embed(rows, head.pooling, adapter, client), sum(map(len, rows))


def pooling_of(model: AdaptedModel, adapter: Adapter | None) -> Pooling:
    """Return how texts are pooled. Raises RequestError: there are no embeddings."""
    try:
        return model.pooling(adapter)
    except BaseModelError as problem:  # clients need not know where it is
        raise RequestError(str(problem).replace(f"{model.folder}/", ""), param="model") from None


async def results(futures: Sequence[Future[Tensor]]) -> list[Tensor]:
    """Return the states of inputs that were queued. Raises RequestError: the engine failed, or has ended."""
    done = await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
    for one in done:
        if isinstance(one, asyncio.CancelledError):  # by the end of the engine, because nobody here did
            raise RequestError("the server ended before the answer; ask again", status=503)
        if isinstance(one, BaseException):
            raise RequestError(f"the engine failed on this request: {type(one).__name__}", status=500)
    return [one for one in done if isinstance(one, Tensor)]


def _reply(vectors: Sequence[Tensor], pooling: Pooling, body: EmbeddingRequest, num_tokens: int) -> bytes:
    """Return the body of a reply, vector by vector, because one call for all may hold the interpreter for seconds."""
    rows = []
    for index, embedding in enumerate(pooling.embedding(torch.stack(list(vectors)), body.dimensions)):
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
    answer = as_classification(head, values)
    probs = list(answer.probabilities.values())
    several = {"labels": answer.labels} if head.has_several else {}
    return {"label": answer.label, **several, "probs": probs, "num_classes": len(probs)}
