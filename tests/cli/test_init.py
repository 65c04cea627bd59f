"""`lorakit init`: a recipe for a base and rows of any form, which `lorakit check` passes."""

import copy
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from lorakit.cli import main
from lorakit.recipe import load_recipe
from lorakit.training.new_recipe import BaseFacts, free_output, read_sample, recipe_text
from tests.helpers.chat_templates import conversations, tokenizer_for, trl_templates
from tests.helpers.rows import chat, write_rows

FORMS: dict[str, Any] = {
    "messages": lambda i, text: chat(f"say {i}", text),
    "prompt + completion": lambda i, text: {"prompt": f"say {i} ", "completion": text},
    "text": lambda i, text: {"text": f"{i} {text}"},
    "chosen + rejected": lambda i, text: {"prompt": f"say {i} ", "chosen": text, "rejected": f"{text} no"},
    "anchor + positive": lambda i, text: {"anchor": f"say {i}", "positive": text, "negative_1": f"{text} {i}"},
    "instruction + output": lambda i, text: {"instruction": f"say {i}", "input": "", "output": text},
    "conversations": lambda i, text: {
        "id": i, "conversations": [{"from": "human", "value": f"say {i}"}, {"from": "gpt", "value": text}],
    },
}  # fmt: skip


@pytest.fixture
def init(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def run(form: str, number: int, *options: str, length: int = 3, out: str = "r.yaml") -> int:
        write_rows(tmp_path / "rows.jsonl", [FORMS[form](i, "so " * (length + i % 5)) for i in range(number)])
        return main(["init", "--base", str(base), "--data", "rows.jsonl", "--out", out, *options])

    return run


@pytest.mark.parametrize("form", FORMS)
def test_check_passes_the_recipe_of_every_form_of_rows(
    form: str, init: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(form, 40, "--yes") == 0
    text = Path("r.yaml").read_text()
    assert f"# 40 rows of the form {form}; in all of them" in text
    assert "256 positions" in text

    assert main(["check", "r.yaml"]) == 0
    assert "nothing is wrong with this recipe" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("form", "tokens", "template"),
    [
        ("messages", ["<|im_start|>", "<|im_end|>"], "chatml"),
        ("instruction + output", [], "alpaca"),
        ("prompt + completion", [], None),
    ],
)
def test_a_base_without_a_chat_template_gets_one_by_name_where_rows_need_it(
    form: str, tokens: list[str], template: str | None, init: Any, tmp_path: Path, base: Path, tokenizer: Any
) -> None:
    plain = shutil.copytree(base, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    other = copy.deepcopy(tokenizer)
    other.chat_template = None
    words = Tokenizer.from_str(re.sub(r"<\|(\w+)\|>", r"<\1>", other.backend_tokenizer.to_str()))
    renamed = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<start>", eos_token="<end>")
    renamed.add_special_tokens({"additional_special_tokens": tokens})
    renamed.save_pretrained(plain)

    assert init(form, 40, "--yes", "--base", str(plain)) == 0

    recipe = load_recipe("r.yaml")
    assert recipe.data.chat_template == template
    assert (main(["check", "r.yaml"]) == 0) == (not tokens)  # the base has no rows of the tokens that were added


def test_the_longest_row_follows_from_the_rows_and_the_base(init: Any) -> None:
    init("messages", 40, "--output", "runs/a")
    few = load_recipe("r.yaml")
    init("messages", 1001, length=80, out="many.yaml")
    many = load_recipe("many.yaml")

    assert (few.output, many.output) == ("runs/a", "adapters/rows")
    assert (few.data.max_tokens, many.data.max_tokens) == (64, 256)  # the base has no more positions
    assert (few.data.on_long_rows, many.data.on_long_rows) == ("stop", "drop")


def test_a_share_of_many_rows_is_held_out_and_none_of_few(init: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert init("text", 400) == 0
    many = load_recipe("r.yaml")
    assert many.data.eval == 0.05
    assert "eval_every_steps" in many.train.model_fields_set
    assert "eval: 0.05    # about 20 rows held out" in Path("r.yaml").read_text()
    assert main(["check", "r.yaml"]) == 0
    used = dict(re.findall(r"^(rows|held out) +(\d+)", capsys.readouterr().out, re.MULTILINE))
    assert int(used["rows"]) + int(used["held out"]) == 400

    assert init("text", 399, out="few.yaml") == 0
    assert load_recipe("few.yaml").data.eval is None
    assert "# eval: held-out.jsonl    # rows to test with, of your own: 399 are too few" in Path("few.yaml").read_text()


def test_no_share_is_held_out_of_copies_of_a_row(init: Any, tmp_path: Path, base: Path) -> None:
    write_rows(tmp_path / "copies.jsonl", [{"text": "a b c"}] * 500)
    assert main(["init", "--base", str(base), "--data", "copies.jsonl", "--out", "c.yaml"]) == 0
    assert load_recipe("c.yaml").data.eval is None
    assert "# rows to test with, of your own: too many of these are the same" in Path("c.yaml").read_text()
    assert main(["check", "c.yaml"]) == 0


def test_held_out_rows_count_for_the_longest_and_outputs_do_not_meet(init: Any, tmp_path: Path) -> None:
    (tmp_path / "adapters" / "rows").mkdir(parents=True)
    write_rows(tmp_path / "held-out.jsonl", [chat("say", "so " * 100)])
    assert init("messages", 40, "--eval", "held-out.jsonl") == 0

    recipe = load_recipe("r.yaml")
    assert recipe.data.eval == "held-out.jsonl"
    assert recipe.data.max_tokens > 64
    assert recipe.output == "adapters/rows-2"


LABELLED: dict[str, Any] = {
    "classify": lambda i: {"text": f"say {i}", "label": ("yes", "no", "Ünsure")[i % 3]},
    "numbers": lambda i: {**chat(f"say {i}", "so"), "label": i % 3},
    "truth values": lambda i: {"text": f"say {i}", "label": i % 2 == 0},
    "mixed": lambda i: {"text": f"say {i}", "label": (1, "1", "True", None)[i % 4] if i else None},
    "several": lambda i: {"text": f"say {i}", "label": [["a"], [], ["b", "a"]][i % 3]},
    "regression": lambda i: {"text": f"say {i}", "label": i / 2},
    "texts of numbers": lambda i: {"text": f"say {i}", "label": str(i / 2)},
    "a fraction late": lambda i: {"text": f"say {i}", "label": i + (i == 39) / 2},
    "kto": lambda i: {"prompt": f"say {i} ", "completion": "so", "label": i % 2 == 0},
    "kto of numbers": lambda i: {"prompt": f"say {i} ", "completion": "so", "label": i % 2},
}


@pytest.mark.parametrize(
    ("form", "objective"),
    [
        ("classify", {"name": "classify", "labels": ("no", "yes", "Ünsure")}),
        ("numbers", {"name": "classify", "labels": ("0", "1", "2")}),
        ("truth values", {"name": "classify", "labels": ("false", "true")}),
        ("mixed", {"name": "classify", "labels": ("1", "true")}),
        ("several", {"name": "classify", "labels": ("a", "b"), "problem_type": "multi_label_classification"}),
        ("regression", {"name": "classify", "problem_type": "regression"}),
        ("texts of numbers", {"name": "classify", "problem_type": "regression"}),
        ("a fraction late", {"name": "classify", "problem_type": "regression"}),
        ("kto", {"name": "kto", "beta": 0.1}),
        ("kto of numbers", {"name": "kto", "beta": 0.1}),
    ],
)
def test_rows_with_labels_get_their_objective_and_all_labels(
    form: str, objective: dict[str, Any], init: Any, tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "rows.jsonl", [LABELLED[form](number) for number in range(40)])
    assert main(["init", "--base", str(base), "--data", "rows.jsonl", "--eval", "rows.jsonl", "--out", "r.yaml"]) == 0

    assert load_recipe("r.yaml").objective.model_dump() == objective
    skip = ["data.on_bad_rows=skip"] if form == "mixed" else []
    assert main(["check", "r.yaml", *skip, "data.on_shared_rows=count"]) == 0, capsys.readouterr()


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        (lambda i: "same", "label: 1 different ones"),
        (lambda i: {"a": 1}, r"label: \"{'a'"),
        (lambda i: [["a"]], r"label: \"\['a'"),
        (lambda i: [f"label {i % 40}"], "label: more than 31 different ones in lists"),
        (lambda i: i, "label: more than 500 different ones"),
        (lambda i: "p\x7fq", r"label: 'p\\x7fq'"),
        (lambda i: " ", "label: ' '"),
    ],
)
def test_labels_that_are_no_classes_are_refused(
    label: Any, problem: str, init: Any, tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"text": f"say {number}", "label": label(number)} for number in range(1, 601)])
    assert main(["init", "--base", str(base), "--data", "rows.jsonl", "--out", "r.yaml"]) == 2
    assert re.search(problem, capsys.readouterr().err)


def test_the_recipe_trains(init: Any, tmp_path: Path) -> None:
    init("prompt + completion", 30)
    assert main(["train", "r.yaml", "base.dtype=float32", "train.epochs=null", "train.steps=2"]) == 0
    assert json.loads((tmp_path / "adapters" / "rows" / "run.json").read_text())["status"] == "finished"


def test_nothing_is_overwritten_guessed_or_written_of_rows_that_cannot_be_used(
    init: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there.yaml").write_text("mine")
    assert init("text", 3, out="there.yaml") == 2
    assert "--out: there.yaml exists" in capsys.readouterr().err
    assert (tmp_path / "there.yaml").read_text() == "mine"
    assert main(["init", "--out", "new.yaml"]) == 2
    assert "--base and --data missing" in capsys.readouterr().err
    write_rows(tmp_path / "bad.jsonl", [{"text": 5}])
    assert main(["init", "--base", "builtin:tiny", "--data", "bad.jsonl", "--out", "new.yaml"]) == 2
    assert "none of 1 rows of bad.jsonl can be used; the first: bad.jsonl:1: text" in capsys.readouterr().err
    Path("bad.jsonl").write_text("")
    assert main(["init", "--base", "builtin:tiny", "--data", "bad.jsonl", "--out", "new.yaml"]) == 2
    assert "data: bad.jsonl: no rows in it; write a row on each line" in capsys.readouterr().err
    assert not (tmp_path / "new.yaml").exists()


def test_the_columns_of_a_table_are_those_that_are_named_or_known_by_their_names(
    init: Any, tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("qa.csv").write_text("id,question,answer\n" + "".join(f"{i},say {i},so\n" for i in range(9)))
    Path("dolly.csv").write_text("instruction,context,response,system\n" + "say,from here,so,be brief\n" * 9)
    Path("odd.csv").write_text("frage,antwort\nsay,so\n")
    Path("two.csv").write_text("question,query,answer\na,b,c\n")
    write_rows(tmp_path / "usual.jsonl", [{"prompt": "a", "completion": "b", "question": "c"}])

    def written(data: str, *options: str) -> int:
        Path("r.yaml").unlink(missing_ok=True)
        return main(["init", "--base", str(base), "--data", data, "--out", "r.yaml", *options])

    assert written("qa.csv") == 0
    assert load_recipe("r.yaml").data.columns == {"instruction": "question", "output": "answer"}
    assert main(["check", "r.yaml"]) == 0
    checked = capsys.readouterr().out
    assert "say 0<|end|><|assistant|>[[so<|end|>]]" in checked
    assert "id: not read, in 9 rows" in checked
    assert written("dolly.csv") == 0
    columns = {"instruction": "instruction", "input": "context", "system": "system", "output": "response"}
    assert load_recipe("r.yaml").data.columns == columns
    capsys.readouterr()
    assert main(["check", "r.yaml"]) == 0
    first = capsys.readouterr().out
    assert "be brief" in first
    assert "say\nfrom here<|end|>" in first
    assert written("odd.csv", "--columns", "prompt=F: {frage}\n", "completion=antwort") == 0
    assert load_recipe("r.yaml").data.columns == {"prompt": "F: {frage}\n", "completion": "antwort"}
    for data, names in (("odd.csv", "'frage', 'antwort'"), ("two.csv", "'question', 'query', 'answer'")):
        assert written(data) == 2
        assert f"{data}: its columns are {names}; say which is the prompt" in capsys.readouterr().err
    assert written("usual.jsonl") == 2  # its keys are those of rows, so no column is chosen
    assert "none of 1 rows of usual.jsonl" in capsys.readouterr().err


def test_steps_are_of_the_rows_that_turns_become_and_a_switch_of_thinking_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [conversations()["two turns"]] * 20)
    tokenizer = tokenizer_for(trl_templates()["qwen3"])
    rows = read_sample((str(path),), tokenizer)
    assert (rows.count, rows.num_rows) == (20, 40)
    base = BaseFacts("base", "Model", 10**9, 4096)
    text = recipe_text(base, rows, None, "out")
    assert "epochs: 10    # about 30 steps" in text
    assert "\n  # chat_template_kwargs: {enable_thinking: false}    # no row thinks (docs/qwen3.md)\n" in text
    write_rows(path, [conversations()["thinking in content"]])
    assert "enable_thinking" not in recipe_text(base, read_sample((str(path),), tokenizer), None, "out")


def test_some_bad_rows_are_named_in_the_recipe(init: Any, tmp_path: Path, base: Path) -> None:
    write_rows(tmp_path / "mixed.jsonl", [{"text": "a b c"}, {"txt": "a"}])
    assert main(["init", "--base", str(base), "--data", "mixed.jsonl", "--out", "m.yaml"]) == 0
    assert "the first: mixed.jsonl:2: no row format has the keys txt" in Path("m.yaml").read_text()


def test_rows_to_mend_are_the_next_step(init: Any, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(train: list[Any], held_out: list[Any]) -> str:
        write_rows(Path("mine.jsonl"), train)
        write_rows(Path("others.jsonl"), held_out)
        rows = ["--data", "mine.jsonl", "--eval", "others.jsonl"]
        assert main(["init", "--base", str(base), *rows, "--out", "m.yaml"]) == 0
        Path("m.yaml").unlink()
        return capsys.readouterr().out

    good = {"text": "a b c"}
    assert "next: lorakit check m.yaml, then lorakit train m.yaml" in said([good] * 3, [good])
    for train, held_out, note in (
        ([good, {"txt": "a"}, 3], [good], "note: 2 of 3 sampled rows cannot be used; the first: mine.jsonl:2: no row"),
        ([good], [good, {"txt": "a"}], "note: 1 of 2 sampled rows cannot be used; the first: others.jsonl:2: no row"),
    ):
        text = said(train, held_out)
        assert note in text
        assert "next: mend the rows of the notes, then lorakit check m.yaml, then" in text


def test_in_a_terminal_it_asks_for_what_is_missing(
    init: Any, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    write_rows(tmp_path / "rows.jsonl", [chat("hi", "yes")])
    monkeypatch.setattr("sys.stdin", Terminal(f"{base}\n"))
    assert main(["init"]) == 2
    assert "the input ended; nothing was written" in capsys.readouterr().err
    assert main(["init", "--yes"]) == 2
    assert "--base and --data missing" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", Terminal(f"{base}\nrows.jsonl\n"))
    assert main(["init"]) == 0
    assert load_recipe("recipe.yaml").base.model == str(base)


def test_a_shipped_recipe_is_copied_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--from", "coming-from/trl", "--out", "t.yaml"]) == 0
    assert load_recipe("t.yaml").train.log_to == ("tensorboard",)
    assert main(["init", "--from", "quickstart", "--out", "q.yaml"]) == 0
    assert load_recipe("q.yaml").base.model == "builtin:tiny"
    assert main(["init", "--from", "quikstart", "--out", "new.yaml"]) == 2
    assert "Nearest: 'quickstart'" in capsys.readouterr().err


def test_an_empty_recipe_is_told_of_init(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert main(["check", str(tmp_path / "empty.yaml")]) == 2
    assert "`lorakit init` writes a recipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "output"),
    [
        ("x/rows.jsonl.gz", "rows"),
        ("sets/*.parquet", "sets"),
        ("sets/**/[ab].csv", "sets"),
        ("**/*.json", "mine"),
        (".", "mine"),
    ],
)
def test_a_run_is_named_after_its_rows(data: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert free_output(data) == f"adapters/{output}"
