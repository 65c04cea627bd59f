"""Answer requests for what hidden states say: embeddings, labels or rewards of adapters with a head, and relevance.

The relevance of texts to one another comes from a head that reads two of them at once, or from their embeddings.
"""

import asyncio
import base64
import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, final

import torch
import torch.nn.functional as F
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from lorakit.errors import BaseModelError, LorakitError
from lorakit.inference.adapted_model import as_classification, head_for
from lorakit.inference.prompts import PromptCodec
from lorakit.patch.own_head import OwnHead
from lorakit.patch.pooling import MODULES, Pooling
from lorakit.serving.engine import ServingEngine
from lorakit.serving.errors import RequestError
from lorakit.serving.request_log import Log, record_of, unless_client_leaves
from lorakit.serving.requests import EmbeddingRequest, HeadRequest, RerankRequest, ScoreRequest, as_list
from lorakit.serving.served_models import ServedModels
from lorakit.slots.routing import Adapter

Reader = TypeVar("Reader")  # of the states: a pooling, or a head
Inputs = tuple[Reader, Pooling, list[list[int]]]  # who reads the states, how they are pooled, and the token ids


@final
class StateRoutes:
    """The routes of embeddings, heads and relevance. A base without embeddings is served; requests get the reason."""

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
        def encode(adapter: Adapter | None, codec: PromptCodec) -> Inputs[Pooling]:
            pooling = self._pooling(adapter)
            pooling.embedding(torch.empty(0), body.dimensions)  # refused before anything is computed
            texts: list[str | list[int]] = as_list(body.input)
            return pooling, pooling, [codec.text_ids(text, pooling) for text in texts]

        pooling, vectors, usage = await self._states(request, body.model, body.input, encode)
        content = await run_in_threadpool(_embeddings, vectors, pooling, body, usage)
        return Response(content, media_type="application/json")

    async def head(self, request: Request, body: HeadRequest, *, objective: str | None = None) -> Response:
        """Reply with the label of each input for the objective `classify`, else with the values of the head."""

        def encode(adapter: Adapter | None, codec: PromptCodec) -> Inputs[OwnHead]:
            head = head_for(codec.head, objective)
            return head, head.pooling, list(map(codec.row_ids, body.rows))

        head, states, usage = await self._states(request, body.model, body.input or body.rows[0], encode)
        data = ({"index": index, **_shown(head, head.values(own), objective)} for index, own in enumerate(states))
        return await run_in_threadpool(_listed, body.model, data, usage | {"completion_tokens": 0})

    async def score(self, request: Request, body: ScoreRequest) -> Response:
        scores, usage = await self._scores(request, body)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return _listed(body.model, data, usage)

    async def rerank(self, request: Request, body: RerankRequest) -> Response:
        scores, usage = await self._scores(request, body)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or len(scores)]
        ranked = [
            {"index": index, "document": {"text": body.documents[index]}, "relevance_score": scores[index]}
            for index in order
        ]
        return JSONResponse({"model": body.model, "results": ranked, "usage": usage})

    async def _scores(self, request: Request, body: ScoreRequest | RerankRequest) -> tuple[list[float], dict[str, int]]:
        """Return the relevance of each pair of texts, and the usage. Without a head, each text is embedded once."""
        pairs = body.pairs
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))

        def encode(adapter: Adapter | None, codec: PromptCodec) -> Inputs[OwnHead | None]:
            head = codec.head
            if head is None:
                pooling = self._pooling(adapter)
                return None, pooling, [codec.text_ids(text, pooling) for text in texts]
            relevance(head, torch.zeros(head.num_values))  # refused before anything is computed
            return head, head.pooling, list(map(codec.row_ids, pairs))

        head, states, usage = await self._states(request, body.model, pairs[0][0], encode)

        def scores() -> list[float]:
            if head is not None:
                return [relevance(head, head.values(state)) for state in states]
            vectors = dict(zip(texts, (F.normalize(state, dim=0) for state in states), strict=True))
            return [float(vectors[one] @ vectors[two]) for one, two in pairs]

        return await run_in_threadpool(scores), usage

    def _pooling(self, adapter: Adapter | None) -> Pooling:
        """Return how texts are pooled. Raises RequestError: there are no embeddings."""
        model = self._models.model
        try:
            return model.pooling(adapter)
        except BaseModelError as problem:  # clients need not know where it is
            raise RequestError(str(problem).replace(f"{model.folder}/", ""), param="model") from None

    async def _states(
        self,
        request: Request,
        model: str | None,
        shown: Any,
        encode: Callable[[Adapter | None, PromptCodec], Inputs[Reader]],
    ) -> tuple[Reader, list[Tensor], dict[str, int]]:
        """Return who reads the states of the inputs, the states, and the usage. shown: the prompt, for the log."""
        record = record_of(request)
        name = self._models.begin(request, model, shown)

        def start() -> tuple[Reader, int, Sequence[Future[Tensor]]]:
            adapter = self._models.pool.adapter(name)
            reader, pooling, rows = encode(adapter, self._models.model.codec(adapter))
            return reader, sum(map(len, rows)), self._engine.embed(rows, pooling, adapter, record.client)

        reader, num_tokens, futures = await run_in_threadpool(start)
        record.num_prompt_tokens = num_tokens
        states = await unless_client_leaves(request, _results(futures))
        return reader, states, {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


async def _results(futures: Sequence[Future[Tensor]]) -> list[Tensor]:
    """Return the states of inputs that were queued. Raises RequestError: the engine failed, or has ended."""
    done = await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
    for one in done:
        if isinstance(one, asyncio.CancelledError):  # by the end of the engine, because nobody here did
            raise RequestError("the server ended before the answer; ask again", status=503)
        if isinstance(one, BaseException):
            raise RequestError(f"the engine failed on this request: {type(one).__name__}", status=500)
    return [one for one in done if isinstance(one, Tensor)]


def _listed(model: str | None, rows: Iterable[dict[str, Any]], usage: dict[str, int]) -> Response:
    data = list(rows)
    return JSONResponse({"object": "list", "created": int(time.time()), "model": model, "data": data, "usage": usage})


def _embeddings(vectors: Sequence[Tensor], pooling: Pooling, body: EmbeddingRequest, usage: dict[str, int]) -> bytes:
    """Return the body of a reply, vector by vector, because one call for all may hold the interpreter for seconds."""
    rows = []
    for index, embedding in enumerate(pooling.embedding(torch.stack(list(vectors)), body.dimensions)):
        value: Any = embedding.tolist()
        if body.encoding_format == "base64":
            value = base64.b64encode(embedding.numpy().astype("<f4").tobytes()).decode()
        rows.append(json.dumps({"object": "embedding", "index": index, "embedding": value}))
    rest = json.dumps({"model": body.model, "usage": usage})
    return f'{{"object": "list", "data": [{", ".join(rows)}], {rest[1:]}'.encode()


def _shown(head: OwnHead, values: Tensor, objective: str | None) -> dict[str, Any]:
    """Return the label of a head's values, or for no objective the values as they are, such as a reward."""
    if objective is None:
        return {"object": "pooling", "data": values.tolist()}
    answer = as_classification(head, values)
    probs = list(answer.probabilities.values())
    several = {"labels": answer.labels} if head.has_several else {}
    return {"label": answer.label, **several, "probs": probs, "num_classes": len(probs)}


def relevance(head: OwnHead, values: Tensor) -> float:
    """Return the one value of a head, or the probability of the second of its two labels.

    Raises LorakitError: it has more labels.
    """
    if len(head.labels) > 2 or head.has_several:
        raise LorakitError(f"model: a head of one value or two labels ranks texts; this one has {len(head.labels)}")
    return float(values.softmax(0)[1] if head.labels else values[0])
