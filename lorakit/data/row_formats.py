"""Parse a row into a conversation or plain text; its keys decide which of the usual row formats it has.

They are tried in this order: ``messages``; ``conversations``; ``prompt`` + ``completion``; ``instruction`` (+
``input``) + ``output``; ``text``. Invariant: other keys are ignored, and a value of the wrong type is a BadRow.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lorakit.data.rows import BadRow

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES: Final = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "model": "assistant", "chatgpt": "assistant", "tool": "tool", "observation": "tool",
}  # fmt: skip


@dataclass(frozen=True)
class Chat:
    """A conversation for the tokenizer's chat template."""

    messages: tuple[dict[str, Any], ...]
    tools: list[Any] | None
    trained: tuple[bool, ...]
    """for each message: True if the loss is on it"""


@dataclass(frozen=True)
class Plain:
    """Text without a template: the loss is on the completion, not on the prompt."""

    prompt: str
    completion: str


def parse_row_format(row: Any) -> Chat | Plain:
    """Parse the conversation or text of a row.

    Raises:
        BadRow: no known format, or a value of the wrong type.
    """
    if not isinstance(row, Mapping):
        raise BadRow(f"a row is a mapping, got {type(row).__name__}")
    present = {key for key, value in row.items() if value is not None}
    if "messages" in present:
        return _chat(row["messages"], row.get("tools"))
    if "conversations" in present:
        return _chat([*_system(row), *_sharegpt(row["conversations"])], row.get("tools"))
    if {"prompt", "completion"} <= present:
        if isinstance(row["prompt"], list) and isinstance(row["completion"], list):
            return _chat([*row["prompt"], *row["completion"]], row.get("tools"), len(row["prompt"]))
        return Plain(_text(row, "prompt", may_be_empty=True), _text(row, "completion"))
    if {"instruction", "output"} <= present:
        instruction_input = _text(row, "input", may_be_empty=True) if "input" in present else ""
        question = _text(row, "instruction") + (f"\n{instruction_input}" if instruction_input else "")
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": _text(row, "output")}]
        return _chat([*_system(row), *turns], None)
    if "text" in present:
        return Plain("", _text(row, "text"))
    raise BadRow(
        f"keys {sorted(map(str, row))} are none of: messages; conversations; prompt + completion;"
        " instruction (+ input) + output; text"
    )


def _system(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    if row.get("history"):
        raise BadRow("history: not read; put the earlier turns into `messages`")
    return [{"role": "system", "content": _text(row, "system")}] if row.get("system") else []


def _text(row: Mapping[str, Any], key: str, *, may_be_empty: bool = False) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise BadRow(f"{key}: text expected, got {type(value).__name__}")
    if not value.strip() and not may_be_empty:
        raise BadRow(f"{key} is empty")
    return value


def _sharegpt(turns: Any) -> list[dict[str, Any]]:
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise BadRow(f"conversations: a list expected, got {type(turns).__name__}")
    messages = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping) or "from" not in turn or "value" not in turn:
            raise BadRow(f"conversations: turn {number} has no 'from' and 'value'")
        if not isinstance(turn["from"], str) or turn["from"] not in SHAREGPT_ROLES:
            raise BadRow(f"conversations: turn {number} is from {turn['from']!r}; known: {', '.join(SHAREGPT_ROLES)}")
        messages.append({"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]})
    return messages


def _chat(messages: Any, tools: Any, first_trained: int = 0) -> Chat:
    if not isinstance(messages, list) or not messages:
        raise BadRow(f"messages: a list with at least one message expected, got {str(messages)[:40]}")
    checked = tuple(_message(number, message) for number, message in enumerate(messages, 1))
    trained = tuple(
        message["role"] == "assistant" and index >= first_trained and messages[index].get("weight", 1) != 0
        for index, message in enumerate(checked)
    )
    if any(message.get("weight", 1) not in (0, 1) for message in messages):
        raise BadRow("weight: 0 or 1 expected")
    return Chat(checked, _tools(tools), trained)


def _message(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, Mapping) else message
        raise BadRow(f"message {number}: role {str(role)[:40]!r} is none of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(number, part) for part in content)
    if message["role"] == "assistant" and not content and not message.get("tool_calls"):
        raise BadRow(f"message {number}: the assistant says nothing")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise BadRow(f"message {number}: content is {type(content).__name__}, not text")
    # without None, because templates test whether a key exists
    fields = {key: value for key, value in message.items() if value is not None and key != "weight"}
    return {**fields, "content": content or ""}


def _part(number: int, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise BadRow(f"message {number}: content has a part that is not text")


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError:
            raise BadRow("tools: not a JSON list") from None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise BadRow(f"tools: a list expected, got {type(tools).__name__}")
    return tools
