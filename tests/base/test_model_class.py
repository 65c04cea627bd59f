"""The class of a base: a patch belongs to the one that config.json names, training needs a causal language model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

import lorakit
from lorakit.base.meta import check_stored_tensors
from lorakit.base.transformers_io import load_base
from lorakit.errors import BaseModelError, LorakitError, MergeError, PatchError, RunError
from lorakit.inspection.show import show
from lorakit.recipe import load_recipe
from lorakit.training.check import check
from tests.helpers.fork_server import ROOT
from tests.helpers.patches import CPU, IDS, make_patch


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return save_bert(BertForSequenceClassification, tmp_path_factory.mktemp("bert") / "classifier", tokenizer)


@pytest.fixture(scope="module")
def patch(classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = patched(classifier)
    return lorakit.save_patch(model, tmp_path_factory.mktemp("bert") / "patch")


def save_bert(kind: Any, folder: Path, tokenizer: Any) -> Path:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=64, num_labels=3,
    )  # fmt: skip
    kind(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def patched(folder: Path) -> Any:
    """Return the classifier with a random adapter and a random head of its own, as after training."""
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    lorakit.inject(model, rank=4, alpha=8, targets=["query", "value"], modules_to_save=["classifier"])
    torch.manual_seed(1)
    for tensor in lorakit.adapter_tensors(model).values():
        tensor.data.normal_(std=0.1)
    return model


def test_a_classifiers_patch_is_shown_and_merged_on_the_class_that_the_base_names(
    classifier: Path, patch: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    show(str(patch), str(classifier), lines.append)
    merged = BertForSequenceClassification.from_pretrained(lorakit.merge(classifier, patch, out=tmp_path / "merged"))

    assert "the base it was trained on" in lines[-1]
    torch.testing.assert_close(merged.eval()(IDS).logits, patched(classifier)(IDS).logits)


def test_the_classifier_of_the_documentation_trains_its_head_in_full(classifier: Path) -> None:
    lines = (ROOT / "docs" / "adapters.md").read_text().splitlines()
    (call,) = (line for line in lines if line.startswith("model = lorakit.inject(classifier,"))
    names = {"lorakit": lorakit, "classifier": BertForSequenceClassification.from_pretrained(classifier)}
    exec(call, names)
    trained = lorakit.adapter_tensors(names["model"])
    assert {name for name in trained if "classifier" in name} == {"classifier.weight", "classifier.bias"}
    assert len(trained) > 20


def test_a_base_that_lacks_a_patchs_classifier_is_refused_by_its_class(
    patch: Path, tmp_path: Path, tokenizer: Any
) -> None:
    masked = save_bert(BertForMaskedLM, tmp_path / "masked", tokenizer)
    with pytest.raises(
        PatchError, match=r"\(BertForMaskedLM\): 2 of its 6 parts\n.*classifier.bias is not a parameter"
    ):
        lorakit.merge(masked, patch, out=tmp_path / "merged")


def test_a_patch_of_the_language_model_fits_a_base_that_names_another_class(
    base: Path, tmp_path: Path, tokenizer: Any
) -> None:
    patch = make_patch(base, tmp_path / "patch")
    named = json.loads((base / "config.json").read_text()) | {"architectures": ["LlamaModel"]}
    other = tmp_path / "other"
    other.mkdir()
    for file in base.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "config.json").write_text(json.dumps(named))
    assert lorakit.merge(other, patch, out=tmp_path / "merged").is_dir()


def test_check_says_of_a_classifier_what_train_says(classifier: Path, recipe: Callable[..., Path]) -> None:
    path = recipe(base={"model": str(classifier)}, adapter={"targets": ["query"]})
    expected = "BertModel has no head that predicts tokens; objective embed and classify train it, got sft"
    with pytest.raises(LorakitError, match=expected):
        check(load_recipe(path), lambda line: None)
    with pytest.raises(RunError, match=expected):
        lorakit.train(path)


def test_verifying_a_classifier_is_refused_before_it_is_merged(classifier: Path, patch: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(MergeError, match="verify: runs BertModel, and the patch is of BertForSeq"):
        lorakit.merge(classifier, patch, out=tmp_path / "merged", verify=True, say=lines.append)
    assert not lines
    assert not (tmp_path / "merged").exists()


def test_a_base_without_a_causal_class_is_named_in_one_line(tmp_path: Path) -> None:
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(BaseModelError) as caught:
        load_base(tmp_path, torch.float32, CPU)
    assert "T5ForConditionalGeneration is not a causal language model, which recipes and answers need" in str(
        caught.value
    )
    assert len(str(caught.value)) < 400
    lines: list[str] = []
    show(str(tmp_path), None, lines.append)
    assert "architecture T5ForConditionalGeneration" in lines
    with pytest.raises(BaseModelError, match="T5ForConditionalGeneration is not a causal language model"):
        check_stored_tensors(tmp_path)
