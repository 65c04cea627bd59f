"""A conversation is answered as Python answers its messages, whoever answers each turn."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lorakit
from lorakit.cli import main
from lorakit.decoding.sampling import SamplingSettings
from lorakit.errors import LorakitError
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.conversation import Conversation
from lorakit.serving.engine import ServingEngine
from tests.helpers.patches import make_patch


@pytest.fixture(scope="module")
def patches(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("patches")
    return {name: make_patch(base, folder / name, seed=seed) for seed, name in enumerate(("a", "b"))}


@pytest.fixture(scope="module")
def model(base: Path, patches: dict[str, Path]) -> AdaptedModel:
    return lorakit.load(base, patches, dtype="float32")


@pytest.fixture
def talk(model: AdaptedModel) -> Iterator[Conversation]:
    with contextlib.closing(ServingEngine(model, max_rows=1)) as engine:
        yield Conversation(model, engine, settings=SamplingSettings(max_tokens=12))


def test_every_turn_is_answered_after_those_before_by_the_adapter_of_the_moment(
    talk: Conversation, model: AdaptedModel
) -> None:
    talk.system = "Be brief."
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for adapter, text in (("a", "hello"), ("b", "and you?"), (None, "well then")):
        talk.adapter = adapter
        messages.append({"role": "user", "content": text})
        expected = model.generate([messages], adapter, max_new_tokens=12)[0]
        messages.append({"role": "assistant", "content": expected})

        assert "".join(talk.answer(text)) == expected

    assert talk.messages == messages[1:]


def test_an_answer_that_is_broken_off_stays_as_far_as_it_came(talk: Conversation) -> None:
    talk.settings = SamplingSettings(max_tokens=60)
    pieces = talk.answer("hello")
    text = "".join(next(pieces) for _ in range(3))
    pieces.close()

    assert talk.messages[-1] == {"role": "assistant", "content": text}
    assert "".join(talk.answer("hello"))  # the engine is free


def test_an_answer_has_no_more_tokens_than_fit(talk: Conversation) -> None:
    talk.settings = SamplingSettings(max_tokens=100_000, min_tokens=100)
    talk.messages = [{"role": "user", "content": "so many words " * 8}]
    assert "".join(talk.answer("more"))


def test_a_conversation_that_is_too_long_is_refused_and_does_not_change(talk: Conversation) -> None:
    talk.messages = [{"role": "user", "content": "so many words " * 200}]
    with pytest.raises(LorakitError, match="begin anew"):
        list(talk.answer("more"))
    assert len(talk.messages) == 1


def test_the_command_talks_and_switches_adapters(
    base: Path, patches: dict[str, Path], model: AdaptedModel, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    lines = ["hello", "/use b", "/clear", "", "hello", "/use nobody", "/tempo", "/quit", "never read"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    monkeypatch.setattr("lorakit.serving.conversation.CHAT_TOKENS", 9)
    adapters = ["--adapter", f"a={patches['a']}", "--adapter", f"b={patches['b']}"]

    assert main(["chat", str(base), *adapters, "--dtype", "fp32"]) == 0

    captured = capsys.readouterr()
    said = [[{"role": "user", "content": "hello"}]]
    one, two = (model.generate(said, name, max_new_tokens=9)[0] for name in "ab")
    assert captured.out == f"a answers\n{one}\nb answers\n{two}\n"
    said_wrong = [line for line in captured.err.splitlines() if not line.startswith("note")]
    assert said_wrong[0].startswith("adapter 'nobody' is not loaded")
    assert [line.split()[0] for line in said_wrong[1:]] == ["/use", "/clear", "/quit"]


def test_the_first_to_answer_must_be_there(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(base), "--use", "nobody"]) == 2
    assert "--use 'nobody': no --adapter has that name" in capsys.readouterr().err


def test_ctrl_d_in_a_terminal_ends_the_line_of_the_prompt(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keyboard, terminal = os.openpty()
    os.write(keyboard, b"\x04")
    with open(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["chat", str(base), "--dtype", "fp32"]) == 0
    os.close(keyboard)
    assert capsys.readouterr().out == "the base answers\nbase> \n"
