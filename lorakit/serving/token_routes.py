"""Turn prompts into tokens and back, by vLLM's two routes."""

from typing import Any, final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lorakit.inference.adapted_model import AdaptedModel
from lorakit.patch.prompting import PromptForm
from lorakit.serving.body import read_body, read_fields
from lorakit.serving.openai_requests import RequestError, read_messages, typed_field
from lorakit.serving.request_record import record_of
from lorakit.serving.served_models import ServedModels

TOKENIZE_FIELDS = (
    "model", "prompt", "messages", "tools", "add_special_tokens", "add_generation_prompt", "return_token_strs",
)  # fmt: skip


@final
class TokenRoutes:
    """The tokenizer of a server, which the base and its adapters share."""

    def __init__(self, model: AdaptedModel, models: ServedModels) -> None:
        self._model, self._models = model, models

    async def tokenize(self, request: Request) -> Response:
        """Reply with the tokens of a text or of messages, which a completion of them has."""
        body = read_fields(await read_body(request), TOKENIZE_FIELDS)
        self._read_model(request, body)
        if ("prompt" in body) == ("messages" in body):
            raise RequestError("prompt: one of prompt and messages is required", param="prompt")
        ids = self._text_ids(body) if "prompt" in body else self._message_ids(body)
        strings = typed_field(body, "return_token_strs", bool, default=False)
        return JSONResponse(
            {
                "count": len(ids), "max_model_len": self._models.max_tokens, "tokens": ids,
                "token_strs": self._model.tokenizer.convert_ids_to_tokens(ids) if strings else None,
            }
        )  # fmt: skip

    def _text_ids(self, body: dict[str, Any]) -> list[int]:
        text = typed_field(body, "prompt", str)
        for name in ("add_generation_prompt", "tools"):
            if name in body:
                raise RequestError(f"{name}: goes with messages", param=name)
        special = typed_field(body, "add_special_tokens", bool, default=True)
        if special:
            return self._model.prompts.token_ids(text, PromptForm(raw=True))
        return list(self._model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _message_ids(self, body: dict[str, Any]) -> list[int]:
        if typed_field(body, "add_special_tokens", bool, default=False):
            raise RequestError(
                "add_special_tokens: not with messages, whose template has them", param="add_special_tokens"
            )
        tools = typed_field(body, "tools", list, default=None)
        prompt = typed_field(body, "add_generation_prompt", bool, default=True)
        messages = read_messages(body)
        return self._model.prompts.token_ids(messages, PromptForm(), tools, add_generation_prompt=prompt)

    async def detokenize(self, request: Request) -> Response:
        """Reply with the text of tokens."""
        body = read_fields(await read_body(request), ("model", "tokens"))
        self._read_model(request, body)
        ids = typed_field(body, "tokens", list)
        if not all(type(token) is int and 0 <= token < self._model.prompts.num_tokens for token in ids):
            raise RequestError(f"tokens: token ids below {self._model.prompts.num_tokens}", param="tokens")
        return JSONResponse({"prompt": self._model.tokenizer.decode(ids)})

    def _read_model(self, request: Request, body: dict[str, Any]) -> None:
        """Read the model's name, which is optional, because all have one tokenizer."""
        record = record_of(request)
        record.model = typed_field(body, "model", str, default=None)
        if record.model is not None:
            self._models.adapter_name(record.model)
