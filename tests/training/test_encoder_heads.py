"""Classifiers and rerankers of encoders, such as BERT: transformers' classes are the oracle, with PEFT and merged."""

import inspect
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import lorakit
from lorakit.cli import main
from lorakit.errors import LorakitError, PatchError
from lorakit.ops.encoder_head import EncoderHead
from lorakit.run.metrics import read_metrics
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from tests.helpers.bases import make_encoder
from tests.helpers.http_server import serving
from tests.helpers.rows import write_rows
from tests.helpers.training import train, train_in_two_processes

Recipe = Callable[..., Path]
MATRIX = pytest.mark.matrix
LABELS = ["sale", "had", "bought"]
TEXTS = {"sale": "who sold {} lamps?", "had": "somebody had {} melons and shoes", "bought": "somebody bought {} boats"}
THINGS = ("lamps", "melons", "boats")
QUESTIONS = [(f"who sold {thing}?", f"somebody had {other}") for thing in THINGS for other in THINGS]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def texts_of(numbers: range) -> list[str]:
    return [TEXTS[label].format(number) for number in numbers for label in LABELS]


def labelled(numbers: range, label: Callable[[int, int], Any]) -> list[dict[str, Any]]:
    """Rows of the texts. label: (index of the kind, number) -> label of a row."""
    places = [(kind, number) for number in numbers for kind in range(len(LABELS))]
    return [{"text": TEXTS[LABELS[kind]].format(number), "label": label(kind, number)} for kind, number in places]


@pytest.fixture
def classifier(recipe: Recipe, tmp_path: Path) -> Recipe:
    """A recipe of a classifier of an encoder. label: of the rows, by the index of their kind and their number."""

    def write(
        base: Path,
        label: Callable[[int, int], Any] = lambda kind, number: LABELS[kind],
        objective: dict[str, Any] | None = None,
        rows: Sequence[dict[str, Any]] = (),
        **sections: Any,
    ) -> Path:
        held_out = rows or labelled(range(12, 15), label)
        data = {
            "train": str(write_rows(tmp_path / "rows.jsonl", rows or labelled(range(8), label))),
            "eval": str(write_rows(tmp_path / "held-out.jsonl", held_out)),
        }
        steps = {"steps": 8, "batch_size": 6, "micro_batch_size": 4, "eval_every_steps": 8, "learning_rate": 0.01}
        settings = {"train": {**steps, **sections.pop("train", {})}, "data": data}
        settings["objective"] = objective or {"name": "classify", "labels": LABELS}
        return recipe(base={"model": str(base), "dtype": "float32"}, **settings, **sections)

    return write


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return make_encoder(tmp_path / "bert")


def last_eval(out: Path) -> dict[str, float]:
    return [line for line in read_metrics(out / "metrics.jsonl") if "eval_loss" in line][-1]


def logits_of(model: Any, base: Path, texts: Sequence[Any]) -> torch.Tensor:
    """The logits of transformers' class for each text or pair of texts, as its users ask it."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    inputs = [tokenizer(*([text] if isinstance(text, str) else text), return_tensors="pt") for text in texts]
    takes_types = "token_type_ids" in inspect.signature(model.get_base_model().forward).parameters
    with torch.no_grad():
        rows = [{key: one[key] for key in one if takes_types or key != "token_type_ids"} for one in inputs]
        return torch.cat([model(**row).logits for row in rows])


def in_peft(base: Path, out: Path, num_labels: int) -> Any:
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=num_labels, dtype=torch.float32)
    return PeftModel.from_pretrained(model, out).eval()


def merged(base: Path, out: Path, to: Path) -> Any:
    """The merged model in PEFT's wrapper, of which `logits_of` asks it."""
    folder = lorakit.merge(base, out, out=to, dtype="float32")
    model, report = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    model.eval().get_base_model = lambda: model
    return model


@pytest.mark.parametrize(
    ("kind", "with_head"),
    [
        ("bert", False),
        ("modernbert", True),
        *(
            pytest.param(kind, with_head, marks=MATRIX)
            for kind in ("bert", "roberta", "distilbert", "electra", "mpnet", "deberta-v2", "xlm-roberta")
            for with_head in (False, True)
        ),
    ],
)
def test_an_encoders_classifier_is_what_peft_and_the_merged_model_say(
    classifier: Recipe, tmp_path: Path, kind: str, with_head: bool
) -> None:
    """Its held-out loss too: neither padding nor the number of a label is seen by a token."""
    base = make_encoder(tmp_path / kind, kind, with_head=with_head)
    out, said = train(classifier(base))

    assert "new head" in said
    theirs = in_peft(base, out, 3)
    reference = logits_of(theirs, base, texts_of(range(12, 15)))
    expected = torch.nn.functional.cross_entropy(reference, torch.arange(9) % 3)
    assert last_eval(out)["eval_loss"] == pytest.approx(float(expected), rel=1e-4)
    model = lorakit.load(base, {"a": out}, dtype="float32")
    texts = [*texts_of(range(15, 18)), "sold sold sold and somebody had them"]
    ours = torch.tensor([list(one.probabilities.values()) for one in model.classify(texts, "a")])
    torch.testing.assert_close(ours, logits_of(theirs, base, texts).softmax(1), rtol=1e-5, atol=1e-6)
    full = merged(base, out, tmp_path / "merged")
    torch.testing.assert_close(ours, logits_of(full, base, texts).softmax(1), rtol=1e-4, atol=1e-5)
    assert full.config.id2label == dict(enumerate(LABELS))


@pytest.mark.parametrize(
    ("objective", "label"),
    [
        ({"labels": LABELS, "problem_type": "multi_label_classification"}, lambda kind, _: LABELS[kind:][:2]),
        ({"problem_type": "regression"}, lambda kind, number: kind - number / 4),
    ],
)
def test_several_labels_and_numbers(classifier: Recipe, bert: Path, objective: dict[str, Any], label: Any) -> None:
    out, _ = train(classifier(bert, label, {"name": "classify", **objective}))
    kind = objective["problem_type"]
    reference = logits_of(in_peft(bert, out, 3 if "labels" in objective else 1), bert, texts_of(range(12, 15)))
    rows = labelled(range(12, 15), label)
    if kind == "regression":
        expected = torch.nn.functional.mse_loss(reference[:, 0], torch.tensor([row["label"] for row in rows]))
    else:
        wanted = torch.tensor([[float(one in row["label"]) for one in LABELS] for row in rows])
        expected = torch.nn.functional.binary_cross_entropy_with_logits(reference, wanted)
    assert last_eval(out)["eval_loss"] == pytest.approx(float(expected), rel=1e-4)
    config = json.loads((lorakit.merge(bert, out, out=out.parent / "merged") / "config.json").read_text())
    assert (config["problem_type"], config["architectures"]) == (kind, ["BertForSequenceClassification"])


@pytest.mark.parametrize("kind", ["bert", pytest.param("electra", marks=MATRIX), pytest.param("roberta", marks=MATRIX)])
def test_a_reranker_reads_a_question_and_a_text_as_transformers_does(
    classifier: Recipe, tmp_path: Path, kind: str
) -> None:
    """Between separators, the second one with its `token_type_ids`; in requests of a server too."""
    base = make_encoder(tmp_path / kind, kind)
    rows = [
        {"prompt": question, "completion": text, "label": "yes" if question[9:14] == text[13:18] else "no"}
        for question, text in QUESTIONS
    ]
    out, _ = train(classifier(base, objective={"name": "classify", "labels": ["no", "yes"]}, rows=rows))
    theirs = in_peft(base, out, 2)
    reference = logits_of(theirs, base, QUESTIONS)
    expected = torch.nn.functional.cross_entropy(reference, torch.tensor([int(row["label"] == "yes") for row in rows]))
    assert last_eval(out)["eval_loss"] == pytest.approx(float(expected), rel=1e-4)
    assert not torch.allclose(reference, logits_of(theirs, base, ["".join(pair) for pair in QUESTIONS]), atol=1e-3)

    model = lorakit.load(base, {"a": out}, dtype="float32")
    ours = torch.tensor([list(one.probabilities.values()) for one in model.classify(QUESTIONS, "a")])
    torch.testing.assert_close(ours, reference.softmax(1), rtol=1e-5, atol=1e-6)
    engine = ServingEngine(model)
    question = QUESTIONS[0][0]
    documents = [text for _, text in QUESTIONS[:3]]
    with serving(OpenAIServer(model, engine, kind).app) as url:
        body = {"model": "a", "query": question, "documents": documents}
        ranked = httpx.post(f"{url}/rerank", json=body, timeout=60).json()["results"]
        scored = httpx.post(f"{url}/score", json={"model": "a", "text_1": question, "text_2": documents}, timeout=60)
    engine.close()
    scores = torch.tensor([one["relevance_score"] for one in sorted(ranked, key=lambda one: one["index"])])
    torch.testing.assert_close(scores, ours[:3, 1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor([one["score"] for one in scored.json()["data"]]), scores)
    assert main(["score", str(base), "--adapter", f"a={out}", "--data", f"a={out.parent / 'held-out.jsonl'}"]) == 0


def test_adapters_with_other_heads_and_embeddings_answer_in_one_batch(
    classifier: Recipe, recipe: Recipe, bert: Path, tmp_path: Path
) -> None:
    one, _ = train(classifier(bert, output=str(tmp_path / "one")))
    objective = {"name": "classify", "labels": ["even", "odd"]}
    other, _ = train(
        classifier(bert, lambda _, number: ["even", "odd"][number % 2], objective, output=str(tmp_path / "b"))
    )
    rows = write_rows(tmp_path / "texts.jsonl", [{"anchor": a, "positive": b} for a, b in QUESTIONS])
    base = {"model": str(bert), "dtype": "float32"}
    path = recipe(
        base=base,
        objective={"name": "embed", "pooling": "mean"},
        data={"train": str(rows), "eval": None},
        train={"steps": 1, "warmup_steps": 0},
        output=str(tmp_path / "embed"),
    )
    embed, _ = train(path)

    model = lorakit.load(bert, {"one": one, "other": other, "embed": embed}, dtype="float32")
    texts = [*texts_of(range(2)), *texts_of(range(1))]
    names = ["one", "other", "one", "other", "other", "one", "one", "other", "other"]
    mixed = model.classify(texts, names)
    alone = [model.classify([text], name)[0] for text, name in zip(texts, names, strict=True)]
    assert [each.labels for each in mixed] == [each.labels for each in alone]
    for two, three in zip(mixed, alone, strict=True):
        assert list(two.probabilities.values()) == pytest.approx(list(three.probabilities.values()), abs=1e-6)
    with pytest.raises(LorakitError, match="no head that predicts tokens"):
        model.generate(["hi"], adapters="one")
    assert model.embed(texts, "embed").shape == (9, 32)


def test_commands_take_a_recipe_of_an_encoders_classifier(
    classifier: Recipe, bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = classifier(bert)
    assert main(["check", str(path)]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    assert main(["plan", str(path)]) == 0
    assert re.search(r"micro-batch  4 x \d+ tokens, 4 labels", capsys.readouterr().out)  # padded
    rows = write_rows(tmp_path / "pairs.jsonl", [{"prompt": a, "completion": b, "label": a} for a, b in QUESTIONS * 4])
    assert main(["init", "--base", str(bert), "--data", str(rows), "--out", str(tmp_path / "new.yaml")]) == 0
    assert "name: classify, labels:" in capsys.readouterr().out


def test_a_reward_ranks_texts(classifier: Recipe, bert: Path, tmp_path: Path) -> None:
    pairs = [
        {"prompt": "who sold them? ", "chosen": f"somebody sold {number}", "rejected": f"boats {number}"}
        for number in range(12)
    ]
    out, _ = train(classifier(bert, objective={"name": "reward"}, rows=pairs))
    rewards = lorakit.load(bert, {"a": out}, dtype="float32").reward(
        [("who sold them? ", "somebody sold 3"), ("who sold them? ", "boats 3")], "a"
    )
    reference = logits_of(in_peft(bert, out, 1), bert, [("who sold them? ", "somebody sold 3")])
    assert rewards[0] == pytest.approx(float(reference), abs=1e-5)
    assert rewards[0] > rewards[1]


@pytest.mark.spread
@pytest.mark.parametrize("backend", ["fsdp2", pytest.param("zero3", marks=MATRIX), pytest.param("ddp", marks=MATRIX)])
def test_two_processes_train_what_one_does(classifier: Recipe, bert: Path, tmp_path: Path, backend: str) -> None:
    adapter = {"dropout": 0.0}
    alone, _ = train(classifier(bert, output=str(tmp_path / "alone"), adapter=adapter))
    together = train_in_two_processes(classifier(bert, parallel={"backend": backend, "processes": 2}, adapter=adapter))
    assert last_eval(together)["eval_loss"] == pytest.approx(last_eval(alone)["eval_loss"], rel=1e-4)


def test_a_run_starts_from_a_classifier(classifier: Recipe, bert: Path, tmp_path: Path) -> None:
    first, _ = train(classifier(bert, output=str(tmp_path / "first")))
    path = classifier(bert, adapter={"start_from": str(first)}, train={"steps": 2, "warmup_steps": 0})
    recipe = json.loads(path.read_text())
    recipe["adapter"] = {"start_from": str(first)}
    path.write_text(json.dumps(recipe))
    second, _ = train(path)
    start = next(line for line in read_metrics(second / "metrics.jsonl") if "eval_loss" in line)
    assert start["eval_loss"] == pytest.approx(last_eval(first)["eval_loss"], rel=1e-5)


def test_a_classifier_goes_on_with_the_head_of_its_base(classifier: Recipe, bert: Path, tmp_path: Path) -> None:
    """That of a published reranker with one value; labels may be others, or in another order, and start anew."""

    def number(kind: int, number: int) -> float:
        return kind - number / 4

    regression = {"name": "classify", "problem_type": "regression"}
    first, _ = train(classifier(bert, number, regression, output=str(tmp_path / "first")))
    base = lorakit.merge(bert, first, out=tmp_path / "merged", dtype="float32")
    second, _ = train(classifier(base, number, regression, train={"steps": 1, "warmup_steps": 0}))
    start = next(line for line in read_metrics(second / "metrics.jsonl") if "eval_loss" in line)
    assert start["eval_loss"] == pytest.approx(last_eval(first)["eval_loss"], rel=1e-4)
    fewer, _ = train(
        classifier(
            base,
            lambda _, number: ["even", "odd"][number % 2],
            {"name": "classify", "labels": ["even", "odd"]},
            output=str(tmp_path / "fewer"),
        )
    )
    logits = logits_of(merged(base, fewer, tmp_path / "again"), base, texts_of(range(1)))
    assert logits.shape == (3, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_head_is_trained_and_loaded_in_the_bases_dtype(classifier: Recipe, tmp_path: Path, dtype: str) -> None:
    """Also that of a base whose classifier pools by the mean."""
    base = make_encoder(tmp_path / "modernbert", "modernbert")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"dtype": dtype, "classifier_pooling": "mean"}))
    path = classifier(base, train={"steps": 2, "warmup_steps": 0})
    recipe = json.loads(path.read_text())
    path.write_text(json.dumps(recipe | {"base": {**recipe["base"], "dtype": dtype}}))
    out, _ = train(path)
    reference = logits_of(in_peft(base, out, 3), base, texts_of(range(2))).softmax(1)
    for wanted, atol in ((dtype, 0.05), ("float32", 1e-6)):
        answers = lorakit.load(base, {"a": out}, dtype=wanted).classify(texts_of(range(2)), "a")
        ours = torch.tensor([list(one.probabilities.values()) for one in answers])
        torch.testing.assert_close(ours, reference, rtol=0, atol=atol)


def test_a_batch_is_answered_as_alone_where_padding_is_seen(tmp_path: Path) -> None:
    """By convolutions, for one, in spite of a mask."""
    base = make_encoder(tmp_path / "convbert", "convbert")
    patch = peft_classifier(base, tmp_path / "patch", target_modules=["query", "value"])
    model = lorakit.load(base, {"a": patch}, dtype="float32")
    texts = ["who sold", "somebody had 3 melons and shoes and boats", "somebody", *texts_of(range(2))]
    reference = logits_of(in_peft(base, patch, 3), base, texts).softmax(1)
    ours = torch.tensor([list(one.probabilities.values()) for one in model.classify(texts, "a")])
    torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)


def test_rows_of_two_texts_are_two_and_have_room_for_both(
    classifier: Recipe, bert: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "who sold them", "completion": "somebody", "label": "had"}] * 4
    out, _ = train(classifier(bert, rows=rows, train={"steps": 1, "warmup_steps": 0}))
    model = lorakit.load(bert, {"a": out}, dtype="float32")
    refused: list[tuple[Any, str]] = [
        (("", "somebody"), "a tuple is of two texts"),
        (("who", "sold", "them"), "a tuple is of two texts"),
        ((1, 2), "a tuple is of two texts"),
        ("who [SEP] sold", "holds"),
    ]
    for row, said in refused:
        with pytest.raises(LorakitError, match=said):
            model.classify([row], "a")
    engine = ServingEngine(model)
    with serving(OpenAIServer(model, engine, "bert").app) as url:
        reply = httpx.post(f"{url}/classify", json={"model": "a", "input": "who [SEP] sold"}, timeout=60)
    engine.close()
    assert (reply.status_code, "separates texts" in reply.text) == (400, True)

    long = [{"prompt": "who sold them " * 9, "completion": "somebody", "label": "had"}] * 4
    path = classifier(bert, rows=long)
    recipe = json.loads(path.read_text())
    recipe["data"] |= {"max_tokens": 24, "on_long_rows": "truncate"}
    path.write_text(json.dumps(recipe))
    assert main(["train", str(path), "--fresh"]) == 2
    assert "its prompt leaves no room for its completion in data.max_tokens" in capsys.readouterr().err


def peft_classifier(base: Path, to: Path, **settings: Any) -> Path:
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3, dtype=torch.float32)
    peft = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=4, init_lora_weights=False, **settings))
    for name, parameter in peft.named_parameters():
        if "modules_to_save" in name:
            parameter.data.normal_(std=0.3)
    peft.save_pretrained(to)
    return to


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("bert", {"target_modules": ["query", "value"]}),
        ("roberta", {"target_modules": ["query", "value"]}),
        ("bert", {"target_modules": r"bert\.encoder\.layer\.\d+\.attention\.self\.(query|value)"}),
        (
            "bert",
            {
                "target_modules": ["query", "value"],
                "exclude_modules": ["bert.encoder.layer.0.attention.self.query"],
                "rank_pattern": {"bert.encoder.layer.1.attention.self.query": 8},
            },
        ),
        ("distilbert", {"target_modules": ["q_lin", "v_lin"], "modules_to_save": ["pre_classifier"]}),
    ],
)
def test_a_classifier_of_peft_is_read(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    """That of BERT has no pooler of its own: it is the base's."""
    base = make_encoder(tmp_path / kind, kind)
    patch = peft_classifier(base, tmp_path / "patch", **settings)
    texts = texts_of(range(2))
    reference = logits_of(in_peft(base, patch, 3), base, texts).softmax(1)
    answers = lorakit.load(base, {"a": patch}, dtype="float32").classify(texts, "a")
    ours = torch.tensor([list(one.probabilities.values()) for one in answers])
    torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)
    assert set(answers[0].probabilities) == {"LABEL_0", "LABEL_1", "LABEL_2"}


def test_labels_and_their_kind_are_those_of_the_base_where_a_patch_names_none(tmp_path: Path) -> None:
    base = make_encoder(tmp_path / "bert")
    patch = peft_classifier(base, tmp_path / "patch", target_modules=["query"])
    config = json.loads((base / "config.json").read_text())
    named = {"id2label": {"0": "neg", "1": "neu", "2": "pos"}, "problem_type": "multi_label_classification"}
    (base / "config.json").write_text(json.dumps(config | named))
    (answer,) = lorakit.load(base, {"a": patch}, dtype="float32").classify(["who sold"], "a")
    reference = logits_of(in_peft(base, patch, 3), base, ["who sold"]).sigmoid()[0]
    assert list(answer.probabilities) == ["neg", "neu", "pos"]
    assert list(answer.probabilities.values()) == pytest.approx(reference.tolist(), abs=1e-6)


def test_an_adapter_of_the_head_is_refused(tmp_path: Path) -> None:
    base = make_encoder(tmp_path / "bert")
    patch = peft_classifier(base, tmp_path / "patch", target_modules=["query", "dense"])
    with pytest.raises(PatchError, match="adapts bert.pooler.dense of the head; one is read that is saved in full"):
        lorakit.load(base, {"a": patch}, dtype="float32")


def test_a_head_that_is_not_its_bases_is_refused(tmp_path: Path) -> None:
    base = make_encoder(tmp_path / "bert", with_head=True)  # which has no pooler
    patch = peft_classifier(base, tmp_path / "patch", target_modules=["query"])
    with pytest.raises(PatchError, match=r"another head than its base's classifier: .*classifier.*; expected .*pooler"):
        lorakit.load(base, {"a": patch}, dtype="float32")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"messages": [{"role": "user", "content": "hi"}], "label": "had"}], "this encoder reads texts"),
        ([{"text": "who [SEP] sold", "label": "had"}], "holds [SEP], which separates texts"),
    ],
)
def test_rows_that_an_encoder_does_not_read_are_refused(
    classifier: Recipe, bert: Path, capsys: pytest.CaptureFixture[str], rows: Any, said: str
) -> None:
    tokenizer = json.loads((bert / "tokenizer_config.json").read_text())
    tokenizer["chat_template"] = "{% for one in messages %}{{ one.content }}{% endfor %}"
    (bert / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert main(["train", str(classifier(bert, rows=rows * 4))]) == 2
    assert said in capsys.readouterr().err


def test_an_encoder_without_such_a_classifier_is_refused(
    classifier: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(classifier(make_encoder(tmp_path / "albert", "albert")))]) == 2
    assert "Albert: no classifier of this encoder is known" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "settings", "mode"),
    [("modernbert", {"classifier_pooling": "mean"}, "mean"), ("modernbert", {}, "cls"), ("esmc", {}, "cls")],
)
def test_the_pooling_of_a_head_is_found_by_what_it_computes(kind: str, settings: dict[str, Any], mode: str) -> None:
    assert EncoderHead(AutoConfig.for_model(kind, hidden_size=32, num_attention_heads=4, **settings), 4).mode == mode
