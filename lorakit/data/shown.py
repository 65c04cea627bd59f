"""Check that the chat template shows all of a conversation that is trained on.

Whether a part is shown is asked by rendering without it, because its text may occur elsewhere too: the name of a
function in the list of tools.

Invariant: what is trained is in its answer's text, word for word, and what is asked is in the prompt. A row of which a
part is left out is a BadRow that names the part: the adapter would learn to answer without it.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from lorakit.data.chat_template import Answer, ChatTemplate, shows
from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import HARMLESS_IN_MESSAGES, Chat, function_of, has_value, refusal, split_thinking

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

    def changes(**fields: Any) -> bool:
        """True if the text is another one with other values of these fields; None: without the field."""
        changed = {key: value for key, value in {**message, **fields}.items() if value is not None}
        return not _is_same_text(template, row, [*row.messages[:index], changed, *row.messages[index + 1 :]])

    calls = message.get("tool_calls") or []
    for position, call in enumerate(calls):
        others = [*calls[:position], *calls[position + 1 :]]
        if not _names(call, text) or not changes(tool_calls=others or None):
            raise BadRow(f"message {number}: the chat template leaves out its tool call")
        emptied = _without_arguments(call)
        if emptied != call and not changes(tool_calls=[*calls[:position], emptied, *calls[position + 1 :]]):
            raise BadRow(f"message {number}: the chat template leaves out the arguments of its tool call")
    for key, value in _further_fields(message):
        if not changes(**{key: None}) or (isinstance(value, str) and not shows(text, value.strip())):
            raise refusal(key, f"message {number}: the chat template leaves out ")


def check_prompt(template: ChatTemplate, row: Chat, text: str) -> None:
    """Raise BadRow unless the text of a conversation shows its tools and each message that is not trained.

    Of an assistant's message the thinking and further fields may be left out: templates drop those of earlier turns in
    use too.
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
            if message["role"] != "assistant" and leaves_out(template, row, [(number - 1, key)]):
                raise refusal(key, f"message {number}: the chat template leaves out ")
    if row.tools and template.render(row.messages, None) == template.render(row.messages, row.tools):
        raise BadRow("tools: the chat template leaves them out")


def unshown_keys(template: ChatTemplate, row: Chat) -> frozenset[str]:
    """Return the harmless keys of messages, such as ``name``, that the template leaves out of the text."""
    fields = [
        (index, key)
        for index, message in enumerate(row.messages)
        for key, value in message.items()
        if key in HARMLESS_IN_MESSAGES and has_value(value)
    ]
    if not fields or leaves_out(template, row, fields):  # all at once first, because each takes a rendering
        return frozenset(key for _, key in fields)
    return frozenset(key for index, key in fields if leaves_out(template, row, [(index, key)]))


def leaves_out(template: ChatTemplate, row: Chat, fields: Collection[tuple[int, str]]) -> bool:
    """True if the text is the same without these fields: (index of the message, key)."""
    messages = [
        {key: value for key, value in message.items() if (index, key) not in fields}
        for index, message in enumerate(row.messages)
    ]
    return _is_same_text(template, row, messages)


def _is_same_text(template: ChatTemplate, row: Chat, messages: Sequence[dict[str, Any]]) -> bool:
    """True if a conversation's text is the same with other messages; False too if the template refuses them."""
    try:
        return template.render(messages, row.tools) == template.render(row.messages, row.tools)
    except BadRow:
        return False


def _names(call: Any, text: str) -> bool:
    """True if a text has the name of a tool call's function."""
    name = function_of(call).get("name")
    return bool(name) and str(name) in text


def _without_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with empty arguments, in the form that they have."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if not has_value(arguments) or arguments == "{}":
        return call
    changed = {**function, "arguments": "{}" if isinstance(arguments, str) else {}}
    return {**call, "function": changed} if "function" in call else changed


def _further_fields(message: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in message.items():
        if key not in (*OWN_RULE, *HARMLESS_IN_MESSAGES) and has_value(value):
            yield key, value
