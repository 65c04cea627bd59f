"""Answer requests for how well documents answer a query: by an adapter's head that reads both, or by embeddings."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import final

import torch
import torch.nn.functional as F
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from lorakit.errors import LorakitError
from lorakit.patch.own_head import OwnHead
from lorakit.serving.embedding_routes import pooling_of, results
from lorakit.serving.engine import ServingEngine
from lorakit.serving.request_log import record_of, unless_client_leaves
from lorakit.serving.requests import RerankRequest, ScoreRequest
from lorakit.serving.served_models import ServedModels


@final
class ScoreRoutes:
    """vLLM's routes for the relevance of texts to one another."""

    def __init__(self, engine: ServingEngine, models: ServedModels) -> None:
        self._engine = engine
        self._models = models

    async def score(self, request: Request, body: ScoreRequest) -> Response:
        scores, usage = await self._scores(request, body)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        reply = {"object": "list", "created": int(time.time()), "model": body.model, "data": data, "usage": usage}
        return JSONResponse(reply)

    async def rerank(self, request: Request, body: RerankRequest) -> Response:
        scores, usage = await self._scores(request, body)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or len(scores)]
        ranked = [
            {"index": index, "document": {"text": body.documents[index]}, "relevance_score": scores[index]}
            for index in order
        ]
        return JSONResponse({"model": body.model, "results": ranked, "usage": usage})

    async def _scores(self, request: Request, body: ScoreRequest | RerankRequest) -> tuple[list[float], dict[str, int]]:
        """Return the relevance of each pair of texts, and the usage."""
        record = record_of(request)
        pairs = body.pairs
        name = self._models.begin(request, body.model, pairs[0][0])
        head, num_tokens, futures = await run_in_threadpool(self._start, pairs, name, record.client)
        record.num_prompt_tokens = num_tokens
        states = await unless_client_leaves(request, results(futures))
        if head is not None:
            scores = [relevance(head, head.values(state)) for state in states]
        else:
            vectors = dict(zip(_texts(pairs), (F.normalize(state, dim=0) for state in states), strict=True))
            scores = [float(vectors[one] @ vectors[two]) for one, two in pairs]
        return scores, {"prompt_tokens": num_tokens, "total_tokens": num_tokens}

    def _start(
        self, pairs: list[tuple[str, str]], name: str | None, client: str | None
    ) -> tuple[OwnHead | None, int, list[Future[Tensor]]]:
        """Queue the texts; return the head that scores their states, the number of tokens, and the states.

        Without a head the states are those of all texts, each once, for their embeddings.
        """
        adapter = self._models.pool.adapter(name)
        codec = self._models.model.codec(adapter)
        if codec.head is not None:
            relevance(codec.head, torch.zeros(codec.head.num_values))  # refused before anything is computed
            rows = list(map(codec.row_ids, pairs))
            return codec.head, sum(map(len, rows)), self._engine.embed(rows, codec.head.pooling, adapter, client)
        pooling = pooling_of(self._models.model, adapter)
        rows = [codec.text_ids(text, pooling) for text in _texts(pairs)]
        return None, sum(map(len, rows)), self._engine.embed(rows, pooling, adapter, client)


def _texts(pairs: Sequence[tuple[str, str]]) -> list[str]:
    return list(dict.fromkeys(text for pair in pairs for text in pair))


def relevance(head: OwnHead, values: Tensor) -> float:
    """Return the one value of a head, or the probability of the second of its two labels.

    Raises LorakitError: it has more labels.
    """
    if len(head.labels) > 2 or head.has_several:
        raise LorakitError(f"score: a head with one value, or two labels, ranks texts; this one has {len(head.labels)}")
    return float(values.softmax(0)[1] if head.labels else values[0])
