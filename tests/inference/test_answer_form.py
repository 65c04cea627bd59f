"""Law: an answer that a chat template writes is read back as the thinking, content and calls that it was written from."""

import itertools
import json
import random
from collections.abc import Iterable
from typing import Any

import llguidance.hf
import pytest
import torch
from llguidance import LLMatcher

from lorakit.data.chat_template import ChatTemplate
from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import Chat
from lorakit.decoding.grammar import GrammarCompiler
from lorakit.inference.answer_form import AnswerForm, AnswerPart, find_answer_form
from lorakit.inference.answer_parser import AnswerParser
from lorakit.inference.call_grammar import call_grammar
from tests.helpers.chat_templates import tokenizer_for, trl_templates

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "note": {"type": "string"},
                    "days": {"type": "integer"},
                    "share": {"type": "number"},
                    "exact": {"type": "boolean"},
                    "where": {"type": "object"},
                    "tags": {"type": "array"},
                },
            },
        },
    }
    for name in ("weather_of", "get-time", "none")
]
VALUES: dict[str, list[Any]] = {
    "city": ["Paris", 'a "quoted" é', "3", "true", "a < b & c > d", "line\nbreak", "日本語 🎉", "{not json", "it's"],
    "note": ["x" * 50, "a: b, c=d", "[1, 2]", "back\\slash"],
    "days": [0, -3, 12345678901],
    "share": [0.5, -1e-7],
    "exact": [True, False],
    "where": [{}, {"a": {"b": [1, "}", {"c": None}]}}],
    "tags": [[], ["a", "]"], [1, [2]]],
}
CONTENTS = ["", "fine", "two\n\nlines", "a < b {c}", "日本"]
THOUGHTS = ["", "hm", "first\n\nthen {this}"]
MISTRAL = """{{ bos_token }}{% for message in messages %}{% if message.role == "user" %}[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS] [{% for one in message.tool_calls %}{{ dict(one.function, id=one.id) | tojson }}
{{- ", " if not loop.last }}{% endfor %}]{{ eos_token }}{% else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"""
MISTRAL_ARGS = """{{ bos_token }}{% for message in messages %}{% if message.role == "user" %}[INST]{{ message.content }}[/INST]
{%- else %}{{ message.content }}{% for one in message.tool_calls or [] %}[TOOL_CALLS]{{ one.function.name }}[ARGS]
{{- one.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"""
DEEPSEEK_V3_1 = """{{ bos_token }}{% for message in messages %}{% if message.role == "user" %}<｜User｜>{{ message.content }}
{%- else %}<｜Assistant｜></think>{{ message.content or "" }}{% if message.tool_calls %}<｜tool▁calls▁begin｜>
{%- for one in message.tool_calls %}<｜tool▁call▁begin｜>{{ one.function.name }}<｜tool▁sep｜>{{ one.function.arguments | tojson }}
{{- "<｜tool▁call▁end｜>" }}{% endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<｜Assistant｜></think>{% endif %}"""
TEMPLATES = {**trl_templates(), "mistral": MISTRAL, "mistral_args": MISTRAL_ARGS, "deepseek_v3_1": DEEPSEEK_V3_1}
FORMS = {name: find_answer_form(ChatTemplate(tokenizer_for(text))) for name, text in TEMPLATES.items()}
Call = tuple[str, Any, str | None]
"""name, arguments and id"""
WITH_CALLS = sorted(name for name, form in FORMS.items() if form.calls is not None)


def join_parts(parts: Iterable[AnswerPart]) -> tuple[str, str, list[Call]]:
    """The thinking, the content and the calls of an answer's parts."""
    parts = list(parts)
    texts = ["".join(part.text for part in parts if part.kind == kind) for kind in ("thought", "content")]
    calls: list[list[Any]] = []
    for part in parts:
        if part.kind == "call" and part.name is not None:
            calls.append([part.name, "", part.id])
        if part.kind == "call":
            calls[-1][1] += part.text
    return texts[0], texts[1], [(name, json.loads(arguments), one) for name, arguments, one in calls]


def parsed(form: AnswerForm, prompt: str, text: str, cuts: list[int]) -> tuple[str, str, list[Call]]:
    parser = AnswerParser(form, prompt, TOOLS)
    ends = [0, *sorted(cuts), len(text)]
    parts = [part for start, stop in itertools.pairwise(ends) for part in parser.add(text[start:stop])]
    return join_parts([*parts, *parser.finish()])


def drawn_answer(draw: random.Random, most_calls: int) -> dict[str, Any]:
    calls = []
    for number in range(draw.randint(0, most_calls)):
        keys = draw.sample(sorted(VALUES), draw.randint(0, 4))
        arguments = {key: draw.choice(VALUES[key]) for key in keys}
        name = draw.choice(TOOLS)["function"]["name"]  # type: ignore[index]
        calls.append(
            {"type": "function", "id": f"call0000{number}", "function": {"name": name, "arguments": arguments}}
        )
    message: dict[str, Any] = {"role": "assistant", "content": draw.choice(CONTENTS if calls else CONTENTS[1:])}
    if calls:
        message["tool_calls"] = calls
    if thought := draw.choice(THOUGHTS):
        message["reasoning_content"] = thought
    return message


@pytest.mark.parametrize("name", WITH_CALLS)
def test_an_answer_is_read_back_as_it_was_written_whatever_pieces_it_comes_in(name: str) -> None:
    template = ChatTemplate(tokenizer_for(TEMPLATES[name]))
    form = FORMS[name]
    draw = random.Random(name)
    num_read = num_calls = 0
    for _ in range(60):
        message = drawn_answer(draw, 1 if name == "gptoss" else 3)  # of which its template writes the first
        if name == "gptoss" and "tool_calls" in message:
            message["content"] = ""  # which its template writes as thinking
        try:
            answer = template.find_answer(Chat([{"role": "user", "content": "hi"}, message], TOOLS, (False, True)), 1)
        except BadRow:  # several calls where the template writes one, or a value that it cannot write
            continue
        shown = answer.content
        expected_calls = [
            (one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", [])
        ]
        if expected_calls and not all(called in shown for called, _ in expected_calls):
            continue  # the template drops calls beside content
        cuts = [draw.randint(0, len(shown)) for _ in range(draw.randint(0, 12))]
        thought, content, calls = parsed(form, answer.prompt, shown, cuts)
        assert (thought, content, calls) == parsed(form, answer.prompt, shown, []), shown
        assert [call[:2] for call in calls] == expected_calls, shown
        if message["content"] in shown:
            assert content.strip() == message["content"], shown
        if form.thought and message.get("reasoning_content", "-") in shown:
            assert thought == message.get("reasoning_content", ""), shown
        num_read += 1
        num_calls += len(calls)
    assert num_read >= 15
    assert num_calls >= 8


def test_the_templates_whose_calls_are_read() -> None:
    families = ("deepseekv3", "glm4moe", "llama3_1", "nemotron_3_nano", "qwen2_5", "qwen3", "qwen3_6", "mistral")
    assert set(families) < set(WITH_CALLS)
    assert FORMS["gemma3"] == AnswerForm()


def test_an_answer_of_gpt_oss_as_the_model_writes_it() -> None:
    text = (
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary<|message|>A moment.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.weather_of <|constrain|>json<|message|>{"city": "a < b"}'
    )
    assert parsed(FORMS["gptoss"], "<|start|>assistant", "no channel", [3]) == ("", "no channel", [])
    for cut in range(len(text)):
        assert parsed(FORMS["gptoss"], "<|start|>assistant", text, [cut]) == (
            "I look.",
            "A moment.",
            [("weather_of", {"city": "a < b"}, None)],
        )


@pytest.mark.parametrize("cut", range(40))
def test_what_is_no_call_is_content_and_nothing_is_lost(cut: int) -> None:
    form = FORMS["qwen2_5"]
    for text in (
        "a <tool_call>\n{broken\n</tool_call> b",
        '<tool_call>\n{"name": "weather_of", "argum',
        "a < b <tool> <tool_cal",
    ):
        thought, content, calls = parsed(form, "", text, [min(cut, len(text))])
        assert (thought, calls) == ("", [])
        assert "".join(content.split()) == "".join(text.split())


def test_marks_are_not_cut_inside_of_a_token() -> None:
    calls = FORMS["deepseek_v3_1"].calls
    assert calls is not None
    assert (calls.open, calls.close) == ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    assert (calls.start, calls.end) == ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")


BROKEN: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    # form, answer, content, names and arguments
    (
        "llama3_1", '{"name": "none", "parameters": {}}; {"name": "weather_of", "parameters": {"days": 2}} then', "then",
        [("none", "{}"), ("weather_of", '{"days": 2}')],
    ),
    ("llama3_1", '{"name": "none", "parameters": {}} and more', "and more", [("none", "{}")]),
    ("mistral", '[TOOL_CALLS] [{"name": "none", "arguments": {}}] and more', "and more", [("none", "{}")]),
    (
        "qwen2_5",
        '<tool_call>\n{"name": "none", "arguments": {"a": "b\nc",}}\n</tool_call>\n<tool_call>\n{"name": "none",'
        ' "arguments": {}}\n</tool_call>', "", [("none", '{"a": "b\\nc",}'), ("none", "{}")],
    ),
    (
        "qwen2_5",
        '<tool_call>\n{"name": "none", "arguments": {"a": [1\n</tool_call>\nso', "so", [("none", '{"a": [1\n')],
    ),
    (
        "qwen2_5",
        '<tool_call>\n{"name": "none", "arguments": {"a": "</tool_call> }"}}\n</tool_call>', "",
        [("none", '{"a": "</tool_call> }"}')],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), BROKEN)
def test_what_a_model_writes_beside_and_into_calls_is_neither_lost_nor_takes_the_next_call(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for cut in range(len(text) + 1):
        parser = AnswerParser(FORMS[name], "", TOOLS)
        parts = [*parser.add(text[:cut]), *parser.add(text[cut:]), *parser.finish()]
        found: list[list[str]] = []
        for part in parts:
            if part.name is not None:
                found.append([part.name, ""])
            if part.kind == "call":
                found[-1][1] += part.text
        assert [tuple(one) for one in found] == calls, cut
        assert "".join(part.text for part in parts if part.kind == "content").strip() == content, cut


@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_second_call_ends_an_answer_that_may_have_one(name: str) -> None:
    template = ChatTemplate(tokenizer_for(TEMPLATES[name]))
    calls = [
        {"type": "function", "id": f"call0000{number}", "function": {"name": "none", "arguments": {"a": number}}}
        for number in range(3)
    ]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    try:
        text = template.find_answer(Chat(tuple(messages), TOOLS, (False, True)), 1).content
    except BadRow:
        text = ""
    if text.count("none") < 2:
        pytest.skip("its template writes one call")
    parser = AnswerParser(FORMS[name], "", TOOLS, parallel=False)
    parts = [part for letter in text for part in parser.add(letter)]
    assert len(join_parts([*parts, *parser.finish()])[2]) == 1
    assert parser.is_done


FRAMED = [name for name in WITH_CALLS if FORMS[name].calls.style == "framed"]  # type: ignore[union-attr]


def framed_call(name: str, arguments: dict[str, Any]) -> str:
    template = ChatTemplate(tokenizer_for(TEMPLATES[name]))
    call = {"type": "function", "function": {"name": "weather_of", "arguments": arguments}}
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]})
    text = template.find_answer(Chat(messages, TOOLS, (False, True)), 1).content
    return text[text.index("<tool_call>") :]


@pytest.mark.parametrize("name", FRAMED)
def test_a_string_in_frames_is_emitted_while_it_comes(name: str) -> None:
    given = {"city": 'a "b"\n</ é' * 20, "days": 12, "note": ""}
    parser = AnswerParser(FORMS[name], "", TOOLS)
    parts = [parser.add(letter) for letter in framed_call(name, given)]
    assert max(len("".join(part.text for part in some)) for some in parts) < 30
    assert len([some for some in parts if some]) > 140
    (call,) = join_parts(part for some in [*parts, parser.finish()] for part in some)[2]
    assert call == ("weather_of", given, None)


@pytest.mark.parametrize("name", FRAMED)
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "2024", "2024"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, '"2024"', "2024"),  # as a grammar has it
        ({"type": ["string", "null"]}, "true", "true"),
        ({"$ref": "#/$defs/year"}, "[1]", "[1]"),
        ({"allOf": [{"$ref": "#/$defs/year"}], "default": None}, "None", None),
        ({"oneOf": [{"$ref": "#/$defs/year"}, {"type": "integer"}]}, "2024", 2024),
        ({"type": ["integer", "null"]}, "2024", 2024),
        ({"$ref": "#/properties/a"}, "2024", 2024),
        ({}, "2024", 2024),
    ],
)
def test_an_argument_in_frames_that_is_a_text_or_null_is_no_number(
    name: str, schema: dict[str, Any], text: str, value: Any
) -> None:
    defs = {"year": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
    parameters = {"type": "object", "properties": {"a": schema, "b": True}, "$defs": defs}
    tools = [{"type": "function", "function": {"name": "weather_of", "parameters": parameters}}]
    parser = AnswerParser(FORMS[name], "", tools)
    parts = [part for letter in framed_call(name, {"a": text}) for part in parser.add(letter)]
    assert join_parts([*parts, *parser.finish()])[2] == [("weather_of", {"a": value}, None)]


@pytest.mark.parametrize("name", FRAMED)
def test_a_value_in_frames_is_read_once_when_it_is_complete(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = framed_call(name, {"days": [1] * 500})
    read = list[str]()
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda value: read.append(value) or loads(value))
    parser = AnswerParser(FORMS[name], "", TOOLS)
    for letter in text:
        parser.add(letter)
    assert 0 < sum(map(len, read)) < 3 * len(text)


@pytest.mark.parametrize("name", FRAMED)
def test_a_call_in_frames_that_is_cut_is_one_with_the_beginning_of_its_arguments(name: str) -> None:
    text = framed_call(name, {"city": "Paris", "days": 12})
    for cut in range(text.index("Paris"), len(text) - len("</tool_call>")):
        parser = AnswerParser(FORMS[name], "", TOOLS)
        first, *others = [*parser.add(text[:cut]), *parser.finish()]
        assert (first.name, {part.kind for part in others}) == ("weather_of", {"call"})
        arguments = "".join(part.text for part in others)
        assert '{"city": "Paris", "days": 12}'.startswith(arguments)
        with pytest.raises(json.JSONDecodeError):  # so that no tool runs with half of its arguments
            json.loads(arguments)


@pytest.mark.parametrize("name", FRAMED)
def test_arguments_that_never_end_are_read_in_time_that_grows_with_them(name: str) -> None:
    calls = FORMS[name].calls
    assert calls is not None
    for text in (calls.before_key, calls.before_key + "a" + calls.before_value, calls.before_value, " "):
        with pytest.raises(ValueError, match="no name of a function|Expecting"):
            calls.read(f"{calls.start.lstrip().removeprefix(calls.start_mark)}none{text * 5000}x", TOOLS)


def test_json_is_a_call_of_llama_only_where_a_tool_has_its_name() -> None:
    form = FORMS["llama3_1"]
    assert parsed(form, "", '{"name": "weather_of", "parameters": {"days": 2}}', [3, 9])[2] == [
        ("weather_of", {"days": 2}, None)
    ]
    text = '{"name": "Ada", "parameters": {}}'
    assert parsed(form, "", text, [5]) == ("", text, [])
    assert join_parts(AnswerParser(form, "", []).add("{}")) == ("", "{}", [])


def test_a_prompt_that_opens_a_thought_has_an_answer_that_begins_in_it() -> None:
    form = FORMS["deepseek_r1_distill"]
    text = "\nfirst\n</think>\n\nthen"
    for cut in range(len(text)):
        assert parsed(form, "<｜Assistant｜><think>\n", text, [cut]) == ("first", "then", [])
        assert parsed(form, "<｜Assistant｜>", f"<think>{text}", [cut]) == ("first", "then", [])


@pytest.mark.parametrize("name", WITH_CALLS)
def test_the_grammar_of_a_required_call_takes_what_the_template_writes_and_no_call_of_another_tool(name: str) -> None:
    tokenizer = tokenizer_for(TEMPLATES[name])
    vocabulary = llguidance.hf.from_tokenizer(
        tokenizer, n_vocab=max(tokenizer.added_tokens_decoder) + 1, eos_token=[tokenizer.eos_token_id]
    )
    form = FORMS[name]
    given = [{"city": 'Par"is <é>', "days": 3}, {"city": "Rome"}]
    for number in (1, 2):
        written = [{"function": {"name": "weather_of", "arguments": one}} for one in given[:number]]
        calls = [{"type": "function", "id": f"call0000{index}", **one} for index, one in enumerate(written)]
        messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": calls})
        try:
            answer = ChatTemplate(tokenizer).find_answer(Chat(messages, TOOLS, (False, True)), 1)
        except BadRow:  # a template of one call
            continue
        text = answer.content
        if form.thought is None or not answer.prompt.rstrip().endswith(form.thought[0].strip()):
            text = text.removeprefix(form.header)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for tools, parallel, expected in (
            (TOOLS, True, True),
            (TOOLS, False, number == 1 or name == "gptoss"),
            (TOOLS[1:], True, False),
        ):
            grammar = call_grammar(form, tokenizer, tools, answer.prompt, parallel=parallel)
            assert LLMatcher.validate_grammar_with_warnings(grammar, vocabulary) == (False, [])
            matcher = LLMatcher(vocabulary, grammar)
            assert (matcher.validate_tokens(ids) == len(ids)) is expected, (grammar, text)
            if form.thought is not None and not form.is_opened_by(answer.prompt):
                thought_text = f"{form.thought[0]}hm{form.thought[1]}{'<|start|>assistant' * (name == 'gptoss')}"
                thought = tokenizer(thought_text, add_special_tokens=False)["input_ids"]
                assert (matcher.validate_tokens([*thought, *ids]) == len(thought + ids)) is expected, (grammar, text)


@pytest.mark.parametrize("name", ["qwen3_6", "deepseek_r1_distill"])
def test_json_comes_after_a_thought_that_the_prompt_opens(name: str) -> None:
    tokenizer = tokenizer_for(TEMPLATES[name])
    form = FORMS[name]
    prompt = ChatTemplate(tokenizer).render([{"role": "user", "content": "hi"}], None, prompt=True)
    assert form.is_opened_by(prompt)
    assert form.thought is not None
    grammar = {
        "type": "grammar", "grammar": call_grammar(form, tokenizer, [], prompt, parallel=False, otherwise=True),
        "otherwise": {"type": "json_object"}, "thought_end": form.thought[1].strip(),
    }  # fmt: skip
    end = tokenizer.eos_token_id
    compiler = GrammarCompiler(tokenizer, max(tokenizer.added_tokens_decoder) + 1, [end])

    def is_taken(text: str) -> bool:
        answer = compiler.compile(grammar)
        assert answer is not None
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return all(
            answer.restrict(torch.zeros(len(tokenizer)))[token].isfinite() and answer.accept(token)
            for token in [*ids, end]
        )

    thought = 'hm { "ok": [ "ok'
    assert is_taken(f'{thought}\n</think>\n\n{{"ok": true}}')
    assert not is_taken(f'{thought}\n</think>\n\n{{"ok": true, "ok": true}}')
    assert not is_taken(f"{thought}\n</think>\n\nno")
    assert not is_taken('{"ok": true}')
