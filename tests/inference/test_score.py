"""Exact match on held-out rows: every row is asked as in use and counted, or named before any is asked."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

import lorakit
from lorakit.data.row_settings import RowSettings
from lorakit.errors import DataError
from lorakit.inference.measures import Answered, chosen_measures
from lorakit.inference.prompts import PromptCodec
from lorakit.inference.score import NO_MEASURES, ScoredFiles, print_scores, score, write_predictions
from lorakit.patch.prompting import PromptForm
from tests.helpers.rows import chat, write_rows

ROOT = Path(__file__).parents[2]
SENTENCE = "Mira from Oslo ordered 3 lamps on Monday."
PLAIN = f"<|user|>{SENTENCE}<|end|><|assistant|>"
SYSTEM = {"role": "system", "content": "Be kind."}
TOOL = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def model() -> Any:
    patches = {name: ROOT / "adapters" / name for name in ("json", "pirate")}
    return lorakit.load("builtin:tiny", patches, dtype="float32")


def answer(model: Any, prompt: Any, adapter: str | None, **how: Any) -> str:
    return str(model.generate([prompt], adapter, max_new_tokens=64, **how)[0])


def scored(model: Any, data: Any, measures: Any = NO_MEASURES, **how: Any) -> tuple[ScoredFiles, list[str]]:
    lines: list[str] = []
    scores = score(model, data, max_new_tokens=64, measures=measures, **how)
    print_scores(scores, measures, lines.append)
    return scores, "\n".join(lines).splitlines()


@pytest.mark.parametrize("adapter", [None, "json"])
def test_a_row_of_any_format_is_right_where_generate_gives_its_answer(
    model: Any, tmp_path: Path, adapter: str | None
) -> None:
    asked, said = chat(SENTENCE, answer(model, SENTENCE, adapter))["messages"]
    kindly = said | {"content": answer(model, [SYSTEM, asked], adapter)}
    rows = [
        {"messages": [asked, said]},
        {"messages": [asked, said, asked]},
        {"messages": [asked, kindly], "system": SYSTEM["content"]},
        {"conversations": [{"from": "human", "value": SENTENCE}, {"from": "gpt", "value": said["content"]}]},
        {"prompt": [asked], "completion": [said]},
        {"instruction": SENTENCE, "output": said["content"]},
        {"prompt": PLAIN, "completion": answer(model, PLAIN, adapter, raw=True) + "\n"},
    ]
    file = str(write_rows(tmp_path / "rows.jsonl", rows))

    scores, lines = scored(model, {file: [adapter]})

    assert [each.correct for each in scores.answers[file, adapter]] == [True] * len(rows)
    assert lines[1].split() == [file, adapter or "base", "7", "7", "100.0%"]


def test_a_row_with_tools_is_asked_with_them(model: Any, tmp_path: Path) -> None:
    shown = model.tokenizer.apply_chat_template(
        chat(SENTENCE, "x")["messages"][:1], tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    said = answer(model, model.tokenizer(shown)["input_ids"], None)
    file = str(write_rows(tmp_path / "rows.jsonl", [chat(SENTENCE, said) | {"tools": [TOOL]}]))

    assert scored(model, {file: [None]})[0].answers[file, None][0].correct
    assert said != answer(model, SENTENCE, None)


def test_every_adapter_of_a_file_has_a_line_and_its_first_wrong_answers(model: Any, tmp_path: Path) -> None:
    rows = [chat(SENTENCE, answer(model, SENTENCE, "json")), *(chat(SENTENCE, f"{i}\n" * 31) for i in range(7))]
    file = str(write_rows(tmp_path / "rows.jsonl", rows))

    _, lines = scored(model, {file: [None, "json", "pirate"]}, settings=RowSettings(limit=7))

    assert [line.split()[1:] for line in lines[1:4]] == [
        ["base", "0", "7", "0.0%"], ["json", "1", "7", "14.3%"], ["pirate", "0", "7", "0.0%"]
    ]  # fmt: skip
    assert lines[5] == f"wrong answers of json on {file}: 6"
    assert lines[6].startswith(f"  {file}:2: expected '0\\n0\\n")
    assert '\'..., got \'{"name": "Mira"' in lines[6]
    assert lines[11] == "  ... and 1 more (--predictions FILE writes all answers)"
    assert lines[13] == f"wrong answers of pirate on {file}: 7"
    assert not any("of the base" in line for line in lines)
    assert max(map(len, lines)) < len(file) + 200


def test_a_wrong_answer_is_cut_where_it_differs(model: Any, tmp_path: Path) -> None:
    right = answer(model, SENTENCE, "json")
    file = str(write_rows(tmp_path / "rows.jsonl", [chat(SENTENCE, right.replace("Monday", "Friday"))]))

    line = scored(model, {file: ["json"]})[1][-1]

    assert "Friday\"}'" in line
    assert "Monday\"}'" in line


UNASKABLE = {
    "nothing to ask": {"text": "hi"},
    "1201 tokens and 64 new ones, and at most 1024 fit this base": {"prompt": "say " * 600, "completion": "x"},
    "its answer has no text": {"prompt": "say", "completion": "<|end|>"},
    "grade: not a key that is read here": chat("a", "b") | {"grade": 3},
    "not JSON": "broken",
}  # fmt: skip


def write_unaskable(path: Path) -> Path:
    write_rows(path, [chat("a", "b"), *UNASKABLE.values()])
    path.write_text(path.read_text().replace('"broken"', "{"))
    return path


def test_rows_that_cannot_be_asked_are_named_together_before_any_is_asked(model: Any, tmp_path: Path) -> None:
    good = write_rows(tmp_path / "good.jsonl", [chat("a", "b")])
    bad = write_unaskable(tmp_path / "bad.jsonl")

    with pytest.raises(DataError, match="data: 5 of 7 rows cannot be asked") as caught:
        score(model, {str(good): [None], str(bad): [None]}, max_new_tokens=64)

    for line, reason in enumerate(UNASKABLE, 2):
        assert any(f"{bad}:{line}: " in said and reason in said for said in str(caught.value).splitlines()), reason


def test_rows_that_cannot_be_asked_for_one_reason_are_a_line(model: Any, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"mesages": chat("a", f"b {i}")["messages"]} for i in range(30)])

    with pytest.raises(DataError) as caught:
        score(model, {str(rows): [None]})

    (line,) = (line for line in str(caught.value).splitlines() if "no row format" in line)
    assert line.startswith(
        f"  30 rows ({rows}:1, {rows}:2, {rows}:3, ...), the first: no row format has the keys mesages"
    )


def test_rows_that_are_left_out_on_request_are_counted_and_named(model: Any, tmp_path: Path) -> None:
    file = str(write_unaskable(tmp_path / "bad.jsonl"))

    scores, lines = scored(model, {file: [None]}, settings=RowSettings(on_bad_rows="skip", ignore_keys=("grade",)))
    write_predictions(tmp_path / "all.jsonl", scores, NO_MEASURES)

    assert [each.row.location for each in scores.answers[file, None]] == [f"{file}:1", f"{file}:5"]
    assert f"left out 4 of 6 rows of {file}, which cannot be asked:" in lines
    written = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    left_out = {line["row"]: line["left_out"] for line in written if "left_out" in line}
    assert list(left_out) == [f"{file}:{line}" for line in (2, 3, 4, 6)]
    assert all(any(f"  {row}: {reason}" == line for line in lines) for row, reason in left_out.items())


def test_a_file_without_a_row_to_ask_is_an_error(model: Any, tmp_path: Path) -> None:
    for rows in ([], [{"text": "hi"}]):
        file = str(write_rows(tmp_path / "rows.jsonl", rows))
        with pytest.raises(DataError, match="no rows to score"):
            scored(model, {file: [None]}, settings=RowSettings(on_bad_rows="skip"))


def test_an_answer_as_long_as_it_may_be_is_never_exact(model: Any, tmp_path: Path) -> None:
    said = answer(model, SENTENCE, "json")
    tokens = len(model.tokenizer(said)["input_ids"])
    file = str(write_rows(tmp_path / "rows.jsonl", [chat(SENTENCE, said)]))

    whole = score(model, {file: ["json"]}, max_new_tokens=tokens + 1).answers[file, "json"][0]
    cut = score(model, {file: ["json"]}, max_new_tokens=tokens).answers[file, "json"][0]

    assert (whole.correct, whole.answer) == (True, Answered(said))
    assert (cut.correct, cut.answer) == (False, Answered(said, cut=True))  # a longer answer would look the same


def test_an_answer_longer_than_allowed_is_asked_and_cut_and_the_summary_says_how_long_it_may_be(
    model: Any, tmp_path: Path
) -> None:
    right = answer(model, SENTENCE, "json")
    rows = [chat(SENTENCE, right), chat(SENTENCE, right + " " + right)]
    file = str(write_rows(tmp_path / "rows.jsonl", rows))
    enough = 1 + max(len(model.tokenizer(row["messages"][1]["content"])["input_ids"]) for row in rows)
    measures = chosen_measures(["exact_match", "prefix"], {})

    lines: list[str] = []
    scores = score(model, {file: ["json"]}, max_new_tokens=5, measures=measures)
    print_scores(scores, measures, lines.append)
    write_predictions(tmp_path / "all.jsonl", scores, measures)

    assert lines[1].split()[1:] == ["json", "0", "2", "0.0%", "0.0%"]
    assert lines[-1] == (
        f"\n{file}: 2 of 2 expected answers are longer than --max-new-tokens 5: their answers are cut, and no exact"
        f" match; {enough} is enough for all"
    )
    assert sum(line.endswith(" (cut at --max-new-tokens)") for line in lines) == 2
    written = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [(line["cut"], line["exact_match"]) for line in written] == [(True, 0.0)] * 2
    assert right.startswith(written[0]["predicted"])
    assert list(score(model, {file: [None]}, max_new_tokens=enough).rows[file].notes(enough, "")) == []


def test_the_last_answers_of_conversations_are_said_to_be_of_more(model: Any, tmp_path: Path) -> None:
    twice = {"messages": chat("say", "so")["messages"] + chat(SENTENCE, "x")["messages"]}
    file = str(write_rows(tmp_path / "rows.jsonl", [twice, chat(SENTENCE, "x")]))
    _, lines = scored(model, {file: [None]})
    assert f"{file}: 2 of 3 answers are asked: the last of each conversation" in lines


def test_every_answer_is_progress(model: Any, tmp_path: Path) -> None:
    file = str(write_rows(tmp_path / "rows.jsonl", [chat(f"say {number}", "x") for number in range(5)]))
    shown: list[tuple[int | None, int | None]] = []

    score(
        model,
        {file: [None, "json"]},
        max_new_tokens=3,
        progress=lambda: nullcontext(lambda done, total: shown.append((done, total))),
    )

    assert shown == [(done, 10) for done in range(1, 11)]


def test_predictions_hold_a_line_for_every_row_and_adapter(model: Any, tmp_path: Path) -> None:
    right = answer(model, SENTENCE, "json")
    rows = [chat(SENTENCE, right), {"prompt": "say", "completion": "x"}, chat("a", "b") | {"tools": [TOOL]}]
    file, out = str(write_rows(tmp_path / "rows.jsonl", rows)), tmp_path / "all.jsonl"

    scores, _ = scored(model, {file: [None, "json"]})
    write_predictions(out, scores, NO_MEASURES)

    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert written[3] == {
        "row": f"{file}:1", "adapter": "json", "messages": chat(SENTENCE, right)["messages"][:1], "expected": right,
        "predicted": right, "correct": True,
    }  # fmt: skip
    assert [line["adapter"] for line in written] == [None] * 3 + ["json"] * 3
    assert [line["correct"] for line in written] == [
        each.correct for each in [*scores.answers[file, None], *scores.answers[file, "json"]]
    ]
    assert (written[1]["prompt"], written[2]["tools"]) == ("say", [TOOL])


def test_generate_takes_token_ids(model: Any) -> None:
    ids = model.prompts.token_ids(SENTENCE, PromptForm())

    assert answer(model, ids, "json") == answer(model, SENTENCE, "json")
    for wrong in ([5, -1], [5, 10**6]):
        with pytest.raises(lorakit.LorakitError, match="the token id (-1|1000000),"):
            answer(model, wrong, None)


def test_a_plain_prompt_has_no_end_token_that_the_tokenizer_appends(model: Any) -> None:
    tokenizer = type(model.tokenizer).from_pretrained(model.tokenizer.name_or_path)
    plain = tokenizer("say it")["input_ids"]
    ends = ("<|end|>", tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A <|end|>", special_tokens=[ends])
    assert tokenizer("say it")["input_ids"] == [*plain, ends[1]]

    codec = PromptCodec(model.model, tokenizer)

    assert codec.token_ids("say it", PromptForm(raw=True)) == plain
