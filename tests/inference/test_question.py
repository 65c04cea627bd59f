"""A row asks for its last answer in the form in which it is asked in use, whatever its format."""

import copy
from typing import Any

import pytest

from lorakit.data.chat_template import ChatTemplate
from lorakit.data.encode import Encoder
from lorakit.data.row_files import BadRow
from lorakit.data.row_settings import RowSettings
from lorakit.inference.score import Question, parse_question

ASKED = {"role": "user", "content": "hi"}
ANSWERED = {"role": "assistant", "content": "yes"}
KIND = {"role": "system", "content": "Be kind."}
CHAT = {"messages": [ASKED, ANSWERED]}
TURNS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
TOOL = {"type": "function", "function": {"name": "clock"}}
THINKS = (  # as some templates do: thinking is added to the last answer, and left out of earlier ones
    "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}</call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def asked(tokenizer: Any, row: Any, template: str | None = None, ignore: tuple[str, ...] = ()) -> Question:
    if template is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = template
    return parse_question(row, ChatTemplate(tokenizer), ignore)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        (CHAT, [ASKED]),
        (CHAT | {"system": "Be kind.", "id": 7}, [KIND, ASKED]),
        ({"conversations": TURNS}, [ASKED]),
        ({"instruction": "hi", "output": "yes"}, [ASKED]),
        ({"prompt": [ASKED], "completion": [ANSWERED]}, [ASKED]),
        ({"prompt": "hi ", "completion": "yes"}, "hi "),
        ({"messages": [ASKED, ANSWERED, ASKED, ANSWERED]}, [ASKED, ANSWERED, ASKED]),
        ({"messages": [ASKED, ANSWERED, ASKED]}, [ASKED]),
        ({"messages": [ASKED, ANSWERED, ASKED, ANSWERED | {"content": "no", "train": False}]}, [ASKED]),
    ],
)
def test_a_row_of_any_format_is_a_prompt_and_its_last_trained_answer(tokenizer: Any, row: Any, prompt: Any) -> None:
    found = asked(tokenizer, row)
    assert (found.prompt, found.tools, found.answer) == (prompt, None, "yes")


def test_tools_go_with_the_question(tokenizer: Any) -> None:
    assert asked(tokenizer, CHAT | {"tools": [TOOL]}) == Question([ASKED], [TOOL], "yes")


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (ANSWERED, "<think>\n\n</think>\n\nyes"),
        (ANSWERED | {"tool_calls": [TOOL]}, "<think>\n\n</think>\n\nyes<call>clock</call>"),
    ],
)
def test_the_answer_is_what_training_teaches_as_the_template_shows_it(
    tokenizer: Any, message: Any, answer: str
) -> None:
    row = {"messages": [ASKED, message]}
    templated = copy.deepcopy(tokenizer)
    templated.chat_template = THINKS

    (encoded,) = Encoder(templated, RowSettings())(row)

    assert asked(tokenizer, row, THINKS).answer == answer
    assert tokenizer.decode([i for i, mask in zip(encoded.ids, encoded.label_mask, strict=True) if mask]) == (
        answer + "<|end|>"
    )


def test_an_earlier_answer_may_lose_its_reasoning_as_it_does_in_use(tokenizer: Any) -> None:
    reasoned = ANSWERED | {"reasoning_content": "hm"}
    template = THINKS.replace("<think>\n\n</think>\n\n", "<think>{{ m.reasoning_content }}</think>")

    question = asked(tokenizer, {"messages": [ASKED, reasoned, ASKED, reasoned]}, template)

    assert question == Question([ASKED, reasoned, ASKED], None, "<think>hm</think>yes", num_trained=2)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "hi yes"}, "plain text without a prompt has nothing to ask"),
        ({"prompt": "", "completion": "yes"}, "plain text without a prompt has nothing to ask"),
        ({"messages": [ASKED]}, "no assistant message that carries the loss"),
        ({"messages": [ASKED, ANSWERED | {"weight": 0}]}, "weight of every assistant message is 0 or false"),
        ({"messages": [ANSWERED, ASKED]}, "begins with its answer"),
        (CHAT | {"label": False}, "label: whether the answer is good"),
        ({"messages": [ASKED, ANSWERED | {"reasoning_content": "hm"}]}, "leaves out reasoning_content"),
        ({"a": 1}, "no row format has the keys a;"),
    ],
)
def test_a_row_without_an_exact_question_is_refused(tokenizer: Any, row: Any, reason: str) -> None:
    with pytest.raises(BadRow) as caught:
        asked(tokenizer, row)
    assert reason in str(caught.value)


def test_keys_to_ignore_are_those_of_training(tokenizer: Any) -> None:
    assert asked(tokenizer, CHAT | {"grade": 3}, ignore=("grade",)) == asked(tokenizer, CHAT)


def test_a_conversation_without_a_chat_template_is_refused(tokenizer: Any) -> None:
    with pytest.raises(BadRow, match="the tokenizer has no chat template"):
        asked(tokenizer, CHAT, "")
