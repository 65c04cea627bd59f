"""A base without a tokenizer says so, and takes one from another folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lorakit
from lorakit.base.transformers_io import TOKENIZER_FILES, load_tokenizer
from lorakit.cli import main
from lorakit.errors import LorakitError
from lorakit.patch import read_patch
from tests.helpers.bases import make_base
from tests.helpers.patches import make_patch


@pytest.fixture
def without_tokenizer(tmp_path: Path, tokenizer: Any) -> Path:
    """The random base of the other tests, whose folder holds config and weights alone."""
    folder = make_base(tmp_path / "bare", tokenizer)
    for name in TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)
    return folder


def test_a_base_without_a_tokenizer_is_not_blamed_on_the_rows(
    without_tokenizer: Path, recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(base={"model": str(without_tokenizer), "dtype": "float32"})
    with pytest.raises(LorakitError, match="bare: has no tokenizer; name a folder that has one: base.tokenizer"):
        load_tokenizer(without_tokenizer)

    assert main(["check", str(path)]) == 2
    shown = capsys.readouterr().err
    assert "bare: has no tokenizer; name a folder that has one: base.tokenizer in a recipe" in shown
    assert "rows cannot be used" not in shown
    assert main(["check", str(path), "base.tokenizer=nowhere"]) == 2
    assert "tokenizer: no folder" in capsys.readouterr().err


def test_a_recipe_names_the_tokenizer_and_the_patch_knows_it(
    without_tokenizer: Path, base: Path, recipe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {"steps": 1, "warmup_steps": 0}
    path = recipe(base={"model": str(without_tokenizer), "tokenizer": str(base), "dtype": "fp32"}, train=steps)
    own = lorakit.train(path).folder
    assert f"try it     lorakit generate {without_tokenizer} --tokenizer {base} --adapter" in capsys.readouterr().out
    assert f', tokenizer="{base}")' in (own / "README.md").read_text()
    path = recipe(train=steps, output=str(tmp_path / "usual"))
    usual = lorakit.train(path).folder

    assert (own / "adapter_model.safetensors").exists()
    one, two = (read_patch(folder).metadata for folder in (own, usual))
    assert one["base"] == two["base"]
    assert one["base"]["tokenizer"] is not None
    assert json.loads((own / "run.json").read_text())["recipe"]["base"]["dtype"] == "float32"


def test_a_base_without_a_tokenizer_takes_and_gives_token_ids(
    without_tokenizer: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patch = make_patch(base, tmp_path / "patch")
    bare = lorakit.load(without_tokenizer, dtype="float32")
    bare.load_adapter("a", patch, allow={"base"})
    usual = lorakit.load(base, {"a": patch}, dtype="float32")
    named = lorakit.load(without_tokenizer, {"a": patch}, tokenizer=base, dtype="float32")

    ids = usual.tokenizer("hi there")["input_ids"]
    assert bare.tokenizer is None
    for adapter in ("a", None):
        answers = usual.generate_ids([ids, ids[:2]], adapter, max_new_tokens=8)
        assert bare.generate_ids([ids, ids[:2]], adapter, max_new_tokens=8) == answers
        assert usual.generate([ids, ids[:2]], adapter, max_new_tokens=8) == usual.tokenizer.batch_decode(answers)
        assert named.generate(["hi"], adapter, max_new_tokens=8) == usual.generate(["hi"], adapter, max_new_tokens=8)
    for call in (bare.generate, bare.generate_ids):
        with pytest.raises(LorakitError, match="this base has no tokenizer; name the folder of one"):
            call(["hi"])
    with pytest.raises(LorakitError, match="the token id 99999999, and the base has"):
        bare.generate_ids([[99999999]])

    arguments = ["generate", str(without_tokenizer), "--prompt", "hi", "--dtype", "fp32", "--max-new-tokens", "8"]
    assert main(arguments) == 2
    assert "bare: has no tokenizer; name a folder that has one" in capsys.readouterr().err
    assert main([*arguments, "--tokenizer", str(base)]) == 0
    assert capsys.readouterr().out == usual.generate(["hi"], max_new_tokens=8)[0] + "\n"


@pytest.mark.parametrize(("short", "full"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_short_names_of_dtypes_are_taken_everywhere(base: Path, tmp_path: Path, short: str, full: str) -> None:
    assert str(lorakit.load(base, dtype=short).model.dtype) == f"torch.{full}"
    with pytest.raises(LorakitError, match="dtype 'fp12' is none of auto"):
        lorakit.load(base, dtype="fp12")
    patch, out = make_patch(base, tmp_path / "patch"), tmp_path / "merged"
    assert main(["merge", str(base), str(patch), "--out", str(out), "--dtype", short]) == 0
    assert json.loads((out / "merge.json").read_text())["dtype"] == full
