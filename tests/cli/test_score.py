"""`lorakit score`: which rows are asked of the base, a merged model and the adapters, and what it refuses first."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lorakit.cli import main
from lorakit.cli.generate import _adapters_by_file
from tests.helpers.patches import make_patch
from tests.helpers.rows import chat, write_rows

FLAGS = ("--max-new-tokens", "6", "--dtype", "float32")


def said(capsys: pytest.CaptureFixture[str], command: str, *arguments: object) -> tuple[int, list[str], str]:
    capsys.readouterr()
    code = main([command, *map(str, arguments), *FLAGS])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err


def table(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines[1 : lines.index("") if "" in lines else None]]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", [chat("say", "it"), {"prompt": "say ", "completion": "it"}])


def test_a_merged_model_has_the_answers_of_its_adapter(
    base: Path, tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patch, merged = make_patch(base, tmp_path / "patch"), tmp_path / "merged"
    assert main(["merge", str(base), str(patch), "--out", str(merged)]) == 0

    def predictions(name: str, *arguments: object) -> list[Any]:
        code, lines, _ = said(capsys, "score", *arguments, "--predictions", tmp_path / name)
        assert code == 0
        assert all(line[0] == str(rows) and line[2:] == ["0", "2", "0.0%"] for line in table(lines))
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    of_merged = predictions("merged.jsonl", merged, "--data", rows)
    of_base = predictions("base.jsonl", base, "--data", rows)
    of_both = predictions("both.jsonl", base, "--adapter", f"x={patch}", "--data", f"x={rows}")

    assert of_both == [*of_base, *(line | {"adapter": "x"} for line in of_merged)]
    assert [line["predicted"] for line in of_base] != [line["predicted"] for line in of_merged]


def test_a_file_without_a_name_is_for_every_adapter_and_one_with_a_name_for_that(
    base: Path, tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patches = [f"{name}={make_patch(base, tmp_path / name, seed=seed)}" for seed, name in enumerate("ab")]
    adapters = [part for patch in patches for part in ("--adapter", patch)]

    code, lines, err = said(capsys, "score", base, *adapters, "--data", rows)
    assert (code, err) == (0, "")
    assert [line[1] for line in table(lines)] == ["base", "a", "b"]

    code, lines, err = said(capsys, "score", base, *adapters, "--data", f"b={rows}")
    assert code == 0
    assert [line[1] for line in table(lines)] == ["base", "b"]
    assert err == "note: a: no --data, not scored\n"


def test_the_base_answers_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    adapters = {"a": "x", "b": "y"}
    (tmp_path / "lang=en.jsonl").write_text("")

    assert _adapters_by_file(["a=f", "b=f", "a2"], adapters) == {"f": [None, "a", "b"], "a2": [None, "a", "b"]}
    assert _adapters_by_file(["f", "a=f"], adapters) == {"f": [None, "a", "b"]}
    assert _adapters_by_file(["lang=en.jsonl"], {}) == {"lang=en.jsonl": [None]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "jso={rows}"], "--data jso: no such adapter (loaded: none; --data {rows} scores the base alone)"),
        (["--adapter", "json=p", "--data", "jso={rows}"], "--data jso: no such adapter (loaded: json). Nearest: 'json'."),
        (["--data", "no.jsonl"], "data: no.jsonl: no such file or folder"),
        (["--data", "{rows}", "--predictions", "{rows}"], "--predictions: {rows} exists already"),
        (["--data", "{rows}", "--predictions", "no/p.jsonl"], "--predictions: no is no folder that can be written to"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_the_base_is_loaded(
    arguments: list[str], message: str, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = rows.read_bytes()
    code, lines, err = said(capsys, "score", "no-such-base", *(part.format(rows=rows) for part in arguments))
    assert (code, lines) == (2, [])
    assert message.format(rows=rows) in err
    assert rows.read_bytes() == before


def test_rows_of_weight_0_are_left_out_and_counted_and_others_count_once(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weighted = [chat("say", "it") | {"weight": weight} for weight in (0, 1, 2.5)]
    rows = write_rows(tmp_path / "rows.jsonl", [*weighted, {"prompt": "say ", "completion": "it", "weight": 0}])

    code, lines, _ = said(capsys, "score", base, "--data", rows, "--predictions", tmp_path / "all.jsonl")

    assert code == 0
    assert table(lines) == [[str(rows), "base", "0", "2", "0.0%"]]
    assert f"2 rows of weight 0 left out of {rows}" in lines
    assert f"1 row with another weight than 1 in {rows}; each counts once here" in lines
    written = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert written[2:] == [{"row": f"{rows}:{line}", "left_out": "weight 0"} for line in (1, 4)]

    write_rows(rows, [chat("say", "it") | {"weight": 0}])
    code, _, err = said(capsys, "score", base, "--data", rows)
    assert (code, err) == (2, f"lorakit score: {rows}: no rows to score, 1 of weight 0\n")


def test_rows_that_cannot_be_asked_stop_it_or_are_left_out_by_name(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "a " * 300, "completion": "b"}, chat("a", "b") | {"grade": 1}]
    )
    asked = ("score", base, "--data", rows)

    code, lines, err = said(capsys, *asked)
    assert (code, lines) == (2, [])
    assert err.startswith("lorakit score:\ndata: 2 of 2 rows cannot be asked:\n")

    code, lines, _ = said(capsys, *asked, "--on-bad-rows", "skip", "--ignore-keys", "grade")
    assert code == 0
    assert table(lines) == [[str(rows), "base", "0", "1", "0.0%"]]
    assert lines[-2] == f"left out 1 of 2 rows of {rows}, which cannot be asked:"
    assert lines[-1].startswith(f"  {rows}:1: prompts: ")


def test_columns_and_a_chat_template_are_given_as_in_a_recipe(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table_file, template, file = tmp_path / "qa.csv", tmp_path / "own.jinja", tmp_path / "answers.jsonl"
    table_file.write_text("question,answer,level\nsay 1,so,1\nsay 2,so so,2\n")
    template.write_text(
        "{% for m in messages %}<|user|>Q {{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|user|>Q {% endif %}"
    )
    asked = ("score", base, "--data", table_file, "--columns", "instruction=question", "output=answer")

    code, lines, _ = said(capsys, *asked, "--chat-template", template, "--predictions", file)
    assert (code, table(lines)) == (0, [[str(table_file), "base", "0", "2", "0.0%"]])
    first = json.loads(file.read_text().splitlines()[0])
    assert first["messages"] == [{"role": "user", "content": "say 1"}]
    assert first["expected"] == "so"

    for wrong, expected in (
        (["--columns", "promt=a"], "--columns 'promt=a': the keys are messages, .* Nearest: 'prompt'"),
        (["--columns", "prompt"], "--columns 'prompt': write each key once, as KEY=COLUMN"),
        (["--columns", "prompt={a"], "--columns prompt: expected '}'"),
        (["--columns", "prompt=a", "completion=answer"], "data.columns.prompt: the row has no 'a'; its columns"),
        (["--chat-template", tmp_path / "absent"], "--chat-template: .*absent: No such file"),
    ):
        code, _, err = said(capsys, "score", base, "--data", table_file, *wrong)
        assert code == 2
        assert re.search(expected, err), err


def test_other_measures_stand_beside_exact_match_and_in_the_predictions(
    base: Path, tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text("def words(predicted, expected):\n    return 12.5\n")
    own, file = f"{tmp_path}/own.py:words", tmp_path / "answers.jsonl"
    code, lines, _ = said(capsys, "score", base, "--data", rows, "--measure", "prefix", "--metric", own,
                          "--predictions", file)  # fmt: skip

    assert code == 0
    assert lines[0].split()[-3:] == ["share", "prefix", "words"]
    assert table(lines) == [[str(rows), "base", "0", "2", "0.0%", "0.0%", "12.5"]]
    assert [(line["prefix"], line["words"]) for line in map(json.loads, file.read_text().splitlines())] == [
        (0.0, 12.5)
    ] * 2
    code, _, err = said(capsys, "score", base, "--data", rows, "--measure", "numeric")
    assert code == 2
    assert "its answer has no number for numeric to compare" in err
