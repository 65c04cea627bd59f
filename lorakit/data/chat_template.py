"""Render conversations with the tokenizer's chat template, and find every answer in the rendered text.

Answers are found by comparing renderings, because most templates have no generation markers. Example, for the second
message of a conversation:

    prompt      <|user|>hi<|end|><|assistant|>               messages before it, with the generation prompt
    through     <|user|>hi<|end|><|assistant|>yes<|end|>     messages up to and including it
    answer                                    yes<|end|>     from the end of the prompt to the end of the end token

Invariant: no guess. A row whose answers cannot be found exactly is a BadRow, and so is one that the template shows only
in part.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Final, final

from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import HARMLESS_IN_MESSAGES, Chat, has_value, refusal
from lorakit.errors import DataError

SHOWN_FIELDS: Final = ("role", "content", "tool_calls")
"""fields of a message that are looked for in the text by themselves"""
SENTINEL: Final = "\u241elorakit\u241e"  # not expected in any row, so that its position in a rendering is unique
TEMPLATE_FAILURES: Final = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError,
)  # fmt: skip
"""errors of a template's expressions, besides jinja's own"""
DATE_FUNCTION: Final = "strftime_now"
"""function of transformers that templates write today's date with, such as Llama 3.1's"""


def render_template(
    tokenizer: Any,
    messages: Sequence[Any],
    tools: list[Any] | None = None,
    *,
    prompt: bool = False,
    template: str | None = None,
) -> str:
    """Render messages with a chat template; ``prompt``: with the header of the answer that is to follow.

    ``template``: None is the tokenizer's own. transformers renders in jinja's sandbox. Errors of the template are
    jinja's or TEMPLATE_FAILURES.
    """
    text = tokenizer.apply_chat_template(
        list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt, chat_template=template
    )
    return str(text)


def writes_date(tokenizer: Any) -> bool:
    """True if a tokenizer's chat template writes today's date, so that the same row has other tokens tomorrow."""
    return DATE_FUNCTION in str(tokenizer.chat_template)


def _dated(template: str, today: date) -> str:
    """Return a template that writes a fixed date, where its formats are texts: ``strftime_now("%d %b %Y")``."""
    call = re.compile(DATE_FUNCTION + r"""\(\s*(["'])(.*?)\1\s*\)""")
    return call.sub(lambda match: json.dumps(today.strftime(match[2])), template)


@dataclass(frozen=True)
class Answer:
    """An assistant's turn in the rendered text, as character positions."""

    start: int
    """end of its prompt"""
    stop: int
    """end of its end token, or of its content if the template writes no end token"""
    end_token_start: int | None
    """None: the template writes no end token"""


@final
class ChatTemplate:
    """The chat template of one tokenizer. ``today``: the date that it writes as today's; None: the clock's."""

    def __init__(self, tokenizer: Any, today: date | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = None if today is None else _dated(str(tokenizer.chat_template), today)
        self._added_tokens = added_tokens(tokenizer)

    def render(self, messages: tuple[dict[str, Any], ...], tools: list[Any] | None, *, prompt: bool = False) -> str:
        """Return the text of a conversation; ``prompt``: with the header of the answer that is to follow.

        Raises:
            BadRow: there is no template, or it raises an error.
        """
        import jinja2

        if not self._tokenizer.chat_template:
            raise BadRow("is a conversation, but the tokenizer has no chat template; use prompt + completion rows")
        try:
            return render_template(self._tokenizer, messages, tools, prompt=prompt, template=self._template)
        except (jinja2.TemplateError, *TEMPLATE_FAILURES) as problem:
            raise BadRow(f"the chat template refuses it: {problem}") from None

    def find_answer(self, row: Chat, index: int, text: str) -> Answer:
        """Return the position of message ``index``, an assistant's, in the text of the full conversation.

        Raises:
            BadRow: the answer's start or end cannot be found exactly.
        """
        start = self._answer_start(row, index, text)
        is_last = index == len(row.messages) - 1
        through = text if is_last else self.render(row.messages[: index + 1], row.tools)
        if text.startswith(through):
            stop, end_token = len(through.rstrip()), self._token_at_end(through)
            content_stop = stop - len(end_token)
        else:
            # because the template renders this message differently once others follow, use the text after its content
            after = self._around_content(row, index, text)[1]
            end_token = self._token_at_start(after)
            if end_token != self._token_at_end(through) and (
                # unless the template writes the token after the message before too, so that it ends any message
                index == 0 or self._token_at_start(self._around_content(row, index - 1, text)[1]) != end_token
            ):
                end_token = ""  # because this token is the header of the next turn
            content_stop = len(text) - len(after)
            stop = content_stop + (len(after) - len(after.lstrip()) + len(end_token) if end_token else 0)
        # without its thinking, because templates drop that of earlier turns
        content = str(row.messages[index]["content"]).rpartition("</think>")[2].strip()
        if content not in text[start:content_stop]:
            raise BadRow(f"message {index + 1}: the chat template does not show it after its prompt")
        if end_token and end_token in json.dumps(row.messages[index], ensure_ascii=False, default=str):
            raise BadRow(f"message {index + 1}: holds the end token {end_token!r}, so its end cannot be told")
        return Answer(start, stop, stop - len(end_token) if end_token else None)

    def check_complete(self, row: Chat, text: str) -> None:
        """Raise BadRow unless every message, tool and tool call is in the text.

        The adapter would learn to answer without a part that is left out, and be given that part in use.
        """
        for number, message in enumerate(row.messages, 1):
            content = str(message["content"]).strip()
            quoted = (json.dumps(content, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False))
            if not any(form in text for form in (content, content.rpartition("</think>")[2].strip(), *quoted)):
                raise BadRow(f"message {number} ({message['role']}): the chat template leaves it out")
            for call in message.get("tool_calls") or []:
                function = call.get("function", call) if isinstance(call, dict) else {}
                if str(function.get("name", SENTINEL)) not in text:
                    raise BadRow(f"message {number}: the chat template leaves out its tool call")
        if row.tools and self.render(row.messages, None) == text:
            raise BadRow("tools: the chat template leaves them out")
        self._check_fields(row, text)

    def unread_keys(self, row: Chat, text: str) -> frozenset[str]:
        """Return the harmless keys of messages, such as ``name``, that the template leaves out of the text."""
        fields = [
            (index, key)
            for index, message in enumerate(row.messages)
            for key, value in message.items()
            if key in HARMLESS_IN_MESSAGES and has_value(value)
        ]
        if not fields or self._leaves_out(row, text, fields):  # all at once first, because each takes a rendering
            return frozenset(key for _, key in fields)
        return frozenset(key for index, key in fields if self._leaves_out(row, text, [(index, key)]))

    def _check_fields(self, row: Chat, text: str) -> None:
        """Raise BadRow unless every further field of a message, such as ``reasoning_content``, changes the text.

        Harmless fields need not, nor those of an assistant's message without loss: templates drop the reasoning of
        earlier turns in use too.
        """
        for index, message in enumerate(row.messages):
            if message["role"] == "assistant" and not row.trained[index]:
                continue
            for key, value in message.items():
                if key in (*SHOWN_FIELDS, *HARMLESS_IN_MESSAGES) or not has_value(value):
                    continue
                if self._leaves_out(row, text, [(index, key)]):
                    raise refusal(key, f"message {index + 1}: the chat template leaves out ")

    def _leaves_out(self, row: Chat, text: str, fields: Collection[tuple[int, str]]) -> bool:
        """True if the text is the same without these fields: (index of the message, key)."""
        messages = tuple(
            {key: value for key, value in message.items() if (index, key) not in fields}
            for index, message in enumerate(row.messages)
        )
        try:
            return self.render(messages, row.tools) == text
        except BadRow:
            return False  # the template needs one of them

    def _answer_start(self, row: Chat, index: int, text: str) -> int:
        """Return the end of the prompt after which the model generates this answer."""
        # a conversation that begins with its answer has no prompt
        prompt = self.render(row.messages[:index], row.tools, prompt=True) if index else SENTINEL
        if text.startswith(prompt):
            return len(prompt)
        if index and index == len(row.messages) - 1:
            raise BadRow(
                f"message {index + 1}: in use, the answer is generated after {prompt[-40:]!r}, but in the training row"
                " the chat template puts it after something else, so training on it would teach the wrong prompt;"
                " use prompt + completion rows, or another chat template"
            )
        return len(self._around_content(row, index, text)[0])

    def _around_content(self, row: Chat, index: int, text: str) -> tuple[str, str]:
        """Return the text before and after the content of a message, found by rendering a sentinel as its content."""
        marked = {"role": row.messages[index]["role"], "content": SENTINEL}
        messages = (*row.messages[:index], marked, *row.messages[index + 1 :])
        before, sentinel, after = self.render(messages, row.tools).partition(SENTINEL)
        if not sentinel or not text.endswith(after):
            raise BadRow(f"message {index + 1}: the chat template changes with its content: the labels cannot be told")
        return (before if text.startswith(before) else text), after

    def _token_at_end(self, text: str) -> str:
        """Return the added token that a text ends with, white space aside; empty if there is none."""
        return max(filter(text.rstrip().endswith, self._added_tokens), key=len, default="")

    def _token_at_start(self, text: str) -> str:
        """Return the added token that a text begins with, white space aside; empty if there is none."""
        return max(filter(text.lstrip().startswith, self._added_tokens), key=len, default="")


def added_tokens(tokenizer: Any) -> set[str]:
    """Return the texts of the tokens that a template can end a turn with."""
    return {token.content for token in tokenizer.added_tokens_decoder.values()} | {tokenizer.eos_token}


def end_marker(tokenizer: Any) -> str | None:
    """Return the token that the template writes after the last assistant's content; None if it writes none."""
    import jinja2

    try:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": SENTINEL}]
        tail = render_template(tokenizer, turns).rpartition(SENTINEL)[2].lstrip()
    except (jinja2.TemplateError, *TEMPLATE_FAILURES) as problem:
        raise DataError(f"the tokenizer's chat template fails on a plain conversation: {problem}") from None
    return max(filter(tail.startswith, added_tokens(tokenizer)), key=len, default=None)
