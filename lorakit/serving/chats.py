"""Encode the prompt of a chat, and prepare how its answers are restricted and divided into parts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from lorakit.decoding.sampling import SamplingSettings
from lorakit.errors import LorakitError
from lorakit.inference.answer_parser import AnswerParser
from lorakit.inference.call_grammar import call_grammar
from lorakit.inference.prompts import PromptCodec
from lorakit.patch.prompting import PromptForm
from lorakit.serving.errors import RequestError
from lorakit.serving.requests import ChatRequest

PROMPT_END: Final = 64
"""tokens at the end of a prompt, in which a template opens or closes a thought"""


def chat_ids(codec: PromptCodec, chat: ChatRequest) -> list[int]:
    """Return the token ids of a chat's prompt. Raises LorakitError: the template does not show every part of it."""
    (messages,) = chat.prompts
    tools = chat.used_tools or None
    try:
        codec.check_shown(messages, tools, chat.template_kwargs)
    except LorakitError:
        as_system = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
        if as_system == messages:
            raise
        codec.check_shown(as_system, tools, chat.template_kwargs)
        messages = as_system  # for a template that knows the role by its older name
    return codec.token_ids(messages, PromptForm(), tools, template_kwargs=chat.template_kwargs)


def forced_settings(
    codec: PromptCodec, chat: ChatRequest, ids: Sequence[int], settings: SamplingSettings
) -> SamplingSettings:
    """Return the settings with the grammar of a chat's forced tools. Raises RequestError: there is none."""
    if not chat.forced_tools:
        return settings
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
    return replace(settings, response_format={"type": "grammar", "grammar": grammar})


def parser_of(codec: PromptCodec, chat: ChatRequest, ids: Sequence[int]) -> AnswerParser | None:
    """Return the parser of one answer; None where its text has no parts."""
    form = codec.answer_form
    if form.thought is None and (form.calls is None or not chat.used_tools):
        return None
    return AnswerParser(form, _end_of(codec, ids), chat.used_tools)


def _end_of(codec: PromptCodec, ids: Sequence[int]) -> str:
    return str(codec.tokenizer.decode(list(ids[-PROMPT_END:])))
