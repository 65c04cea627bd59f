"""Parse a row into a conversation or plain text; its keys decide which of the usual row formats it has.

They are tried in this order: ``messages``; ``conversations``; ``prompt`` + ``completion``; ``instruction`` (+
``input``) + ``output``; ``text``. Invariant: every key of a row, turn and message is read, harmless, ignored on
request, or a BadRow (row_keys.py); so is a value of the wrong type.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from lorakit.data.json_row import ARRAY_REMEDY, BadRow
from lorakit.data.row_keys import HARMLESS_IN_MESSAGES, REMEDIES, SWITCHES, harmless_keys, is_switched_on

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES: Final = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "model": "assistant", "chatgpt": "assistant", "tool": "tool", "observation": "tool",
}  # fmt: skip
FORMATS: Final = {
    ("messages",): ("tools", "system"),
    ("conversations",): ("tools", "system"),
    ("prompt", "completion"): (),
    ("instruction", "output"): ("input", "system"),
    ("text",): (),
}
"""keys that a row of this format has -> keys that it may have besides"""


@dataclass(frozen=True)
class Chat:
    """A conversation for the tokenizer's chat template."""

    messages: tuple[dict[str, Any], ...]
    tools: list[Any] | None
    trained: tuple[bool, ...]
    """for each message: True if the loss is on it"""
    unread: frozenset[str] = frozenset()
    """keys of the row, of turns and of messages that were not read"""
    weight: float = 1.0
    """weight of the loss of the row's labels"""


@dataclass(frozen=True)
class Plain:
    """Text without a template: the loss is on the completion, not on the prompt."""

    prompt: str
    completion: str
    unread: frozenset[str] = frozenset()
    weight: float = 1.0


def parse_row_format(row: Any, ignore: Collection[str] = ()) -> Chat | Plain:
    """Parse the conversation or text of a row. ``ignore``: keys to leave unread, of the row, turns and messages.

    Raises:
        BadRow: no known format, a key that is not read, or a value of the wrong type.
    """
    if not isinstance(row, Mapping):
        array = f"; {ARRAY_REMEDY}" if isinstance(row, list) else ""
        raise BadRow(f"a row is a mapping, got {type(row).__name__}{array}")
    row = {key: value for key, value in row.items() if value is not None}
    weight = 1.0 if "weight" in ignore else _weight(row)
    present = row.keys() - set(ignore)
    names = next((names for names in FORMATS if present >= set(names)), None)
    if names is None:
        hints = [f"; {key}: {REMEDIES[key]}" for key in row if key in ("chosen", "rejected")][:1]
        raise BadRow(
            f"keys {sorted(map(str, row))} are none of: messages; conversations; prompt + completion;"
            f" instruction (+ input) + output; text{''.join(hints) or '; data.columns names other columns'}"
        )
    is_chat = (
        names == ("prompt", "completion") and isinstance(row["prompt"], list) and isinstance(row["completion"], list)
    )
    read = {*names, *FORMATS[names], "weight", *(("tools", "system") if is_chat else ())} - set(ignore)
    unread = frozenset(harmless_keys(row, read, ignore))
    row = {key: value for key, value in row.items() if key in read}
    if names == ("text",):
        return Plain("", _text(row, "text"), unread, weight)
    if names == ("prompt", "completion") and not is_chat:
        return Plain(_text(row, "prompt", may_be_empty=True), _text(row, "completion"), unread, weight)
    messages, first_trained = _messages(names, row, ignore)
    return replace(_chat(messages, row, unread, ignore, first_trained), weight=weight)


def _weight(row: Mapping[str, Any]) -> float:
    """Return the row's ``weight``; 1 without the key."""
    weight = row.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise BadRow(f"weight: a number of 0 or more expected, got {repr(weight)[:40]}")
    return float(weight)


def _messages(names: tuple[str, ...], row: Mapping[str, Any], ignore: Collection[str]) -> tuple[Any, int]:
    """Return the messages of a conversation's row, and the index of the first one that may be trained."""
    match names[0]:
        case "messages":
            return row["messages"], 0
        case "conversations":
            return _sharegpt(row["conversations"], ignore), 0
        case "prompt":
            return [*row["prompt"], *row["completion"]], len(row["prompt"])
    instruction_input = _text(row, "input", may_be_empty=True) if "input" in row else ""
    question = _text(row, "instruction") + (f"\n{instruction_input}" if instruction_input else "")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": _text(row, "output")}], 0


def _text(row: Mapping[str, Any], key: str, *, may_be_empty: bool = False) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise BadRow(f"{key}: text expected, got {type(value).__name__}")
    if not value.strip() and not may_be_empty:
        raise BadRow(f"{key} is empty")
    return value


def _sharegpt(turns: Any, ignore: Collection[str]) -> list[dict[str, Any]]:
    """Return ShareGPT's turns as messages, with the other keys of each turn."""
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise BadRow(f"conversations: a list expected, got {type(turns).__name__}")
    messages = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping) or "from" not in turn or "value" not in turn:
            raise BadRow(f"conversations: turn {number} has no 'from' and 'value'")
        if not isinstance(turn["from"], str) or turn["from"] not in SHAREGPT_ROLES:
            raise BadRow(f"conversations: turn {number} is from {turn['from']!r}; known: {', '.join(SHAREGPT_ROLES)}")
        others = {key: value for key, value in turn.items() if key not in ("from", "value")}
        harmless_keys(others, SWITCHES, ignore, HARMLESS_IN_MESSAGES, f"conversations: turn {number}: ")
        messages.append({**others, "role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]})
    return messages


def _chat(
    messages: Any, row: Mapping[str, Any], unread: frozenset[str], ignore: Collection[str], first_trained: int
) -> Chat:
    if not isinstance(messages, list) or not messages:
        raise BadRow(f"messages: a list with at least one message expected, got {str(messages)[:40]}")
    checked = [_message(number, message, ignore) for number, message in enumerate(messages, 1)]
    trained = [
        is_switched_on(f"message {number}: ", message) and message["role"] == "assistant" and number > first_trained
        for number, message in enumerate(messages, 1)
    ]
    if not any(trained):
        answers = [message for message in messages[first_trained:] if message["role"] == "assistant"]
        if off := [key for key in SWITCHES if any(message.get(key) is not None for message in answers)]:
            raise BadRow(f"has nothing to learn: {' or '.join(off)} of every assistant message is 0 or false")
    if row.get("system"):
        text = _text(row, "system")
        if checked[0]["role"] not in ("system", "developer"):
            checked, trained = [{"role": "system", "content": text}, *checked], [False, *trained]
        elif checked[0]["content"] != text:
            raise BadRow("system: another one than the conversation's own system message; keep one")
    ignored = {key for message in messages for key in message if key in ignore}
    return Chat(tuple(checked), _tools(row.get("tools")), tuple(trained), unread | ignored)


def _message(number: int, message: Any, ignore: Collection[str]) -> dict[str, Any]:
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
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise BadRow(f"message {number}: tool_calls: a list of mappings expected, got {str(calls)[:40]}")
    # without None, because templates test whether a key exists
    unread = {*SWITCHES, *ignore} - {"role", "content"}
    fields = {key: value for key, value in message.items() if value is not None and key not in unread}
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
