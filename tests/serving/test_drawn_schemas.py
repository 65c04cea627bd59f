"""Law: under the grammar of any schema that is not refused, each beginning of an answer has an end that obeys."""

import json
import random
from collections import Counter
from typing import Any

import jsonschema_rs
import pytest
import torch

from lorakit.data.chat_template import ChatTemplate
from lorakit.decoding.generation import LENGTH
from lorakit.decoding.grammar import GrammarCompiler
from lorakit.decoding.sampling import Sampler, SamplingSettings, draw_tokens
from lorakit.errors import LorakitError
from lorakit.inference.answer_form import find_answer_form
from lorakit.inference.answer_parser import AnswerParser
from lorakit.inference.call_grammar import call_grammar
from tests.helpers.chat_templates import tokenizer_for, trl_templates
from tests.helpers.tokenizers import sentencepiece

NAMES = ["a", "b", "ab", "x-1", "\n", "\u00e9"]
PATTERNS = ["^x-", "^[a-z]+$", ".*", "^b", "^[0-9]*$", "^a$", "^[a-z]{1,2}$", "^(a|b+)$"]
FORMATS = ["date", "uuid", "ipv4", "time", "email", "date-time"]
ENDS = {b'"': 50.0, b"}": 50.0, b"]": 50.0, b"@": 45.0, b"Z": 45.0, b":": 45.0, b",": 45.0}
"""text of a token -> how much it is preferred where the answer is to end"""
MAX_TOKENS = 600


def drawn_value(draw: random.Random) -> Any:
    """Return a schema without others inside."""
    kind = draw.randrange(14)
    if kind < 5:
        return {"type": ["string", "integer", "number", "boolean", "null"][kind]}
    if kind < 8:
        return [True, False, {}][kind - 5]
    low, high = sorted((draw.randint(-3, 9), draw.randint(-3, 9)))
    return [
        {"const": draw.choice([1, "a", None, {"a": 1}, [1], 0.1, "\n/\u00e9", {"\n": [-0.5]}])},
        {"enum": draw.sample([1, 2, "a", "b", True, None], draw.randint(1, 3))},
        {"type": "string", **draw.choice([{"pattern": draw.choice(PATTERNS)}, {"format": draw.choice(FORMATS)}])},
        {"type": "string", "minLength": max(0, low), "maxLength": max(0, high)},
        {"type": draw.choice(["integer", "number"]), "minimum": low, "maximum": high},
        {
            "type": "number",
            draw.choice(["minimum", "exclusiveMinimum"]): low,
            "exclusiveMaximum": draw.choice([low / 2, high + 0.5]),
        },
    ][kind - 8]


def drawn_object(draw: random.Random, depth: int, references: list[str]) -> dict[str, Any]:
    names = draw.sample(NAMES, draw.randint(0, 3))
    schema: dict[str, Any] = {"type": "object"}
    if names:
        schema["properties"] = {name: drawn_schema(draw, depth - 1, references) for name in names}
    if draw.random() < 0.6:
        others = draw.sample(NAMES, draw.randint(0, 2))
        schema["required"] = others if draw.random() < 0.2 else [name for name in names if draw.random() < 0.5]
    if draw.random() < 0.3:
        patterns = draw.sample(PATTERNS, draw.choice([1, 1, 1, 2]))
        schema["patternProperties"] = {pattern: drawn_schema(draw, depth - 1, references) for pattern in patterns}
    if (rest := draw.random() * (0.6 if "patternProperties" in schema else 1)) < 0.7:
        schema["additionalProperties"] = False if rest < 0.5 else drawn_schema(draw, depth - 1, references)
    for key in ("minProperties", "maxProperties"):
        schema |= {key: draw.randint(0, 3)} if draw.random() < 0.1 else {}
    return schema


def drawn_schema(draw: random.Random, depth: int, references: list[str]) -> Any:
    kind = draw.random()
    if depth <= 0 or kind < 0.35:
        return drawn_value(draw)
    if references and kind < 0.42:
        return {"$ref": draw.choice(references)}
    if kind < 0.72:
        return drawn_object(draw, depth, references)
    if kind > 0.85:
        key = draw.choice(["anyOf", "anyOf", "anyOf", "oneOf", "allOf"])
        return {key: [drawn_schema(draw, depth - 1, references) for _ in range(draw.randint(1, 3))]}
    schema: dict[str, Any] = {"type": "array"}
    if draw.random() < 0.7:
        schema["items"] = drawn_schema(draw, depth - 1, references)
    if draw.random() < 0.3:
        schema["prefixItems"] = [drawn_schema(draw, depth - 1, references) for _ in range(draw.randint(1, 2))]
    for key in ("minItems", "maxItems"):
        schema |= {key: draw.randint(0, 3)} if draw.random() < 0.4 else {}
    return schema


def drawn_document(draw: random.Random, *, is_object: bool = False) -> dict[str, Any]:
    """Return a schema, of which two in five have definitions that refer to themselves and to each other."""
    references = ["#"] if draw.random() < 0.1 and not is_object else []
    references += ["#/$defs/p", "#/$defs/q"] if draw.random() < 0.4 else []
    schema = drawn_object(draw, 3, references) if is_object else drawn_schema(draw, 3, references)
    schema = schema if isinstance(schema, dict) else {"anyOf": [schema]}
    if len(references) > 1:
        schema["$defs"] = {name: drawn_schema(draw, 2, references) for name in "pq"}
    return schema


def preference(text: bytes) -> float:
    """Return how much a token is preferred where the answer is to end: earlier letters are, so that names differ."""
    if text in ENDS:
        return ENDS[text]
    if text[:1] in (b"{", b"["):
        return -10.0
    if not text.strip():
        return -20.0
    return 40.0 if text.isdigit() else 0.0 if text in (b"\\", b"-", b".", b"e", b"E") else 20.0 - text[0] / 10


class Writer:
    """Writes answers of one tokenizer with drawn tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._end = tokenizer.eos_token_id
        self.compiler = GrammarCompiler(tokenizer, len(tokenizer), [self._end])
        texts = [self.compiler._vocabulary().decode_bytes([token]) for token in range(len(tokenizer))]
        self._preferences = torch.tensor([preference(text) for text in texts])
        self._preferences[self._end] = 60.0
        self._blanks = torch.tensor([-4.0 * (not text.strip()) for text in texts])

    def write(self, form: dict[str, Any], chooser: random.Random) -> list[int] | str:
        """Return the tokens of an answer: some are drawn from all that may come, then it is brought to its end.

        `LENGTH`: it has no end. Raises LorakitError: no token may come.
        """
        settings = SamplingSettings(temperature=1.0, seed=chooser.randrange(2**30))
        sampler = Sampler(settings, [], frozenset([self._end]), self.compiler.compile(form))
        noise = torch.Generator().manual_seed(chooser.randrange(2**30))
        num_free = chooser.randint(0, 40)
        ids: list[int] = []
        while len(ids) < MAX_TOKENS:
            is_free = len(ids) < num_free
            wanted = self._blanks + 1.5 * (self._preferences >= 50) if is_free else self._preferences
            (item,) = draw_tokens([sampler], [torch.randn(len(self._blanks), generator=noise) + wanted])
            if isinstance(item, Exception):
                raise item
            token = item[0]
            if token == self._end:
                return ids
            ids.append(token)
        return LENGTH


@pytest.fixture(scope="module")
def writers(tokenizer: Any) -> list[Writer]:
    return [Writer(one) for one in (tokenizer_for("<|im_start|><|im_end|>"), tokenizer, sentencepiece())]


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


def assert_names_come_once(text: str) -> None:
    """The parser of `object` calls reads a call as a value, where a name that comes twice is lost."""
    json.loads(text[text.index("{") : text.rindex("}") + 1], object_pairs_hook=unique)


def finite(text: str) -> float:
    return max(-1e300, min(1e300, float(text)))  # 9e999 is a number in JSON


def check(schema: dict[str, Any], text: str) -> None:
    value = json.loads(text, object_pairs_hook=unique, parse_float=finite)
    jsonschema_rs.validate(schema, value)


@pytest.mark.parametrize("num_schemas", [100, pytest.param(2000, marks=pytest.mark.matrix)])
def test_answers_of_drawn_schemas_obey_them_and_none_comes_to_a_dead_end(
    writers: list[Writer], num_schemas: int
) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(num_schemas):
        draw = random.Random(seed)
        schema = drawn_document(draw)
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        try:
            writers[0].compiler.compile(form)
        except LorakitError as problem:
            assert str(problem).startswith("response_format: ")
            outcomes["refused"] += 1
            continue
        for writer in writers:
            ids = writer.write(form, draw)
            assert ids != LENGTH, (seed, schema)
            check(schema, writer.compiler._vocabulary().decode_str(ids))
            outcomes["obeys"] += 1
    assert outcomes["obeys"] > 1.5 * num_schemas
    assert outcomes["refused"] > num_schemas / 10


@pytest.mark.parametrize("family", ["qwen2_5", "deepseekv3"])
@pytest.mark.parametrize("num_schemas", [20, pytest.param(500, marks=pytest.mark.matrix)])
def test_arguments_of_drawn_calls_obey_the_schemas_of_their_tools(family: str, num_schemas: int) -> None:
    tokenizer = tokenizer_for(trl_templates()[family])
    answer_form = find_answer_form(ChatTemplate(tokenizer))
    closed = answer_form.thought[1] if answer_form.thought else ""  # else a thought without end may come first
    writer = Writer(tokenizer)
    num_calls = 0
    for seed in range(num_schemas):
        draw = random.Random(seed)
        schema = {"additionalProperties": False, **drawn_document(draw, is_object=True)}
        tools = [{"type": "function", "function": {"name": "act", "parameters": schema}}]
        try:
            grammar = call_grammar(answer_form, tokenizer, tools, closed, parallel=False)
            ids = writer.write({"type": "grammar", "grammar": grammar}, draw)
        except LorakitError as problem:
            assert "no token is left" not in str(problem), (seed, schema)
            continue
        assert ids != LENGTH, (seed, schema)
        parser = AnswerParser(answer_form, "", tools)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        parts = [*parser.add(text), *parser.finish()]
        assert [part.name for part in parts if part.name is not None] == ["act"], (seed, schema, text)
        assert_names_come_once(text)
        arguments = "".join(part.text for part in parts)
        jsonschema_rs.validate(schema, json.loads(arguments, object_pairs_hook=unique, parse_float=finite))
        num_calls += 1
    assert num_calls > num_schemas / 3
