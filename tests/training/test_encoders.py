"""Embeddings of encoders, such as BERT, whose tokens see all others: sentence-transformers is the oracle."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import lorakit
from lorakit.cli import main
from lorakit.decoding.embedding import pooled_states
from lorakit.errors import LorakitError
from lorakit.patch.pooling import Pooling
from lorakit.recipe import load_recipe
from lorakit.run.metrics import read_metrics
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from tests.helpers.bases import make_embedding_base, make_encoder
from tests.helpers.http_server import serving
from tests.helpers.rows import write_rows
from tests.helpers.training import train, train_in_two_processes

Recipe = Callable[..., Path]
THINGS = ("lamps", "melons", "boats", "books", "shoes")
MATRIX = pytest.mark.matrix
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def rows(numbers: range) -> list[dict[str, str]]:
    return [
        {
            "anchor": f"who sold {number} {thing}?",
            "positive": f"somebody had {number} {thing}" + " and sold them" * (number % 3),
        }
        for number in numbers
        for thing in THINGS
    ]


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    return make_encoder(tmp_path / "bert")


@pytest.fixture
def embed(recipe: Recipe, tmp_path: Path) -> Recipe:
    """A recipe of embeddings of an encoder."""
    data = {
        "train": str(write_rows(tmp_path / "texts.jsonl", rows(range(6)))),
        "eval": str(write_rows(tmp_path / "held-out-texts.jsonl", rows(range(6, 9)))),
    }
    steps = {"steps": 6, "batch_size": 10, "micro_batch_size": 3, "eval_every_steps": 3}

    def write(base: Path, name: str = "recipe.yaml", pooling: str | None = "mean", **sections: Any) -> Path:
        section = {"name": "embed", **({"pooling": pooling} if pooling else {})}
        own_data = {**data, **sections.pop("data", {})}
        settings = {"train": steps, "data": own_data, "objective": section, **sections}
        return recipe(name, base={"model": str(base), "dtype": "float32"}, **settings)

    return write


def theirs(folder: Path, texts: list[str]) -> torch.Tensor:
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    vectors: torch.Tensor = model.encode(texts, convert_to_tensor=True)
    return vectors


def loss_of(anchors: torch.Tensor, positives: torch.Tensor) -> float:
    """The objective of held-out rows, as its formula says: the mean over all rows, with all positives."""
    similarities = anchors @ positives.T / 0.05
    return float(torch.nn.functional.cross_entropy(similarities, torch.arange(len(anchors))))


def last_eval(out: Path) -> dict[str, float]:
    return [line for line in read_metrics(out / "metrics.jsonl") if "eval_loss" in line][-1]


@pytest.mark.parametrize(
    ("kind", "pooling", "with_head"),
    [
        ("bert", "mean", False),
        pytest.param("bert", "cls", True, marks=MATRIX),
        pytest.param("bert", "lasttoken", False, marks=MATRIX),
        ("modernbert", "cls", True),
        pytest.param("modernbert", "mean", False, marks=MATRIX),
        *(pytest.param(kind, "mean", True, marks=MATRIX) for kind in ("roberta", "distilbert", "electra", "mpnet")),
    ],
)
def test_what_an_encoder_learns_is_what_sentence_transformers_reads(
    embed: Recipe, tmp_path: Path, kind: str, pooling: str, with_head: bool
) -> None:
    """Its held-out loss too: neither padding nor the number of a label is seen by a token."""
    base = make_encoder(tmp_path / kind, kind, with_head=with_head)
    out, said = train(embed(base, pooling=pooling))

    held_out = rows(range(6, 9))
    texts = [row["anchor"] for row in held_out] + [row["positive"] for row in held_out]
    reference = theirs(out, texts)
    assert last_eval(out)["eval_loss"] == pytest.approx(loss_of(*reference.chunk(2)), rel=1e-4)
    assert "base alone" in said
    model = lorakit.load(base, {"a": out}, dtype="float32")
    assert torch.allclose(model.embed(texts, "a"), reference, atol=2e-6)
    alone = torch.cat([model.embed([text], "a") for text in texts[:3]])
    assert torch.allclose(alone, reference[:3], atol=2e-6)
    lorakit.merge(base, out, out=tmp_path / "merged", dtype="float32")
    assert torch.allclose(theirs(tmp_path / "merged", texts), reference, atol=1e-5)
    assert torch.allclose(lorakit.load(tmp_path / "merged", dtype="float32").embed(texts), reference, atol=1e-5)


@pytest.mark.spread
@pytest.mark.parametrize("backend", ["fsdp2", pytest.param("zero3", marks=MATRIX), pytest.param("ddp", marks=MATRIX)])
def test_two_processes_train_what_one_does(embed: Recipe, encoder: Path, tmp_path: Path, backend: str) -> None:
    alone, _ = train(embed(encoder, output=str(tmp_path / "alone"), adapter={"dropout": 0.0}))
    path = embed(encoder, parallel={"backend": backend, "processes": 2}, adapter={"dropout": 0.0})
    together = train_in_two_processes(path)
    assert last_eval(together)["eval_loss"] == pytest.approx(last_eval(alone)["eval_loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"pooling": None}, "objective.pooling: name that of this encoder, mean or cls"),
        (
            {"objective": {"name": "sft"}},
            "BertModel has no head that predicts tokens; objective embed and classify train it, got sft",
        ),
        ({"data": {"packing": True}}, "tokens of this base see later ones"),
    ],
    ids=str,
)
def test_what_an_encoder_cannot_train_is_refused(
    embed: Recipe, encoder: Path, capsys: pytest.CaptureFixture[str], sections: dict[str, Any], said: str
) -> None:
    assert main(["train", str(embed(encoder, **sections))]) == 2
    assert said in capsys.readouterr().err


def test_a_base_is_trained_with_its_own_pooling(
    embed: Recipe, encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As its files say, which `lorakit init` writes."""
    out, _ = train(embed(encoder, pooling="cls"))
    merged = tmp_path / "merged"
    lorakit.merge(encoder, out, out=merged)
    assert main(["check", str(embed(merged, pooling="mean"))]) == 2
    assert "objective.pooling: mean, and this base was trained with cls; set pooling: cls" in capsys.readouterr().err
    path = tmp_path / "new.yaml"
    assert main(["init", "--base", str(merged), "--data", str(tmp_path / "texts.jsonl"), "--out", str(path)]) == 0
    assert load_recipe(path).objective.pooling == "cls"
    assert "chat_template" not in path.read_text()
    assert main(["check", str(path)]) == 0


def test_a_decoder_whose_tokens_see_later_ones_embeds_each_text_by_itself(tmp_path: Path, tokenizer: Any) -> None:
    """As EmbeddingGemma's: a short text is padded beside a long one."""
    base = make_embedding_base(tmp_path / "base", tokenizer, "mean")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer),
        intermediate_size=48,
        use_bidirectional_attention=True,
        initializer_range=0.3,
        **sizes,
    )
    Gemma3ForCausalLM(config).save_pretrained(base)
    model = lorakit.load(base, dtype="float32")
    texts = ["hi", "who sold 3 lamps to somebody on a day of rain?"]
    assert torch.allclose(model.embed(texts)[0], model.embed(texts[:1])[0], atol=1e-5)
    assert torch.allclose(model.embed(texts), theirs(base, texts), atol=1e-5)


@pytest.mark.parametrize("kind", ["roberta", "mpnet", "bert"])
def test_a_text_of_all_positions_is_embedded_and_a_longer_one_refused(tmp_path: Path, kind: str) -> None:
    """RoBERTa counts positions from behind its padding token's id."""
    base = make_encoder(tmp_path / kind, kind)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"pad_token_id": 1}))
    limit = 64 if kind == "bert" else 62
    model = lorakit.load(base, dtype="float32")
    pooling = Pooling("mean", normalize=True, max_tokens=None, dimensions=())
    assert len(model.prompts.text_ids([5] * limit, pooling)) == limit
    assert pooled_states(model, [[5] * limit], [None], [pooling])[0].isfinite().all()
    with pytest.raises(LorakitError, match=f"from 1 to {limit} can be embedded"):
        model.prompts.text_ids([5] * (limit + 1), pooling)


def test_an_encoder_embeds_and_answers_no_prompts(
    embed: Recipe, encoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = embed(encoder)
    out, _ = train(path)
    model = lorakit.load(encoder, {"a": out}, dtype="float32")
    with pytest.raises(LorakitError, match="no head that predicts tokens; it embeds"):
        model.generate(["hi"])
    with pytest.raises(LorakitError, match="this base has no embeddings"):
        model.embed(["hi"])
    texts = [row["anchor"] for row in rows(range(4))]
    engine = ServingEngine(model)
    with serving(OpenAIServer(model, engine, "bert").app) as url:
        reply = httpx.post(f"{url}/v1/embeddings", json={"model": "a", "input": texts}, timeout=60).json()
        refused = httpx.post(f"{url}/v1/completions", json={"model": "a", "prompt": "hi"}, timeout=60)
    engine.close()
    assert torch.allclose(torch.tensor([one["embedding"] for one in reply["data"]]), model.embed(texts, "a"), atol=1e-6)
    assert (refused.status_code, "it embeds" in refused.json()["error"]["message"]) == (400, True)
    for command in (["plan", str(path)], ["show", str(encoder)], ["show", str(out)]):
        capsys.readouterr()
        assert main(command) == 0, command
    target = json.loads((out / "adapter_config.json").read_text())["target_modules"]
    assert "pooler" not in "".join(target)
