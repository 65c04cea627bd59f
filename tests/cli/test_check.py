"""`lorakit check`: what it says about the rows of a recipe."""

import errno
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from lorakit.cli import main
from lorakit.data import token_cache
from lorakit.files.atomic import cache_folder
from tests.helpers.rows import chat, write_rows


@pytest.fixture
def shown(recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def check(train: list[Any], held_out: list[Any] | None = None, **data: Any) -> list[str]:
        files: dict[str, Any] = {"train": str(write_rows(tmp_path / "train.jsonl", train)), "eval": None}
        if held_out is not None:
            files["eval"] = str(write_rows(tmp_path / "eval.jsonl", held_out))
        assert main(["check", str(recipe(data=files | data))]) == 0
        return capsys.readouterr().out.splitlines()

    return check


def test_the_first_token_is_no_label_because_nothing_predicts_it(shown: Any) -> None:
    lines = shown([{"text": "some text"}])
    assert "s[[ome text<|end|>]]" in lines
    counts = next(line for line in lines if line.startswith("rows "))
    used, tokens, labels = (int(number) for number in re.findall(r"\d+", counts))
    assert (used, labels) == (1, tokens - 1)
    assert any(line.startswith("<|start|>[[<|user|>") for line in shown([chat("hi", "yes")], loss_on="all"))


def test_weights_and_mixed_formats_are_counted_where_there_are_any(shown: Any) -> None:
    weighted = [chat(f"say {number}", "so") | {"weight": weight} for number, weight in enumerate((0, 1, 2.5, 0.5))]
    lines = [line.strip() for line in shown([*weighted, {"prompt": "say ", "completion": "so"}])]
    assert any(line.endswith("; 1 of weight 0 left out") for line in lines)
    assert "note       train: weight: other than 1 in 2 of 4 rows, from 0.5 to 2.5" in lines
    assert "note       train: formats: 3 of conversations, 1 of plain text (no template)" in lines
    text = "\n".join(shown([chat("hi", "yes"), chat("hi", "no") | {"weight": 1}]))
    assert "weight:" not in text
    assert "formats:" not in text


def test_held_out_rows_that_are_training_rows_too_are_counted(shown: Any) -> None:
    rows = [chat(f"say {number}", "so") for number in range(8)]
    note = "held-out rows are training rows too"
    lines = shown(rows[:5], [*rows[3:], {"messages": rows[4]["messages"], "id": 1}])
    assert f"note       3 of 6 {note} (the same tokens)" in lines
    assert note not in "\n".join(shown(rows[:4], rows[4:]))


def test_a_key_that_is_not_read_is_one_line_for_training_and_held_out_rows(shown: Any) -> None:
    rows = [chat(f"say {number}", "so") | {"id": number} for number in range(5)]
    assert [line for line in shown(rows[:3], rows[3:]) if "not read" in line] == ["note       id: not read, in 5 rows"]


def test_a_switch_of_thinking_is_named_where_no_row_thinks(shown: Any, tmp_path: Path) -> None:
    template = tmp_path / "thinks.jinja"
    template.write_text(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{{ '</think>' if enable_thinking is false }}{% endif %}"
    )
    note = "no row thinks: data.chat_template_kwargs: {enable_thinking: false}"

    def is_named(*answers: str, **data: Any) -> bool:
        return note in "\n".join(shown([chat("hi", answer) for answer in answers], chat_template=str(template), **data))

    assert is_named("yes", "no")
    assert not is_named("yes", "A</think>no")
    assert not is_named("</think>yes", chat_template_kwargs={"enable_thinking": False})


def test_a_run_of_another_recipe_is_discarded_by_a_command_that_is_named(
    recipe: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(recipe(train={"steps": 1, "warmup_steps": 0}))]) == 0
    assert main(["check", str(recipe(train={"steps": 1, "warmup_steps": 0, "learning_rate": 0.5}))]) == 2
    assert "Choose another output, or start over: `lorakit train RECIPE --fresh`" in capsys.readouterr().err


def test_what_names_no_rows_or_template_of_lorakit_is_explained(
    recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register = tmp_path / "dataset_info.json"
    for indent in (None, 2):
        register.write_text(json.dumps({"mine": {"file_name": "mine.json"}}, indent=indent))
        assert main(["check", str(recipe(data={"train": str(register)}))]) == 2
        assert f"{register}: a register of data sets, without rows; name the files" in capsys.readouterr().err
    assert main(["check", str(recipe(data={"chat_template": "qwen3"}))]) == 2
    assert "No such file or directory; without it the base's own is used; by name there are" in capsys.readouterr().err
    path = recipe()
    assert main(["check", str(path), "data.template=qwen3"]) == 2
    assert "nothing to set: the base's own chat template is used" in capsys.readouterr().err


def test_a_full_disk_of_the_cache_is_no_mistake_of_the_recipe(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(token_cache, "append_rows", full)
    rows = write_rows(tmp_path / "new.jsonl", [chat("never", "tokenised")])
    assert main(["check", str(recipe(data={"train": str(rows)}))]) == 75
    assert f"lorakit check: {cache_folder('tokens')}" in capsys.readouterr().err


def test_what_an_adapter_can_hold_is_compared_with_the_rows(recipe: Any, tmp_path: Path, capsys: Any) -> None:
    def lines(**sections: Any) -> list[str]:
        assert main(["check", str(recipe(**sections))]) == 0
        return capsys.readouterr().out.splitlines()

    def numbers(name: str, output: list[str]) -> list[int]:
        line = next(line for line in output if line.startswith(name)).replace(",", "")
        return [int(number) for number in re.findall(r"\d+", line)]

    data = {"data": {"train": str(write_rows(tmp_path / "many.jsonl", [{"text": "word " * 200} for _ in range(300)])),
                     "eval": None, "max_tokens": 256, "on_long_rows": "truncate"}}  # fmt: skip
    small = lines(**data, adapter={"rank": 1, "targets": ["q_proj"], "layers": [0]}, train={"batch_size": 256})
    share = numbers("rows", small)[2] / 64  # A and B of one 32 x 32 layer
    measured = f"{share:.2g} label tokens for each trainable parameter, and about 2 have room"
    verdict = f"rank 1 may be too small for these rows (rank {math.ceil(share / 2)} has room)"
    assert f"capacity   {verdict}: {measured}" in small
    note = "note       train.batch_size: an epoch has 2 steps of 256; small ones teach more"
    assert any(line.startswith(note) for line in small)
    large = lines()
    assert any(re.match(r"capacity   rank \d+ is large enough: ", line) for line in large)
    assert not [line for line in large if "train.batch_size:" in line]


def test_mlp_is_the_linear_layers_outside_of_attention(recipe: Any, capsys: Any) -> None:
    assert main(["check", str(recipe(adapter={"targets": "mlp", "layers": [1]}))]) == 0
    assert "targets    3 of 15 linear layers (gate_proj, up_proj, down_proj), with " in capsys.readouterr().out
