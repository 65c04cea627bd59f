"""Find in a chat template how answers write thinking and tool calls, by rendering an answer that has some.

No list of model families: an answer with calls of functions that no model knows is rendered, and the text around their
names and arguments is how this template writes a call. Example, Qwen 2.5:

    <tool_call>\\n{"name": "NAME", "arguments": {"KEY": "VALUE"}}\\n</tool_call>
    start          a JSON object with both                       end

Invariant: a form reads back the calls that were rendered; a template without one has no form of calls.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, final

from lorakit.data.chat_template import ChatTemplate, common_length
from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import CLOSED_THOUGHT, OPEN_THOUGHT, Chat, function_of
from lorakit.decoding.grammar import find_target

NAMES: Final = ("lorakit_one", "lorakit_two")
ARGUMENTS: Final = {"key_one": "value one", "key_two": "value two"}
CONTENT: Final = "lorakit content"
THOUGHT: Final = "lorakit thought"
QUESTION: Final[Mapping[str, Any]] = {"role": "user", "content": "lorakit question"}
NAME: Final = r"[\w.:-]+"  # a function's name
BRACKET: Final = re.compile(r"[{\[]")
DECODER: Final = json.JSONDecoder()
MAX_KEY: Final = 1000  # letters of an argument's name
Kind = Literal["content", "thought", "call"]


@dataclass(frozen=True)
class AnswerPart:
    """A piece of an answer: text of its content or its thinking, or of a call's arguments, which are JSON."""

    kind: Kind
    text: str = ""
    name: str | None = None  # of the function, where a call begins
    id: str | None = None  # of the call, where it begins, if the answer gives one


@dataclass(frozen=True)
class CallForm:
    """How an answer writes tool calls, by the style of the text inside of one.

    `object`: a JSON object of name and arguments, or a list of them. `json`: the name, ``before_arguments``, a JSON
    object. `framed`: the name, and for each argument ``before_key``, key, ``before_value``, value, ``after_value``.
    """

    style: Literal["object", "json", "framed"]
    start: str  # around each call
    end: str
    open: str = ""  # around all calls
    close: str = ""
    between: str = ""  # two calls
    before_arguments: str = ""
    before_key: str = ""
    before_value: str = ""
    after_value: str = ""
    arguments_key: str = "arguments"  # of `object`, as below
    is_list: bool = False
    has_id: bool = False

    @property
    def start_mark(self) -> str:
        """The text that a call is found by: ``start`` up to its first white space. Empty: an answer is one call."""
        return "".join(self.start.split()[:1])

    @property
    def end_mark(self) -> str:
        """The text that a call is complete with: ``end`` from its last white space. Empty: the answer's end."""
        return "".join(self.end.split()[-1:])

    def read(self, text: str, tools: Sequence[Any]) -> tuple[list[AnswerPart], str]:
        """Return the calls of the text between the marks, and text behind them. tools: for the types of ``framed``.

        Raises ValueError: the text is no call of this form.
        """
        if self.style == "object":
            value, stop = DECODER.raw_decode(text.lstrip())
            calls = [self._read_object(one) for one in (value if isinstance(value, list) else [value])]
            return calls, text.lstrip()[stop:].strip()
        begun = self.begin(text)
        if begun is None:
            raise ValueError("no name of a function")
        arguments, num_letters = self.reader(begun[1], tools).add(text[begun.end() :] + self.end_mark)
        return [_call(begun[1], arguments)], self.behind(text[begun.end() + num_letters :])

    def behind(self, text: str) -> str:
        """Return the text behind a call's arguments, without what is there before ``end_mark``."""
        known = "}" if self.style == "object" else self.end.removesuffix(self.end_mark).strip()
        return re.sub(rf"\A\s*{_tolerant(known)}", "", text).strip()

    def reader(self, name: str, tools: Sequence[Any]) -> "JsonObject | FramedArguments":
        """Return a reader of the arguments of a call."""
        return FramedArguments(self, _types_of(tools, name)) if self.style == "framed" else JsonObject(self.end_mark)

    def begin(self, text: str) -> re.Match[str] | None:
        """Match a call up to its arguments, its name in group 1. None: they begin later, or are not read in parts."""
        if self.is_list or self.has_id:
            return None
        before = rf'\s*{{\s*"name"\s*:\s*"({NAME})"\s*,\s*"{re.escape(self.arguments_key)}"\s*:\s*'
        if self.style != "object":
            before = rf"(?:{_tolerant(self.start.lstrip().removeprefix(self.start_mark))})?\s*({NAME})"
        ends = (_tolerant(mark.strip()) for mark in (self.before_key, self.end))
        after = {"object": r"(?={)", "json": r"[^{]*(?={)", "framed": rf"(?=\s*(?:{'|'.join(ends)}))"}
        return re.match(before + after[self.style], text)

    def _read_object(self, value: Any) -> AnswerPart:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise ValueError("no object with a name")
        arguments = value.get(self.arguments_key, value.get("arguments", value.get("parameters", {})))
        return _call(value["name"], arguments, value.get("id"))


@final
class JsonObject:
    """A JSON object that comes in pieces, perhaps a broken one: it ends with its last bracket, or before the mark.

    Models write line breaks inside of strings, where JSON has them escaped, and commas behind a last item.
    """

    def __init__(self, mark: str = "") -> None:
        self.is_over = False
        self._mark = "" if mark[:1] in '{}[]"' else mark
        self._depth = 0
        self._in_string = False
        self._is_escaped = False  # True behind a backslash in a string

    def add(self, text: str) -> tuple[str, int]:
        """Return what of a text is the object's, control characters escaped, and the number of letters read."""
        letters = []
        for at, letter in enumerate(text):
            if self._in_string:
                self._in_string = self._is_escaped or letter != '"'
                self._is_escaped = letter == "\\" and not self._is_escaped
                letters.append(letter if letter >= " " else json.dumps(letter)[1:-1])
                continue
            self.is_over = self._mark != "" and text.startswith(self._mark, at)
            if self.is_over or self._mark.startswith(text[at:]):  # the mark, or perhaps its beginning
                return "".join(letters), at
            letters.append(letter)
            self._in_string = letter == '"'
            self._depth += (letter in "{[") - (letter in "}]")
            if self._depth <= 0 and letter in "}]":
                self.is_over = True
                return "".join(letters), at + 1
        return "".join(letters), len(text)


@final
class FramedArguments:
    """The arguments of a `framed` call, as a JSON object: strings as they come, other values when they are complete."""

    def __init__(self, form: CallForm, types: Mapping[str, str]) -> None:
        self.is_over = False
        key, value, self._after = (text.strip() for text in (form.before_key, form.before_value, form.after_value))
        space = re.escape(form.before_value.removeprefix(value))
        before = rf"\s*{_tolerant(key)}(.{{1,{MAX_KEY}}}?){_tolerant(value)}(?:{space}|(?!{space})(?=.))"
        self._before_value = re.compile(before, re.DOTALL)
        self._marks = ["".join(text.split()) for text in (form.end, key)]  # a value is followed by one of them
        self._ends = (form.after_value.rstrip(), self._after)
        self._types = types
        self._opening = "{"  # of the next argument
        self._type: str | None = None  # of the argument that is read
        self._in_value = False

    def add(self, text: str) -> tuple[str, int]:
        """Return the JSON that is certain after more text, and the number of letters read."""
        pieces = []
        at = 0
        while self._in_value or (before := self._before_value.match(text, at)):
            if not self._in_value and before:
                key = before[1].strip()
                self._type = self._types.get(key)
                pieces.append(
                    f"{self._opening}{json.dumps(key, ensure_ascii=False)}: " + '"' * (self._type == "string")
                )
                self._opening = ", "
                at = before.end()
            stop = text.find(self._after, at)
            self._in_value = stop < 0
            if self._in_value and self._type != "string":
                return "".join(pieces), at
            begun = max(num_begun(text, mark) for mark in self._ends)
            end = max(at, len(text) - begun) if self._in_value else stop
            value = text[at:end].removesuffix("" if self._in_value else self._ends[0].removesuffix(self._after))
            if self._type == "string":
                pieces.append(json.dumps(value, ensure_ascii=False)[1:].removesuffix('"' * self._in_value))
            else:
                pieces.append(json.dumps(_value(value, self._type == "text"), ensure_ascii=False))
            if self._in_value:
                return "".join(pieces), end
            at = stop + len(self._after)
        coming = "".join(text[at : at + 2 * MAX_KEY].split())
        has_ended = coming.startswith(self._marks[0])
        self.is_over = has_ended or not any(mark.startswith(coming[: len(mark)]) for mark in self._marks)
        return "".join(pieces) + (self._opening.strip(", ") + "}") * has_ended, at


@dataclass(frozen=True)
class AnswerForm:
    """How a template writes answers."""

    header: str = ""  # begins an answer without thinking
    thought: tuple[str, str] | None = None  # texts around thinking
    calls: CallForm | None = None
    dropped: tuple[str, ...] = ()  # texts between the parts

    def is_opened_by(self, prompt: str) -> bool:
        """True if a prompt ends with the beginning of a thought, so that an answer goes on with it."""
        return self.thought is not None and prompt.rstrip().endswith(self.thought[0].strip())

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything that is written around the parts of an answer."""
        calls = self.calls
        around = () if calls is None else (calls.open, calls.start, calls.before_arguments, calls.end, calls.close)
        return (self.header, *(self.thought or ()), *around, *self.dropped)


HARMONY_HEADER: Final = "<|channel|>final<|message|>"
HARMONY_START: Final = "<|start|>assistant"  # of each part of an answer
HARMONY_DROPPED: Final = (
    HARMONY_HEADER, "<|channel|>commentary<|message|>", "<|channel|>commentary", "<|message|>", HARMONY_START,
    "<|end|>", "<|call|>", "<|return|>",
)  # fmt: skip
"""of gpt-oss: the model writes the name of a function after the channel, and its chat template before it"""


def find_answer_form(template: ChatTemplate) -> AnswerForm:
    """Return how a chat template writes answers, found in what it renders."""
    try:
        plain = _answer(template, content=CONTENT)
    except BadRow:
        return AnswerForm()
    header = plain.partition(CONTENT)[0]
    calls = _find_calls(template, header)
    if header == HARMONY_HEADER:
        return AnswerForm("", ("<|channel|>analysis<|message|>", "<|end|>"), calls, HARMONY_DROPPED)
    if calls is not None and calls.start.strip()[:1].isalpha():  # a word of plain text could begin a call
        calls = None
    return AnswerForm(header, _find_thought(template, header), calls)


def _answer(template: ChatTemplate, **fields: Any) -> str:
    """Return what a template writes for an answer. Raises BadRow: it refuses such an answer."""
    function = {"description": "none", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": {"name": name, **function}} for name in NAMES]
    messages = (dict(QUESTION), {"role": "assistant", "content": "", **fields})
    return template.find_answer(Chat(messages, tools, (False, True)), 1).content


def _find_thought(template: ChatTemplate, header: str) -> tuple[str, str] | None:
    with suppress(BadRow):
        before, _, rest = _answer(template, content=CONTENT, reasoning_content=THOUGHT).partition(THOUGHT)
        if CONTENT in rest:
            return before or OPEN_THOUGHT, rest.partition(CONTENT)[0]
    # of a template whose prompts open a thought, which it then does not show
    return (OPEN_THOUGHT, CLOSED_THOUGHT) if CLOSED_THOUGHT in header else None


def _find_calls(template: ChatTemplate, header: str) -> CallForm | None:
    calls = [
        {"type": "function", "id": f"call0000{number}", "function": {"name": name, "arguments": ARGUMENTS}}
        for number, name in enumerate(NAMES)
    ]
    for names in (NAMES, NAMES[:1]):  # some templates write one call, and refuse or drop others
        with suppress(BadRow):
            text = _answer(template, tool_calls=calls[: len(names)])
            form = _form_of(text.removeprefix(header), names, sorted(template.added_tokens))
            if form is not None:
                return form
    return None


def _form_of(text: str, names: Sequence[str], tokens: Sequence[str]) -> CallForm | None:
    """Return the form of the calls of functions with these names in an answer; None: it is none that is read here.

    tokens: texts of special tokens, which marks do not end inside of.
    """
    spans, fields = _spans(text, names)
    if not spans:
        return None
    first, last = text[: spans[0][0]], text[spans[-1][1] :]
    if len(spans) == 1:  # one call, or a list of them
        form = CallForm(start=first, end=last, **fields)
    else:
        between = text[spans[0][1] : spans[1][0]]
        atom = re.compile("|".join([*map(re.escape, tokens), "."]), re.DOTALL)
        start = "".join(_common_end(atom.findall(first), atom.findall(between)))
        inner = between[: len(between) - len(start)]
        end = "".join(atom.findall(last)[: common_length(atom.findall(last), atom.findall(inner))])
        around: dict[str, Any] = {"open": first.removesuffix(start), "close": last.removeprefix(end)}
        form = CallForm(start=start, end=end, between=inner.removeprefix(end), **around, **fields)
    try:
        inner = text.partition(form.start_mark)[2] if form.start_mark else text
        calls, _ = form.read(inner.partition(form.end_mark)[0] if form.end_mark else inner, [])
    except ValueError:
        return None
    expected = [(name, ARGUMENTS) for name in names[: len(calls)]]
    return form if calls and [(call.name, json.loads(call.text)) for call in calls] == expected else None


def _spans(text: str, names: Sequence[str]) -> tuple[list[tuple[int, int]], dict[str, Any]]:
    """Return where the calls in a text begin and end, without what is around them, and their style with its fields."""
    objects = [one for one in _json_values(text) if any(name in str(one[2]) for name in names)]
    if objects:
        value = objects[0][2]
        call = value[0] if isinstance(value, list) else value
        key = next((key for key, item in call.items() if item == ARGUMENTS), "")
        fields = {"style": "object", "arguments_key": key, "is_list": isinstance(value, list), "has_id": "id" in call}
        return [(start, stop) for start, stop, _ in objects], fields
    starts = [text.find(name) for name in names]
    arguments = [(start, stop) for start, stop, value in _json_values(text) if value == ARGUMENTS]
    if -1 in starts:
        return [], {}
    if len(arguments) == len(names):
        before = text[starts[0] + len(names[0]) : arguments[0][0]]
        spans = [(start, stop) for start, (_, stop) in zip(starts, arguments, strict=True)]
        return spans, {"style": "json", "before_arguments": before}
    (key, value), (key2, value2) = ARGUMENTS.items()
    framed = re.search(rf"{names[0]}(.*?){key}(.*?){value}(.*?){key2}(.*?){value2}", text, re.DOTALL)
    if framed is None or framed[2] != framed[4]:
        return [], {}
    between = framed[3]
    before_key = "".join(_common_end(framed[1], between))
    after_value = between.removesuffix(before_key)
    stops = [match.end() + len(after_value) for match in re.finditer(value2, text)]
    fields = {"before_key": before_key, "before_value": framed[2], "after_value": after_value}
    return list(zip(starts, stops, strict=True)), {"style": "framed", **fields}


def _common_end(text: Sequence[str], other: Sequence[str]) -> Sequence[str]:
    """Return the letters or tokens with which two texts end alike."""
    return text[len(text) - common_length(text[::-1], other[::-1]) :]


def _json_values(text: str) -> list[tuple[int, int, Any]]:
    """Return (start, stop, value) of each outermost JSON object or list in a text."""
    values = []
    start = 0
    while match := BRACKET.search(text, start):
        try:
            value, stop = DECODER.raw_decode(text, match.start())
            values.append((match.start(), stop, value))
            start = stop
        except ValueError:
            start = match.end()
    return values


def _call(name: str, arguments: Any, identity: str | None = None) -> AnswerPart:
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments are no object")
    return AnswerPart("call", json.dumps(arguments, ensure_ascii=False), name, identity)


def _types_of(tools: Sequence[Any], name: str) -> dict[str, str]:
    """Return argument -> `string`, or `text` where it may be null too or its type is elsewhere, of a function."""
    parameters = next((one.get("parameters") for one in map(function_of, tools) if one["name"] == name), None) or {}
    types = {}
    with suppress(TypeError, ValueError, LookupError, AttributeError, RecursionError):  # it is no schema
        for key, one in parameters.get("properties", {}).items():
            if _types_in(one, parameters) <= {"string", "null"}:
                types[key] = "string" if one.get("type") == "string" else "text"
    return types


def _types_in(schema: Any, root: Any) -> set[str]:
    """Return the types of the values that a schema describes; `any` is one."""
    if not isinstance(schema, dict):
        return {"any"}
    inner = [one for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key, ())]
    inner += [find_target(root, schema["$ref"])] if "$ref" in schema else []
    types = schema.get("type", "any")
    own = {types} if isinstance(types, str) else set(types)
    return set().union(*(_types_in(one, root) for one in inner)) if inner and own == {"any"} else own


def _value(text: str, is_text: bool) -> Any:
    """Return the value of an argument that is written as JSON or, if it is none or has to be a text, as text."""
    try:
        value = json.loads({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text
    return text if is_text and not isinstance(value, str | None) else value


def _tolerant(text: str) -> str:
    """Return a pattern of a text in which white space may be of another length."""
    return r"\s*".join(map(re.escape, re.split(r"\s+", text)))


def num_begun(text: str, mark: str) -> int:
    """Return how many letters at the end of a text may begin a mark."""
    longest = min(len(text), len(mark) - 1)
    return next((number for number in range(longest, 0, -1) if text.endswith(mark[:number])), 0)
