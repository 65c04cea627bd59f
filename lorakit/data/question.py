"""Turn a row into a question: a prompt in the form in which the row is asked in use, and the answer that it expects.

    row          {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    prompt       [{"role": "user", "content": "hi"}]             rendered by the chat template
    answer       yes                                             as the template shows it, without its end token

A conversation asks for its last answer that carries the loss. A row of plain text asks with its prompt unchanged.
Invariant: the answer is the text that training has as labels. A row in which it cannot be found exactly is a BadRow.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from lorakit.data.chat_template import ChatTemplate
from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import Text, Tokens, to_conversation
from lorakit.data.shown import shown_answers


@dataclass(frozen=True)
class Question:
    """A prompt and its expected answer."""

    prompt: str | list[dict[str, Any]]
    """text that is given unchanged, or messages for the chat template"""
    tools: list[Any] | None
    answer: str
    weight: float = 1.0
    """weight of the row in training"""


def parse_question(row: Any, template: ChatTemplate, ignore: Collection[str] = ()) -> Question:
    """Parse a row's question. Raises BadRow: training refuses it, or it has no prompt or answer. ``ignore``: keys."""
    parsed = to_conversation(row, ignore)
    if isinstance(parsed, Tokens):
        raise BadRow("a row of token ids has no prompt to ask with; use rows of text or messages")
    if isinstance(parsed, Text):
        if not parsed.prompt.strip():
            raise BadRow("plain text without a prompt has nothing to ask; use prompt + completion rows")
        return Question(parsed.prompt, None, parsed.completion, parsed.weight)
    if not any(parsed.trained):
        raise BadRow("has no answer to compare with: no assistant message that carries the loss")
    _, (answer,) = shown_answers(template, parsed, last_only=True)
    if answer.index == 0:
        raise BadRow("begins with its answer, so there is nothing to ask")
    # not the message's content, because templates add to it, such as empty thinking, or the form of a tool call
    return Question(list(parsed.messages[: answer.index]), parsed.tools, answer.content, parsed.weight)
