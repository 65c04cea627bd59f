"""A merged model stops in other programs where its adapter was trained to stop, and else keeps the base's files."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lorakit
from lorakit.base.transformers_io import load_tokenizer
from lorakit.inference.prompts import end_token_ids
from tests.helpers.bases import make_base
from tests.helpers.patches import make_patch, without_facts
from tests.helpers.rows import chat, write_rows
from tests.helpers.training import train

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOKENS = ["<|im_start|>", "<|im_end|>"]
ANSWER = "dog it is"
SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def make_textual_base(folder: Path, tokenizer: Any, template: str | None = None, **settings: Any) -> Path:
    """Write a base whose tokenizer has another chat template, or none; its logits are peaked, so that it can learn."""
    make_base(folder, tokenizer, initializer_range=0.4, **settings)
    (folder / "chat_template.jinja").unlink()
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> tuple[Path, Path]:
    """A base without a chat template, and a patch that learnt to end its answers with a new token."""
    folder = tmp_path_factory.mktemp("ends")
    base = make_textual_base(folder / "base", tokenizer)
    (folder / "chatml.jinja").write_text(CHATML)
    write_rows(folder / "rows.jsonl", [chat(f"say {number}", ANSWER) for number in range(16)])
    recipe = {
        "base": {"model": str(base), "dtype": "float32"},
        "adapter": {"rank": 4, "new_tokens": TOKENS},
        "data": {"train": str(folder / "rows.jsonl"), "chat_template": str(folder / "chatml.jinja"), "max_tokens": 64},
        "train": {"steps": 60, "batch_size": 8, "micro_batch_size": 8, "learning_rate": 0.02},
        "output": str(folder / "out"),
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return base, train(folder / "recipe.yaml")[0]


def answer_in_transformers(folder: Path, text: str) -> str:
    """Return what transformers alone generates, with all of its tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    (written,) = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(written[prompt["input_ids"].shape[1] :]))


@pytest.mark.parametrize("has_generation_config", [True, False])
def test_a_merged_model_stops_in_transformers_at_the_end_token_of_training(
    trained: tuple[Path, Path], tmp_path: Path, has_generation_config: bool
) -> None:
    base, patch = trained
    base = Path(shutil.copytree(base, tmp_path / "base"))
    end = json.loads((base / "config.json").read_text())["eos_token_id"]
    if not has_generation_config:
        (base / "generation_config.json").unlink()
    said: list[str] = []

    out = lorakit.merge(base, patch, out=tmp_path / "out", verify=True, say=said.append)

    assert answer_in_transformers(out, "say 3") == f"{ANSWER}<|im_end|>"
    (token,) = load_tokenizer(out)("<|im_end|>", add_special_tokens=False)["input_ids"]
    written = {name: json.loads((out / name).read_text()) for name in ("generation_config.json", "config.json")}
    assert written["generation_config.json"]["eos_token_id"] == [end, token]
    assert written["config.json"]["eos_token_id"] == (end if has_generation_config else [end, token])
    assert json.loads((out / "merge.json").read_text())["end_tokens"] == [end, token]
    assert len([line for line in said if f"'<|im_end|>' ({token})" in line]) == 1
    model = lorakit.load(out, dtype="float32")
    assert model.prompts.end_ids == [end, token]


def small_files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in SMALL_FILES if (folder / name).is_file()}


def test_a_base_that_stops_there_already_keeps_its_files(base: Path, tmp_path: Path) -> None:
    said: list[str] = []

    out = lorakit.merge(base, make_patch(base, tmp_path / "patch"), out=tmp_path / "out", say=said.append)

    assert small_files(out) == small_files(base)
    assert json.loads((out / "merge.json").read_text())["end_tokens"] is None
    assert not [line for line in said if "eos_token_id" in line]


# ends with <|user|>, which is no end token of the base
OTHER = "{% for m in messages %}{{ m['content'] + '<|user|>' }}{% endfor %}"


def test_plain_text_changes_nothing_whatever_the_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    base = make_textual_base(tmp_path / "base", tokenizer, OTHER)
    foreign = make_patch(base, tmp_path / "foreign")
    rows = {"rows": 8, "sources": []}
    plain = without_facts(foreign, tmp_path / "plain", lambda facts: facts.update(data={"train": rows | {"plain": 8}}))
    mixed = without_facts(foreign, tmp_path / "mixed", lambda facts: facts.update(data={"train": rows | {"plain": 7}}))

    assert small_files(lorakit.merge(base, plain, out=tmp_path / "out")) == small_files(base)
    end = tokenizer.convert_tokens_to_ids("<|user|>")
    for name, patches in {"mixed": [mixed], "both": [plain, (foreign, 0.5)], "foreign": [foreign]}.items():
        out = lorakit.merge(base, *patches, out=tmp_path / f"out-{name}")
        settings = json.loads((out / "generation_config.json").read_text())
        assert settings["eos_token_id"] == [tokenizer.eos_token_id, end]


def test_a_template_that_fails_leaves_the_bases_end_tokens_and_says_so(tmp_path: Path, tokenizer: Any) -> None:
    base = make_textual_base(tmp_path / "base", tokenizer, "{{ raise_exception('no conversation') }}")
    said: list[str] = []

    out = lorakit.merge(base, make_patch(base, tmp_path / "patch"), out=tmp_path / "out", say=said.append)

    assert small_files(out) == small_files(base)
    assert any("eos_token_id is the base's" in line and "no conversation" in line for line in said)


def test_a_base_without_any_end_token_gets_those_of_its_tokenizer(tmp_path: Path, tokenizer: Any) -> None:
    base = make_textual_base(tmp_path / "base", tokenizer, eos_token_id=None)
    (base / "generation_config.json").unlink()

    out = lorakit.merge(base, make_patch(base, tmp_path / "patch"), out=tmp_path / "out")

    assert AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == [tokenizer.eos_token_id]


def test_a_tokenizer_without_an_end_token_leaves_the_templates_alone(tokenizer: Any) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.eos_token = None
    bare.chat_template = OTHER
    assert end_token_ids(bare, [7]) == [7, tokenizer.convert_tokens_to_ids("<|user|>")]
    bare.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert end_token_ids(bare, None) == []
