"""A part of a model that is called row by row gives each row of a packed line what it gives the row alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorakit.ops.row_by_row import call_row_by_row
from lorakit.run.metrics import read_metrics
from lorakit.training.start import train
from scripts.zoo.trial import make_small
from tests.helpers.fork_server import run_python
from tests.helpers.models import build


class Sums(nn.Module):
    """A state: the sum of all tokens up to this one. Takes and returns more than its hidden states."""

    def forward(
        self, hidden: Tensor, *, mask: Tensor, names: str, sides: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, None, str]:
        assert mask.shape[-2:] == (hidden.shape[1], hidden.shape[1])
        return hidden.cumsum(1) + sides[0] - sides[1] + mask.sum(-1)[0, 0, :, None], None, names


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = Sums()
        self.mlp = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.shape[1]
        mask = torch.ones(1, 1, tokens, tokens).tril()
        positions = torch.zeros(1, tokens, 1)
        state: Tensor = self.state(hidden, mask=mask, names="a", sides=(positions, positions))[0]
        return state + self.mlp(hidden)


@pytest.mark.parametrize("sizes", [(3, 5, 2), (1, 3, 4), (2, 1, 1)])  # also as many tokens as a token has values
def test_parts_in_which_rows_meet_are_called_row_by_row_and_no_others(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Model()
    lengths: list[int] = []
    rows = [torch.randn(1, size, 4) for size in sizes]
    alone = [model(row) for row in rows]
    lengths[:] = sizes[:2]
    found = call_row_by_row(model.children(), lambda: model(torch.cat(rows[:2], 1)), lengths)

    assert found == [model.state]
    lengths[:] = sizes
    torch.testing.assert_close(model(torch.cat(rows, 1)), torch.cat(alone, 1))
    lengths[:] = ()  # padded rows: lines of their own
    torch.testing.assert_close(model(rows[1]), alone[1])


@pytest.mark.parametrize("architecture", ["qwen3_5", pytest.param("falcon_h1", marks=pytest.mark.matrix)])
def test_a_hybrid_learns_the_same_packed_and_padded_with_dropout(
    architecture: str, recipe: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], tokenizer: Any
) -> None:
    base = make_small(architecture, tokenizer, tmp_path / "base")
    losses: dict[str, list[float]] = {}
    for packing in ("auto", False):
        path = recipe(
            base={"model": str(base)}, data={"packing": packing}, adapter={"dropout": 0.2}, output=str(tmp_path / str(packing)),
            train={"steps": 4, "batch_size": 6, "micro_batch_size": 3, "activation_checkpointing": "layers"},
        )  # fmt: skip
        metrics = read_metrics(train(path).folder / "metrics.jsonl")
        losses[str(packing)] = [line["loss"] for line in metrics if "loss" in line]
        assert ("where rows would see each other" in capfd.readouterr().out) == (packing == "auto")

    assert losses["auto"][0] != losses["auto"][-1]
    assert losses["auto"] == pytest.approx(losses["False"], rel=1e-4)


def test_a_command_has_no_lines_of_transformers_about_kernels(tmp_path: Path, tokenizer: Any) -> None:
    base = make_small("qwen3_5", tokenizer, tmp_path / "base")

    ended = run_python("-m", "lorakit.cli", "generate", base, "--prompt", "say 3", "--max-new-tokens", "2")

    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.spread
@pytest.mark.matrix
@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero3"])
def test_a_hybrid_learns_the_same_with_two_processes(
    backend: str, recipe: Callable[..., Path], tmp_path: Path, tokenizer: Any
) -> None:
    """ZeRO-3 gathers a layer's weights at every call, so ranks call it equally often, and it pads."""
    base = make_small("qwen3_5", tokenizer, tmp_path / "base")
    losses = []
    for name, parallel in (("single", {}), (backend, {"backend": backend, "processes": 2})):
        path = recipe(
            base={"model": str(base)}, output=str(tmp_path / name), parallel=parallel,
            train={"steps": 3, "batch_size": 5, "micro_batch_size": 2},
        )  # fmt: skip
        metrics = read_metrics(train(path).folder / "metrics.jsonl")
        losses.append([line["loss"] for line in metrics if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_rows_are_padded_where_nothing_keeps_them_apart_and_the_run_says_so(
    recipe: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], tokenizer: Any
) -> None:
    base = make_small("bloom", tokenizer, tmp_path / "base")  # it adds a bias of each key's number in the line
    path = recipe(base={"model": str(base)}, output=str(tmp_path / "out"), train={"steps": 1, "warmup_steps": 0})
    train(path)
    assert "rows are padded instead: BloomForCausalLM " in capfd.readouterr().out
    with pytest.raises(Exception, match=r"data.packing: BloomForCausalLM .*; set data.packing: auto"):
        train(
            recipe(
                base={"model": str(base)},
                data={"packing": True},
                output=str(tmp_path / "two"),
                train={"steps": 1, "warmup_steps": 0},
            )
        )


def test_a_layer_may_be_written_into(tokenizer: Any) -> None:
    """As Llama 4 and Gemma 3n do, which autograd refuses for a view that a function of its own returns."""
    import lorakit

    model = lorakit.inject(build("llama"), targets=["q_proj"])
    layer = model.model.layers[0].self_attn.q_proj
    output = layer(torch.randn(1, 3, 32))
    output += 1
    output.sum().backward()
    assert layer.lora_B.grad is not None
