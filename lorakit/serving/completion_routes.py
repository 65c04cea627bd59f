"""Answer chats and texts: from a request's body to its reply."""

import asyncio
from typing import Any, final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from lorakit.decoding.sampling import TokenLogprobs
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.patch.prompting import PromptForm
from lorakit.serving.adapter_pool import AdapterPool
from lorakit.serving.answer import Piece, StreamedAnswer
from lorakit.serving.body import read_body
from lorakit.serving.engine import ServingEngine
from lorakit.serving.openai_requests import CompletionRequest, RequestError, parse_request
from lorakit.serving.prompt_logprobs import prompt_logprobs
from lorakit.serving.reply import Reply
from lorakit.serving.request_record import CLIENT_LEFT, RequestRecord, record_of, unless_client_leaves
from lorakit.serving.served_models import ServedModels


@final
class CompletionRoutes:
    """The two routes that generate."""

    def __init__(self, model: AdaptedModel, pool: AdapterPool, engine: ServingEngine, models: ServedModels) -> None:
        self._model, self._pool, self._engine, self._models = model, pool, engine, models
        self._one_at_a_time = asyncio.Lock()
        """for the forwards of echoes, which are beside the engine's"""

    async def chat(self, request: Request) -> Response:
        """Reply to messages."""
        return await self._complete("chat", request)

    async def text(self, request: Request) -> Response:
        """Reply to texts or token ids."""
        return await self._complete("text", request)

    async def _complete(self, kind: str, request: Request) -> Response:
        record, body = record_of(request), await read_body(request)
        completion = parse_request(kind, body)
        record.model, record.prompt = completion.model, body["messages" if kind == "chat" else "prompt"]
        name = self._models.adapter_name(completion.model)
        record.served = completion.model
        if not self._engine.is_alive:
            raise RequestError("the engine has ended after an error; restart the server", status=503)
        client = request.headers.get("authorization")
        lease = self._pool.lease(name)
        adapter = await run_in_threadpool(lease.__enter__)  # which may read the adapter from disk
        try:
            codec, form = self._model.codec(adapter), PromptForm(raw=True)
            rows = [codec.token_ids(prompt, form, completion.tools) for prompt in completion.prompts]
            record.num_prompt_tokens = sum(map(len, rows))
            for ids in rows:
                for index in range(completion.choices):
                    answer = StreamedAnswer(
                        self._engine, self._model, ids, adapter, completion, index=index, client=client
                    )
                    record.answers.append(answer)
            if completion.echo:
                await self._add_echoes(completion, record.answers)
        except BaseException:  # a prompt that is refused, or a client that left: the other rows are for nobody
            for answer in record.answers:
                answer.cancel()
            raise
        finally:
            await run_in_threadpool(lease.__exit__, None, None, None)  # which may wait while another one is read
        reply = Reply(kind, completion, record.answers, record.num_prompt_tokens, codec.tokenizer)
        if completion.stream:
            return EventStream(reply, record)
        return JSONResponse(await unless_client_leaves(request, reply.full()))

    async def _add_echoes(self, request: CompletionRequest, answers: list[StreamedAnswer]) -> None:
        """Set the echo of each answer: its prompt, and the log-probabilities of its tokens if they are wanted."""
        number = request.settings.logprobs
        computed: dict[int, list[TokenLogprobs | None]] = {}
        for index, answer in enumerate(answers):
            row = index // request.choices
            prompt = request.prompts[row]
            tokenizer = self._model.codec(answer.adapter).tokenizer
            decoded = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=True)
            if number is None:
                answer.echo = Piece(decoded)
                continue
            if row not in computed:
                async with self._one_at_a_time:
                    computed[row] = await run_in_threadpool(
                        prompt_logprobs, self._model, answer.adapter, answer.ids, number
                    )
            answer.echo = Piece(decoded, tuple(zip(answer.ids, computed[row], strict=True)))


@final
class EventStream(StreamingResponse):
    """A stream of events that says in its record how it ended."""

    def __init__(self, reply: Reply, record: RequestRecord) -> None:
        super().__init__(reply.events(), media_type="text/event-stream")
        self._reply, self._record = reply, record

    async def __call__(self, *arguments: Any) -> None:
        try:
            await super().__call__(*arguments)
        finally:
            if self._reply.error is not None:
                self._record.status = self._reply.error.status
            elif not self._reply.finished:
                self._record.status = CLIENT_LEFT
            for answer in self._record.answers:  # also where the client left before the first event
                answer.cancel()
