"""`check` says so where answers end with a token whose row of the output head was never trained."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorakit.recipe import load_recipe
from lorakit.training.check import check
from tests.helpers.bases import make_base
from tests.helpers.rows import chat, write_rows

TEMPLATE = "{% for m in messages %}{{ '<|system|>' + m.content + '<|user|>' }}{% endfor %}"
TEXT = {"prompt": "hi ", "completion": "yes"}


def shrink(head: Tensor, end: int) -> None:
    head[end] *= 0.01


def reserve(head: Tensor, end: int) -> None:
    head[end] = head[end + 1] * 1.0001


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(("change", "reason"), [(shrink, "its norm is 0.0"), (reserve, "it equals the row of token")])
def test_an_untrained_row_of_the_end_token_is_named_with_its_remedy(
    tmp_path: Path, tokenizer: Any, tie: bool, change: Any, reason: str
) -> None:
    base = make_base(tmp_path / "base", tokenizer, tie_word_embeddings=tie)
    (base / "chat_template.jinja").write_text(TEMPLATE)
    end = tokenizer.convert_tokens_to_ids("<|user|>")
    chats = write_rows(tmp_path / "chats.jsonl", [chat("a", "b")] * 8)
    texts = write_rows(tmp_path / "texts.jsonl", [TEXT] * 8)

    def notes(rows: Path = chats, **adapter: Any) -> list[str]:
        recipe = {
            "base": {"model": str(base)}, "adapter": {"rank": 2, **adapter}, "data": {"train": str(rows)},
            "train": {"steps": 2, "batch_size": 4, "micro_batch_size": 4}, "output": str(tmp_path / "out"),
        }  # fmt: skip
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
        said: list[str] = []
        check(load_recipe(tmp_path / "recipe.yaml"), say=said.append)
        return [line for line in said if "never trained" in line]

    assert notes() == []
    tensors = load_file(base / "model.safetensors")
    change(tensors["model.embed_tokens.weight" if tie else "lm_head.weight"], end)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})

    (note,) = notes()

    assert f"answers end with '<|user|>' ({end})" in note
    assert reason in note
    remedy = {"trainable_tokens": ["<|user|>"]} if tie else {"modules_to_save": ["lm_head"]}
    assert f"adapter.{next(iter(remedy))}: [" in note
    assert notes(**remedy) == []
    assert notes(texts) == []  # which end with another token
