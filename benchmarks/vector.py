"""A step of SFT through the vector of its tokens' losses, beside through their sum alone (O3).

    python -m benchmarks.vector [--shape 100M] [--pairs 7] [--keep]

Objectives are functions of the losses of label tokens, so the head returns all of them, and backward multiplies the
gradient of each by what the objective makes of it. The other side has a head that knows no more than their sum.
"""

import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import CPU, peak_bytes, program, scratch, table
from benchmarks.models import make_base, make_patch
from benchmarks.pairs import VOCABULARY
from benchmarks.rows import packed, random_rows
from benchmarks.sides import RANK, lorakit_engine, patch_tensors
from benchmarks.turns import Side, Step, answers_of, middle, ratio, serve
from lorakit.base.transformers_io import load_base
from lorakit.launch.libraries import limit_kernel_caches
from lorakit.objectives.cross_entropy import LossHead, _cross_entropy_, select_labelled
from lorakit.objectives.objective import SFT
from lorakit.ops.products import linear

SIDES = ("vector", "sum")
LENGTHS = (256,) * 4


class SumOfLosses(torch.autograd.Function):
    """The sum of the losses of all labels, with one factor for the gradient of all."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: LossHead, labels: Tensor) -> Tensor:
        gradient = torch.empty_like(hidden)
        losses = torch.empty(len(hidden))
        weight = head.get_parameter("weight")
        for chunk in head.chunks(hidden):
            z, _ = head.logits(hidden[chunk])
            losses[chunk], _ = _cross_entropy_(z, labels[chunk], head.vocabulary, 0.0, True)
            gradient[chunk] = linear(z, weight.T, None, by_onednn=True) if head.by_onednn else torch.mm(z, weight)
        ctx.save_for_backward(gradient)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0], None, None


class SumHead(LossHead):
    """A head that gives the sum alone."""

    def forward(self, hidden: Tensor, labels: Tensor, positions: Tensor | None = None, *rest: Any) -> Any:
        hidden, labels = select_labelled(hidden, labels, positions)
        total = SumOfLosses.apply(hidden, self, labels[:, None])  # type: ignore[no-untyped-call]
        return total[None], torch.zeros(1)


def lorakit_side(name: str, base: Path, patch: Path) -> Step:
    limit_kernel_caches("float32")
    objective = SFT if name == "vector" else replace(SFT, terms=lambda scores: (scores.losses.sum(),), metrics={})
    engine = lorakit_engine(load_base(base, torch.float32, CPU), patch_tensors(patch), CPU, objective)
    loss_model = engine._loss_model
    assert loss_model.head is not None
    if name == "sum":
        loss_model.head.__class__ = SumHead
    number = 0

    def step() -> dict[str, Any]:
        nonlocal number
        batch = packed(random_rows(VOCABULARY, LENGTHS, number))
        began = time.perf_counter()
        report = engine.accumulate([batch])
        seconds = time.perf_counter() - began
        learning = [parameter for parameter in loss_model.parameters() if parameter.grad is not None]
        digest = zlib.crc32(b"".join(one.grad.numpy().tobytes() for one in learning if one.grad is not None))
        for parameter in learning:
            parameter.grad = None
        number += 1
        return {"seconds": seconds, "loss": report.loss, "gradients": digest}

    return step


def side(name: str, base: str, patch: str) -> None:
    """One side, in this process."""
    imports = peak_bytes()
    step = lorakit_side(name, Path(base), Path(patch))
    weights = sum(file.stat().st_size for file in Path(base).glob("*.safetensors"))
    serve(step, imports_bytes=imports, weights_bytes=weights)


def measure(shape: str, pairs: int) -> dict[str, Any]:
    """Both sides in turn."""
    base = make_base(scratch(), shape, torch.float32)
    patch = make_patch(scratch(), base, rank=RANK, seed=0)
    sides = {name: Side("benchmarks.vector", name, str(base), str(patch)) for name in SIDES}
    taken = answers_of(sides, pairs)
    return {"shape": shape, "rank": RANK, "dtype": "float32", **taken}


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that targets speak of."""
    return {
        "SFT through the vector of losses / their sum": ratio(result["vector"], result["sum"]),
        "gradients that are other bits": sum(
            a["gradients"] != b["gradients"] for a, b in zip(result["vector"], result["sum"], strict=True)
        ),
    }


def show(result: dict[str, Any]) -> None:
    print(
        f"{result['shape']}, forward and backward of {len(LENGTHS)} rows of {LENGTHS[0]} tokens, float32, rank {RANK}\n"
    )
    table([("", "seconds"), *((name, f"{middle(result[name]):.3f}") for name in SIDES)])
    print()
    for name, rate in rates(result).items():
        print(f"{name:<46} {rate:.3f}")


if __name__ == "__main__":
    program("vector-{shape}", measure, show, shape="100M", pairs=7)
