"""Runs that train embeddings: what they learn, what reads them, and what is refused."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

import lorakit
from lorakit.cli import main
from lorakit.errors import LorakitError, MergeError, PatchError
from lorakit.patch import read_patch, write_patch
from lorakit.run.metrics import read_metrics
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from tests.helpers.http_server import serving
from tests.helpers.patches import make_embedding_patch, make_patch
from tests.helpers.rows import write_rows
from tests.helpers.training import train, train_in_two_processes, train_through_stops

Recipe = Callable[..., Path]
TRAIN = {"steps": 16, "batch_size": 8, "micro_batch_size": 3, "eval_every_steps": 8, "save_every_steps": 4}
THINGS = ("lamps", "melons", "boats", "books", "shoes")
TEXTS = ["who sold 3 lamps?", "somebody had 40 boats"]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def rows(numbers: range) -> list[dict[str, Any]]:
    return [
        {
            "anchor": f"who sold {number} {thing}?",
            "positive": f"somebody had {number} {thing}" + " and sold them" * (number % 2),
            "negative": f"somebody bought {number + 1} {thing}",
        }
        for number in numbers
        for thing in THINGS
    ]


@pytest.fixture
def embed(recipe: Recipe, tmp_path: Path) -> Recipe:
    """A recipe of embeddings with one negative."""
    data = {
        "train": str(write_rows(tmp_path / "texts.jsonl", rows(range(8)))),
        "eval": str(write_rows(tmp_path / "held-out-texts.jsonl", rows(range(8, 12)))),
    }

    def write(name: str = "recipe.yaml", objective: Any = None, **sections: Any) -> Path:
        own = {"name": "embed", "negatives": 1, **(objective or {})}
        settings = {"train": {**TRAIN, **sections.pop("train", {})}, "data": data, "objective": own}
        return recipe(name, **{**settings, **sections})

    return write


def evals(out: Path) -> list[dict[str, float]]:
    return [line for line in read_metrics(out / "metrics.jsonl") if "eval_loss" in line]


def tensors(out: Path) -> bytes:
    return (out / "adapter_model.safetensors").read_bytes()


def theirs(folder: Path) -> torch.Tensor:
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    vectors: torch.Tensor = model.encode(TEXTS, convert_to_tensor=True)
    return vectors


@pytest.mark.parametrize("pooling", [pytest.param("lasttoken", marks=pytest.mark.matrix), "mean"])
def test_embeddings_are_learned_and_are_what_sentence_transformers_and_peft_say(
    embed: Recipe, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], pooling: str
) -> None:
    out, said = train(embed(objective={"pooling": pooling}))

    first, *_, last = evals(out)
    assert last["eval_loss"] < first["eval_loss"]
    assert last["eval_mrr"] > first["eval_mrr"]
    assert "base alone" in said
    assert "lorakit score" in said
    model = lorakit.load(base, {"a": out}, dtype="float32")
    vectors = model.embed(TEXTS, "a")
    assert vectors.norm(dim=1).tolist() == pytest.approx([1, 1])
    assert torch.allclose(theirs(out), vectors, atol=1e-6)

    peft = PeftModel.from_pretrained(AutoModel.from_pretrained(base, dtype=torch.float32), out).eval()
    states = peft(
        torch.tensor([model.codec(None).text_ids(TEXTS[0], model.pooling(model.adapter("a")))])
    ).last_hidden_state[0]
    pooled = states.mean(0) if pooling == "mean" else states[-1]
    assert torch.allclose(torch.nn.functional.normalize(pooled, dim=0), vectors[0], atol=1e-6)

    lorakit.merge(base, out, out=tmp_path / "merged", dtype="float32")
    assert torch.allclose(theirs(tmp_path / "merged"), vectors, atol=1e-5)
    assert torch.allclose(lorakit.load(tmp_path / "merged", dtype="float32").embed(TEXTS), vectors, atol=1e-5)

    capsys.readouterr()
    held_out = str(tmp_path / "held-out-texts.jsonl")
    assert main(["score", str(base), "--adapter", f"a={out}", "--data", held_out, "--dtype", "float32"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(line[1], line[2]) for line in table[-2:]] == [
        ("base", f"{first['eval_loss']:.4f}"),
        ("a", f"{last['eval_loss']:.4f}"),
    ]


@pytest.mark.parametrize("steps", [pytest.param({1}, marks=pytest.mark.matrix), {2, 5}], ids=str)
def test_a_run_that_was_stopped_ends_in_the_same_bytes(
    embed: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: set[int]
) -> None:
    whole, _ = train(embed(output=str(tmp_path / "whole"), adapter={"dropout": 0.1}))
    out, _ = train_through_stops(embed(adapter={"dropout": 0.1}), monkeypatch, steps)
    assert tensors(out) == tensors(whole)
    assert evals(out)[-1]["eval_loss"] == evals(whole)[-1]["eval_loss"]


@pytest.mark.matrix
def test_two_processes_train_what_one_does(embed: Recipe, tmp_path: Path) -> None:
    alone, _ = train(embed(output=str(tmp_path / "alone")))
    together = train_in_two_processes(embed(parallel={"backend": "ddp", "processes": 2}))
    for one, other in zip(evals(alone), evals(together), strict=True):
        assert other["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-4)


@pytest.mark.matrix
def test_a_run_goes_on_from_a_patch_of_embeddings(embed: Recipe, tmp_path: Path) -> None:
    out, _ = train(embed())
    more, _ = train(embed(output=str(tmp_path / "more"), adapter={"start_from": str(out)}))
    assert evals(more)[0]["eval_loss"] == pytest.approx(evals(out)[-1]["eval_loss"], rel=1e-5)


def test_the_best_patch_beside_the_last_one_embeds_too(embed: Recipe, base: Path) -> None:
    """Whose folder there is none of, before its files of pooling are written."""
    out, said = train(embed(train={"learning_rate": 2.0, "eval_every_steps": 1, "warmup_steps": 0}))
    assert "best" in said
    assert (out / "best" / "modules.json").is_file()
    assert lorakit.load(base, {"a": out / "best"}, dtype="float32").embed(TEXTS, "a").shape == (2, 32)


@pytest.mark.matrix
def test_trained_dimensions_may_be_kept_and_no_others(embed: Recipe, base: Path) -> None:
    out, _ = train(embed(objective={"matryoshka_dims": [8, 16]}))
    model = lorakit.load(base, {"a": out}, dtype="float32")
    full = model.embed(TEXTS, "a")
    cut = model.embed(TEXTS, "a", dimensions=8)
    assert cut.shape == (2, 8)
    assert torch.allclose(cut, torch.nn.functional.normalize(full[:, :8], dim=1), atol=1e-6)
    with pytest.raises(LorakitError, match="dimensions: one of 8, 16, got 12"):
        model.embed(TEXTS, "a", dimensions=12)


@pytest.mark.matrix
def test_files_of_embeddings_are_none_of_another_patch_in_their_folder(
    embed: Recipe, recipe: Recipe, base: Path
) -> None:
    out, _ = train(embed())
    assert main(["train", str(recipe(output=str(out), train=TRAIN)), "--fresh"]) == 0
    assert (out / "modules.json").exists()
    assert lorakit.load(base, {"a": out}).generate(["hi"], "a", max_new_tokens=2)


@pytest.mark.matrix
def test_what_has_no_embeddings_says_so(embed: Recipe, base: Path, tmp_path: Path) -> None:
    out, _ = train(embed())
    model = lorakit.load(base, {"a": out, "plain": make_patch(base, tmp_path / "plain")}, dtype="float32")
    for name in (None, "plain"):
        with pytest.raises(LorakitError, match="this base has no embeddings"):
            model.embed(TEXTS, name)
    for ask in (lambda: model.generate(["hi"], "a"), lambda: model.generate_ids(["hi"], ["a"])):
        with pytest.raises(LorakitError, match="answers no prompts, it embeds"):
            ask()
    with pytest.raises(LorakitError, match="an adapter, or the base, has no head of its own"):
        model.classify(TEXTS, "a")
    with pytest.raises(LorakitError, match="one has no tokens"):
        model.embed([[]], "a")
    with pytest.raises(LorakitError, match="prompts: give a text or token ids; got"):
        model.embed([[{"role": "user", "content": "hi"}]], "a")
    with pytest.raises(LorakitError, match="a list of prompts, got 'text'"):
        model.embed("text", "a")
    assert model.embed([], "a").shape[0] == 0


@pytest.fixture
def url(embed: Recipe, base: Path, tmp_path: Path) -> Iterator[tuple[str, Any]]:
    out, _ = train(embed())
    model = lorakit.load(base, {"a": out, "plain": make_patch(base, tmp_path / "plain")}, dtype="float32")
    engine = ServingEngine(model)
    with serving(OpenAIServer(model, engine, "tiny").app) as address:
        yield address, model
    engine.close()


def test_an_adapter_is_served_by_its_own_pooling(url: tuple[str, Any]) -> None:
    address, model = url
    reply = httpx.post(f"{address}/v1/embeddings", json={"model": "a", "input": TEXTS}, timeout=60).json()
    vectors = torch.tensor([one["embedding"] for one in reply["data"]])
    assert torch.allclose(vectors, model.embed(TEXTS, "a"), atol=1e-6)
    for body, said in (
        ({"model": "plain", "input": TEXTS}, "this base has no embeddings"),
        ({"model": "a", "input": TEXTS, "dimensions": 8}, "dimensions: this base's config.json, or this adapter's"),
    ):
        refused = httpx.post(f"{address}/v1/embeddings", json=body, timeout=60)
        assert refused.status_code == 400
        assert said in refused.json()["error"]["message"]
    chat = {"model": "a", "messages": [{"role": "user", "content": "hi"}]}
    assert httpx.post(f"{address}/v1/chat/completions", json=chat, timeout=60).status_code == 400


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"objective": {"pooling": "max"}}, "objective.pooling"),
        ({"objective": {"temperature": 0}}, "objective.temperature"),
        ({"objective": {"beta": 0.1}}, "beta: goes with dpo"),
        ({"objective": {"matryoshka_dims": [0]}}, "objective.matryoshka_dims"),
        ({"objective": {"matryoshka_dims": [64]}}, "objective.matryoshka_dims: up to 32, the base's width, got 64"),
        ({"parallel": {"backend": "ddp", "processes": 2, "pipeline": 2}}, "parallel.pipeline: 2: not with objective"),
        (
            {"data": {"train": "a", "loss_on": "all"}},
            "data.loss_on: all: goes with objective sft, got embed, which reads",
        ),
        ({"adapter": {"modules_to_save": ["lm_head"]}}, "the output head of LlamaForCausalLM is not used here"),
        ({"adapter": {"new_tokens": ["<x>"]}}, "adapter.new_tokens: not with objective embed"),
        ({"objective": {"negatives": 2}}, "negative: has 1 texts, and objective.negatives is 2"),
    ],
    ids=str,
)
def test_a_recipe_that_cannot_be_trained_is_refused(
    embed: Recipe, capsys: pytest.CaptureFixture[str], sections: dict[str, Any], said: str
) -> None:
    assert main(["train", str(embed(**sections))]) == 2
    assert said in capsys.readouterr().err


def test_check_shows_every_text_of_the_first_row(embed: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(embed())]) == 0
    said = capsys.readouterr().out
    for name, text in zip(("anchor", "positive", "negative"), rows(range(1))[0].values(), strict=True):
        assert f"first row, {name} (" in said
        assert f"{text}[[embedding]]" in said


def test_pooling_belongs_to_an_adapter(embed: Recipe, recipe: Recipe, base: Path, tmp_path: Path) -> None:
    """Adapters that pool otherwise are others, also with the same tensors; they are not merged or combined."""
    out, _ = train(embed(objective={"pooling": "mean"}))
    other = tmp_path / "foreign"
    shutil.copytree(out, other)
    foreign = replace(read_patch(out), metadata={}, folder=tmp_path)
    write_patch(other, foreign, overwrite=True)
    flags = json.loads((other / "1_Pooling/config.json").read_text())
    flags |= {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    (other / "1_Pooling/config.json").write_text(json.dumps(flags))
    model = lorakit.load(base, {"mean": out, "last": other}, dtype="float32")
    assert torch.allclose(theirs(other), model.embed(TEXTS, "last"), atol=1e-6)
    assert not torch.allclose(model.embed(TEXTS, "last"), model.embed(TEXTS, "mean"), atol=1e-2)
    with pytest.raises(MergeError, match="not pooled alike"):
        lorakit.merge(base, out, other, out=tmp_path / "merged")
    with pytest.raises(PatchError, match="combining loses how embeddings are pooled"):
        lorakit.combine(out, other, out=tmp_path / "both")

    plain, _ = train(recipe(output=str(tmp_path / "plain"), train={"steps": 1, "warmup_steps": 0}))
    command = [
        "score",
        str(base),
        "--adapter",
        f"a={out}",
        "--adapter",
        f"p={plain}",
        "--data",
        str(tmp_path / "texts.jsonl"),
    ]
    assert main(command) == 2


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("modules.json", "[1]", "not a list of modules"),
        ("modules.json", "{}", "not a JSON list"),
        (
            "modules.json",
            '[{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "../up"}]',
            "is no sub-folder",
        ),
        ("config_sentence_transformers.json", '{"prompts": ["a"], "default_prompt_name": [1]}', None),
        (
            "config_sentence_transformers.json",
            '{"prompts": {"x": 3}, "default_prompt_name": "x"}',
            "default_prompt_name",
        ),
        ("sentence_bert_config.json", '{"do_lower_case": true}', "do_lower_case"),
        ("1_Pooling/config.json", '{"word_embedding_dimension": 32, "pooling_mode": "max"}', "pooling max"),
    ],
)
def test_files_of_others_are_read_or_refused_when_the_patch_is(
    base: Path, tmp_path: Path, name: str, content: str, said: str | None
) -> None:
    folder = make_embedding_patch(base, tmp_path / "foreign")
    assert lorakit.load(base, {"a": folder}).embed(TEXTS, "a").shape == (2, 32)
    (folder / name).write_text(content)
    if said is None:
        assert lorakit.load(base, {"a": folder}).embed(TEXTS, "a").shape == (2, 32)
        return
    with pytest.raises(PatchError, match=said):
        lorakit.load(base, {"a": folder})


@pytest.mark.matrix
def test_the_config_says_what_the_adapter_is_for(embed: Recipe) -> None:
    out, _ = train(embed())
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["task_type"] == "FEATURE_EXTRACTION"
    assert not any(key.startswith("model.") for key in config["target_modules"])
