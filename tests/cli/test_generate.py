"""`lorakit generate`: which prompts it answers, and with which adapter."""

import copy
import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, GPTNeoConfig

from lorakit.cli import main
from lorakit.cli.generate import _read_prompt
from lorakit.launch.libraries import FLOAT32_KERNELS, LIMITS
from tests.helpers.http_server import started
from tests.helpers.patches import make_patch
from tests.helpers.rows import chat, write_rows
from tests.helpers.training import train
from tests.serving.test_slot_sizes import BASES

FLAGS = ("--max-new-tokens", "4", "--dtype", "float32")


def answers(
    capsys: pytest.CaptureFixture[str], *arguments: object, command: str = "generate"
) -> tuple[int, list[str], str]:
    code = main([*map(str, (command, *arguments, *FLAGS))])
    said = capsys.readouterr()
    return code, said.out.splitlines(), said.err


def test_each_prompt_is_answered_and_standard_input_is_one_prompt(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "say it\n\nsay more than that\n"
    each = answers(capsys, base, "--prompt", "say it", "--prompt", "say more than that")[1]
    assert len(each) == 2

    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert answers(capsys, base) == answers(capsys, base, "--prompt", text.strip())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            GPTNeoConfig(
                hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=16
            ),
            "note: transformers' `generate` answers, which takes longer: base: GPTNeoForCausalLM has layers of the kind",
        ),
        (BASES["deepseek_v3"][0], "note: each row has a slot as long as the longest one's, as DeepseekV3"),
        (BASES["llama"][0], None),
    ],
    ids=["no slots", "one size", "slots"],
)
def test_a_base_whose_answers_take_more_time_or_memory_says_why(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str], config: Any, said: str | None
) -> None:
    config = copy.deepcopy(config)
    config.vocab_size = len(tokenizer)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    rows = write_rows(tmp_path / "rows.jsonl", [chat("hi", "you")])
    for code, _, err in (
        answers(capsys, tmp_path / "base", "--raw", "--prompt", "hi"),
        answers(capsys, tmp_path / "base", "--data", rows, command="score"),
    ):
        notes = [line for line in err.splitlines() if "slot" in line or "takes longer" in line]
        assert (code, len(notes)) == (0, 0 if said is None else 1), err
        assert said is None or notes[0].startswith(said)
    if said is not None and "slot as long" in said:
        with started(tmp_path / "base", log=tmp_path / "log") as (process, _):
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
        note, *_ = (
            json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if '"event": "note"' in line
        )
        assert f"note: {note['note']}".startswith(said)


def test_an_adapter_of_plain_text_says_that_the_base_is_asked_otherwise(
    recipe: Callable[..., Path], base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "plain.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"say {n}", "completion": f" {n}"}) + "\n" for n in range(6)))
    data = {"train": str(rows), "eval": None}
    patch, _ = train(recipe(data=data, train={"steps": 1, "warmup_steps": 0}))
    asked = base, "--adapter", f"plain={patch}", "--prompt", "say 1"

    assert "note: plain is asked in plain text, as in training" in answers(capsys, *asked)[2]
    assert "plain text" not in answers(capsys, *asked, "--raw")[2]
    assert "plain text" not in answers(capsys, *asked, "--use", "none")[2]


def test_standard_input_loses_the_line_break_at_its_end_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, prompt in {"say it\n": "say it", "  say it \n\n": "  say it \n", "say it ": "say it "}.items():
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert _read_prompt() == prompt


def test_tools_are_in_the_prompt_or_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tools, template = tmp_path / "tools.json", tmp_path / "template.jinja"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "look_up", "parameters": {}}}]))
    template.write_text("{{ tools | tojson if tools }}{% for m in messages %}<{{ m.content }}>{% endfor %}")
    asked = (base, "--no-raw", "--chat-template", template, "--prompt", "say it")
    as_text = (base, "--raw", "--prompt", json.dumps(json.loads(tools.read_text())) + "<say it>")

    assert answers(capsys, *asked, "--tools", tools) == answers(capsys, *as_text)
    assert answers(capsys, *asked)[1] != answers(capsys, *as_text)[1]
    silent = tmp_path / "silent.jinja"
    silent.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    for arguments, file, names in [
        ((base, "--no-raw", "--chat-template", silent, "--prompt", "a"), tools, "the chat template leaves them out"),
        ((base, "--raw", "--prompt", "a"), tools, "tools: a chat template shows them"),
        ((base, "--prompt", "a"), tmp_path / "none.json", "cannot be read"),
        ((base, "--prompt", "a"), template, "cannot be read"),
    ]:
        code, _, said = answers(capsys, *arguments, "--tools", file)
        assert code == 2
        assert names in said


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--prompt", " "], "--prompt: an empty prompt"),
        (["--prompt", "a", "--prompt", ""], "--prompt: an empty prompt"),
        ([], "standard input: an empty prompt"),
    ],
)
def test_no_prompt_is_an_error(
    arguments: list[str], names: str, base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    code, out, err = answers(capsys, base, *arguments)
    assert (code, out) == (2, [])
    assert names in err


def test_the_adapter_that_answers_unasked_is_named(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (make_patch(base, tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two")))
    both = ("--adapter", f"a={one}", "--adapter", f"b={two}", "--prompt", "say it")
    code, out, err = answers(capsys, base, *both)
    assert code == 0
    assert err == "note: a answers, the first of 2; choose with --use NAME or --each\n"
    assert answers(capsys, base, *both, "--use", "a") == (0, out, "")
    assert answers(capsys, base, *both[:2], *both[4:]) == (0, out, "")


def test_a_patch_in_the_bases_place_is_told(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patch = make_patch(base, tmp_path / "patch")
    code, _, err = answers(capsys, patch, "--prompt", "say it")
    assert code == 2
    assert f"{patch} is a patch, not a model; name its base here, and the patch as --adapter NAME={patch}" in err


def test_the_kernels_of_prompts_of_many_lengths_are_limited_as_in_training(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LIMITS:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    assert answers(capsys, base, "--prompt", "say it")[0] == 0
    limits = LIMITS | {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": FLOAT32_KERNELS}
    assert {name: os.environ.get(name) for name in LIMITS} == {name: str(limit) for name, limit in limits.items()}
