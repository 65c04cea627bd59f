"""Write the answers of one request in OpenAI's form, at once or as a stream of events."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, final

from lorakit.decoding.sampling import TokenLogprobs
from lorakit.serving.answer import Piece, StreamedAnswer
from lorakit.serving.error_replies import error_body
from lorakit.serving.openai_requests import CompletionRequest, RequestError


@final
class Reply:
    """The answers of one request in OpenAI's form.

    error: what ended a stream, whose status was sent before; None: nothing did. finished: True after the last event.
    """

    def __init__(
        self, kind: str, request: CompletionRequest, answers: list[StreamedAnswer], prompt_tokens: int, tokenizer: Any
    ) -> None:
        self._kind, self._request, self._answers = kind, request, answers
        self._prompt_tokens, self._tokenizer = prompt_tokens, tokenizer
        self._offsets = [0] * len(answers)
        """characters of each choice's tokens so far"""
        self._special = frozenset(() if tokenizer is None else tokenizer.all_special_ids)
        self.error: RequestError | None = None
        self.finished = False
        self._head = {
            "id": f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model,
        }

    async def full(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        try:
            choices = await asyncio.gather(*(self._choice(index, answer) for index, answer in enumerate(self._answers)))
        finally:  # where one choice fails, the others are for nobody
            for answer in self._answers:
                answer.cancel()
        name = "chat.completion" if self._kind == "chat" else "text_completion"
        return {**self._head, "object": name, "choices": choices, "usage": self._usage()}

    async def _choice(self, index: int, answer: StreamedAnswer) -> dict[str, Any]:
        pieces = [piece async for piece in answer.pieces()]
        text = "".join(piece.text for piece in pieces)
        said = (
            {"message": {"role": "assistant", "content": text, "refusal": None}}
            if self._kind == "chat"
            else {"text": text}
        )
        return {"index": index, **said, "logprobs": self._logprobs(index, pieces), "finish_reason": pieces[-1].reason}

    async def events(self) -> AsyncIterator[str]:
        """Yield the events of a stream: roles, texts as they come, reasons, then the usage if it is wanted."""
        name = "chat.completion.chunk" if self._kind == "chat" else "text_completion"
        extra: dict[str, Any] = {"usage": None} if self._request.include_usage else {}
        pieces: asyncio.Queue[tuple[int, Piece | RequestError]] = asyncio.Queue()
        tasks = [asyncio.create_task(_forward(index, answer, pieces)) for index, answer in enumerate(self._answers)]
        try:
            for index in range(len(self._answers)) if self._kind == "chat" else ():
                role = {"role": "assistant", "content": ""}
                choice = {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
                yield _event({**self._head, "object": name, "choices": [choice], **extra})
            running = len(tasks)
            while running:
                index, piece = await pieces.get()
                if isinstance(piece, RequestError):
                    self.error = piece
                    yield _event(error_body(piece))
                    return
                running -= piece.reason is not None
                if piece.text or piece.reason or piece.tokens:
                    yield _event({**self._head, "object": name, "choices": [self._chunk(index, piece)], **extra})
            if self._request.include_usage:
                yield _event({**self._head, "object": name, "choices": [], "usage": self._usage()})
            self.finished = True
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()
            for answer in self._answers:  # a task that had not begun cancels nothing
                answer.cancel()

    def _chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        said = (
            {"delta": {"content": piece.text} if piece.text else {}} if self._kind == "chat" else {"text": piece.text}
        )
        return {"index": index, **said, "logprobs": self._logprobs(index, [piece]), "finish_reason": piece.reason}

    def _usage(self) -> dict[str, Any]:
        completion = sum(answer.num_tokens for answer in self._answers)
        cached = sum(answer.cached_tokens for answer in self._answers[:: self._request.choices])  # each prompt once
        return {
            "prompt_tokens": self._prompt_tokens, "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion, "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip

    def _logprobs(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        """Return the log-probabilities of a choice's next pieces in OpenAI's form; None if they are not wanted."""
        tokens = [token for piece in pieces for token in piece.tokens]
        if self._kind == "text":  # as other servers: who asks for one token counts on one
            tokens += [piece.end for piece in pieces if piece.end is not None]
        if not tokens:
            return None
        if self._kind == "chat":
            content = [self._entry(token, logprobs) for token, logprobs in tokens if logprobs is not None]
            return {"content": content, "refusal": None}
        offsets = []
        for token, _ in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += 0 if token in self._special else len(self._text(token))
        return {
            "tokens": [self._text(token) for token, _ in tokens],
            "token_logprobs": [None if logprobs is None else logprobs.token for _, logprobs in tokens],
            "top_logprobs": [
                None if logprobs is None else {self._text(token): value for token, value in logprobs.top}
                for _, logprobs in tokens
            ],
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        top = [self._token_entry(*one) for one in logprobs.top]
        return self._token_entry(token, logprobs.token) | {"top_logprobs": top}

    def _token_entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


async def _forward(
    index: int, answer: StreamedAnswer, pieces: "asyncio.Queue[tuple[int, Piece | RequestError]]"
) -> None:
    try:
        async for piece in answer.pieces():
            pieces.put_nowait((index, piece))
    except RequestError as problem:
        pieces.put_nowait((index, problem))
    except Exception as problem:  # else the stream would wait for ever
        pieces.put_nowait((index, RequestError(f"internal error: {type(problem).__name__}", status=500)))
        raise


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
