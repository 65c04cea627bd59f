"""Turn a row into a conversation or a text; its keys decide which of the usual row formats it has.

Invariant: every key of a row, turn and message is read, harmless, ignored on request, or a BadRow that names it; so is
a value of the wrong type. A key that is ignored where it decides the labels would give a silent wrong result:
``"train": false`` beside an answer, or KTO's ``"label": false`` beside a bad one.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from lorakit.data.row_files import ARRAY_REMEDY, BadRow, decode_line, parse_text
from lorakit.errors import did_you_mean

_KEYS: Final = json.loads((Path(__file__).parent.parent / "assets" / "row_keys.json").read_text(encoding="utf-8"))
ROLES: Final[dict[str, str]] = _KEYS["roles"]  # a message's role, or ShareGPT's word -> role of the chat template
NO_LABEL: Final = -100  # in ``labels`` of a row of token ids, as in other programs: no loss on this token
MAX_ID: Final = 2**31 - 1
MAX_WEIGHT: Final = 1e30
SHOWN_KEYS: Final = 40  # of a row of no format
CALL: Final = "function_call"  # LLaMA-Factory's word for an assistant's turn whose text is JSON of its tool calls
OPEN_THOUGHT: Final = "<think>"
CLOSED_THOUGHT: Final = "</think>"
THOUGHTS: Final = ("reasoning_content", "reasoning", "thinking")
"""keys of a message with its thinking, which may also begin its content"""
UNTHINKING: Final = "no thinking"
HARMLESS: Final[frozenset[str]] = frozenset(_KEYS["harmless"])  # keys of a row's origin, which decide no label
HARMLESS_IN_MESSAGES: Final = HARMLESS | {"name"}
SWITCHES: Final = ("weight", "train", "loss", "loss_weight")
"""keys of a message that turn its loss on or off: OpenAI's, axolotl's, another's and LLaMA-Factory's name"""
PARTS: Final = ("text", "reasoning", "tool_call")  # types of parts of a content; the last two are LLaMA-Factory's
WORTH: Final[dict[str, str]] = _KEYS["worth"]
"""key of a row -> what it says; `UNIGNORED_KEYS` of recipe/data.py has the same keys, as a test checks"""
MEDIA: Final[tuple[str, ...]] = tuple(_KEYS["media"])
"""keys of what text may be about and no row can have, so that ignoring them would train text about nothing"""
_TEXT_ALONE: Final = "lorakit trains on text alone; leave such rows out (data.on_bad_rows: skip does, and counts them)"
REMEDIES: Final[dict[str, str]] = {**WORTH, **dict.fromkeys(MEDIA, _TEXT_ALONE), **_KEYS["remedies"]}
"""key -> what it means and where it is meant to go"""
OF_ROWS: Final = (*SWITCHES, "system", "tools", "history")  # keys whose remedy is about a row, not about a message
USUAL_COLUMNS: Final[dict[str, list[str]]] = _KEYS["columns"]  # key of a row -> usual names of a column with its value


@dataclass(frozen=True, kw_only=True)
class _Row:
    unread: frozenset[str] = frozenset()  # keys of the row, of turns and of messages that were not read
    weight: float = 1.0  # weight of the loss of the row's labels
    notes: frozenset[str] = frozenset()  # facts of a conversation, counted because they are mistakes in many files


@dataclass(frozen=True)
class Chat(_Row):
    """A conversation for the tokenizer's chat template."""

    messages: tuple[dict[str, Any], ...]
    tools: list[Any] | None
    trained: tuple[bool, ...]  # for each message: True if the loss is on it


@dataclass(frozen=True)
class Text(_Row):
    """Text without a template: the loss is on the completion, not on the prompt."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Encoded(_Row):
    """The tokens of one row: as it gives them, without a template, begin or end token, or as `Encoder` makes them."""

    ids: list[int]
    label_mask: list[bool]  # True: the loss is on this token
    token_weights: list[float] | None = None  # weight of each token's loss beside the row's, 0 or more; None: all are 1
    plain: bool = False  # the row is plain text, rendered by no template
    is_text: bool = False  # the row is a text without a prompt, which can be split
    system: str | None = None  # system prompt that the row begins with
    tail: int = 0  # last tokens that stay when the row is cut: end tokens of the tokenizer, and what stands for a label


def to_conversation(row: Any, ignore: Collection[str] = ()) -> Chat | Text | Encoded:
    """Return the conversation, text or tokens of a row. ``ignore``: keys to leave unread, of row, turns and messages.

    Raises BadRow: the row is one, has no known format, a key that is not read, or a value of the wrong type.
    """
    ignore = set(ignore) - WORTH.keys()
    if isinstance(row, BadRow):  # which could not be read, or whose columns lack a key
        raise row
    if not isinstance(row, Mapping):
        array = f"; {ARRAY_REMEDY}" if isinstance(row, list) else ""
        raise BadRow(f"a row is a mapping, got {type(row).__name__}{array}")
    null = {key for key, value in row.items() if value is None}
    row = {key: value for key, value in row.items() if value is not None}
    if key := next((key for key in WORTH if has_value(row.get(key))), None):
        raise refusal(key)
    weight = 1.0 if "weight" in ignore else _weight(row)
    fitting = [form for form in FORMATS if set(form.required) <= row.keys() - ignore]
    if not fitting:
        raise _no_format(row, null)
    full = (form for form in fitting if all(has_value(row[key]) for key in form.required))
    form = next(full, fitting[0])  # the first one of which no key is empty, else the first one
    read = {*form.required, *form.optional, "weight"} - ignore
    unread = frozenset(key for key, value in row.items() if has_value(value) and key not in read)
    if wrong := [key for key in row if key in unread and key not in ignore | HARMLESS]:
        raise refusal(wrong[0])
    row = {key: value for key, value in row.items() if key in read}
    parsed = form.parse(row, ignore)
    return replace(parsed, unread=parsed.unread | unread, weight=weight)


def _no_format(row: Mapping[str, Any], null: Collection[str]) -> BadRow:
    """Return the error for a row of no format: with the key that is null, the nearest key, or the columns to name."""
    lacking = [[key for key in form.required if key not in row] for form in FORMATS]
    if keys := next((keys for keys in lacking if all(key in null for key in keys)), None):
        return BadRow(f"{' and '.join(keys)} is null")
    known = [key for form in FORMATS for key in form.required]
    columns = usual_columns(row)
    others = [] if columns else [key for key in row if key not in (*known, *HARMLESS)][:SHOWN_KEYS]
    nearest = next(filter(None, (did_you_mean(str(key), known, 1) for key in others)), "")
    named = ", ".join(f"{key}: {name}" for key, name in columns.items()) or "prompt: COLUMN, completion: COLUMN"
    return BadRow(
        f"no row format has the keys {', '.join(sorted(map(str, row))[:SHOWN_KEYS]) or '(none)'}; the formats are"
        f" {'; '.join(' + '.join(form.required) for form in FORMATS)}; name other columns: data.columns: {{{named}}}."
        f"{nearest}"
    )


def usual_columns(names: Collection[str]) -> dict[str, str]:
    """Return key of a row -> the column with its value, by usual names; empty without one prompt and one answer."""
    of_key = {key: [name for name in names if str(name).lower() in usual] for key, usual in USUAL_COLUMNS.items()}
    is_clear = len(of_key["instruction"]) == len(of_key["output"]) == 1 >= len(of_key["input"])
    return {key: columns[0] for key, columns in of_key.items() if columns} if is_clear else {}


def has_value(value: Any) -> bool:
    """True unless a value is None, or an empty text, list or mapping."""
    return value is not None and not (isinstance(value, str | list | tuple | Mapping) and not value)


def refusal(key: str, where: str = "") -> BadRow:
    """Return the error for a key that is not read. ``where``: the message that has it; empty for the row."""
    name = str(key)[:40]
    remedy = None if where and key in OF_ROWS else REMEDIES.get(key)
    why = f": {remedy}" if remedy else "" if where else ": not a key that is read here"
    offer = "" if key in (*WORTH, *MEDIA, "weights") else f" (data.ignore_keys: [{name}] leaves it unread)"
    return BadRow(f"{where}{name}{why}{offer}")


def _weight(row: Mapping[str, Any]) -> float:
    """Return the row's ``weight``; 1 without the key."""
    weight = row["weight"] if has_value(row.get("weight")) else 1
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MAX_WEIGHT:
        raise BadRow(f"weight: a number from 0 to {MAX_WEIGHT:g} expected, got {repr(weight)[:40]}")
    return float(weight)


def _text(row: Mapping[str, Any], key: str, *, may_be_empty: bool = False) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise BadRow(f"{key}: text expected, got {type(value).__name__}")
    if not value.strip() and not may_be_empty:
        raise BadRow(f"{key} is empty")
    return value


def _prompt_completion(row: Mapping[str, Any], ignore: Collection[str]) -> Chat | Text:
    if isinstance(row["prompt"], list) and isinstance(row["completion"], list):
        messages = [*row["prompt"], *row["completion"]]
        return _chat({**row, "messages": messages}, ignore, first_trained=len(row["prompt"]))
    for key in ("system", "tools"):
        if has_value(row.get(key)):
            raise refusal(key)
    return Text(_text(row, "prompt", may_be_empty=True), _text(row, "completion"))


def _instruction(row: Mapping[str, Any], ignore: Collection[str]) -> Chat:
    extra = _text(row, "input", may_be_empty=True) if "input" in row else ""
    question = _text(row, "instruction") + (f"\n{extra}" if extra else "")
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": _text(row, "output")}]
    return _chat({**row, "messages": messages}, ignore)


def _token_ids(row: Mapping[str, Any], ignore: Collection[str]) -> Encoded:
    ids = _numbers(row, "input_ids", 0, MAX_ID)
    masks = [key for key in ("labels", "mask", "loss_mask") if key in row]
    if len(masks) != 1:
        raise BadRow(
            f"input_ids: beside them one of labels ({NO_LABEL} for a token without loss, else the token), mask and"
            f" loss_mask (0 or 1) says where the loss is, got {' and '.join(masks) or 'none'}"
        )
    key = masks[0]
    values = _numbers(row, key, NO_LABEL, MAX_ID) if key == "labels" else _numbers(row, key, 0, 1)
    attended = _numbers(row, "attention_mask", 0, 1) if "attention_mask" in row else [1] * len(ids)
    weights = _numbers(row, "weights", 0, MAX_WEIGHT, float) if has_value(row.get("weights")) else None
    for name, each in ((key, values), ("attention_mask", attended), ("weights", weights or values)):
        if len(each) != len(ids):
            raise BadRow(f"{name}: has {len(each)} values, and input_ids {len(ids)}")
    if 0 in attended:
        raise BadRow("attention_mask: 0 for some tokens; rows have no padding, so cut it off in all columns")
    if key != "labels":
        return Encoded(ids, [value == 1 for value in values], weights)
    for number, (token, label) in enumerate(zip(ids, values, strict=True), 1):
        if label not in (token, NO_LABEL):
            raise BadRow(f"labels: value {number} is {label} for the token {token}; labels are not shifted")
    return Encoded(ids, [label != NO_LABEL for label in values], weights)


def _numbers(
    row: Mapping[str, Any], key: str, least: int, most: float, kind: type[int] | type[float] = int
) -> list[Any]:
    """Return a row's list of numbers of a kind, int or float; true and false are 1 and 0."""
    values = parse_json(key, row[key])
    if not isinstance(values, list):
        raise BadRow(f"{key}: a list expected, got {type(values).__name__}")
    for value in values:
        if not isinstance(value, int | kind) or not least <= value <= most:
            name = "whole numbers" if kind is int else "numbers"
            raise BadRow(f"{key}: {name} from {least} to {most} expected, got {repr(value)[:40]}")
    return [kind(value) for value in values]


@dataclass(frozen=True)
class RowFormat:
    """A row format. ``required``, ``optional``: keys of its rows. ``parse``: from a row and the keys to ignore."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    parse: Callable[[Mapping[str, Any], Collection[str]], Chat | Text | Encoded]


FORMATS: Final = (
    RowFormat(("messages",), ("tools", "system"), lambda row, ignore: _chat(row, ignore)),
    RowFormat(("conversations",), ("tools", "system"), lambda row, ignore: _chat(row, ignore, "conversations")),
    RowFormat(("prompt", "completion"), ("tools", "system"), _prompt_completion),
    RowFormat(("instruction", "output"), ("input", "system"), _instruction),
    RowFormat(("text",), (), lambda row, ignore: Text("", _text(row, "text"))),
    RowFormat(("input_ids",), ("labels", "mask", "loss_mask", "attention_mask", "weights"), _token_ids),
)
"""in the order in which they are tried. A new key also goes into `RowKey` of recipe/data.py, as a test checks"""


def _chat(row: Mapping[str, Any], ignore: Collection[str], key: str = "messages", *, first_trained: int = 0) -> Chat:
    """Return the conversation of a row's messages. first_trained: index of the first one that may be trained."""
    given = parse_json(key, row[key])
    if not isinstance(given, list) or not given:
        raise BadRow(f"{key}: a list with at least one message expected, got {str(given)[:40]}")
    messages = [_as_message(number, message, ignore) for number, message in enumerate(given, 1)]
    checked = [_message(number, message, ignore) for number, message in enumerate(messages, 1)]
    trained = [_is_trained(number, message, first_trained) for number, message in enumerate(messages, 1)]
    if not any(trained):
        answers = [message for message in messages[first_trained:] if message["role"] == "assistant"]
        if off := [name for name in SWITCHES if any(message.get(name) is not None for message in answers)]:
            raise BadRow(f"has nothing to learn: {' or '.join(off)} of every assistant message is 0 or false")
    if row.get("system"):
        text = _text(row, "system")
        if checked[0]["role"] not in ("system", "developer"):
            checked = [{"role": "system", "content": text}, *checked]
            trained = [False, *trained]
        elif checked[0]["content"] != text:
            raise BadRow("system: another one than the conversation's own system message; keep one")
    unread = {name for message in messages for name in message if name in ignore}
    unread |= {name for turn in given for name in _unread_in_parts(turn)}
    tools = _tools(row.get("tools"))
    notes = frozenset(_notes(checked, tools))
    return Chat(tuple(checked), tools, tuple(trained), unread=frozenset(unread), notes=notes)


def _notes(messages: Collection[Mapping[str, Any]], tools: list[Any] | None) -> Iterator[str]:
    """Yield what is counted of a conversation: calls of tools that the prompt does not name, no user, no thinking."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if not any(split_thinking(one["content"])[0] or any(key in one for key in THOUGHTS) for one in answers):
        yield UNTHINKING
    called = {str(function_of(call).get("name")) for message in answers for call in message.get("tool_calls", ())}
    if called and not tools:
        yield "tool calls without `tools`"
    elif called - {str(function_of(tool).get("name")) for tool in tools or ()}:
        yield "a call of a tool that `tools` does not list"
    if all(message["role"] != "user" for message in messages):
        yield "no message of the user"


def _unread_in_parts(turn: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a turn's parts that are not read, which are harmless or to be ignored."""
    content = turn.get("value") if turn.get("content") is None else turn["content"]
    for part in content if isinstance(content, list) else ():
        yield from (key for key, value in part.items() if has_value(value) and key not in ("type", "text", "value"))


def _as_message(number: int, turn: Any, ignore: Collection[str]) -> dict[str, Any]:
    """Return a turn as a message with ``role`` and ``content``; ShareGPT's has ``from`` and ``value``."""
    if not isinstance(turn, Mapping):
        raise BadRow(f"message {number}: a mapping with role and content expected, got {str(turn)[:40]!r}")
    message = {key: value for key, value in turn.items() if value is not None}
    for ours, theirs in (("role", "from"), ("content", "value")):
        if ours not in message and theirs in message:
            message[ours] = message.pop(theirs)
    if "role" not in message or not (turn.keys() & {"content", "value"} or message.get("tool_calls")):
        keys = ", ".join(map(str, message)) or "(none)"
        known = ("role", "content", "from", "value")
        near = "".join(did_you_mean(str(key), known, 1) for key in message if key not in known)
        raise BadRow(f"message {number}: has the keys {keys}; a message has role and content, or from and value.{near}")
    name = message["role"]
    if not isinstance(name, str) or name not in ROLES:
        raise BadRow(f"message {number}: role {str(name)[:40]!r} is none of {', '.join(ROLES)}")
    fields: dict[str, Any] = {}
    if name == CALL:
        # the thinking before the calls, as LLaMA-Factory writes it, is the message's text
        thinking, closed, calls = str(message.get("content")).rpartition(CLOSED_THOUGHT)
        fields = {"content": thinking + closed, "tool_calls": _function_calls(f"message {number}: {CALL}: ", calls)}
    elif isinstance(message.get("content"), list):
        fields = _from_parts(f"message {number}: content: ", message["content"], ignore)
    if twice := [key for key in fields if key != "content" and has_value(message.get(key))]:
        raise BadRow(f"message {number}: has {twice[0]} beside its content, which has some too; keep one of them")
    return message | fields | {"role": ROLES[name]}


def _from_parts(where: str, parts: list[Any], ignore: Collection[str]) -> dict[str, Any]:
    """Return the fields of a message whose content is a list of parts."""
    texts: dict[str, list[str]] = {}
    for given in parts:
        part = {key: value for key, value in given.items() if value is not None} if isinstance(given, Mapping) else {}
        kind = part.pop("type", None)
        text = part.pop("value" if "value" in part else "text", None)
        if medium := next((name for name in MEDIA if name in str(kind)), None):
            raise refusal(medium, where)
        if kind not in PARTS or not isinstance(text, str):
            raise BadRow(f"{where}a part has the type {', '.join(PARTS)} and a text, got {str(given)[:60]!r}")
        if unread := [key for key, value in part.items() if has_value(value) and key not in {*ignore, *HARMLESS}]:
            raise refusal(unread[0], where)
        texts.setdefault(kind, []).append(text)
    fields: dict[str, Any] = {"content": "".join(texts.get("text", ()))}
    if "reasoning" in texts:
        fields["reasoning_content"] = "".join(texts["reasoning"])
    if "tool_call" in texts:
        fields["tool_calls"] = [call for text in texts["tool_call"] for call in _function_calls(where, text)]
    return fields


def _function_calls(where: str, text: str) -> list[dict[str, Any]]:
    """Return the tool calls in the JSON text of a call or of a list of calls, each with a name and arguments."""
    value = parse_text(text, f"{where}JSON of one call or a list of calls expected: ")
    calls = value if isinstance(value, list) else [value]
    for call in calls:
        if not function_of(call).get("name") or "arguments" not in function_of(call):
            raise BadRow(f"{where}a call has a name and arguments, got {str(call)[:60]!r}")
    return [call if "function" in call else {"type": "function", "function": call} for call in calls]


def function_of(value: Any) -> dict[str, Any]:
    """Return the function of a tool or of a tool call, in either form; empty if it has none."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    return function if isinstance(function, dict) else {}


def arguments_of(function: Mapping[str, Any]) -> Any:
    """Return the arguments of a called function, parsed where they are JSON text; a BadRow of a text that is none."""
    arguments = function.get("arguments")
    return decode_line(arguments.encode()) if isinstance(arguments, str) and arguments else arguments


def _message(number: int, message: Mapping[str, Any], ignore: Collection[str]) -> dict[str, Any]:
    content = message.get("content")
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
    for function in map(function_of, calls):
        if has_value(function.get("arguments")) and not isinstance(arguments_of(function), Mapping):
            raise BadRow(
                f"message {number}: the arguments of tool call {str(function.get('name'))[:40]!r} are no JSON object,"
                f" got {str(function['arguments'])[:60]!r}"
            )
    if message["role"] == "assistant":
        text = content or ""
        if text.lstrip().startswith(OPEN_THOUGHT) and CLOSED_THOUGHT not in text:
            raise BadRow(f"message {number}: its thinking has no end: {OPEN_THOUGHT} without {CLOSED_THOUGHT}")
        if CLOSED_THOUGHT in text and (key := next((key for key in THOUGHTS if key in fields), None)):
            raise BadRow(f"message {number}: has thinking in {key} and in its content; keep one of them")
    return {**fields, "content": content or ""}


def split_thinking(content: str) -> tuple[str, str]:
    """Return the thinking that a content begins with, which may be empty, and what follows it."""
    thinking, _, rest = content.rpartition(CLOSED_THOUGHT)
    return thinking.strip().removeprefix(OPEN_THOUGHT).strip(), rest.strip()


def _is_trained(number: int, message: Mapping[str, Any], first_trained: int) -> bool:
    """True if the loss is on a message: one of SWITCHES leaves it on, or none of them is there.

    Raises BadRow: another value than 0, 1, false or true, two keys that disagree, or one turns on what is not trained.
    """
    values = {key: message[key] for key in SWITCHES if message.get(key) is not None}
    for key, value in values.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise BadRow(f"message {number}: {key}: 0 or 1 expected, got {repr(value)[:40]}")
    if len({bool(value) for value in values.values()}) > 1:
        raise BadRow(f"message {number}: {', '.join(values)} disagree")
    if message["role"] == "assistant" and number > first_trained:
        return all(values.values())
    if switches := [key for key, value in values.items() if value]:
        where = "of a prompt" if message["role"] == "assistant" else f"of the {message['role']}"
        raise BadRow(
            f"message {number}: {switches[0]}: {message[switches[0]]}: a message {where} is not trained; leave the key"
            " out (data.loss_on: all trains every token)"
        )
    return False


def _tools(tools: Any) -> list[Any] | None:
    """Return the list of tools in the form that OpenAI's clients send, and so the form in which it is asked in use."""
    tools = parse_json("tools", tools)
    if not tools:
        return None
    if not isinstance(tools, list):
        raise BadRow(f"tools: a list expected, got {type(tools).__name__}")
    # the description of a function alone, as LLaMA-Factory and others write it
    is_plain = [isinstance(one, Mapping) and "name" in one and not one.keys() & {"type", "function"} for one in tools]
    return [{"type": "function", "function": one} if plain else one for one, plain in zip(tools, is_plain, strict=True)]


def parse_json(key: str, value: Any) -> Any:
    """Return a value, or what its JSON text says: a cell of a CSV file is text."""
    return parse_text(value, f"{key}: not a JSON list: ") if isinstance(value, str) and value else value
