"""Compiled layers learn what the others learn, and nothing is compiled once the first steps are over."""

import json
import shutil
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lorakit import train
from lorakit.errors import RecipeError, RunError
from lorakit.recipe import load_recipe
from lorakit.training.compile import CompiledLayers


def losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


COMPILER = "inductor"


@pytest.mark.parametrize(
    "compiler",
    [
        "aot_eager",  # the graphs of torch's compiler, run by torch
        pytest.param(
            COMPILER,
            marks=[
                pytest.mark.spread, pytest.mark.slow,
                pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler"),
            ],
        ),
    ],
)  # fmt: skip
@pytest.mark.matrix
@pytest.mark.filterwarnings("default")  # torch uses what it has deprecated
def test_compiled_layers_learn_the_same_and_are_compiled_once(
    compiler: str, recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    if compiler != COMPILER:
        monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=compiler))
    shared = {"adapter": {"rank": 4, "dropout": 0.0}, "data": {"eval": None}}
    plain = train(recipe("plain.yaml", **shared, output=str(tmp_path / "plain"))).folder
    assert "graphs" not in capsys.readouterr().out

    compiled = train(
        recipe("compiled.yaml", **shared, output=str(tmp_path / "compiled")), **{"train.compile": True}
    ).folder

    told = json.loads((compiled / "run.json").read_text())["compiled"]
    output = capsys.readouterr().out
    assert "compile    each layer, in the first steps" in output
    assert 0 < told["graphs"] < 12
    assert told["last_step"] == 1  # rows of uneven length, as many or fewer of them, in every step after
    assert f"compiled   {told['graphs']} graphs, the last of them in step 1" in output
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-4)


@pytest.mark.spread
@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler")
@pytest.mark.filterwarnings("default")
def test_dropout_adds_no_graphs(recipe: Any) -> None:
    compiled = train(recipe(adapter={"rank": 4, "dropout": 0.1}, data={"eval": None}), **{"train.compile": True}).folder

    told = json.loads((compiled / "run.json").read_text())["compiled"]
    assert 0 < told["graphs"] < 12
    assert told["last_step"] == 1


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"parallel": {"backend": "fsdp2", "processes": 2}}, "layers that stay in memory, got fsdp2:"),
        ({"parallel": {"offload": "stream"}}, "layers that stay in memory, got single, offload: stream"),
        ({"base": {"quantize": "nf4"}}, "a base in floats, got base.quantize: nf4"),
    ],
)
def test_recipes_say_where_it_goes(recipe: Any, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe(recipe(train={"compile": True}, **sections))


def test_an_offload_that_says_none_goes_with_it(recipe: Any) -> None:
    spelt_out = {"optimizer": "none", "parameters": "none"}
    assert load_recipe(recipe(train={"compile": True}, parallel={"offload": spelt_out})).train.compile


def test_a_model_without_repeated_layers_is_refused() -> None:
    with pytest.raises(RunError, match="Sequential has no repeated layers to compile"):
        CompiledLayers(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.filterwarnings("default")
def test_without_a_compiler_the_run_says_so(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()  # or what an earlier test compiled is used
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)

    with pytest.raises(RunError, match="train.compile: torch cannot compile this model's layers; leave it out"):
        train(recipe(data={"eval": None}), **{"train.compile": True})
