"""A response format holds for every token, whatever the model would say, and refuses what it would not obey."""

import json
import re
import sys
from typing import Any

import openai
import pytest
import torch

from lorakit.decoding.generation import STOP
from lorakit.decoding.grammar import ANY_TEXT, OTHERWISE, THOUGHT_END, GrammarCompiler
from lorakit.decoding.sampling import Sampler, SamplingSettings, draw_tokens
from lorakit.errors import LorakitError
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from tests.helpers import patient
from tests.helpers.chat_templates import tokenizer_for
from tests.helpers.http_server import serving

ORDER = {
    "type": "object",
    "properties": {"item": {"enum": ["lamp", "chair"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["item", "count"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "order", "schema": ORDER}}
NODE: dict[str, Any] = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/a"}, "at": {"type": "integer"}},
    "additionalProperties": False,
}
CHAIN: dict[str, Any] = {
    "$ref": "#/$defs/0",
    "$defs": {str(number): {"items": {"$ref": f"#/$defs/{number + 1}"}} for number in range(1000)} | {"1000": {}},
}
DOUBLED: dict[str, Any] = {str(number): {"allOf": [{"$ref": f"#/$defs/{number + 1}"}] * 2} for number in range(40)} | {
    "40": {"type": "string", "pattern": "a|b"}
}
REGEX = {"type": "regex", "pattern": "(yes|no), [0-9]{2}"}
PROMPT = list(range(5, 25))


def text_of(
    model: AdaptedModel, engine: ServingEngine, response_format: Any, **settings: Any
) -> tuple[str, str | None]:
    chosen = SamplingSettings(**{"max_tokens": 100, "response_format": response_format} | settings)
    generation = engine.submit(PROMPT, settings.pop("adapter", None), chosen)
    return model.tokenizer.decode(generation.ids(), skip_special_tokens=True), generation.reason


@pytest.mark.parametrize("seed", range(6))
def test_answers_of_a_random_model_obey_schema_and_expression(
    model: AdaptedModel, engine: ServingEngine, seed: int
) -> None:
    text, reason = text_of(model, engine, SCHEMA, temperature=1.0, seed=seed)
    assert reason == STOP
    order = json.loads(text)
    assert order.keys() == {"item", "count"}
    assert order["item"] in ("lamp", "chair")
    assert order["count"] in range(1, 10)

    text, reason = text_of(model, engine, REGEX, temperature=1.0, seed=seed)
    assert (reason, bool(re.fullmatch(REGEX["pattern"], text))) == (STOP, True)


def test_a_cut_answer_is_the_beginning_of_one_that_obeys(model: AdaptedModel, engine: ServingEngine) -> None:
    text, reason = text_of(model, engine, {"type": "json_object"}, max_tokens=3)
    assert reason == "length"
    assert text.startswith("{")


def test_rows_beside_it_are_not_restricted(model: AdaptedModel, engine: ServingEngine) -> None:
    alone = engine.submit(PROMPT, "a", SamplingSettings(max_tokens=20)).ids()
    together = [
        engine.submit(PROMPT, "a", SamplingSettings(max_tokens=20, response_format=form))
        for form in (REGEX, None, SCHEMA)
    ]
    answers = [generation.ids() for generation in together]
    assert answers[1] == alone
    assert answers[0] != alone != answers[2]


@pytest.mark.parametrize(
    ("response_format", "words"),
    [
        ({"type": "xml"}, "type is text, json_object, json_schema or regex, got 'xml'"),
        ({}, "type is text, json_object, json_schema or regex, got None"),
        ({"type": ["text"]}, "type is text, json_object, json_schema or regex, got ['text']"),
        ({"type": "text", "schema": {}}, "'schema' is not known in type text"),
        ({"type": "json_object", "schema": {"const": 1}}, "'schema' is not known in type json_object"),
        (
            {"type": "json_schema", "json_schema": {"schema": {}, "strcit": True}},
            "'strcit' is not known in json_schema",
        ),
        ({"type": "regex", "pattern": "(a"}, "invalid regex"),
        ({"type": "regex"}, "has a text as pattern, got None"),
        ({"type": "json_schema"}, "type json_schema has"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "string", "format": "nonsense"}}}, "nonsense"),
        *(
            ({"type": "json_schema", "json_schema": {"schema": schema}}, f"response_format: {words}")
            for schema, words in [
                ({"patternProperties": {"^[ab]$": {}}, "additionalProperties": False}, "patternProperties: the names"),
                ({"patternProperties": {"^a|b+$": {}}, "additionalProperties": False}, "patternProperties: the names"),
                ({"patternProperties": {"^x-": {}}}, "patternProperties: the names of '^x-' may run out"),
                ({"$ref": "#"}, "$ref '#' requires itself"),
                (
                    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": NODE | {"required": ["next"]}}},
                    "$ref",
                ),
                ({"anyOf": [{"const": 1}, {"type": "array", "items": {"$ref": "#/anyOf/1"}, "minItems": 1}]}, "$ref"),
                ({"minProperties": 1, "additionalProperties": {"$ref": "#"}}, "$ref '#' requires itself"),
                ({"type": "array", "items": [{"$ref": "#"}], "minItems": 1}, "$ref '#' requires itself"),
                (
                    {"type": "array", "items": [{}], "additionalItems": {"$ref": "#/items/0"}, "minItems": 3}
                    | {"prefixItems": []},
                    "additionalItems: it goes with a list of items",
                ),
                (
                    {"patternProperties": {"^[ab]\\z": {}}, "additionalProperties": False},
                    "patternProperties: the names",
                ),
                ({"patternProperties": {"^\n+": {}}, "additionalProperties": False}, "patternProperties: the names"),
                ({"const": -(2**63)}, "the number -9223372036854775808 in the schema"),  # which ended the process
                ({"enum": [{"a": [2**53 + 1]}]}, "the number 9007199254740993 in the schema"),
                ({"type": "string", "minLength": 2**64}, "the number 18446744073709551616 in the schema"),
                ({"const": float("inf")}, "the number inf in the schema"),
                (CHAIN, "the schema has 3006 levels"),  # which ended the process
                ({"description": "a" * 65_537}, "the schema has 65556 characters of JSON"),
                *(
                    (
                        {"patternProperties": {pattern: {}}, "additionalProperties": False, "minProperties": 1},
                        f"patternProperties: no name is of {pattern!r}: ",
                    )
                    for pattern in ["[^\\w\\W]", "[a&&b]", "a^"]
                ),
                ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.1}, "exclusiveMinimum: 0 itself would be"),
                ({"exclusiveMaximum": -1, "exclusiveMinimum": -1.5}, "exclusiveMaximum: -1 itself would be"),
                *(
                    (schema, "the schema cannot be read: ValueError: its patterns and options are too many")
                    for patterns in [[{"type": "string", "pattern": f"a{number}"} for number in range(30)]]
                    for texts in [[{"type": "string", "pattern": "ab|c"}, {"pattern": f"a{'b' * 90}"}]]
                    for schema in [
                        {"allOf": patterns},
                        {"allOf": [{"properties": {"a": one}} for one in patterns]},
                        {"allOf": [{"additionalProperties": one} for one in patterns]},
                        {"prefixItems": [{"anyOf": patterns}, {"allOf": patterns}]},
                        {"$ref": "#/$defs/a", "allOf": patterns[:10], "$defs": {"a": {"allOf": patterns[10:]}}},
                        {"allOf": [{"anyOf": patterns * 5}, {"oneOf": patterns * 5}]},
                        {"allOf": [{"anyOf": texts}] * 30},
                        {"$ref": "#/$defs/0", "$defs": DOUBLED},
                        {
                            "patternProperties": {f"^{number:04}[0-9]+$": {} for number in range(300)},
                            "additionalProperties": False,
                        },
                    ]
                ),
                *(
                    (schema, "exclusiveMinimum: 0 itself would be")
                    for schema in [
                        {"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.1}]},
                        {"items": {"$ref": "#/$defs/a", "maximum": 0.1}, "$defs": {"a": {"exclusiveMinimum": 0}}},
                        {"anyOf": [{"const": 9}, {"maximum": 0.1}], "exclusiveMinimum": 0},
                        {"minimum": 0, "exclusiveMinimum": True, "maximum": 0.1},
                        {
                            "allOf": [
                                {"properties": {"a": {"exclusiveMinimum": 0}}},
                                {"additionalProperties": {"maximum": 0.1}},
                            ]
                        },
                    ]
                ),
                *(
                    (schema, "patternProperties: the names of '^x-' may run out")
                    for inner in [{"patternProperties": {"^x-": {}}}]
                    for schema in [
                        {"items": inner},
                        {"prefixItems": [{}, inner]},
                        {"items": [{}, inner]},
                        {"items": [{}], "additionalItems": inner},
                        {"additionalProperties": inner},
                        {"patternProperties": {"^x-.*": inner}, "additionalProperties": False},
                        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{}, {"allOf": [{}, inner]}]}}},
                        {"oneOf": [{"type": "null"}, {"properties": {"a": inner}}]},
                    ]
                ),
                ({"$ref": "#there", "$defs": {"a": {"$anchor": "there"}}}, "the schema cannot be read: ValueError"),
                ({"items": {"patternProperties": 5}}, "the schema cannot be read: TypeError"),
            ]
        ),
    ],
)
def test_what_would_not_be_obeyed_is_refused(
    engine: ServingEngine, response_format: dict[str, Any], words: str
) -> None:
    with pytest.raises(LorakitError, match=re.escape(words)):
        engine.submit(PROMPT, None, SamplingSettings(response_format=response_format))


def test_schemas_whose_answers_end_are_taken_though_they_refer_to_themselves(engine: ServingEngine) -> None:
    closed = {"type": "object", "additionalProperties": False, "patternProperties": {"^[a-z]+$": {}, "^x-": {}}}
    for schema in (
        {"anyOf": [{"type": "null"}, NODE | {"required": ["next"]}], "$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "object", "properties": {"patterns": closed, "again": {"$ref": "#"}}, "required": ["patterns"]},
    ):  # fmt: skip
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        engine.submit(PROMPT, None, SamplingSettings(response_format=form, max_tokens=1)).cancel()


@pytest.mark.parametrize("keyword", ["patternProperties", "prefixItems", "$ref", "exclusiveMinimum", "allOf"])
def test_keywords_are_read_where_a_schema_is_and_not_in_names_and_values(engine: ServingEngine, keyword: str) -> None:
    value = {keyword: {"^x-": "#"}, "additionalItems": 1, "maximum": 0.1, "exclusiveMinimum": 0}
    for schema in (
        {"type": "object", "properties": {keyword: {"type": "string"}, "additionalItems": {}, "maximum": {}}},
        {"const": value},
        {"enum": [value]},
        {"type": "string", "default": value, "examples": [value]},
        {"anyOf": [{"exclusiveMinimum": 0}, {"maximum": 0.1}]},
        {"allOf": [{"type": "string", "pattern": one} for one in ["[a-z]", "[A-Z]", "[0-9]", "[!@#$%]", "^.{8,}$"]]},
        {"anyOf": [{"type": "string", "pattern": f"^a{number}$"} for number in range(500)]},
        {"type": "object", "properties": {str(one): {"type": "string", "format": "date"} for one in range(1000)}},
        {"exclusiveMinimum": False, "minimum": 0.1, "maximum": 0.5},
        {"allOf": [{"properties": {"a": {"exclusiveMinimum": 0}}}, {"properties": {"b": {"maximum": 0.1}}}]},
    ):
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        engine.submit(PROMPT, None, SamplingSettings(response_format=form, max_tokens=1)).cancel()
    schema = {"type": "object", "properties": {keyword: {"patternProperties": {"^x-": {}}}}}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    with pytest.raises(LorakitError, match="patternProperties: the names of '.x-' may run out"):
        engine.submit(PROMPT, None, SamplingSettings(response_format=form))


def sampler_of(tokenizer: Any, response_format: Any) -> Sampler:
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    ends = frozenset([tokenizer.eos_token_id])
    return Sampler(SamplingSettings(response_format=response_format), [], ends, compiler.compile(response_format))


def written(tokenizer: Any, response_format: Any, text: str) -> str:
    """Return what a sampler writes whose logits are for a text, as long as it is the beginning of that."""
    sampler = sampler_of(tokenizer, response_format)
    answer = ""
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        logits = torch.zeros(len(tokenizer))
        logits[token] = 1.0
        (item,) = draw_tokens([sampler], [logits])
        assert not isinstance(item, Exception), item
        answer += tokenizer.decode([item[0]])
        if not text.startswith(answer):
            break
    return answer


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "object"}, '{"a":1,"b":{"a":[{"a":1}]},"ab":"\\"a\\":"}', '{"a":1,"b":[],"a'),
        ({"type": "object"}, '{"\\n\\u0001":1}', '{"\\u006'),
        ({"properties": {"a": {"type": "integer"}}, "required": ["b"]}, '{"a":1,"b":2,"c":3}', '{"a":1,"b":2,"b'),
        ({"properties": {"a": {"type": "integer"}}}, '{"ab":"a"}', '{"\\u006'),
        ({"properties": {"\n": {"type": "integer"}}}, '{"\\n":1}', '{"\\u000a'),
        ({"properties": {"\x1f": {"type": "integer"}}}, '{"\\u001f":1}', '{"\\u001F'),
    ],
)
def test_no_object_has_a_name_twice_nor_in_another_spelling(schema: dict[str, Any], right: str, wrong: str) -> None:
    tokenizer = tokenizer_for("<|im_start|><|im_end|>")
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "object", **schema}}}
    assert written(tokenizer, form, right) == right
    end = "1" if wrong.endswith("6") else '"'
    answer = written(tokenizer, form, wrong + end)
    assert answer.startswith(wrong[:-1])
    assert not (wrong + end).startswith(answer)
    call = '<call>{"n": 1, "n": 1'
    either = {"type": "grammar", "grammar": f"start: ({json.dumps(call)} | @{OTHERWISE})\n", OTHERWISE: form}
    assert [written(tokenizer, either, text) for text in (right, wrong + end, call)] == [right, answer, call]


def test_no_name_comes_twice_in_the_arguments_of_a_call_that_is_forced() -> None:
    tokenizer = tokenizer_for("<|im_start|><|im_end|>")
    call = 'start: "<call>" %json {"type": "object"} "</call>"\n'
    form = {"type": "grammar", "grammar": call}
    right = '<call>{"a":1,"b":{"a":2}}</call>'
    assert written(tokenizer, form, right) == right
    assert not written(tokenizer, form, '<call>{"a":1,"a":2}').startswith('<call>{"a":1,"a"')
    free = {"type": "grammar", "grammar": f"start: {ANY_TEXT}\n"}
    assert written(tokenizer, free, '{"a", "a", "') == '{"a", "a", "'


@pytest.mark.parametrize("end", ["</think>", "|"])
def test_a_thought_of_any_length_leaves_a_few_bytes_and_its_end_is_found_across_tokens(end: str) -> None:
    tokenizer = tokenizer_for("<|im_start|><|im_end|>")
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    grammar = f"start: /[a-z ]+/ {json.dumps(end)} @{OTHERWISE}\n"
    thinking = {"type": "grammar", "grammar": grammar, OTHERWISE: form, THOUGHT_END: end}
    sampler = sampler_of(tokenizer, thinking)
    ids = [token for letter in "so it goes " * 40 + end for token in tokenizer.encode(letter, add_special_tokens=False)]
    assert len(ids) > 400
    for token in ids:
        (item,) = draw_tokens([sampler], [torch.zeros(len(tokenizer)).index_fill(0, torch.tensor([token]), 1.0)])
        assert not isinstance(item, Exception)
        assert item.id == token
        assert len(sampler._grammar._thought) < 40  # type: ignore[union-attr]
    double = '{"a":1,"a"'
    assert not written(tokenizer, thinking, f"so{end}{double}").endswith(double)


@pytest.mark.parametrize(("before", "after"), [("{", "}"), ('{"a":1,\n', '"b":1}'), ('{"a":', "1}")])
def test_white_space_in_json_has_an_end(before: str, after: str) -> None:
    tokenizer = tokenizer_for("<|im_start|><|im_end|>")
    most = before + " " * (40 - before.count("\n"))
    assert written(tokenizer, {"type": "json_object"}, most + after) == most + after
    answer = written(tokenizer, {"type": "json_object"}, most + " " * 3)
    assert answer[: len(most)] == most
    assert answer[len(most)] not in " \t\r\n"


def test_llguidance_writes_nothing_to_standard_error(engine: ServingEngine, capfd: pytest.CaptureFixture[str]) -> None:
    form = {"type": "regex", "pattern": "(a{1000}){1000}"}  # of which it says that it grew too large
    generation = engine.submit(PROMPT, None, SamplingSettings(response_format=form))
    with pytest.raises(LorakitError, match="too many expressions"):
        generation.ids()
    assert capfd.readouterr().err == ""


def test_a_shortest_length_does_not_go_with_a_format(engine: ServingEngine) -> None:
    with pytest.raises(LorakitError, match="does not go with min_tokens"):
        engine.submit(PROMPT, None, SamplingSettings(min_tokens=3, response_format=REGEX))


def test_openais_client_gets_what_it_asks_for(model: AdaptedModel, engine: ServingEngine) -> None:
    with (
        serving(OpenAIServer(model, engine, "tiny").app) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        reply = client.chat.completions.create(
            model="a", messages=[{"role": "user", "content": "an order"}], response_format=SCHEMA, max_tokens=60,  # type: ignore[call-overload]
            n=3, seed=1,
        )  # fmt: skip
        with pytest.raises(openai.BadRequestError, match="response_format.type: should be 'text'"):
            client.chat.completions.create(
                model="a", messages=[{"role": "user", "content": "x"}], response_format={"type": "xml"}  # type: ignore[call-overload]
            )  # fmt: skip
    assert len({choice.message.content for choice in reply.choices}) > 1
    assert all(json.loads(choice.message.content)["count"] for choice in reply.choices)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        pytest.param(
            {"response_format": {"type": "regex", "pattern": "(a{1000}){1000}"}},
            "lexer error: too many expressions",
            marks=pytest.mark.matrix,
        ),
        ({"stop_token_ids": list(range(3200)), "min_tokens": 2}, "no token is left that may come next"),
    ],
    ids=["grammar", "tokens"],
)
def test_settings_that_fail_later_are_the_requests_error(
    model: AdaptedModel, engine: ServingEngine, fields: dict[str, Any], said: str
) -> None:
    body = {"model": "a", "prompt": PROMPT, "max_tokens": 4} | fields
    with serving(OpenAIServer(model, engine, "tiny").app) as address:
        reply = patient.post(f"{address}/v1/completions", json=body)
        streamed = patient.post(f"{address}/v1/completions", json=body | {"stream": True})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
    assert said in error["message"]
    assert said in streamed.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_token_that_the_form_excludes_has_the_least_log_probability(
    model: AdaptedModel, engine: ServingEngine, stream: bool
) -> None:
    body = {
        "model": "a", "prompt": PROMPT, "response_format": REGEX, "logprobs": 50, "max_tokens": 4, "stream": stream
    }  # fmt: skip
    with serving(OpenAIServer(model, engine, "tiny", max_logprobs=50).app) as address:
        reply = patient.post(f"{address}/v1/completions", json=body)
    assert reply.status_code == 200
    assert "-9999.0" in reply.text
    assert "Infinity" not in reply.text  # which is no JSON


def test_without_the_extra_it_is_named(engine: ServingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # an import fails, as without the package
    with pytest.raises(LorakitError, match=r"needs llguidance: pip install 'lorakit\[structured\]'"):
        engine.submit(PROMPT, None, SamplingSettings(response_format=REGEX))
