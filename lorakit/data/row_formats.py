"""Turn a row into a conversation or a text; its keys decide which of the usual row formats it has.

Invariant: every key of a row, turn and message is read, harmless, ignored on request, or a BadRow that names it; so is
a value of the wrong type. A key that is ignored where it decides the labels would give a silent wrong result:
``"train": false`` beside an answer, or KTO's ``"label": false`` beside a bad one.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from lorakit.data.row_files import ARRAY_REMEDY, BadRow

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES: Final = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "model": "assistant", "chatgpt": "assistant", "tool": "tool", "observation": "tool",
}  # fmt: skip
HARMLESS: Final = frozenset({
    "_id", "author", "category", "conversation_id", "created_at", "dataset", "date", "domain", "guid", "hash", "id",
    "idx", "index", "lang", "language", "license", "message_id", "meta", "metadata", "model", "num_tokens", "num_turns",
    "prompt_id", "row_id", "source", "split", "subset", "tags", "task", "timestamp", "token_count", "topic", "uid",
    "updated_at", "url", "uuid",
})  # fmt: skip
"""keys of a row's origin, which decide no label"""
HARMLESS_IN_MESSAGES: Final = HARMLESS | {"name", "tool_call_id"}
SWITCHES: Final = ("weight", "train", "loss")
"""keys of a message that turn its loss on or off: OpenAI's, axolotl's and another's name"""
_PREFERENCE: Final = "a preference pair, and objective sft learns one answer; keep the better one as the row's answer"
_KTO: Final = (
    "whether the answer is good, which objective sft does not read; remove the rows with bad answers, and the key"
)
_MEDIA: Final = "lorakit trains on text alone; leave such rows out"
_FULL_ROW: Final = "of a full row is not read; write weight: 0 for a row that is not to be trained on"
REMEDIES: Final = {
    "chosen": _PREFERENCE, "rejected": _PREFERENCE, "chosen_rejected": _PREFERENCE,
    "label": _KTO, "kto_tag": _KTO,
    "image": _MEDIA, "images": _MEDIA, "video": _MEDIA, "videos": _MEDIA, "audio": _MEDIA, "audios": _MEDIA,
    "history": "not read; put the earlier turns into `messages`",
    "system": "plain text has no system prompt; use `messages`, or write it into the prompt",
    "tools": "plain text has no tools; use `messages`",
    "function_call": "OpenAI's earlier form; use `tool_calls`",
    "functions": "OpenAI's earlier form; use `tools`",
    "train": _FULL_ROW, "loss": _FULL_ROW,
}  # fmt: skip
"""key -> what it means and where it is meant to go"""
OF_ROWS: Final = (*SWITCHES, "system", "tools", "history")
"""keys whose remedy is about a row, not about a message"""


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
class Text:
    """Text without a template: the loss is on the completion, not on the prompt."""

    prompt: str
    completion: str
    unread: frozenset[str] = frozenset()
    weight: float = 1.0


@dataclass(frozen=True)
class _Messages:
    messages: Any
    first_trained: int = 0
    """index of the first message that may be trained"""


def to_conversation(row: Any, ignore: Collection[str] = ()) -> Chat | Text:
    """Return the conversation or text of a row. ``ignore``: keys to leave unread, of the row, turns and messages.

    Raises:
        BadRow: no known format, a key that is not read, or a value of the wrong type.
    """
    if not isinstance(row, Mapping):
        array = f"; {ARRAY_REMEDY}" if isinstance(row, list) else ""
        raise BadRow(f"a row is a mapping, got {type(row).__name__}{array}")
    row = {key: value for key, value in row.items() if value is not None}
    weight = 1.0 if "weight" in ignore else _weight(row)
    form = next((form for form in FORMATS if row.keys() - set(ignore) >= set(form.required)), None)
    if form is None:
        raise _no_format(row)
    read = {*form.required, *form.optional, "weight"} - set(ignore)
    unread = unread_keys(row, read, ignore)
    row = {key: value for key, value in row.items() if key in read}
    parsed = form.parse(row, ignore)
    if isinstance(parsed, Text):
        return replace(parsed, unread=unread, weight=weight)
    chat = _chat(parsed.messages, row, ignore, parsed.first_trained)
    return replace(chat, unread=chat.unread | unread, weight=weight)


def has_value(value: Any) -> bool:
    """True unless a value is None, or an empty text, list or mapping."""
    return value is not None and not (isinstance(value, str | list | tuple | Mapping) and not value)


def unread_keys(
    item: Mapping[str, Any],
    read: Collection[str],
    ignore: Collection[str],
    harmless: Collection[str] = HARMLESS,
    where: str = "",
) -> frozenset[str]:
    """Return the keys with a value that are not read. ``where``: the message, for the error.

    Raises:
        BadRow: a key is neither read nor harmless nor one to ignore.
    """
    unread = [key for key, value in item.items() if has_value(value) and key not in read]
    for key in unread:
        if key not in ignore and key not in harmless:
            raise refusal(key, where)
    return frozenset(unread)


def refusal(key: str, where: str = "") -> BadRow:
    """Return the error for a key that is not read. ``where``: the message that has it; empty for the row."""
    name = str(key)[:40]
    remedy = None if where and key in OF_ROWS else REMEDIES.get(key)
    why = f": {remedy}" if remedy else "" if where else ": not a key that is read here"
    return BadRow(f"{where}{name}{why} (data.ignore_keys: [{name}] leaves it unread)")


def _no_format(row: Mapping[Any, Any]) -> BadRow:
    hints = [f"{key}: {REMEDIES[key]}" for key in row if key in ("chosen", "rejected")]
    formats = "; ".join(" + ".join(form.required) for form in FORMATS)
    columns = "name other columns: data.columns: {prompt: COLUMN, completion: COLUMN}"
    return BadRow(
        f"no row format has the keys {', '.join(sorted(map(str, row))) or '(none)'}; the formats are {formats};"
        f" {hints[0] if hints else columns}"
    )


def _weight(row: Mapping[str, Any]) -> float:
    """Return the row's ``weight``; 1 without the key."""
    weight = row.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise BadRow(f"weight: a number of 0 or more expected, got {repr(weight)[:40]}")
    return float(weight)


def _text(row: Mapping[str, Any], key: str, *, may_be_empty: bool = False) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise BadRow(f"{key}: text expected, got {type(value).__name__}")
    if not value.strip() and not may_be_empty:
        raise BadRow(f"{key} is empty")
    return value


def _messages(row: Mapping[str, Any], ignore: Collection[str]) -> _Messages:
    return _Messages(row["messages"])


def _sharegpt(row: Mapping[str, Any], ignore: Collection[str]) -> _Messages:
    """Return ShareGPT's turns as messages, with the other keys of each turn."""
    turns = row["conversations"]
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise BadRow(f"conversations: a list expected, got {type(turns).__name__}")
    messages = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping) or "from" not in turn or "value" not in turn:
            raise BadRow(f"conversations: turn {number} has no 'from' and 'value'")
        if not isinstance(turn["from"], str) or turn["from"] not in SHAREGPT_ROLES:
            raise BadRow(f"conversations: turn {number} is from {turn['from']!r}; known: {', '.join(SHAREGPT_ROLES)}")
        others = {key: value for key, value in turn.items() if key not in ("from", "value")}
        unread_keys(others, SWITCHES, ignore, HARMLESS_IN_MESSAGES, f"conversations: turn {number}: ")
        messages.append({**others, "role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]})
    return _Messages(messages)


def _prompt_completion(row: Mapping[str, Any], ignore: Collection[str]) -> _Messages | Text:
    if isinstance(row["prompt"], list) and isinstance(row["completion"], list):
        return _Messages([*row["prompt"], *row["completion"]], len(row["prompt"]))
    for key in ("system", "tools"):
        if has_value(row.get(key)):
            raise refusal(key)
    return Text(_text(row, "prompt", may_be_empty=True), _text(row, "completion"))


def _instruction(row: Mapping[str, Any], ignore: Collection[str]) -> _Messages:
    extra = _text(row, "input", may_be_empty=True) if "input" in row else ""
    question = _text(row, "instruction") + (f"\n{extra}" if extra else "")
    return _Messages([{"role": "user", "content": question}, {"role": "assistant", "content": _text(row, "output")}])


def _text_alone(row: Mapping[str, Any], ignore: Collection[str]) -> Text:
    return Text("", _text(row, "text"))


@dataclass(frozen=True)
class RowFormat:
    """A row format. ``required``, ``optional``: keys of its rows. ``parse``: from a row and the keys to ignore."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    parse: Callable[[Mapping[str, Any], Collection[str]], _Messages | Text]


FORMATS: Final = (
    RowFormat(("messages",), ("tools", "system"), _messages),
    RowFormat(("conversations",), ("tools", "system"), _sharegpt),
    RowFormat(("prompt", "completion"), ("tools", "system"), _prompt_completion),
    RowFormat(("instruction", "output"), ("input", "system"), _instruction),
    RowFormat(("text",), (), _text_alone),
)
"""in the order in which they are tried. A new key also goes into `RowKey` of recipe/data.py, as a test checks"""


def _chat(messages: Any, row: Mapping[str, Any], ignore: Collection[str], first_trained: int) -> Chat:
    if not isinstance(messages, list) or not messages:
        raise BadRow(f"messages: a list with at least one message expected, got {str(messages)[:40]}")
    checked = [_message(number, message, ignore) for number, message in enumerate(messages, 1)]
    trained = [_is_trained(number, message, first_trained) for number, message in enumerate(messages, 1)]
    if not any(trained):
        answers = [message for message in messages[first_trained:] if message["role"] == "assistant"]
        if off := [key for key in SWITCHES if any(message.get(key) is not None for message in answers)]:
            raise BadRow(f"has nothing to learn: {' or '.join(off)} of every assistant message is 0 or false")
    if row.get("system"):
        text = _text(row, "system")
        if checked[0]["role"] not in ("system", "developer"):
            checked = [{"role": "system", "content": text}, *checked]
            trained = [False, *trained]
        elif checked[0]["content"] != text:
            raise BadRow("system: another one than the conversation's own system message; keep one")
    ignored = frozenset(key for message in messages for key in message if key in ignore)
    return Chat(tuple(checked), _tools(row.get("tools")), tuple(trained), ignored)


def _message(number: int, message: Any, ignore: Collection[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, Mapping) else message
        raise BadRow(f"message {number}: role {str(role)[:40]!r} is none of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(number, part) for part in content)
    calls = message.get("tool_calls") or []
    says_nothing = content is None or (isinstance(content, str) and not content.strip())
    if message["role"] == "assistant" and says_nothing and not calls:
        raise BadRow(f"message {number}: the assistant says nothing")
    if not isinstance(content, str) and not (content is None and calls):
        raise BadRow(f"message {number}: content is {type(content).__name__}, not text")
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise BadRow(f"message {number}: tool_calls: a list of mappings expected, got {str(calls)[:40]}")
    # without empty values, because templates test whether a key exists, and `tool_calls: []` means no call
    unread = {*SWITCHES, *ignore} - {"role", "content"}
    fields = {key: value for key, value in message.items() if has_value(value) and key not in unread}
    return {**fields, "content": content or ""}


def _is_trained(number: int, message: Mapping[str, Any], first_trained: int) -> bool:
    """True if the loss is on a message. Raises BadRow: a key turns it on where no answer is trained."""
    is_on = _is_switched_on(f"message {number}: ", message)
    if message["role"] == "assistant" and number > first_trained:
        return is_on
    if switches := [key for key in SWITCHES if message.get(key)]:
        where = "of a prompt" if message["role"] == "assistant" else f"of the {message['role']}"
        raise BadRow(
            f"message {number}: {switches[0]}: {message[switches[0]]}: a message {where} is not trained; leave the key"
            " out (data.loss_on: all trains every token)"
        )
    return False


def _is_switched_on(where: str, message: Mapping[str, Any]) -> bool:
    """True if a message's ``weight``, ``train`` or ``loss`` leaves the loss on it, or none of them is there.

    Raises:
        BadRow: another value than 0, 1, false or true, or two of them that disagree.
    """
    values = {key: message[key] for key in SWITCHES if message.get(key) is not None}
    for key, value in values.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise BadRow(f"{where}{key}: 0 or 1 expected, got {repr(value)[:40]}")
    if len({bool(value) for value in values.values()}) > 1:
        raise BadRow(f"{where}{', '.join(values)} disagree")
    return all(values.values())


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
