"""Runs that train a classifier or a reward: what they learn, what reads it, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import lorakit
from lorakit.cli import main
from lorakit.data.head_labels import HeadLabels
from lorakit.data.row_settings import RowSettings
from lorakit.errors import DataError, LorakitError, MergeError, PatchError, RecipeError
from lorakit.patch import read_patch
from lorakit.patch.own_head import own_head
from lorakit.recipe import load_recipe
from lorakit.recipe.objective import ProblemType
from lorakit.run.metrics import read_metrics
from tests.helpers.patches import make_patch
from tests.helpers.rows import tokenize_rows, write_rows
from tests.helpers.training import losses, train, train_in_two_processes, train_through_stops

Recipe = Callable[..., Path]
TENSORS = "adapter_model.safetensors"
SEVERAL: ProblemType = "multi_label_classification"
SINGLE: ProblemType = "single_label_classification"
LABELS = ["weather", "music", "timer"]
TRAIN = {"steps": 16, "batch_size": 6, "micro_batch_size": 4, "eval_every_steps": 8, "save_every_steps": 4}
TEXTS = {"weather": "will it rain on day {}", "music": "play song {}", "timer": "wake me in {} minutes"}


def labelled_rows(numbers: range) -> list[dict[str, Any]]:
    return [{"text": TEXTS[label].format(number), "label": label} for number in numbers for label in LABELS]


def conversation(number: int, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"say {number}"}, {"role": "assistant", "content": answer}]


@pytest.fixture
def classifier(recipe: Recipe, tmp_path: Path) -> Recipe:
    """A recipe of a classifier of three labels."""
    data = {
        "train": str(write_rows(tmp_path / "rows.jsonl", labelled_rows(range(12)))),
        "eval": str(write_rows(tmp_path / "held-out.jsonl", labelled_rows(range(12, 16)))),
    }

    def write(name: str = "recipe.yaml", **sections: Any) -> Path:
        settings = {"train": {**TRAIN, **sections.pop("train", {})}, "data": data}
        settings["objective"] = {"name": "classify", "labels": LABELS}
        return recipe(name, **{**settings, **sections})

    return write


@pytest.fixture
def reward(recipe: Recipe, tmp_path: Path) -> Recipe:
    """A recipe of a reward for politeness."""
    rows = [
        {
            "prompt": conversation(number, "")[:1],
            "chosen": conversation(number, f"gladly, {number}" + " please" * (number % 3))[1:],
            "rejected": conversation(number, f"no {number}")[1:],
        }
        for number in range(20)
    ]
    data = {
        "train": str(write_rows(tmp_path / "pairs.jsonl", rows[:16])),
        "eval": str(write_rows(tmp_path / "held-out-pairs.jsonl", rows[16:])),
    }
    return lambda **sections: recipe(**{"train": TRAIN, "data": data, "objective": {"name": "reward"}, **sections})


def evals(out: Path) -> list[dict[str, float]]:
    return [line for line in read_metrics(out / "metrics.jsonl") if "eval_loss" in line]


def tensors(out: Path) -> bytes:
    return (out / TENSORS).read_bytes()


def peft_values(base: Path, out: Path, num_labels: int, ids: list[int]) -> torch.Tensor:
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=num_labels, dtype=torch.float32)
    peft = PeftModel.from_pretrained(classifier, out).eval()
    with torch.no_grad():
        logits: torch.Tensor = peft(input_ids=torch.tensor([ids])).logits[0]
    return logits


def test_a_classifier_is_learned_and_is_what_peft_and_the_merged_model_say(
    classifier: Recipe, base: Path, tmp_path: Path
) -> None:
    out, said = train(classifier())

    first, *_, last = evals(out)
    assert last["eval_accuracy"] == 1
    assert last["eval_loss"] < first["eval_loss"] / 4
    assert "new head" in said
    results = json.loads((out / "run.json").read_text())["results"]
    assert results["eval_loss_start"] == first["eval_loss"]
    assert "eval_loss_base" not in results
    assert "perplexity" not in said
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    model = lorakit.load(base, {"intent": out}, dtype="float32")
    texts = ["will it rain on day 3", "play song 99 once more please", "wake me"]
    answers = model.classify(texts, "intent")
    assert [answer.label for answer in answers] == ["weather", "music", "timer"]

    lorakit.merge(base, out, out=tmp_path / "merged", dtype="float32")
    merged, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert merged.config.id2label == dict(enumerate(LABELS))
    tokenizer = AutoTokenizer.from_pretrained(base)
    for text, answer in zip(texts, answers, strict=True):
        ids = tokenizer(text)["input_ids"]
        ours = torch.tensor(list(answer.probabilities.values()))
        torch.testing.assert_close(ours, peft_values(base, out, 3, ids).softmax(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours, merged(torch.tensor([ids])).logits[0].softmax(0), rtol=1e-4, atol=1e-5)
    with pytest.raises(LorakitError, match="is a classifier or gives rewards"):
        lorakit.load(tmp_path / "merged")


def test_a_reward_is_learned_from_pairs_and_is_what_peft_says(
    reward: Recipe, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = train(reward())

    assert evals(out)[-1]["eval_rewards/accuracies"] == 1
    assert "eval_logps/chosen" not in evals(out)[-1]
    model = lorakit.load(base, {"polite": out}, dtype="float32")
    rows = [conversation(7, "gladly, 7"), conversation(7, "no 7")]
    rewards = model.reward(rows, "polite")
    assert rewards[0] > rewards[1]
    ids = AutoTokenizer.from_pretrained(base).apply_chat_template(rows[0], return_dict=True)["input_ids"]
    assert rewards[0] == pytest.approx(float(peft_values(base, out, 1, ids)), rel=1e-5)

    pairs = tmp_path / "held-out-pairs.jsonl"
    assert main(["score", str(base), "--adapter", f"a={out}", "--data", str(pairs), "--dtype", "float32"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table[1][1:4] == ["a", "4", "100.0%"]


def test_rows_with_several_labels_or_none_are_learned(
    classifier: Recipe, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [[label for index, label in enumerate(LABELS) if number >> index & 1] for number in range(8)]
    rows = [{"text": " and ".join(TEXTS[label].format(3) for label in own) or "hi", "label": own} for own in asked]
    file = str(write_rows(tmp_path / "several.jsonl", rows))
    objective = {"name": "classify", "labels": LABELS, "problem_type": "multi_label_classification"}
    train_section = TRAIN | {"steps": 60, "batch_size": 8, "learning_rate": 1e-2}
    path = classifier(objective=objective, data={"train": file, "eval": file}, train=train_section)
    assert main(["check", str(path), "--row", f"{file}:4"]) == 0
    assert "and play song 3[[weather, music]]" in capsys.readouterr().out
    out, _ = train(path)
    assert evals(out)[-1]["eval_accuracy"] == 1
    model = lorakit.load(base, {"a": out}, dtype="float32")
    texts = [row["text"] for row in rows]

    answers = model.classify(texts, "a")

    assert [list(answer.labels) for answer in answers] == asked
    assert [str(answers[number]) for number in (0, 1)] == [
        "no label",
        f"weather  {answers[1].probabilities['weather']:.3f}",
    ]
    lorakit.merge(base, out, out=tmp_path / "merged", dtype="float32")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert merged.config.problem_type == "multi_label_classification"
    ids = AutoTokenizer.from_pretrained(base)(texts[3])["input_ids"]
    ours = torch.tensor(list(answers[3].probabilities.values()))
    torch.testing.assert_close(ours, merged(torch.tensor([ids])).logits[0].sigmoid(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours, peft_values(base, out, 3, ids).sigmoid(), rtol=1e-4, atol=1e-5)
    capsys.readouterr()
    predictions = tmp_path / "answers.jsonl"
    command = ["score", str(base), "--adapter", f"a={out}", "--data", file, "--predictions", str(predictions)]
    assert main([*command, "--dtype", "float32"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table[1][1:5] == ["a", "8", "100.0%", "1.000"]
    assert ["music", "4", "1.000", "1.000", "1.000"] in table
    assert json.loads(predictions.read_text().splitlines()[3])["predicted"] == LABELS[:2]


def test_numbers_are_learned_and_scored_by_their_errors(
    classifier: Recipe, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"play song {number}", "label": number / 4 - 0.5} for number in range(6)]
    file = str(write_rows(tmp_path / "numbers.jsonl", rows))
    objective = {"name": "classify", "problem_type": "regression"}
    train_section = TRAIN | {"steps": 60, "learning_rate": 1e-2}
    out, said = train(classifier(objective=objective, data={"train": file, "eval": file}, train=train_section))
    assert "accuracy" not in said
    assert evals(out)[-1]["eval_loss"] < 0.02
    model = lorakit.load(base, {"a": out}, dtype="float32")
    values = model.reward([row["text"] for row in rows], "a")
    squares = [(value - row["label"]) ** 2 for value, row in zip(values, rows, strict=True)]
    assert sum(squares) / 6 == pytest.approx(evals(out)[-1]["eval_loss"], rel=1e-3)
    with pytest.raises(LorakitError, match="gives a number"):
        model.classify(["hi"], "a")
    lorakit.merge(base, out, out=tmp_path / "merged", dtype="float32")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert (merged.config.problem_type, merged.config.num_labels) == ("regression", 1)
    capsys.readouterr()
    assert main(["score", str(base), "--adapter", f"a={out}", "--data", file, "--dtype", "float32"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table[0][-2:] == ["RMSE", "correlation"]
    assert float(table[1][3]) == pytest.approx((sum(squares) / 6) ** 0.5, abs=1e-3)
    assert float(table[1][4]) > 0.9


@pytest.mark.parametrize("steps", [{1}, pytest.param({5, 9}, marks=pytest.mark.matrix)], ids=str)
def test_a_run_that_was_stopped_ends_in_the_same_bytes(
    classifier: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: set[int]
) -> None:
    whole, _ = train(classifier(output=str(tmp_path / "whole")))
    out, _ = train_through_stops(classifier(), monkeypatch, steps)

    assert tensors(out) == tensors(whole)


@pytest.mark.spread
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.backend=ddp", "parallel.sequence=2"),
        pytest.param(("parallel.backend=zero3",), marks=pytest.mark.matrix),
        pytest.param(("parallel.backend=fsdp2",), marks=pytest.mark.matrix),
        pytest.param(("parallel.backend=ddp", "parallel.tensor=2"), marks=pytest.mark.matrix),
    ],
    ids=" ".join,
)
def test_two_processes_learn_what_one_does(classifier: Recipe, tmp_path: Path, layout: tuple[str, ...]) -> None:
    alone, _ = train(classifier(output=str(tmp_path / "alone")))
    assert losses(train_in_two_processes(classifier(), *layout)) == pytest.approx(losses(alone), rel=1e-4, abs=1e-6)


def test_adapters_with_and_without_heads_share_a_base(classifier: Recipe, base: Path, tmp_path: Path) -> None:
    intent, _ = train(classifier())
    other = {"name": "classify", "labels": [1, 0]}
    rows = [{"text": f"{number}", "label": int(number > 4)} for number in range(10)]
    file = str(write_rows(tmp_path / "numbers.jsonl", rows))
    data = {"train": file, "eval": file}
    number, _ = train(classifier("other.yaml", data=data, objective=other, output=str(tmp_path / "number")))
    plain = make_patch(base, tmp_path / "plain")
    model = lorakit.load(base, {"intent": intent, "number": number, "plain": plain}, dtype="float32")
    texts = ["play song 1", "7", "wake me in 3 minutes"]
    names = ["intent", "number", "intent"]

    together = model.classify(texts, names)

    assert [list(answer.probabilities) for answer in together] == [LABELS, ["1", "0"], LABELS]
    for text, name, answer in zip(texts, names, together, strict=True):
        alone = model.classify([text], name)[0].probabilities
        assert answer.probabilities == pytest.approx(alone, rel=1e-5, abs=1e-7)
    for call, message in (
        (lambda: model.generate(["hi"], "intent"), "answers no prompts, it classifies"),
        (lambda: model.classify(["hi"], "plain"), "has no head of its own"),
        (lambda: model.classify(["hi"], None), "has no head of its own"),
        (lambda: model.reward(["hi"], "intent"), "has labels"),
        (lambda: model.classify([""], "intent"), "has no tokens"),
        (lambda: model.classify("hi", "intent"), "a list of prompts"),
        (lambda: model.merged("intent").__enter__(), "has a head of its own"),
        (lambda: model.classify(["hi " * 200], "intent"), "fit this base"),
    ):
        with pytest.raises(LorakitError, match=message):
            call()
    for others in ((number,), (plain,)):
        with pytest.raises(MergeError, match="merged without other patches"):
            lorakit.merge(base, intent, *others, out=tmp_path / "both")


def test_score_says_which_labels_are_taken_for_which(
    classifier: Recipe, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = train(classifier())
    wrong = {"text": TEXTS["music"].format(5), "label": "timer"}
    file = write_rows(tmp_path / "asked.jsonl", [*labelled_rows(range(20, 23)), wrong])
    answers = tmp_path / "answers.jsonl"
    capsys.readouterr()

    command = ["score", base, "--adapter", f"a={out}", "--data", file, "--dtype", "float32", "--predictions", answers]
    picture = tmp_path / "confusion.png"
    assert main([*map(str, command), "--confusion", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")

    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table[1][1:5] == ["a", "10", "90.0%", "0.905"]
    rows = {line[0]: line[1:] for line in table if line and line[0] in LABELS}
    assert rows["timer"] == ["4", "1.000", "0.750", "0.857", "0", "1", "3"]
    assert rows["music"] == ["3", "0.750", "1.000", "0.857", "0", "3", "0"]
    last = json.loads(answers.read_text().splitlines()[-1])
    assert last == {"row": f"{file}:10", "adapter": "a", "expected": "timer", "predicted": "music"}
    file.write_text('{"text": "no label"}\n')
    assert main(list(map(str, command[:-2]))) == 2
    assert "label: one of objective.labels" in capsys.readouterr().err


def test_a_long_text_is_cut_before_its_label(tokenizer: Any, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"text": "one two three four five six", "label": 1}])
    settings = RowSettings(5, on_long_rows="truncate", labels=("0", "1"), problem_type=SINGLE)

    rows = tokenize_rows(str(file), "train", tokenizer, settings)

    ids = tokenizer("one two three four five six")["input_ids"]
    assert rows.ids(0).tolist() == [*ids[:4], 1]
    assert rows.label_mask(0).tolist() == [False] * 4 + [True]


CHAT = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "3"}]


@pytest.mark.parametrize(
    "row",
    [{"text": "one two"}, {"messages": CHAT[:1]}, {"messages": CHAT}, {"instruction": "one", "output": "two"},
     {"prompt": "one", "completion": " two"}, {"input_ids": [5, 6, 7], "mask": [0, 1, 0]}, {"text": "one", "weight": 2}],
    ids=str,
)  # fmt: skip
def test_rows_of_every_format_have_their_label_after_all_of_the_text(
    base: Path, tokenizer: Any, tmp_path: Path, row: dict[str, Any]
) -> None:
    labels = ("a", "b", "c", "d", "e")
    file = write_rows(tmp_path / "rows.jsonl", [row | {"label": label} for label in labels])

    rows = tokenize_rows(str(file), "train", tokenizer, RowSettings(labels=labels, problem_type=SINGLE))

    messages = row.get("messages") or ([*CHAT[:2]] if "instruction" in row else None)
    shown = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"] if messages else None
    text = row.get("text", "one two")
    expected = row.get("input_ids") or shown or tokenizer(text)["input_ids"]
    for number in range(len(labels)):
        assert rows.ids(number).tolist() == [*expected, number]
        assert rows.label_mask(number).tolist() == [False] * len(expected) + [True]
    if given := messages or row.get("input_ids"):
        assert lorakit.load(base, dtype="float32").prompts.row_ids(given) == expected


def test_token_rows_with_weights_and_rows_of_two_forms_are_refused(
    classifier: Recipe, tokenizer: Any, tmp_path: Path
) -> None:
    row = {"input_ids": [5, 6], "mask": [0, 1], "weights": [1, 0.5], "label": "music"}
    file = write_rows(tmp_path / "tokens.jsonl", [row])
    with pytest.raises(DataError, match="weights: of tokens"):
        tokenize_rows(str(file), "train", tokenizer, RowSettings(labels=tuple(LABELS), problem_type=SINGLE))
    mixed = [*labelled_rows(range(2)), {"messages": CHAT, "label": "music"}]
    file = write_rows(tmp_path / "mixed.jsonl", mixed)
    with pytest.raises(LorakitError, match="some rows are texts and others conversations"):
        train(classifier(data={"train": str(file), "eval": str(file)}))


def test_heads_beside_adapters_of_the_output_head_are_refused_before_a_step(classifier: Recipe) -> None:
    for adapter in ({"targets": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}):
        with pytest.raises(LorakitError, match="output head of LlamaForCausalLM is not used"):
            train(classifier(adapter=adapter))


@pytest.mark.parametrize(
    ("row", "label"),
    [({"label": "b"}, "b"), ({"label": 3}, "3"), ({"label": True}, "true"), ({"label": "True"}, "true"),
     ({"label": 3.0}, "3"), ({"label": " b"}, None),
     ({"label": None}, None), ({}, None), ({"label": ["b"]}, None), ({"label": 3.5}, None)],
    ids=str,
)  # fmt: skip
def test_a_label_is_one_of_the_recipes_or_its_row_is_named(
    tokenizer: Any, tmp_path: Path, row: dict[str, Any], label: str | None
) -> None:
    labels = ("a", "b", "3", "true")
    file = write_rows(tmp_path / "rows.jsonl", [{"text": "hello", **row}])

    def read() -> int:
        return int(
            tokenize_rows(str(file), "train", tokenizer, RowSettings(labels=labels, problem_type=SINGLE)).ids(0)[-1]
        )

    if label is not None:
        assert read() == labels.index(label)
        return
    with pytest.raises(DataError, match=r"rows.jsonl:1.*label: one of objective.labels \(a, b, 3, true\) expected"):
        read()


@pytest.mark.parametrize(
    ("kind", "label"),
    [
        *[(SEVERAL, label) for label in ("a", None, ["c"], ["a", 3], {"a": 1}, [["a"]], True)],
        *[("regression", label) for label in ("a", None, True, [1.0], "nan", "inf", 1e39, "")],
    ],
)
def test_a_label_of_another_type_is_named(tokenizer: Any, tmp_path: Path, kind: ProblemType, label: Any) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"text": "one", "label": label}])
    with pytest.raises(DataError, match=r"rows.jsonl:1.*label: a (list of objective.labels|number)"):
        tokenize_rows(str(file), "train", tokenizer, RowSettings(labels=("a", "b"), problem_type=kind))


@given(st.lists(st.integers(0, 30), unique=True), st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_the_number_of_a_label_says_which_it_is(places: list[int], number: float) -> None:
    names = tuple(f"label {index}" for index in range(31))
    several = HeadLabels(names, SEVERAL)
    assert several.label(several.number([names[place] for place in places])) == tuple(names[i] for i in sorted(places))
    of_numbers = HeadLabels((), "regression")
    assert of_numbers.label(of_numbers.number(number)) == number
    assert -(2**31) <= of_numbers.number(number) < 2**31


@pytest.mark.matrix
def test_a_run_starts_from_a_classifier_of_the_same_labels_alone(
    classifier: Recipe, base: Path, tmp_path: Path
) -> None:
    first, _ = train(classifier(output=str(tmp_path / "first")))
    adapter = {"start_from": str(first), "rank": 4, "dropout": 0.0}
    out, _ = train(classifier(adapter=adapter))
    assert evals(out)[0]["eval_loss"] == pytest.approx(evals(first)[-1]["eval_loss"], rel=1e-4)

    other = {"name": "classify", "labels": LABELS[::-1]}
    with pytest.raises(PatchError, match="its labels are"):
        train(classifier("other.yaml", adapter=adapter, objective=other, output=str(tmp_path / "other")))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"objective": {"name": "classify"}}, "labels: name the labels that the rows have"),
        ({"objective": {"name": "classify", "labels": ["a"]}}, "objective.labels"),
        ({"objective": {"name": "classify", "labels": ["a", "a"]}}, "labels: one is named twice"),
        ({"objective": {"name": "classify", "labels": ["a", "b"], "problem_type": "regression"}}, "none of regression"),
        ({"objective": {"name": "classify", "problem_type": SEVERAL}}, "labels: name the labels that the rows have"),
        ({"objective": {"name": "classify", "problem_type": SEVERAL, "labels": list(range(32))}}, "up to 31"),
        ({"objective": {"name": "reward", "problem_type": "regression"}}, "problem_type: goes with classify"),
        ({"objective": {"name": "sft", "labels": ["a", "b"]}}, "labels: goes with classify"),
        ({"objective": {"name": "reward", "beta": 1.0}}, "beta: goes with dpo"),
        ({"data": {"train": "a", "on_long_rows": "split"}}, "goes with objective sft, got classify"),
        ({"train": {"eval_generate": 1}}, "train.eval_generate: goes with objective sft, got classify"),
        ({"parallel": {"backend": "ddp", "processes": 2, "pipeline": 2}}, "parallel.pipeline: 2: not with objective"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_go_with_a_head_is_refused(classifier: Recipe, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(classifier(**sections))
    assert message in str(caught.value)


def test_check_and_show_name_the_labels(classifier: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    path = classifier(objective={"name": "classify", "labels": LABELS})
    assert main(["check", str(path)]) == 0
    assert "will it rain on day 0[[weather]]" in capsys.readouterr().out
    out, _ = train(path)
    assert main(["show", str(out)]) == 0
    assert "labels       weather, music, timer" in capsys.readouterr().out
    assert "model.classify(" in (out / "README.md").read_text()


def test_a_patch_of_peft_has_transformers_names_of_labels(base: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"])
    get_peft_model(classifier, config).save_pretrained(tmp_path / "peft")

    head = own_head(read_patch(tmp_path / "peft"))
    model = lorakit.load(base, {"a": tmp_path / "peft"}, dtype="float32")

    assert head is not None
    assert head.labels == ("LABEL_0", "LABEL_1")
    ids = model.tokenizer("hello")["input_ids"]
    with torch.no_grad():
        expected = classifier(input_ids=torch.tensor([ids])).logits[0].softmax(0)
    assert list(model.classify(["hello"], "a")[0].probabilities.values()) == pytest.approx(expected.tolist(), rel=1e-5)


def test_a_head_is_refused_where_it_does_not_belong(classifier: Recipe, base: Path, tmp_path: Path) -> None:
    out, _ = train(classifier())

    def load(**changed: torch.Tensor) -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(out, folder)
        (folder / "lorakit.json").unlink()
        tensors = load_file(out / TENSORS) | {f"base_model.model.{key}.weight": value for key, value in changed.items()}
        with safe_open(out / TENSORS, "pt") as file:
            save_file(tensors, folder / TENSORS, metadata=file.metadata())
        lorakit.load(base, {"a": folder})

    load()
    for weight, message in (
        (torch.zeros(2, 32), "a head of 2 values, and its recipe has 3 labels"),
        (torch.zeros(3), "a head of 3 values"),
        (torch.zeros(3, 31), "its head is for 31 values, the base has 32"),
        (torch.full((3, 32), torch.nan), "not finite"),
    ):
        with pytest.raises(PatchError, match=message):
            load(score=weight)
    with pytest.raises(PatchError, match="has a head of its own"):
        lorakit.combine((out, 1.0), (make_patch(base, tmp_path / "plain"), 1.0), out=tmp_path / "both")
    assert main(["export", str(base), "--adapter", f"a={out}", "--vllm", "--out", str(tmp_path / "run.sh")]) == 2


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_head_for_a_classifiers_own_folder_replaces_its_head(base: Path, tmp_path: Path, prefix: str) -> None:
    from peft import LoraConfig, get_peft_model

    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    classifier.save_pretrained(tmp_path / "folder")
    stored = {
        f"{prefix}{name}": tensor for name, tensor in load_file(tmp_path / "folder" / "model.safetensors").items()
    }
    save_file(stored, tmp_path / "folder" / "model.safetensors", metadata={"format": "pt"})
    model = get_peft_model(classifier, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"]))
    trained = model.base_model.model.score.modules_to_save["default"].weight
    trained.data.fill_(0.5)
    model.save_pretrained(tmp_path / "peft")

    lorakit.merge(tmp_path / "folder", tmp_path / "peft", out=tmp_path / "merged")

    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == stored.keys()
    assert torch.equal(merged[f"{prefix}score.weight"], trained.data)
