"""Turn prompts into tokens and back, by vLLM's two routes."""

from functools import partial
from typing import Any, final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lorakit.inference.adapted_model import AdaptedModel
from lorakit.inference.prompts import PromptCodec
from lorakit.patch.prompting import PromptForm
from lorakit.serving.adapter_pool import AdapterPool
from lorakit.serving.errors import RequestError
from lorakit.serving.request_record import record_of
from lorakit.serving.requests import DetokenizeRequest, TokenizeRequest
from lorakit.serving.served_models import ServedModels


@final
class TokenRoutes:
    """The tokenizers of a server: the base's, and those of adapters with new tokens."""

    def __init__(self, model: AdaptedModel, pool: AdapterPool, models: ServedModels) -> None:
        self._model = model
        self._pool = pool
        self._models = models

    async def tokenize(self, request: Request, body: TokenizeRequest) -> Response:
        """Reply with the tokens of a text or of messages, which a completion of them has."""
        name = self._adapter_name(request, body.model)
        return JSONResponse(await run_in_threadpool(partial(self._tokenize, body, name)))

    async def detokenize(self, request: Request, body: DetokenizeRequest) -> Response:
        """Reply with the text of tokens."""
        name = self._adapter_name(request, body.model)
        return JSONResponse(await run_in_threadpool(partial(self._detokenize, body, name)))

    def _adapter_name(self, request: Request, model: str | None) -> str | None:
        """Return the adapter of a request; without a model, as vLLM allows, the base."""
        record_of(request).model = model
        return None if model is None else self._models.adapter_name(model)

    def _tokenize(self, body: TokenizeRequest, name: str | None) -> dict[str, Any]:
        with self._pool.lease(name) as adapter:
            codec = self._model.codec(adapter)
        ids = _token_ids(codec, body)
        return {
            "count": len(ids),
            "max_model_len": self._models.max_tokens,
            "tokens": ids,
            "token_strs": codec.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None,
        }

    def _detokenize(self, body: DetokenizeRequest, name: str | None) -> dict[str, Any]:
        with self._pool.lease(name) as adapter:
            codec = self._model.codec(adapter)
        if max(body.tokens, default=0) >= codec.num_tokens:
            raise RequestError(f"tokens: token ids below {codec.num_tokens}", param="tokens")
        return {"prompt": codec.tokenizer.decode(body.tokens)}


def _token_ids(codec: PromptCodec, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        messages = [message.for_template() for message in body.messages]
        adds_prompt = body.add_generation_prompt is not False
        return codec.token_ids(messages, PromptForm(), body.tools, add_generation_prompt=adds_prompt)
    if body.add_special_tokens is not False:
        return codec.token_ids(body.prompt or "", PromptForm(raw=True))
    return list(codec.tokenizer(body.prompt, add_special_tokens=False, verbose=False)["input_ids"])
