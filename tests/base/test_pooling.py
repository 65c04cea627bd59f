"""How a base's embeddings are pooled is read from sentence-transformers' files; what is not computed here is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorakit.errors import BaseModelError
from lorakit.patch.pooling import Pooling, read_pooling
from tests.helpers.bases import make_embedding_base


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return make_embedding_base(tmp_path_factory.mktemp("bases") / "base", tokenizer)


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """The small files of the base, which a test may change."""
    for name in ("modules.json", "config.json", "1_Pooling/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((source / name).read_text())
    return tmp_path


def change(path: Path, update: Callable[[Any], Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(update(json.loads(path.read_text()) if path.exists() else {})))


def test_the_layout_of_qwen3_embedding_is_read(folder: Path) -> None:
    assert read_pooling(folder) == Pooling("lasttoken", True, None, ())


def test_the_files_of_sentence_transformers_6_mean_the_same(folder: Path) -> None:
    kinds = ["base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling"]
    paths = ["", "1_Pooling"]
    change(
        folder / "modules.json",
        lambda _: [
            {"type": f"sentence_transformers.{kind}", "path": path} for kind, path in zip(kinds, paths, strict=True)
        ],
    )
    change(folder / "1_Pooling/config.json", lambda _: {"embedding_dimension": 32, "pooling_mode": "mean"})
    text = {"method": "forward", "method_output_name": "last_hidden_state"}
    bert = {"transformer_task": "feature-extraction", "modality_config": {"text": text}, "max_seq_length": 40}
    change(folder / "sentence_bert_config.json", lambda _: bert)
    assert read_pooling(folder) == Pooling("mean", False, 40, ())


def test_a_pooling_without_a_mode_is_the_mean_as_in_sentence_transformers(folder: Path) -> None:
    change(folder / "1_Pooling/config.json", lambda _: {"word_embedding_dimension": 32})
    assert read_pooling(folder).mode == "mean"


@pytest.mark.parametrize("text", [["a"], "gemma", 3])
def test_a_text_config_that_is_no_mapping_is_not_read(folder: Path, text: Any) -> None:
    change(folder / "config.json", lambda config: config | {"text_config": text, "hidden_size": 32})
    assert read_pooling(folder).mode == "lasttoken"
    change(folder / "config.json", lambda config: config | {"hidden_size": 31})
    with pytest.raises(BaseModelError, match="the base's hidden_size is 31"):
        read_pooling(folder)


def test_dimensions_are_those_that_the_config_allows(folder: Path) -> None:
    change(folder / "config.json", lambda config: config | {"is_matryoshka": True})
    assert list(read_pooling(folder).dimensions) == [*range(1, 33)]
    change(folder / "config.json", lambda config: config | {"matryoshka_dimensions": [8, 16]})
    assert list(read_pooling(folder).dimensions) == [8, 16]


def with_module(kind: str) -> Callable[[Any], Any]:
    return lambda modules: [*modules, {"path": "3", "type": kind}]


@pytest.mark.parametrize(
    ("file", "update", "said"),
    [
        ("modules.json", with_module("sentence_transformers.models.Dense"), "Dense is not computed here"),
        ("modules.json", with_module("custom.Normalize"), "custom.Normalize is not computed here"),
        (
            "modules.json",
            lambda modules: modules[::-1],
            "Normalize -> Pooling -> Transformer is not computed here; Transformer ->",
        ),
        ("modules.json", lambda modules: [modules[0] | {"path": "0"}, *modules[1:]], "the Transformer is in '0'"),
        ("modules.json", lambda _: {"a": 1}, "not a JSON list"),
        ("1_Pooling/config.json", lambda one: one | {"pooling_mode_cls_token": True}, "pooling cls + lasttoken: not"),
        ("1_Pooling/config.json", lambda one: one | {"pooling_mode": "max"}, "pooling max: not computed here"),
        ("1_Pooling/config.json", lambda one: one | {"weights": 1}, "weights: not known here"),
        ("1_Pooling/config.json", lambda one: one | {"word_embedding_dimension": 8}, "the base's hidden_size is 32"),
        (
            "1_Pooling/config.json",
            lambda one: one | {"pooling_mode": "mean", "include_prompt": False},
            "include_prompt",
        ),
        ("2_Normalize/config.json", lambda _: {"module_input_name": "token_embeddings"}, "'token_embeddings' is not"),
        ("sentence_bert_config.json", lambda _: {"do_lower_case": True}, "do_lower_case: True is not computed here"),
        ("sentence_bert_config.json", lambda _: {"processing_kwargs": {"a": 1}}, "processing_kwargs: not known here"),
        ("sentence_bert_config.json", lambda _: {"modality_config": {"text": {"method": "encode"}}}, "modality_config"),
        (
            "sentence_bert_config.json",
            lambda _: {"modality_config": {"text": {}, "message": {}}},  # which would render the chat template
            "modality_config: {'text': {}, 'message': {}} is not computed here",
        ),
        ("config_sentence_transformers.json", lambda _: {"model_type": "SparseEncoder"}, "'SparseEncoder' is not"),
        (
            "config_sentence_transformers.json",
            lambda _: {"default_prompt_name": "query", "prompts": {"query": "Query: "}},
            "would begin every input with 'Query: '",
        ),
        ("config.json", lambda config: config | {"matryoshka_dimensions": [64]}, "numbers from 1 to 32"),
    ],
)
def test_what_is_not_computed_here_is_refused_by_name(
    folder: Path, file: str, update: Callable[[Any], Any], said: str
) -> None:
    change(folder / file, update)
    with pytest.raises(BaseModelError) as problem:
        read_pooling(folder)
    assert said in str(problem.value)
    assert file in str(problem.value)


def test_a_base_without_the_files_has_no_embeddings(folder: Path) -> None:
    (folder / "modules.json").unlink()
    with pytest.raises(BaseModelError, match="this base has no embeddings"):
        read_pooling(folder)
