"""Check that the chat template shows all of a conversation that is trained on.

Whether a part is shown is asked by rendering without it, because its text may occur elsewhere too: the name of a
function in the list of tools.

Invariant: what is trained is in its answer's text, word for word, and what is asked is in the prompt. A row of which a
part is left out is a BadRow that names the part: the adapter would learn to answer without it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from lorakit.data.chat_template import Answer, ChatTemplate, shows
from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import (
    HARMLESS_IN_MESSAGES,
    THOUGHTS,
    Chat,
    arguments_of,
    function_of,
    has_value,
    refusal,
    split_thinking,
)

OWN_RULE: Final = ("role", "content", "tool_calls", "tool_call_id")
"""fields of a message with a rule of their own; few templates write the id, and the order of results says the same"""


def shown_answers(template: ChatTemplate, row: Chat, *, last_only: bool) -> tuple[Chat, list[Answer]]:
    """Return a conversation up to its last trained answer, and its answers: all that are trained, or the last one.

    The messages after the last answer are left out, because they teach nothing.
    Raises BadRow: an answer cannot be found exactly, or the template leaves out what is trained or asked.
    """
    last = max(index for index, trained in enumerate(row.trained) if trained)
    first = last if last_only else 0
    trained = tuple(index >= first and is_trained for index, is_trained in enumerate(row.trained[: last + 1]))
    shown = replace(row, messages=row.messages[: last + 1], trained=trained)
    answers = [template.find_answer(shown, index) for index, is_trained in enumerate(trained) if is_trained]
    for answer in answers:
        through = replace(shown, messages=shown.messages[: answer.index + 1])
        check_answer(template, through, answer.index, answer.text)
    check_prompt(template, shown, answers[-1].prompt)
    return shown, answers


def check_answer(template: ChatTemplate, row: Chat, index: int, text: str) -> None:
    """Raise BadRow unless a text shows all of a conversation's answer: its content, tool calls and other fields."""
    number = index + 1
    message = row.messages[index]
    thinking, rest = split_thinking(message["content"])
    if not (shows(text, thinking) and shows(text, rest)):
        what = "its thinking" if thinking else "it"
        raise BadRow(f"message {number}: the chat template does not show {what} in full after its prompt")
    calls = message.get("tool_calls") or []
    for position, call in enumerate(calls):
        others = [*calls[:position], *calls[position + 1 :]]
        if not _names(call, text) or leaves_out(template, row, {index: {"tool_calls": others or None}}):
            raise BadRow(f"message {number}: the chat template leaves out its tool call")
        function = function_of(call)
        emptied = {**function, "arguments": {}}
        emptied_call = {**call, "function": emptied} if "function" in call else emptied
        changed = [*calls[:position], emptied_call, *calls[position + 1 :]]
        if arguments_of(function) and leaves_out(template, row, {index: {"tool_calls": changed}}):
            raise BadRow(f"message {number}: the chat template leaves out the arguments of its tool call")
    for key, value in _further_fields(message):
        is_shown = not isinstance(value, str) or shows(text, value.strip())
        if not is_shown or leaves_out(template, row, {index: {key: None}}):
            raise refusal(key, f"message {number}: the chat template leaves out ")


def check_prompt(template: ChatTemplate, row: Chat, text: str) -> None:
    """Raise BadRow unless the text of a conversation shows its tools and each message that is not trained.

    Of an assistant's message the thinking may be left out: templates drop that of earlier turns in use too.
    """
    for number, (message, is_trained) in enumerate(zip(row.messages, row.trained, strict=True), 1):
        if is_trained:
            continue
        content = message["content"]
        if not shows(text, content.strip()) and not shows(text, split_thinking(content)[1]):
            raise BadRow(f"message {number} ({message['role']}): the chat template leaves it out")
        if not all(_names(call, text) for call in message.get("tool_calls") or []):
            raise BadRow(f"message {number}: the chat template leaves out its tool call")
        for key, _ in _further_fields(message):
            is_thinking = message["role"] == "assistant" and key in THOUGHTS
            if not is_thinking and leaves_out(template, row, {number - 1: {key: None}}):
                raise refusal(key, f"message {number}: the chat template leaves out ")
    if row.tools and template.render(row.messages, None) == template.render(row.messages, row.tools):
        raise BadRow("tools: the chat template leaves them out")


def unshown_keys(template: ChatTemplate, row: Chat) -> frozenset[str]:
    """Return the harmless keys of messages, such as ``name``, that the template leaves out of the text."""
    fields = {
        index: {key: None for key, value in message.items() if key in HARMLESS_IN_MESSAGES and has_value(value)}
        for index, message in enumerate(row.messages)
    }
    keys = [(index, key) for index, own in fields.items() for key in own]
    if not keys or leaves_out(template, row, fields):  # all at once first, because each takes a rendering
        return frozenset(key for _, key in keys)
    return frozenset(key for index, key in keys if leaves_out(template, row, {index: {key: None}}))


def leaves_out(template: ChatTemplate, row: Chat, changes: Mapping[int, Mapping[str, Any]]) -> bool:
    """True if the text is the same with other values of fields: index of the message -> key -> value, or None: without.

    False too if the template refuses the other values.
    """
    messages = [
        {key: value for key, value in {**message, **changes.get(index, {})}.items() if value is not None}
        for index, message in enumerate(row.messages)
    ]
    try:
        return template.render(messages, row.tools) == template.render(row.messages, row.tools)
    except BadRow:
        return False


def _names(call: Any, text: str) -> bool:
    """True if a text has the name of a tool call's function."""
    name = function_of(call).get("name")
    return bool(name) and str(name) in text


def _further_fields(message: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in message.items():
        if key not in (*OWN_RULE, *HARMLESS_IN_MESSAGES) and has_value(value):
            yield key, value
