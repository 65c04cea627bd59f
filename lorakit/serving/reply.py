"""Write the answers of one request in OpenAI's form, at once or as a stream of events."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, final

from starlette.concurrency import run_in_threadpool

from lorakit.decoding.generation import STOP
from lorakit.decoding.sampling import Token
from lorakit.inference.answer_form import AnswerPart
from lorakit.inference.prompts import TokenTexts
from lorakit.serving.answer import Deliveries, Delta
from lorakit.serving.errors import error_body, request_error
from lorakit.serving.request_log import RequestRecord
from lorakit.serving.requests import ChatRequest, CompletionRequest

FIELDS: Final = {"content": "content", "thought": "reasoning_content"}  # kind of an answer's part -> field of a message


@final
class Reply:
    """The answers of one request in OpenAI's form. items: of all its choices, as the engine has them."""

    def __init__(self, request: CompletionRequest, record: RequestRecord, items: Deliveries) -> None:
        self._request = request
        self._is_chat = isinstance(request, ChatRequest)
        self._record = record
        self._items = items
        self._texts = TokenTexts(record.choices[0].codec.tokenizer)
        self._offsets = [iter(choice.offsets) for choice in record.choices]
        self._num_calls = [0] * len(record.choices)
        identity = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        name = f"chat.completion{'.chunk' if request.stream else ''}" if self._is_chat else "text_completion"
        self._head = {"id": identity, "created": int(time.time()), "model": request.model, "object": name}

    async def _deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield the deltas of all choices as they come, each with the number of its choice."""
        numbers = {choice: number for number, choice in enumerate(self._record.choices)}
        for choice, number in numbers.items():
            for delta in choice.begin():
                yield number, delta
        running = {choice for choice in self._record.choices if choice.reason is None}
        while running:
            choice, item = await self._items.get()
            if choice in running:  # else a token behind a stop text
                delta = choice.add(item)
                running -= {choice} if delta.reason else set()
                yield numbers[choice], delta

    async def full(self) -> bytes:
        deltas: list[list[Delta]] = [[] for _ in self._record.choices]
        async for index, delta in self._deltas():
            deltas[index].append(delta)
        return await run_in_threadpool(self._full, deltas)

    def _full(self, deltas: Sequence[list[Delta]]) -> bytes:
        choices = [self._full_choice(index, own) for index, own in enumerate(deltas)]
        return to_json({**self._head, "choices": choices, "usage": self._usage()}).encode()

    def _full_choice(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        fields = self._fields(index, [part for delta in deltas for part in delta.parts])
        for call in fields.get("tool_calls", ()):
            del call["index"]  # of streams, whose pieces it joins
        text = fields.pop("content", None if "tool_calls" in fields else "")
        message = {"role": "assistant", "content": text, "refusal": None, **fields}
        answer = {"message": message} if self._is_chat else {"text": text}
        return {"index": index, **answer, "logprobs": self._logprobs(index, deltas), **self._finish(index, deltas[-1])}

    async def events(self) -> AsyncIterator[str]:
        """Yield the events of a stream: roles, texts as they come, reasons, then the usage if it is requested."""
        try:
            for index in range(len(self._record.choices)) if self._is_chat else ():
                role = {"role": "assistant", "content": ""}
                chunk = {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
                yield self._chunk_event(chunk)
            async for index, delta in self._deltas():
                events: Sequence[str] = ()
                if delta.tokens or delta.end:  # thousands of texts, if so many log-probabilities are requested
                    events = await run_in_threadpool(self._chunks, index, delta)
                elif delta.reason or delta.parts:
                    events = self._chunks(index, delta)
                for event in events:
                    yield event
        except Exception as problem:
            error = request_error(problem)
            self._record.error = error
            self._record.status = error.status  # for the log: another one was sent before
            yield _event(error_body(error))
            if error is problem:
                return
            raise
        if self._request.include_usage:
            yield _event({**self._head, "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _chunk_event(self, chunk: dict[str, Any]) -> str:
        usage: dict[str, Any] = {"usage": None} if self._request.include_usage else {}
        return _event({**self._head, "choices": [chunk], **usage}, 5 if chunk["logprobs"] else 0)

    def _chunks(self, index: int, delta: Delta) -> list[str]:
        """Return the events of the next chunks, one for each part: the name of a call comes before its arguments."""
        fields = [self._fields(index, [part]) for part in delta.parts] or [{}]
        answers = [{"delta": one} if self._is_chat else {"text": one.get("content", "")} for one in fields]
        chunks = [{"index": index, **answer, "logprobs": None, "finish_reason": None} for answer in answers]
        chunks[0]["logprobs"] = self._logprobs(index, [delta])
        chunks[-1] |= self._finish(index, delta)
        return list(map(self._chunk_event, chunks))

    def _fields(self, index: int, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        """Return the next fields of a chat's message: ``content``, ``reasoning_content``, ``tool_calls``."""
        fields: dict[str, Any] = {}
        for part in parts:
            if part.kind != "call":
                fields.setdefault(FIELDS[part.kind], []).append(part.text)
                continue
            calls = fields.setdefault("tool_calls", [])
            if part.name is not None:
                self._num_calls[index] += 1
                identity = part.id or f"call_{uuid.uuid4().hex[:24]}"
                calls.append({"id": identity, "type": "function", "function": {"name": part.name, "arguments": []}})
            elif not calls:
                calls.append({"function": {"arguments": []}})
            calls[-1]["index"] = self._num_calls[index] - 1
            calls[-1]["function"]["arguments"].append(part.text)
        for call in fields.get("tool_calls", ()):
            call["function"]["arguments"] = "".join(call["function"]["arguments"])
        return {key: value if key == "tool_calls" else "".join(value) for key, value in fields.items()}

    def _finish(self, index: int, delta: Delta) -> dict[str, Any]:
        return {"finish_reason": "tool_calls" if delta.reason == STOP and self._num_calls[index] else delta.reason}

    def _usage(self) -> dict[str, Any]:
        record = self._record
        return {
            "prompt_tokens": record.num_prompt_tokens,
            "completion_tokens": record.num_tokens,
            "total_tokens": record.num_prompt_tokens + record.num_tokens,
            "prompt_tokens_details": {"cached_tokens": record.num_cached_tokens},
        }

    def _logprobs(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any] | None:
        """Return the log-probabilities of a choice's next tokens in OpenAI's form; None if they are not requested."""
        tokens = [token for delta in deltas for token in delta.tokens]
        if not self._is_chat:  # as other servers: who requests one token counts on one
            tokens += [delta.end for delta in deltas if delta.end is not None]
        if not tokens:
            return None
        if self._is_chat:
            content = [
                self._entry(token.id, token.logprob) | {"top_logprobs": [self._entry(*one) for one in token.top]}
                for token in tokens
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._texts.text(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [next(self._offsets[index]) for _ in tokens],
        }

    def _top(self, token: Token) -> dict[str, float] | None:
        """Return text, or id if the text comes twice -> log-probability, of the drawn and most probable tokens."""
        if token.logprob is None:
            return None
        top: dict[str, float] = {}
        for one, value in dict([*token.top, (token.id, token.logprob)]).items():
            text = self._texts.text(one)
            top[f"token_id:{one}" if text in top else text] = value
        return top

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self._texts.text(token), "logprob": logprob, "bytes": list(self._texts.bytes(token))}


def _event(content: dict[str, Any], levels: int = 0) -> str:
    return f"data: {to_json(content, levels)}\n\n"


def to_json(content: Any, levels: int = 5) -> str:
    """Return JSON, made of parts in so many levels, because one call for all may hold the interpreter for seconds."""
    if levels and isinstance(content, dict):
        return f"{{{', '.join(f'{json.dumps(key)}: {to_json(own, levels - 1)}' for key, own in content.items())}}}"
    if levels and isinstance(content, list) and any(isinstance(one, dict) for one in content[:2]):
        return f"[{', '.join(to_json(one, levels - 1) for one in content)}]"
    return json.dumps(content, ensure_ascii=False)
