"""A chat template of the recipe's own is the patch's: whoever prompts the patch uses it, and nobody another."""

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import lorakit
from lorakit.cli import main
from lorakit.data import token_cache
from lorakit.data.encode import Encoder
from lorakit.data.row_settings import RowSettings
from lorakit.errors import DataError, LorakitError, PatchError, TemporaryFailure
from lorakit.export.servers import prompting_notes
from lorakit.inference.load import brought_template
from lorakit.patch import read_patch
from lorakit.patch.prompting import PromptForm
from lorakit.recipe import load_recipe
from lorakit.training.check import check
from tests.helpers.rows import chat, write_rows
from tests.helpers.training import stop_at, train

CHATML = (
    "{% for m in messages %}{{ '<|user|>' + m.role + '\n' + m.content + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|user|>assistant\n' }}{% endif %}"
)
SHORT = {"steps": 2, "warmup_steps": 0, "eval_every_steps": 9}


def test_a_patch_brings_its_chat_template_with_it(
    recipe: Callable[..., Path], base: Path, tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text(CHATML)
    own, _ = train(recipe(data={"chat_template": str(template)}, train=SHORT))
    prompt = [{"role": "user", "content": "say 1"}]

    foreign = tmp_path / "foreign"
    inject = lorakit.inject(AutoModelForCausalLM.from_pretrained(base), rank=2, targets=["q_proj"])
    lorakit.save_patch(inject, foreign)

    model = lorakit.load(base, {"own": own}, dtype="float32")

    asked = model.prompts.token_ids("say 1", PromptForm())
    assert tokenizer.decode(asked) == "<|user|>user\nsay 1<|end|>\n<|user|>assistant\n"
    (taught,) = Encoder(model.tokenizer, RowSettings())(chat("say 1", "so"))
    assert taught.ids[: len(asked)] == model.prompts.token_ids(prompt, PromptForm()) == asked
    with pytest.raises(PatchError, match="another chat template than is in use here"):
        lorakit.load(base, {"own": own}, dtype="float32", chat_template=CHATML + " ")
    with pytest.raises(PatchError, match="another chat template than .*llama has"):
        lorakit.load(base, dtype="float32").load_adapter("own", own)
    assert brought_template([tmp_path / "absent", own]) == CHATML
    assert brought_template([own, foreign]) is None
    with pytest.raises(PatchError, match=f"{foreign}: was trained with another chat template than is in use here"):
        model.load_adapter("foreign", foreign)  # another program's, which was never asked so
    served = lorakit.load(base, dtype="float32", prompted_as=[own])  # as a server loads it, whose adapters come later
    served.load_adapter("own", own)
    with pytest.raises(PatchError, match=f"{foreign}: was trained with another chat template than is in use here"):
        served.load_adapter("foreign", foreign)
    assert str(tmp_path) not in (own / "README.md").read_text().replace(str(base), "")

    options = ["--adapter", f"a={own}", "--dtype", "float32"]
    assert main(["generate", str(base), *options, "--prompt", "say 1", "--max-new-tokens", "2"]) == 0
    assert "written by the chat template that the adapters bring" in capsys.readouterr().err
    assert main(["merge", str(base), str(own), "--out", str(tmp_path / "merged")]) == 0
    assert "another chat template" not in capsys.readouterr().out
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == CHATML

    start = {"start_from": str(own), "rank": 4, "dropout": 0.0}
    with pytest.raises(LorakitError, match="adapter.start_from: .*another chat template"):
        check(load_recipe(recipe(adapter=start, output=str(tmp_path / "next"))), say=lambda text: None)
    same = recipe(adapter=start, data={"chat_template": str(template)}, output=str(tmp_path / "next"))
    check(load_recipe(same), say=lambda text: None)


def test_a_run_that_goes_on_tomorrow_keeps_the_date_of_its_rows(
    recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{{ strftime_now('%Y-%m-%d') }}" + CHATML)
    rows = write_rows(tmp_path / "rows.jsonl", [chat(f"say {i}", "so") for i in range(8)])
    data = {"train": str(rows), "eval": None, "chat_template": str(template), "max_tokens": 128}
    path = recipe(data=data, train={"steps": 6, "save_every_steps": 2})

    def on_day(number: int) -> None:
        day = type("Day", (), {"today": lambda: date(2026, 1, number), "fromisoformat": date.fromisoformat})
        monkeypatch.setattr(token_cache, "date", day)

    on_day(1)
    stop_at(monkeypatch, {3})
    with pytest.raises(TemporaryFailure):
        train(path)
    on_day(2)
    out, _ = train(path)  # refused before: the rows had other tokens
    assert json.loads((out / "run.json").read_text())["data"]["train"]["today"] == "2026-01-01"


@pytest.mark.parametrize("content", ["{{ range(10**9) }}", "{{ 'a' * 10**15 }}"])
def test_a_template_that_makes_too_much_is_refused(recipe: Callable[..., Path], tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(content + CHATML)
    with pytest.raises(DataError, match="the chat template refuses it: "):
        train(recipe(data={"chat_template": str(path)}))


def test_check_says_that_a_template_writes_the_date(
    recipe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ strftime_now('%d %b %Y') }}" + CHATML)
    for template, is_said in ((path, True), (None, False)):
        check(load_recipe(recipe(data={"chat_template": None if template is None else str(template)})))
        assert ("writes today's date (strftime_now)" in capsys.readouterr().out) == is_said


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "No such file"), (b" \n", "is empty"), (b"\xff", "not UTF-8"), (b"a\n{{ b }", "mine.jinja:2: unexpected")],
    ids=str,
)
def test_a_template_that_cannot_be_read_is_named(
    recipe: Callable[..., Path], tmp_path: Path, content: bytes | None, expected: str
) -> None:
    path = tmp_path / "mine.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"data.chat_template: .*{expected}"):
        train(recipe(data={"chat_template": str(path)}))


THINKING = CHATML.replace(
    "{% if add_generation_prompt %}{{ '<|user|>assistant\n' }}",
    "{% if add_generation_prompt %}{{ '<|user|>assistant\n' }}{% if think is defined and not think %}{{ '-' }}{% endif %}",
).replace("+ m.content", "+ ('-' if think is defined and not think and m.role == 'assistant' else '') + m.content")


def test_variables_of_a_template_are_the_patchs_and_a_call_may_change_them(
    recipe: Callable[..., Path], base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "thinking.jinja"
    template.write_text(THINKING)
    data = {"chat_template": str(template), "chat_template_kwargs": {"think": False}}
    own, _ = train(recipe(data=data, train=SHORT))

    (note,) = prompting_notes(base, {"own": read_patch(own)}, None)
    assert note.endswith('(chat_template_kwargs): {"think": false}')
    assert f"- {note.removeprefix('own: ')}\n" in (own / "README.md").read_text()
    model = lorakit.load(base, {"own": own}, dtype="float32")
    codec = model.codec(model.adapter("own"))
    text = model.tokenizer.decode
    assert text(codec.token_ids("say 1", PromptForm())).endswith("assistant\n-")
    assert text(codec.token_ids("say 1", PromptForm(), template_kwargs={"think": True})).endswith("assistant\n")
    assert text(model.prompts.token_ids("say 1", PromptForm())).endswith("assistant\n")  # the base was not asked so
    other = lorakit.load(base, {"own": own}, dtype="float32", chat_template_kwargs={"think": True})
    assert text(other.codec(other.adapter("own")).token_ids("say 1", PromptForm())).endswith("assistant\n")
    answers = [model.generate(["say 1"], "own", chat_template_kwargs={"think": value}) for value in (False, True)]
    assert answers[0] == model.generate(["say 1"], "own")
    with pytest.raises(
        DataError, match="chat_template_kwargs: thinks: the chat template reads no such variable; .* think"
    ):
        model.generate(["say 1"], "own", chat_template_kwargs={"thinks": True})

    merged = tmp_path / "merged"
    assert main(["merge", str(base), str(own), "--out", str(merged)]) == 0
    of_merged = lorakit.load(merged, dtype="float32")
    assert text(of_merged.prompts.token_ids("say 1", of_merged.prompts.form)).endswith("assistant\n-")

    capsys.readouterr()
    options = ["--adapter", f"a={own}", "--dtype", "float32", "--prompt", "say 1"]
    assert main(["generate", str(base), *options, "--chat-template-kwargs", '{"enable_thinking": false}']) == 2
    assert "enable_thinking: the chat template reads no such variable" in capsys.readouterr().err
    assert main(["generate", str(base), *options, "--chat-template-kwargs", '{"think": true}']) == 0


def test_a_variable_that_no_template_reads_is_refused_before_the_run(recipe: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match=r"data.chat_template_kwargs: enable_thinking: the chat template reads no such"):
        train(recipe(data={"chat_template_kwargs": {"enable_thinking": False}}, train=SHORT))


def test_templates_have_names(recipe: Callable[..., Path], base: Path) -> None:
    with pytest.raises(DataError, match=r"chatml: the tokenizer lacks <\|im_start\|>, <\|im_end\|>; .*new_tokens: \["):
        train(recipe(data={"chat_template": "chatml"}, train=SHORT))
    with pytest.raises(DataError, match="by name there are alpaca, .* Nearest: 'chatml'"):
        train(recipe(data={"chat_template": "chatm"}, train=SHORT))
    tokens = ["<|im_start|>", "<|im_end|>"]
    own, _ = train(recipe(adapter={"new_tokens": tokens}, data={"chat_template": "chatml"}, train=SHORT))

    model = lorakit.load(base, {"own": own}, dtype="float32")

    codec = model.codec(model.adapter("own"))
    asked = codec.tokenizer.decode(codec.token_ids("say 1", PromptForm()))
    assert asked.endswith("<|im_start|>user\nsay 1<|im_end|>\n<|im_start|>assistant\n")
    assert codec.tokenizer.convert_tokens_to_ids("<|im_end|>") in codec.end_ids
    alpaca = lorakit.load(base, dtype="float32", chat_template="alpaca")
    assert alpaca.tokenizer.decode(alpaca.prompts.token_ids("say 1", PromptForm())).endswith("say 1\n\n### Response:\n")
