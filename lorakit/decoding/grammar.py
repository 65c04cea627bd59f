"""Restrict answers to JSON, a JSON schema or a regular expression, with llguidance: the extra `[structured]`."""

import json
import re
import threading
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, Final, final
from urllib.parse import unquote

import numpy as np
import torch
from torch import Tensor

from lorakit.errors import LorakitError

OTHERWISE: Final = "otherwise"  # in a ``grammar``: a ``response_format`` of JSON that an answer may have instead
THOUGHT_END: Final = "thought_end"  # in a ``grammar``: the text before which an answer is a thought
ANY_TEXT: Final = r"/(.|\n)*/"  # in a ``grammar``: a thought, or a value that is written as text
KEYS: Final[Mapping[str, set[str]]] = {
    "text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}, "regex": {"type", "pattern"},
    "grammar": {"type", "grammar", OTHERWISE, THOUGHT_END},
}  # fmt: skip
"""type -> the keys of a ``response_format``"""
SCHEMA_KEYS: Final = {"name", "description", "schema", "strict"}
"""of ``json_schema``; every schema is obeyed as a strict one"""
WHITE_SPACE: Final = r"[ \t\r\n]{0,40}"
"""in JSON, between two of its signs: the indent of 20 levels. Without an end some bases write nothing else."""
QUOTE: Final = ord('"')
NEEDED: Final = re.compile(rb"0{0,2}|00(0[0-7bef]?|1[0-9a-f]?)")
"""hex digits, as a grammar writes them, of the characters that JSON has no shorter escape for, and their beginnings"""
ENDLESS: Final = re.compile(r"(?![\s\S]*([\x00-\x1f\x7f]|\\[afnrtuxz]))([^$]*|[^$|]*(?:\]|\.|\\[dws]|\w)[+*]\$)")
"""patterns of which each beginning of a name has names without number, also without control characters"""
MAX_PATTERN: Final = 65_536  # characters of a pattern, or of a schema as JSON
LARGEST: Final = 2**53  # number that is exact in a schema; llguidance ends the process at integers of -2**63
BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
MAX_WORK: Final = 10_000_000  # of llguidance for a schema: some seconds; it has no limit of its own
MAX_LEVELS: Final = 1000  # of values in each other, also by $ref; from 1,800 on llguidance ends the process


@dataclass(frozen=True)
class JsonPosition:
    """A position in a JSON text while it is written."""

    open: tuple[frozenset[str] | None, ...] = ()  # names of each open object so far; None: of a list
    last: int = 0  # byte before, without strings and white space
    string: bytes | None = None
    """a name that has begun; of another string the backslash that it ends with; None: outside of strings"""

    def after(self, text: bytes) -> "JsonPosition | None":
        """Return the position behind more text. None: a name comes twice, or has an escape that it does not need.

        A grammar reads a name with an escape as another name, whose value obeys another schema.
        """
        position: JsonPosition | None = self
        for byte in text:
            position = position and (position._after(byte) if position.string is None else position._in_string(byte))
        return position

    def _after(self, byte: int) -> "JsonPosition":
        if byte == QUOTE:
            return replace(self, string=b"")
        if byte in b"{[":
            return JsonPosition((*self.open, frozenset() if byte == ord("{") else None), byte)
        return JsonPosition(self.open[:-1] if byte in b"}]" else self.open, self.last if byte in b" \t\r\n" else byte)

    def _in_string(self, byte: int) -> "JsonPosition | None":
        assert self.string is not None
        names = self.open[-1] if self.open and self.last in b"{," else None
        is_escaped = (len(self.string) - len(self.string.rstrip(b"\\"))) % 2 == 1
        is_end = byte == QUOTE and not is_escaped
        if names is None:
            return replace(self, string=None if is_end else b"\\" * (byte == ord("\\") and not is_escaped))
        if is_end:
            name = json.loads(f'"{self.string.decode(errors="replace")}"')
            return None if name in names else JsonPosition((*self.open[:-1], names | {name}), QUOTE)
        written = self.string + bytes([byte])
        escape = written.rfind(b"\\u")
        is_needless = escape >= 0 and not NEEDED.fullmatch(written[escape + 2 : escape + 6])
        return None if is_needless else replace(self, string=written)


def check_schema(schema: dict[str, Any], field: str) -> None:
    """Raise LorakitError, with the request's field, for a schema with answers that do not obey it, or have no end.

    llguidance refuses others. Left are what ``_check_position`` refuses, and references that are deep or circular.
    """
    if (size := len(json.dumps(schema))) > MAX_PATTERN:
        raise LorakitError(f"{field}: the schema has {size} characters of JSON; up to {MAX_PATTERN} are compiled")
    targets = dict[str, Any]()
    ending = set[str]()
    try:
        for one, _ in _values_in(schema):
            if isinstance(one, float | int) and not abs(one) <= LARGEST:
                raise LorakitError(f"{field}: the number {one} in the schema; they are exact up to 2**53; leave it out")
        for together in _positions(schema):
            _check_position(together, field)
            targets |= {one["$ref"]: find_target(schema, one["$ref"]) for one in together if "$ref" in one}
        while more := {name for name, target in targets.items() if name not in ending and _can_end(target, ending)}:
            ending |= more
    except (TypeError, ValueError, LookupError, AttributeError) as problem:
        raise LorakitError(f"{field}: the schema cannot be read: {type(problem).__name__}: {problem}") from None
    levels = sum(max(level for _, level in _values_in(one)) for one in (schema, *targets.values()))
    if levels > MAX_LEVELS:
        raise LorakitError(f"{field}: the schema has {levels} levels, with what each $ref names; up to {MAX_LEVELS}")
    if circle := sorted(targets.keys() - ending):
        raise LorakitError(f"{field}: $ref {circle[0]!r} requires itself, so no answer has an end; make it optional")


def _check_position(together: list[dict[str, Any]], field: str) -> None:
    """Raise LorakitError for names that run out, and for keys beside each other that llguidance does not obey."""
    for one in together:
        for pattern in one.get("patternProperties", ()):
            if one.get("additionalProperties") is not False or not ENDLESS.fullmatch(pattern):
                why = f"the names of {pattern!r} may run out, and none comes twice"
                remedy = "list them, or say additionalProperties: false and have no $, or + or * before it"
                raise LorakitError(f"{field}: patternProperties: {why}: {remedy}, and no control character")
            name = {"type": "string", "pattern": pattern}
            if problem := _llguidance(field).validate_grammar(json.dumps({"grammars": [{"json_schema": name}]})):
                raise LorakitError(f"{field}: patternProperties: no name is of {pattern!r}: {problem}")
        if "prefixItems" in one and "additionalItems" in one:
            raise LorakitError(f"{field}: additionalItems: it goes with a list of items; beside prefixItems say items")
    keys = [(one.get(key) is True, key, one) for one in together for key in BOUNDS]  # True: as of draft 4
    bounds: list[tuple[str, Any]] = [(key, one.get(key[9:].lower() if beside else key)) for beside, key, one in keys]
    bounds = [(key, bound) for key, bound in bounds if type(bound) in (int, float)]
    for key, bound in bounds:
        if "excl" in key and any(bound == int(bound) == int(other) != other for _, other in bounds):
            remedy = f"say {key[9:].lower()} with a number next to {bound}"
            raise LorakitError(f"{field}: {key}: {bound} itself would be allowed, with {bounds}; {remedy}")


def _values_in(value: Any, level: int = 1) -> Iterator[tuple[Any, int]]:
    """Yield a value and all that are inside of it, each with its level."""
    yield value, level
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _values_in(inner, level + 1)


def _positions(root: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield the schemas that hold together, at each position in an answer and for each choice of `anyOf` and `oneOf`.

    What is not a schema is not read: values of `const` and `default`, say, and definitions without a reference.
    Raises ValueError: they need more than ``MAX_WORK``.
    """
    work = 0
    waiting: list[tuple[list[tuple[Any, tuple[str, ...]]], list[dict[str, Any]]]] = [([(root, ())], [])]
    done = set[tuple[int, ...]]()
    while waiting:
        unread, together = waiting.pop()  # schemas, each with the references that led to it, and those that are read
        work += 100 * (1 + len(unread) + len(together)) if unread else _work(together)
        if work > MAX_WORK:
            raise ValueError("its patterns and options are too many together; say them in fewer allOf, anyOf and $ref")
        if unread:
            (one, path), *unread = unread
            together = [*together, one]
            unread += [(inner, path) for inner in one.get("allOf", ())]
            if "$ref" in one and one["$ref"] not in path:
                unread.append((find_target(root, one["$ref"]), (*path, one["$ref"])))
            options = [one[key] for key in ("anyOf", "oneOf") if key in one]
            choices = ([*unread, *((inner, path) for inner in choice)] for choice in product(*options))
            waiting += [([pair for pair in choice if isinstance(pair[0], dict)], together) for choice in choices]
        elif (position := tuple(sorted(map(id, together)))) not in done:
            done.add(position)
            yield together
            waiting += [([(one, ()) for one in inner], []) for inner in _inside(together) if inner]


def _work(together: list[dict[str, Any]]) -> int:
    """Return about how many regular expressions are made to find the strings, and the names, that obey them all.

    Each pattern has as many beginnings of matches as letters, which go with each of another pattern, and two names'.
    """
    texts = [len(one["pattern"]) for one in together if "pattern" in one] + [64 for one in together if "format" in one]
    names = sum(1 + len(name) for one in together for name in one.get("patternProperties", ()))
    options = prod(len(one["enum"]) for one in together if "enum" in one)
    return options * prod(1 + length for length in texts) + 16 * names**2


def _inside(together: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """Yield the schemas of the value of each name (None: other names), and of each item (-1: other items)."""
    keys: set[Any] = {None, -1}.union(*(one.get("properties", ()) for one in together))
    keys.update(*(range(len(_items(one)[0])) for one in together))
    for key in keys:
        inner = []
        for one in together:
            (prefix, items), patterns = _items(one), one.get("patternProperties", {})
            if isinstance(key, int):
                inner.append(prefix[key] if 0 <= key < len(prefix) else items)
            else:
                other = one.get("additionalProperties", True)
                inner += [one.get("properties", {}).get(key, other), *patterns.values()]
        yield [one for one in inner if isinstance(one, dict)]


def _items(schema: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the schemas of an array's first items, and of the others."""
    items = schema.get("items", True)
    if isinstance(items, list):  # as schemas before 2020 name the first ones
        return items, schema.get("additionalItems", True)
    return schema.get("prefixItems", []), items


def find_target(schema: Any, reference: str) -> Any:
    """Return the part of a schema that a `$ref` in it names. Raises ValueError, LookupError or TypeError: none."""
    if reference != "#" and not reference.startswith("#/"):
        raise ValueError(f"$ref {reference!r} is not '#', and does not begin with '#/'")
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        schema = schema[int(key)] if isinstance(schema, list) else schema[key]
    return schema


def _can_end(schema: Any, ending: Set[str]) -> bool:
    """True if an answer that obeys a schema can end. ending: references of which this is certain."""
    if not isinstance(schema, dict):
        return bool(schema)
    properties, names = schema.get("properties", {}), schema.get("required", [])
    others = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties", True)]
    (prefix, items), num_items = _items(schema), int(schema.get("minItems", 0))
    needed = [properties[name] for name in names if name in properties]
    needed += others if schema.get("minProperties", 0) > len(names) or set(names) - properties.keys() else []
    needed += prefix[:num_items] + [items] * (num_items > len(prefix))
    return (
        ("$ref" not in schema or schema["$ref"] in ending)
        and all(_can_end(one, ending) for one in (*needed, *schema.get("allOf", ())))
        and all(any(_can_end(one, ending) for one in schema[key]) for key in ("anyOf", "oneOf") if key in schema)
    )


@final
class Grammar:
    """The restriction of one answer, and how far the answer has come in it. One for each answer.

    position: of an answer that is an object or a list, or begins otherwise and is neither; None: it is neither.
    thought_end: text before which it is a thought.
    """

    def __init__(self, matcher: Any, vocabulary: Any, position: JsonPosition | None, thought_end: str) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._position = position
        self._thought_end = thought_end.encode()
        self._thought = b""  # its last bytes, where its end may have begun

    def restrict(self, logits: Tensor) -> Tensor:
        """Return logits (vocabulary,) of which only tokens are finite that may come next."""
        # not llguidance.torch, which imports torch's compiler for this
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        return logits.masked_fill(torch.from_numpy(bits[: len(logits)] == 0).to(logits.device), -torch.inf)

    def accept(self, token: int) -> bool:
        """Go on after a token that ``restrict`` left. False: it may not come, as ``JsonPosition.after`` says."""
        if self._position is not None and self._thought_end not in self._thought:
            self._thought = self._thought[-len(self._thought_end) :] + self._vocabulary.decode_bytes([token])
        elif self._position is not None:
            text = self._vocabulary.decode_bytes([token])
            has_names = self._position != JsonPosition() or text.lstrip()[:1] in b"{["
            position = self._position.after(text) if has_names else None
            if has_names and position is None:
                return False
            self._position = position
        if not self._matcher.consume_token(token):
            reason = (self._matcher.get_error() or "").splitlines()[:1]  # before its state
            raise LorakitError(f"response_format: it cannot be followed after token {token}: {''.join(reason)}")
        return True


@final
class GrammarCompiler:
    """Makes grammars for the vocabulary of a base. The tables of its tokenizer are made when they are first needed."""

    def __init__(self, tokenizer: Any, num_tokens: int, end_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._num_tokens = num_tokens
        self._end_ids = end_ids
        self._building = threading.Lock()
        self._built_vocabulary: Any = None

    def _vocabulary(self) -> Any:
        """Return the vocabulary, which takes seconds to build: once, whatever number of requests come for it."""
        from llguidance.hf import from_tokenizer

        with self._building:
            if self._built_vocabulary is None:
                ends = self._end_ids
                self._built_vocabulary = from_tokenizer(self._tokenizer, n_vocab=self._num_tokens, eos_token=ends)
            return self._built_vocabulary

    def compile(self, response_format: Mapping[str, Any] | None, *, min_tokens: int = 0) -> Grammar | None:
        """Return the grammar of a ``response_format``, None for any text; or raise LorakitError: not obeyed in full."""
        if response_format is None:
            return None
        kind = response_format.get("type")
        if not isinstance(kind, str) or kind not in KEYS:
            raise LorakitError(f"response_format: type is text, json_object, json_schema or regex, got {kind!r}")
        if unknown := sorted(set(response_format) - KEYS[kind]):
            raise LorakitError(f"response_format: {unknown[0]!r} is not known in type {kind}")
        if kind == "text":
            return None
        matchers = _llguidance("response_format")
        if self._tokenizer is None or min_tokens:
            what = "min_tokens, because a full answer may be shorter" if min_tokens else "a base without a tokenizer"
            raise LorakitError(f"response_format: does not go with {what}")
        otherwise = self.compile(response_format.get(OTHERWISE))  # for its own errors
        text = _grammar_text(kind, response_format)
        vocabulary = self._vocabulary()
        is_bad, messages = matchers.validate_grammar_with_warnings(text, vocabulary)
        if is_bad or messages:  # a warning is a part that it would not obey
            raise LorakitError(f"{'tools' if kind == 'grammar' else 'response_format'}: {'; '.join(messages)}")
        matcher = matchers(vocabulary, text, log_level=0)  # or it writes warnings to standard error
        position = JsonPosition() if otherwise or kind.startswith("json") else None
        num_thoughts = THOUGHT_END in response_format
        if kind == "grammar" and not otherwise and response_format["grammar"].count(ANY_TEXT) <= num_thoughts:
            position = JsonPosition(last=QUOTE)  # of calls, whose brackets are all JSON's
        return Grammar(matcher, vocabulary, position, response_format.get(THOUGHT_END, ""))


def _llguidance(field: str) -> Any:
    """Return the class that checks grammars and follows them. Raises LorakitError: the package is not installed."""
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise LorakitError(f"{field}: it needs llguidance: pip install 'lorakit[structured]'") from None
    return LLMatcher


def _grammar_text(kind: str, response_format: Mapping[str, Any]) -> str:
    matchers = _llguidance("response_format")
    if kind == "grammar":  # written by lorakit, in Lark
        grammars = [{"lark_grammar": response_format["grammar"]}]
        if otherwise := response_format.get(OTHERWISE):
            (answer,) = json.loads(_grammar_text(otherwise["type"], otherwise))["grammars"]
            grammars.append({**answer, "name": OTHERWISE})
        return json.dumps({"grammars": grammars})
    if kind == "regex":
        pattern = response_format.get("pattern")
        if not isinstance(pattern, str):
            raise LorakitError(f"response_format: type regex has a text as pattern, got {pattern!r}")
        return str(matchers.grammar_from_regex(pattern))
    named = response_format.get("json_schema") if kind == "json_schema" else {"schema": {"type": "object"}}
    if isinstance(named, dict) and (unknown := sorted(set(named) - SCHEMA_KEYS)):
        raise LorakitError(f"response_format: {unknown[0]!r} is not known in json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise LorakitError("response_format: type json_schema has {'json_schema': {'name': ..., 'schema': {...}}}")
    check_schema(schema, "response_format")
    return str(matchers.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITE_SPACE}))
