"""Turn prompts into tokens and back, by vLLM's two routes."""

from typing import Any, final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lorakit.inference.adapted_model import AdaptedModel
from lorakit.inference.prompts import PromptCodec
from lorakit.patch.prompting import PromptForm
from lorakit.serving.adapter_pool import AdapterPool
from lorakit.serving.body import read_body, read_fields
from lorakit.serving.openai_requests import RequestError, read_messages, typed_field
from lorakit.serving.request_record import record_of
from lorakit.serving.served_models import ServedModels

TOKENIZE_FIELDS = (
    "model", "prompt", "messages", "tools", "add_special_tokens", "add_generation_prompt", "return_token_strs",
)  # fmt: skip


@final
class TokenRoutes:
    """The tokenizers of a server: the base's, and those of adapters with new tokens."""

    def __init__(self, model: AdaptedModel, pool: AdapterPool, models: ServedModels) -> None:
        self._model, self._pool, self._models = model, pool, models

    async def tokenize(self, request: Request) -> Response:
        """Reply with the tokens of a text or of messages, which a completion of them has."""
        body = read_fields(await read_body(request), TOKENIZE_FIELDS)
        codec = await self._codec(request, body)
        if ("prompt" in body) == ("messages" in body):
            raise RequestError("prompt: one of prompt and messages is required", param="prompt")
        ids = _text_ids(codec, body) if "prompt" in body else _message_ids(codec, body)
        strings = typed_field(body, "return_token_strs", bool, default=False)
        return JSONResponse(
            {
                "count": len(ids), "max_model_len": self._models.max_tokens, "tokens": ids,
                "token_strs": codec.tokenizer.convert_ids_to_tokens(ids) if strings else None,
            }
        )  # fmt: skip

    async def detokenize(self, request: Request) -> Response:
        """Reply with the text of tokens."""
        body = read_fields(await read_body(request), ("model", "tokens"))
        codec = await self._codec(request, body)
        ids = typed_field(body, "tokens", list)
        if not all(type(token) is int and 0 <= token < codec.num_tokens for token in ids):
            raise RequestError(f"tokens: token ids below {codec.num_tokens}", param="tokens")
        return JSONResponse({"prompt": codec.tokenizer.decode(ids)})

    async def _codec(self, request: Request, body: dict[str, Any]) -> PromptCodec:
        """Return the codec of the model in a body; without one, as vLLM allows, the base's."""
        record = record_of(request)
        record.model = typed_field(body, "model", str, default=None)
        name = None if record.model is None else self._models.adapter_name(record.model)
        lease = self._pool.lease(name)
        adapter = await run_in_threadpool(lease.__enter__)  # which may read the adapter from disk
        try:
            return self._model.codec(adapter)
        finally:
            await run_in_threadpool(lease.__exit__, None, None, None)


def _text_ids(codec: PromptCodec, body: dict[str, Any]) -> list[int]:
    text = typed_field(body, "prompt", str)
    for name in ("add_generation_prompt", "tools"):
        if name in body:
            raise RequestError(f"{name}: goes with messages", param=name)
    special = typed_field(body, "add_special_tokens", bool, default=True)
    if special:
        return codec.token_ids(text, PromptForm(raw=True))
    return list(codec.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _message_ids(codec: PromptCodec, body: dict[str, Any]) -> list[int]:
    if typed_field(body, "add_special_tokens", bool, default=False):
        raise RequestError("add_special_tokens: not with messages, whose template has them", param="add_special_tokens")
    tools = typed_field(body, "tools", list, default=None)
    prompt = typed_field(body, "add_generation_prompt", bool, default=True)
    return codec.token_ids(read_messages(body), PromptForm(), tools, add_generation_prompt=prompt)
