"""Answer chats and texts, and tokenise them: from a request's body to its reply.

Invariant: what grows with a request (templates, tokens, grammars, texts of log-probabilities) is computed in threads,
so that the streams of others go on.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final, final

import torch
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from lorakit.data.chat_template import check_template_kwargs
from lorakit.decoding.grammar import OTHERWISE, THOUGHT_END
from lorakit.decoding.sampling import Token, with_logprobs
from lorakit.errors import ContextLengthError, LorakitError, TemporaryFailure
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.inference.answer_form import AnswerPart
from lorakit.inference.answer_parser import AnswerParser
from lorakit.inference.call_grammar import call_grammar
from lorakit.inference.prompts import PromptCodec, encode
from lorakit.ops.openmp import end_openmp_threads
from lorakit.patch.prompting import PromptForm
from lorakit.serving.answer import ChoiceStream, Deliver, Deliveries, Delta, Detokenizer
from lorakit.serving.engine import ServingEngine
from lorakit.serving.errors import TOO_LONG, RequestError
from lorakit.serving.reply import Reply
from lorakit.serving.request_log import RequestRecord, record_of, unless_client_leaves
from lorakit.serving.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TextRequest,
    TokenizeRequest,
    Tool,
)
from lorakit.serving.served_models import ServedModels
from lorakit.slots.routing import Adapter, Route

CHUNK_TOKENS: Final = 128  # positions of an echo whose logits are in memory at once: 80 MB with 150,000 tokens
MAX_CHARACTERS: Final = 256  # of a prompt for each token; no tokenizer has longer ones on average
MAX_LOGPROBS: Final = 20  # at each token, as OpenAI and vLLM have it
PROMPT_END: Final = 64  # tokens at the end of a prompt, in which a template opens or closes a thought


@final
class CompletionRoutes:
    """The routes that generate, and those that turn prompts into tokens and back, as vLLM's."""

    def __init__(self, engine: ServingEngine, models: ServedModels, max_logprobs: int) -> None:
        self._engine = engine
        self._models = models
        self._max_logprobs = max_logprobs
        self._one_at_a_time = asyncio.Lock()  # for the forwards of echoes, which are beside the engine's

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        record = record_of(request)
        items = Deliveries()
        call_soon = asyncio.get_running_loop().call_soon_threadsafe
        await run_in_threadpool(self._start, request, body, lambda item: call_soon(items.put_nowait, item))
        if isinstance(body, TextRequest) and body.echo:
            await unless_client_leaves(request, self._add_echoes(body, record))
        reply = Reply(body, record, items)
        if body.stream:
            return StreamingResponse(reply.events(), media_type="text/event-stream")
        return Response(await unless_client_leaves(request, reply.full()), media_type="application/json")

    def _check_sizes(self, body: CompletionRequest) -> None:
        """Refuse what would take long until it is refused, or be refused for ever."""
        field = body.prompt_field
        if len(body.prompts) * body.choices > self._engine.max_waiting:
            number = f"{len(body.prompts)} prompts of {body.choices} choices"
            raise RequestError(f"{field}: {number}; one request may have {self._engine.max_waiting} in all")
        if isinstance(body, ChatRequest):
            self._check_length(body.used_tools, "tools")
        for prompt in body.prompts:
            self._check_length(prompt, field)
        if (body.num_logprobs or 0) > self._max_logprobs:
            name = "top_logprobs" if isinstance(body, ChatRequest) else "logprobs"
            raise RequestError(
                f"{name}: up to {self._max_logprobs} at each token (--max-logprobs), got {body.num_logprobs}"
            )

    def _check_length(self, prompt: Any, field: str) -> None:
        """Refuse a text, messages or tools, before they are encoded, by the tokens that they have at least."""
        is_ids = isinstance(prompt, list) and prompt and isinstance(prompt[0], int)  # which the engine counts
        least = 0 if is_ids else least_tokens(prompt)
        if least > self._engine.max_positions:
            raise RequestError(f"{field}: at least {least} tokens, and {self._engine.max_positions} fit", code=TOO_LONG)

    def _start(self, request: Request, body: CompletionRequest, deliver: Deliver) -> None:
        """Queue every choice of a prompt before the next one is encoded, because the queue may be full by then."""
        record = record_of(request)
        prompt = body.prompt if isinstance(body, TextRequest) else body.prompts[0]
        name = self._models.begin(request, body.model, prompt)
        self._check_sizes(body)
        adapter = self._models.pool.adapter(name)
        codec = self._models.model.codec(adapter)
        chat = body if isinstance(body, ChatRequest) else None
        for prompt in body.prompts:
            ids = codec.token_ids(prompt, PromptForm(raw=True)) if chat is None else chat_ids(codec, chat)
            end = "" if chat is None else str(codec.tokenizer.decode(ids[-PROMPT_END:]))
            forced = None if chat is None else _form_around(codec, chat, end)
            for index in range(body.choices):
                settings = body.settings_of(len(ids), self._engine.max_positions, index)
                settings = settings if forced is None else replace(settings, response_format=forced)
                parser = None if chat is None else _parser_of(codec, chat, end)
                choice = ChoiceStream(ids, adapter, codec, settings, parser)
                self._begin(choice, body, record.client, deliver)
                record.add(choice)
            record.num_prompt_tokens += len(ids)

    def _begin(self, choice: ChoiceStream, body: CompletionRequest, client: str | None, deliver: Deliver) -> None:
        """Queue a choice, unless it is an echo alone. Raises RequestError: it does not fit."""
        try:
            if isinstance(body, TextRequest) and body.echo and body.max_tokens == 0:
                replace(choice.settings, max_tokens=1).check(choice.codec.num_tokens)  # 0 is of an echo alone
                choice.codec.check_answers()
                choice.codec.check_ids(choice.ids, 0)
            else:
                choice.start(self._engine, deliver, client)
        except ContextLengthError as problem:
            field = body.length_field if len(choice.ids) < self._engine.max_positions else body.prompt_field
            # OpenAI's words, by which gateways know the error
            limit = f"This model's maximum context length is {self._engine.max_positions} tokens"
            message = f"{limit}; {str(problem).removeprefix('prompts: ').replace('max_new_tokens', body.length_field)}"
            raise RequestError(message, param=field, code=TOO_LONG) from None

    async def _add_echoes(self, body: TextRequest, record: RequestRecord) -> None:
        """Set the echo of each choice: its prompt, and the log-probabilities of its tokens if they are requested."""
        for row, prompt in enumerate(body.prompts):
            if record.is_abandoned:
                raise TemporaryFailure("the server is ending; ask again")
            of_prompt = record.choices[row * body.choices : (row + 1) * body.choices]
            async with self._one_at_a_time:
                echo = await run_in_threadpool(self._echo, prompt, of_prompt[0], body.logprobs)
            offsets = of_prompt[0].offsets
            for choice in of_prompt:
                choice.echo = echo
                choice.offsets = [*offsets]

    def _echo(self, prompt: str | list[int], choice: ChoiceStream, num_logprobs: int | None) -> Delta:
        tokenizer = choice.codec.tokenizer
        text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=True)
        parts = [AnswerPart("content", text)]
        if num_logprobs is None:
            return Delta(parts)
        detokenizer = Detokenizer(tokenizer)
        written = ""
        for token in choice.ids:
            choice.offsets.append(min(detokenizer.num_characters, len(text)))
            written += detokenizer.add(token)[0]
        if written + detokenizer.finish()[0] != text and tokenizer.is_fast:  # of unknown tokens, or with other spaces
            encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
            if encoded["input_ids"] == choice.ids:
                choice.offsets = list(accumulate((start for start, _ in encoded["offset_mapping"]), max))
        width = CHUNK_TOKENS if self._engine.takes_parts else len(choice.ids)
        return Delta(parts, prompt_tokens(self._models.model, choice.adapter, choice.ids, num_logprobs, width))

    def tokenize(self, request: Request, body: TokenizeRequest) -> Response:
        """Reply with the tokens of a text or of messages, which a completion of them has."""
        name = self._models.begin(request, body.model)
        chat = None
        if body.messages is not None:
            kwargs = body.chat_template_kwargs
            chat = ChatRequest(model="", messages=body.messages, tools=body.tools, chat_template_kwargs=kwargs)
        self._check_length(body.prompt if chat is None else chat.prompts[0], record_of(request).prompt_field)
        self._check_length([] if chat is None else chat.used_tools, "tools")
        codec = self._models.model.codec(self._models.pool.adapter(name))
        if chat is not None:
            ids = chat_ids(codec, chat, prompt=body.add_generation_prompt is not False)
        elif body.add_special_tokens is not False:
            ids = codec.token_ids(body.prompt or "", PromptForm(raw=True))
        else:
            ids = encode(codec.tokenizer, body.prompt or "")
        texts = codec.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        limit = self._models.max_tokens
        return JSONResponse({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts})

    def detokenize(self, request: Request, body: DetokenizeRequest) -> Response:
        name = self._models.begin(request, body.model)
        if len(body.tokens) > self._engine.max_positions:
            raise RequestError(f"tokens: {len(body.tokens)}, and {self._engine.max_positions} fit", code=TOO_LONG)
        codec = self._models.model.codec(self._models.pool.adapter(name))
        if max(body.tokens, default=0) >= codec.num_tokens:
            raise RequestError(f"tokens: token ids below {codec.num_tokens}")
        return JSONResponse({"prompt": codec.tokenizer.decode(body.tokens)})


def least_tokens(value: Any) -> int:
    """Return how many tokens a text has at least, or messages or tools: one for each of their values but roles."""
    if isinstance(value, str):
        return len(value) // MAX_CHARACTERS
    if isinstance(value, dict):
        return sum(1 + least_tokens(key) + least_tokens(own) for key, own in value.items() if key != "role")
    return sum(max(1, least_tokens(own)) for own in value) if isinstance(value, list) else 0


@torch.no_grad()
def prompt_tokens(
    model: AdaptedModel, adapter: Adapter | None, ids: Sequence[int], number: int, width: int
) -> list[Token]:
    """Return each token with its log-probabilities, and those of the ``number`` most probable ones; the first has none.

    width: tokens of a forward. They come from forwards beside the engine's, so they are those of the engine up to the
    order of its sums.
    """
    device = next(model.model.parameters()).device
    tokens = [Token(ids[0])]
    cache = None
    for start in range(0, len(ids) - 1, width):
        part = list(ids[start : min(start + width, len(ids) - 1)])
        with model.routed(Route((adapter,))):
            output = model.model(input_ids=torch.tensor([part], device=device), past_key_values=cache, use_cache=True)
        cache = output.get("past_key_values")  # which Mamba lacks; its width is that of the input
        following = ids[start + 1 : start + 1 + len(part)]
        tokens += with_logprobs(following, output.logits[0].float(), number)
    end_openmp_threads()
    return tokens


def chat_ids(codec: PromptCodec, chat: ChatRequest, *, prompt: bool = True) -> list[int]:
    """Return the token ids of a chat, and if ``prompt`` of the beginning of an answer, or raise LorakitError."""
    kwargs = dict[str, Any]()
    for field, own in chat.template_kwargs.items():
        check_template_kwargs(codec.tokenizer, own, field)
        kwargs |= own
    (messages,) = chat.prompts
    tools = chat.used_tools or None
    try:
        return codec.shown_ids(messages, tools, kwargs, prompt=prompt)
    except LorakitError:
        as_system = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
        if as_system == messages:
            raise
    # for a template that knows the role by its older name
    return codec.shown_ids(as_system, tools, kwargs, prompt=prompt)


def _form_around(codec: PromptCodec, chat: ChatRequest, end: str) -> dict[str, Any] | None:
    """Return the form of an answer with a thought or calls beside its own form; None of others. end: of the prompt."""
    answers = codec.answer_form
    form = chat.response_format
    form = form if form is not None and form.type.startswith("json") else None  # a regular expression says all of it
    tools = chat.used_tools if form is not None and answers.calls is not None else chat.forced_tools
    thinks = answers.is_opened_by(end)
    if not tools and (form is None or not thinks):
        return None
    parallel = not isinstance(chat.tool_choice, Tool) if chat.parallel_tool_calls is None else chat.parallel_tool_calls
    otherwise = {} if form is None else {OTHERWISE: form.model_dump(exclude_unset=True)}
    grammar = call_grammar(answers, codec.tokenizer, tools, end, parallel=parallel, otherwise=form is not None)
    thought = {THOUGHT_END: answers.thought[1].strip()} if thinks and answers.thought else {}
    return {"type": "grammar", "grammar": grammar, **otherwise, **thought}


def _parser_of(codec: PromptCodec, chat: ChatRequest, end: str) -> AnswerParser | None:
    """Return the parser of one answer; None where its text has no parts."""
    form = codec.answer_form
    if form.thought is None and (form.calls is None or not chat.used_tools):
        return None
    return AnswerParser(form, end, chat.used_tools, parallel=chat.parallel_tool_calls is not False)
