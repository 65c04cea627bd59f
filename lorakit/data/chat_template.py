"""Render conversations with the tokenizer's chat template, and find every answer in the rendered text.

An answer is what the template adds to its prompt, because this is what the model is asked to write in use. Example, for
the second message of a conversation:

    prompt      <|user|>hi<|end|><|assistant|>               messages before it, with the generation prompt
    through     <|user|>hi<|end|><|assistant|>yes<|end|>     messages up to and including it
    answer                                    yes<|end|>     the difference, up to its end token

Invariant: no guess. A row whose answers cannot be found exactly is a BadRow. Whether an answer is complete is asked in
`shown.py`; which answers are in one row, in `encode.py`.
"""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, final

import jinja2
import jinja2.meta

from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import CLOSED_THOUGHT, OPEN_THOUGHT, Chat, arguments_of, function_of, split_thinking
from lorakit.data.template_limits import EndlessTemplate, LimitedSandbox, limited_rendering
from lorakit.errors import DataError, translate_error

SENTINEL: Final = "\u241elorakit\u241e"  # not expected in any row, so that its position in a rendering is unique
TEMPLATE_FAILURES: Final = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
    MemoryError,
)  # fmt: skip
"""errors of a template: jinja's, and those of its expressions"""
OWN_VARIABLES: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "bos_token",
     "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token", "additional_special_tokens"}
)  # fmt: skip
"""variables of every chat template, which transformers sets"""
DATE_FUNCTION: Final = "strftime_now"  # transformers' function by which templates, as Llama 3.1's, write today's date
QUESTION: Final[Sequence[dict[str, Any]]] = ({"role": "user", "content": SENTINEL},)
NO_KWARGS: Final[Mapping[str, Any]] = MappingProxyType({})


@limited_rendering
def render_template(
    tokenizer: Any,
    messages: Sequence[Any],
    tools: list[Any] | None = None,
    *,
    prompt: bool = False,
    template: str | None = None,
    kwargs: Mapping[str, Any] = NO_KWARGS,
) -> str:
    """Render messages with a chat template; ``prompt``: with the header of the answer that is to follow.

    ``kwargs``: variables for the template, as `data.chat_template_kwargs`.

    Arguments of tool calls go to the template as a mapping, whatever form they have in the messages: most templates
    write them as JSON, and would quote a text once more. A template that writes them as they are gets JSON text.

    A text goes as a list of one part to a template that shows nothing else, as those of models for pictures do.

    ``template``: None is the tokenizer's own. transformers renders in jinja's sandbox, whose values and time are
    limited (`template_limits`). Errors of the template are TEMPLATE_FAILURES.
    """
    from lorakit.ops._internals import set_template_sandbox  # not above: `lorakit cache` needs no torch

    set_template_sandbox(LimitedSandbox)
    in_parts = _shows_parts_alone(tokenizer, template or tokenizer.chat_template)

    def render(messages: list[Any]) -> str:
        text = tokenizer.apply_chat_template(
            [_with_parts(one) for one in messages] if in_parts else messages,
            tools=tools, tokenize=False, add_generation_prompt=prompt, chat_template=template, **kwargs,
        )  # fmt: skip
        return str(text)

    copied = [copy.deepcopy(dict(one)) if isinstance(one, Mapping) and "tool_calls" in one else one for one in messages]
    calls = [function_of(call) for one in copied if isinstance(one, dict) for call in one.get("tool_calls") or ()]
    functions = [function for function in calls if isinstance(arguments_of(function), Mapping)]
    for function in functions:
        function["arguments"] = arguments_of(function)
    with suppress(TypeError):  # a mapping is added to a text
        text = render(copied)
        if not any(function["arguments"] and repr(function["arguments"]) in text for function in functions):
            return text
    for function in functions:
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return render(copied)


@lru_cache(maxsize=8)
def _shows_parts_alone(tokenizer: Any, template: str) -> bool:
    """True if a chat template shows the parts of a content, and nothing of a content that is a text."""

    def is_shown(message: dict[str, Any]) -> bool:
        return SENTINEL in tokenizer.apply_chat_template([message], tokenize=False, chat_template=template)

    try:
        return not is_shown(QUESTION[0]) and is_shown(_with_parts(QUESTION[0]))
    except EndlessTemplate:
        raise
    except TEMPLATE_FAILURES:
        return False


def _with_parts(message: Any) -> Any:
    text = message.get("content") if isinstance(message, Mapping) else None
    return {**message, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else message


def check_template_kwargs(tokenizer: Any, kwargs: Mapping[str, Any], key: str) -> None:
    """Raise DataError unless a tokenizer's chat template reads each variable of ``kwargs``. ``key``: for the error."""
    if not kwargs:
        return
    template = tokenizer.chat_template if tokenizer is not None else None
    if not template:
        raise DataError(f"{key}: the tokenizer has no chat template to read {', '.join(kwargs)}")
    read = template_variables(str(template))
    if unread := [name for name in kwargs if name not in read]:
        offered = f"; it reads {', '.join(sorted(read))}" if read else ""
        where = key if unread[0] == key else f"{key}: {unread[0]}"
        raise DataError(f"{where}: the chat template reads no such variable{offered}")


@lru_cache(maxsize=8)
def template_variables(template: str) -> frozenset[str]:
    """Return the variables that a chat template reads from its caller; none of one that cannot be parsed.

    A variable that it sets before it reads it is none, such as `content` in Qwen3's.
    """
    environment = LimitedSandbox(extensions=["jinja2.ext.loopcontrols"])  # which computes no constants
    try:
        # without tags of transformers' own, which mark what an assistant says
        tree = environment.parse(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template))
    except jinja2.TemplateError:
        return frozenset()  # which rendering says
    for assignment in tree.find_all(jinja2.nodes.Assign):
        assignment.fields = ("node", "target")  # the order in which jinja evaluates them, in which names follow here
    names = list(tree.find_all(jinja2.nodes.Name))
    first = {name.name: name.ctx for name in reversed(names)}
    read = {name for name in jinja2.meta.find_undeclared_variables(tree) if first.get(name) == "load"}
    return frozenset(read) - environment.globals.keys() - OWN_VARIABLES


def switches_thinking(tokenizer: Any) -> bool:
    """True if a tokenizer's chat template reads `enable_thinking`, as Qwen3's does."""
    return "enable_thinking" in template_variables(str(tokenizer.chat_template or ""))


@dataclass(frozen=True)
class Answer:
    """An assistant's turn: the text after which the model is asked for it, and what it is to write."""

    index: int  # of its message
    prompt: str
    text: str  # with its end token
    end_token: str  # empty: the template writes none

    @property
    def content(self) -> str:
        """The answer without its end token."""
        return self.text.removesuffix(self.end_token)


@final
class ChatTemplate:
    """The chat template of one tokenizer.

    ``today``: the date, YYYY-MM-DD, that it writes as today's; None: the clock's. ``kwargs``: its variables.
    added_tokens: texts of the tokens beside those of the tokenizer's model, such as marks of a chat.
    Raises DataError: it reads no such variable.
    """

    def __init__(self, tokenizer: Any, today: str | None = None, kwargs: Mapping[str, Any] = NO_KWARGS) -> None:
        check_template_kwargs(tokenizer, kwargs, "data.chat_template_kwargs")
        self._tokenizer = tokenizer
        self._kwargs = kwargs
        self._template: str | None = None
        if today is not None:
            # the date is fixed where its formats are texts: ``strftime_now("%d %b %Y")``
            call = re.compile(DATE_FUNCTION + r"""\(\s*(["'])(.*?)\1\s*\)""")
            written = date.fromisoformat(today).strftime
            self._template = call.sub(lambda match: json.dumps(written(match[2])), str(tokenizer.chat_template))
        self.added_tokens = added_tokens(tokenizer)
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._end_tokens = special | {tokenizer.eos_token}
        with suppress(DataError):  # a template that refuses a plain conversation
            marker = end_marker(tokenizer) if tokenizer.chat_template else None
            self._end_tokens |= {marker} - {None}

    def render(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None, *, prompt: bool = False) -> str:
        """Return the text of a conversation; ``prompt``: with the header of the answer that is to follow.
        Raises BadRow: there is no template, or it raises an error.
        """
        if not self._tokenizer.chat_template:
            raise BadRow(
                "is a conversation, but the tokenizer has no chat template; choose one: data.chat_template: chatml, or"
                " llama3, alpaca, ... or a file; or use prompt + completion rows (data.columns)"
            )
        with translate_error(TEMPLATE_FAILURES, BadRow, "the chat template refuses it"):
            return render_template(
                self._tokenizer, messages, tools, prompt=prompt, template=self._template, kwargs=self._kwargs
            )

    def find_answer(self, row: Chat, index: int) -> Answer:
        """Return message ``index``, an assistant's, as it is to be answered. Raises BadRow: no exact start or end."""
        through = self.render(row.messages[: index + 1], row.tools)
        prompt = self.render(row.messages[:index], row.tools, prompt=True) if index else self._start_of(through, row)
        written = self._written_after(prompt, through, row, index)
        end_token, stop = self._find_end(row, index, through, written)
        message = json.dumps(row.messages[index], ensure_ascii=False, default=str)
        if end_token and end_token in message:
            raise BadRow(f"message {index + 1}: holds the end token {end_token!r}, so its end cannot be told")
        return Answer(index, prompt, written[:stop], end_token)

    def _start_of(self, through: str, row: Chat) -> str:
        """Return the text before the answer that a conversation begins with, up to the header of an answer."""
        before, header, _ = through.partition(self._header(QUESTION, row))
        if not header:
            raise BadRow("message 1: begins with its answer, and the chat template shows no start of it")
        return before + header

    def _header(self, messages: Sequence[dict[str, Any]], row: Chat) -> str:
        """Return what the template writes after messages to ask for an answer."""
        prompt = self.render(messages, row.tools, prompt=True)
        return prompt[common_length(prompt, self.render(messages, row.tools)) :] or SENTINEL

    def _written_after(self, prompt: str, through: str, row: Chat, index: int) -> str:
        if through.startswith(prompt):
            # a template that asks without a header, such as after a tool's result, and shows the answer with one
            return through[len(prompt) :].removeprefix(self._header(QUESTION, row))
        # a template that shows what is before an answer otherwise once it is there, such as without its thinking
        before, header, written = through.rpartition(self._header(row.messages[:index], row))
        question = str(row.messages[index - 1]["content"]).strip()
        if header and question and shows(before, question) and row.messages[index - 1]["role"] != "assistant":
            return written
        # a prompt that opens a thought, which the template leaves out of answers, so the answer has to close it
        opened = prompt.rstrip()
        before = opened.removesuffix(OPEN_THOUGHT)
        if before == opened or not through.startswith(before):
            if (earlier := row.messages[index - 1])["role"] == "assistant":
                lack = "; a tool result is missing" if earlier.get("tool_calls") else "; join them into one"
                raise BadRow(f"message {index + 1}: an assistant message follows an assistant message{lack}")
            raise BadRow(
                f"message {index + 1}: in use, the answer is generated after {prompt[-40:]!r}, but in the training row"
                " the chat template puts it after something else, so training on it would teach the wrong prompt;"
                " use prompt + completion rows, or another chat template"
            )
        body = through[len(before) :]
        if CLOSED_THOUGHT in body:
            return body.removeprefix(OPEN_THOUGHT)
        thought, _ = split_thinking(str(row.messages[index]["content"]))
        return f"{thought}\n{CLOSED_THOUGHT}\n\n{body.lstrip() if thought else body}"

    def _find_end(self, row: Chat, index: int, through: str, written: str) -> tuple[str, int]:
        """Return the end token of an answer, and where it stops in the text; empty: the template writes none.

        A token that only the last message of a conversation ends with is none where another one is before it, as in
        Phi-3's ``<|end|>\\n<|endoftext|>``: in use the model has to stop at the first of them.
        """
        ends = list[tuple[str, int]]()
        rest = written.rstrip()
        while token := max(filter(rest.endswith, self.added_tokens), key=len, default=""):
            if token in self._end_tokens:
                ends.append((token, len(rest)))
            rest = rest.removesuffix(token).rstrip()
        if len(ends) < 2:
            return ends[0] if ends else ("", len(written.rstrip()))
        following = (*row.messages[: index + 1], {"role": "user", "content": SENTINEL})
        lost = len(through) - common_length(through, self.render(following, row.tools))
        return next((one for one in ends if one[1] <= len(written) - lost), ends[0])


def shows(text: str, part: str) -> bool:
    """True if a text has a part in it, as it is or as JSON text."""
    forms = (part, *(json.dumps(part, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False)))
    return any(form in text for form in forms)


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return with how many letters two texts, or with how many items two lists, begin alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def added_tokens(tokenizer: Any) -> set[str]:
    """Return the texts of the tokens that a template can end a turn with."""
    return {token.content for token in tokenizer.added_tokens_decoder.values()} | {tokenizer.eos_token} - {None}


def end_marker(tokenizer: Any) -> str | None:
    """Return the token that the template writes after the last assistant's content; None if it writes none."""
    with translate_error(TEMPLATE_FAILURES, DataError, "the tokenizer's chat template fails on a plain conversation"):
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": SENTINEL}]
        tail = render_template(tokenizer, turns).rpartition(SENTINEL)[2].lstrip()
    return max(filter(tail.startswith, added_tokens(tokenizer)), key=len, default=None)
