"""The first space of an answer: sentencepiece drops that of a text, and an answer goes on after its prompt."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import lorakit
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from tests.helpers.bases import make_base
from tests.helpers.http_server import serving
from tests.helpers.tokenizers import sentencepiece

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if not loop.last %}</s>{% endif %}{% endfor %}"


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    tokenizer = sentencepiece(has_bytes=False)
    tokenizer.chat_template = TEMPLATE
    return lorakit.load(make_base(tmp_path_factory.mktemp("base"), tokenizer), dtype="float32")


@pytest.fixture(scope="module")
def engine(spaced: AdaptedModel) -> Iterator[ServingEngine]:
    opened = ServingEngine(spaced, max_rows=4)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def client(spaced: AdaptedModel, engine: ServingEngine) -> Iterator[httpx.Client]:
    with serving(OpenAIServer(spaced, engine, "base", []).app) as address, httpx.Client(base_url=address) as opened:
        yield opened


def completed(client: httpx.Client, **fields: Any) -> Any:
    body = {"model": "base", "prompt": "a b", "max_tokens": 6, "temperature": 0, **fields}
    return client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]


def words(spaced: AdaptedModel) -> dict[str, float]:
    """Biases that leave only the tokens with a space."""
    return {str(spaced.tokenizer.convert_tokens_to_ids(word)): 100.0 for word in ("\u2581a", "\u2581b")}


def test_an_answer_goes_on_after_its_prompt_at_once_in_pieces_and_in_python(
    client: httpx.Client, spaced: AdaptedModel
) -> None:
    for fields in ({"seed": 3, "temperature": 1.0, "logit_bias": words(spaced)}, {}):
        reply = completed(client, logprobs=1, **fields)
        ids = [
            spaced.tokenizer.convert_tokens_to_ids(one.replace(" ", "\u2581")) for one in reply["logprobs"]["tokens"]
        ]
        if fields:
            assert re.fullmatch("( a| b){6}", reply["text"])
            prompt = spaced.tokenizer("a b", add_special_tokens=False)["input_ids"]
            assert spaced.tokenizer.decode([*prompt, *ids]) == f"a b{reply['text']}"
        else:
            assert spaced.generate(["a b"], raw=True, max_new_tokens=6) == [reply["text"]]
        assert completed(client, echo=True, **fields)["text"] == f"a b{reply['text']}"
        body = {"model": "base", "prompt": "a b", "max_tokens": 6, "temperature": 0, "stream": True, **fields}
        lines = client.post("/v1/completions", json=body).text.split("data: ")[1:-1]
        pieces = [httpx.Response(200, text=line).json()["choices"][0]["text"] for line in lines]
        assert "".join(pieces) == reply["text"]


@pytest.mark.parametrize("echo", [False, True])
def test_a_token_is_where_its_offset_says(client: httpx.Client, spaced: AdaptedModel, echo: bool) -> None:
    reply = completed(client, logprobs=1, echo=echo, prompt="b a", logit_bias=words(spaced))
    logprobs = reply["logprobs"]
    shown = [
        (token, place)
        for token, place in zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
        if "<" not in token
    ]
    assert len(shown) == 6 + 2 * echo
    for number, (token, place) in enumerate(shown):
        at_start = echo and number == 0  # where the space before a text's first word is none
        assert reply["text"][place:].startswith(token.lstrip() if at_start else token)
    assert "".join(token for token, _ in shown).removeprefix(" " * echo) == reply["text"]


@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_of_unknown_tokens_are_in_the_text_that_is_sent(
    client: httpx.Client, spaced: AdaptedModel, as_ids: bool
) -> None:
    text = "\u65e5a a."
    ids = spaced.tokenizer(text)["input_ids"]
    reply = completed(client, logprobs=1, echo=True, prompt=ids if as_ids else text, max_tokens=1)
    offsets = reply["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert len(offsets) == len(ids) + 1
    if not as_ids:
        assert offsets == [0, 0, 1, 2, 4, 5]  # the space before a word, and the word that is unknown, begin together


def test_an_answer_matches_its_expression_with_the_space_before_it(client: httpx.Client) -> None:
    form = {"type": "regex", "pattern": "( a| b)b{2}"}
    for seed in range(4):
        reply = completed(client, response_format=form, temperature=1.0, seed=seed)
        assert re.fullmatch(form["pattern"], reply["text"])


def test_chats_over_http_have_pythons_text(client: httpx.Client, spaced: AdaptedModel) -> None:
    messages = [{"role": "user", "content": "b a"}]
    (expected,) = spaced.generate([messages], max_new_tokens=6)
    body = {"model": "base", "messages": messages, "max_tokens": 6, "temperature": 0}
    reply = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert reply["choices"][0]["message"]["content"] == expected
