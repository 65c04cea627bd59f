"""Encode the prompt of a chat, and prepare how its answers are restricted and divided into parts."""

from collections.abc import Sequence
from typing import Any, Final

from lorakit.errors import LorakitError
from lorakit.inference.answer_parser import AnswerParser
from lorakit.inference.call_grammar import call_grammar
from lorakit.inference.prompts import PromptCodec
from lorakit.serving.errors import RequestError
from lorakit.serving.requests import ChatRequest

PROMPT_END: Final = 64
"""tokens at the end of a prompt, in which a template opens or closes a thought"""


def chat_ids(codec: PromptCodec, chat: ChatRequest) -> list[int]:
    """Return the token ids of a chat's prompt. Raises LorakitError: the template does not show every part of it."""
    (messages,) = chat.prompts
    tools = chat.used_tools or None
    try:
        return codec.shown_ids(messages, tools, chat.template_kwargs)
    except LorakitError:
        as_system = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
        if as_system == messages:
            raise
    # for a template that knows the role by its older name
    return codec.shown_ids(as_system, tools, chat.template_kwargs)


def forced_format(codec: PromptCodec, chat: ChatRequest, ids: Sequence[int]) -> dict[str, Any] | None:
    """Return the `response_format` of a chat's forced tools; None without any. Raises RequestError: there is none."""
    if not chat.forced_tools:
        return None
    try:
        grammar = call_grammar(
            codec.answer_form,
            codec.tokenizer,
            chat.forced_tools,
            _end_of(codec, ids),
            parallel=chat.parallel_tool_calls is not False,
        )
    except ValueError as problem:
        raise RequestError(f"tool_choice: {problem}", param="tool_choice") from None
    return {"type": "grammar", "grammar": grammar}


def parser_of(codec: PromptCodec, chat: ChatRequest, ids: Sequence[int]) -> AnswerParser | None:
    """Return the parser of one answer; None where its text has no parts."""
    form = codec.answer_form
    if form.thought is None and (form.calls is None or not chat.used_tools):
        return None
    return AnswerParser(form, _end_of(codec, ids), chat.used_tools)


def _end_of(codec: PromptCodec, ids: Sequence[int]) -> str:
    return str(codec.tokenizer.decode(list(ids[-PROMPT_END:])))
