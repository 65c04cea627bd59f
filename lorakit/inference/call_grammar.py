"""Write the grammar of answers that call functions, in llguidance's form of Lark, for `tool_choice`.

Invariant: an answer of the grammar is read as one call or more of the given tools, with arguments that obey their
schemas; an argument that is written as text, between marks, may have any text.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, final

from lorakit.data.row_formats import function_of
from lorakit.decoding.grammar import ANY_TEXT, OTHERWISE, check_schema
from lorakit.errors import LorakitError, translate_error
from lorakit.inference.answer_form import HARMONY_START, AnswerForm, CallForm


def call_grammar(
    form: AnswerForm, tokenizer: Any, tools: Sequence[Any], prompt: str, *, parallel: bool, otherwise: bool = False
) -> str:
    """Return the grammar. prompt: an answer to it first closes a thought that its end opens. parallel: several calls.

    otherwise: an answer may obey the grammar ``OTHERWISE`` instead; without tools it has to, after such a thought.
    Raises LorakitError: ``form`` has no calls, or the parameters of a tool are not a schema whose answers end.
    """
    if form.calls is None and tools:
        raise LorakitError("tool_choice: the chat template shows no tool calls")
    with translate_error((TypeError, AttributeError), LorakitError, "tools: parameters that are not a JSON schema"):
        return _Writer(form, tokenizer).write(tools, prompt, parallel, otherwise)


@final
class _Writer:
    def __init__(self, form: AnswerForm, tokenizer: Any) -> None:
        self._answer = form
        self._form = form.calls or CallForm("object", "", "")
        self._ids = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
        added = "|".join(map(re.escape, sorted(self._ids, key=len, reverse=True)))
        self._added = re.compile(f"({added or '(?!)'})")  # a group, so that it splits a text with these tokens kept
        self._rules = list[str]()

    def write(self, tools: Sequence[Any], prompt: str, parallel: bool, otherwise: bool) -> str:
        thought = self._thought_after(prompt, may_begin=not otherwise)
        if not tools:
            return "\n".join([f"start: {thought} @{OTHERWISE}", *self._rules]) + "\n"
        start, end = self._literal(self._form.start), self._literal(self._form.end)
        self._rules.append(f"one: {' | '.join(map(self._call, tools))}")
        more = '(", " one)*' if parallel else ""
        inner = f'"[" one {more} "]"' if self._form.is_list else "one"
        self._rules.append(f"call: {start} {inner} {end}")
        is_repeated = parallel and self._form.start and not self._form.is_list  # each call between its own texts
        more = f"({self._literal(self._form.between)} call)*" if is_repeated else ""
        calls = " ".join((self._literal(self._form.open), "call", more, self._literal(self._form.close)))
        answer = f"({calls} | @{OTHERWISE})" if otherwise else calls
        return "\n".join([f"start: {thought} {answer}", *self._rules]) + "\n"

    def _thought_after(self, prompt: str, may_begin: bool) -> str:
        """Return the thought that a prompt opens, up to its end, or that an answer may begin with; "" for none."""
        if self._answer.thought is None:
            return ""
        opening, closing = (text.strip() for text in self._answer.thought)
        if self._answer.is_opened_by(prompt):
            return f"{self._text_until(closing)} /\\s{{0,2}}/"
        if prompt.rstrip().endswith(closing) or not may_begin:  # a closed thought: none is asked for
            return ""
        behind = self._literal(HARMONY_START) if self._answer.dropped else r"/\s{0,2}/"
        return f"(/\\s{{0,2}}/ {self._literal(opening)} {self._text_until(closing)} {behind})?"

    def _call(self, tool: Any) -> str:
        """Return a call of a function, without the texts around it."""
        form = self._form
        function = function_of(tool)
        name = function["name"]
        parameters = {"type": "object", "additionalProperties": False, **(function.get("parameters") or {})}
        check_schema(parameters, "tools")
        if form.style == "framed":
            return " ".join([self._literal(name), *self._framed(parameters)])
        if form.style == "json":
            return f"{self._literal(name + form.before_arguments)} {_json(parameters)}"
        before = json.dumps(f'{{"name": "{name}", "{form.arguments_key}": ')
        identity = r'", \"id\": \"" /[a-zA-Z0-9]{9}/ "\""' if form.has_id else ""
        return f'{before} {_json(parameters)} {identity} "}}"'

    def _framed(self, parameters: dict[str, Any]) -> list[str]:
        """Return each argument in the order of the schema; one that is not required may be absent."""
        form = self._form
        parts = []
        after = self._literal(form.after_value)
        definitions: dict[str, Any] = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
        for key, schema in (parameters.get("properties") or {}).items():
            schema = {} if schema is True else schema
            if schema.get("type") == "string" and "enum" not in schema:
                value = self._text_until(form.after_value)
            elif schema.get("type") == "string":
                value = f"({' | '.join(map(self._literal, schema['enum']))}) {after}"
            else:
                value = f"{_json({**definitions, **schema})} {after}"
            written = f"{self._literal(form.before_key + key + form.before_value)} {value}"
            parts.append(written if key in parameters.get("required", ()) else f"({written})?")
        return parts

    def _text_until(self, end: str) -> str:
        """Return any text up to an end, with the end."""
        match = self._added.search(end)
        if match is not None and not end[: match.start()].strip():  # no text has an added token in it
            return f"{ANY_TEXT} {self._literal(end[match.start() :])}"
        plain = end if match is None else end[: match.start()]
        name = f"text{len(self._rules)}"
        self._rules.append(f"{name}[suffix={json.dumps(plain)}]: {ANY_TEXT}")
        return f"{name} {self._literal(end[len(plain) :])}".rstrip()

    def _literal(self, text: str) -> str:
        """Return a text, whose added tokens are named by their ids, because no other tokens write them."""
        parts = (part for part in self._added.split(text) if part)
        return " ".join(f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part) for part in parts)


def _json(schema: dict[str, Any]) -> str:
    """Return JSON of a schema, with the spaces that `tojson` writes, because other white space has no end."""
    spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return f"%json {json.dumps({**schema, 'x-guidance': spaces})}"
