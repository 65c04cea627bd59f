"""What runs on the GPU: a side's steps on a base of its own, with as many rows at a time as fit."""

import gc
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.machine import now, peak_bytes
from benchmarks.models import SHAPES, flops, hollow, make_model, random_adapter
from benchmarks.rows import Rows, packed, padded, random_rows
from benchmarks.sides import RANK, adamw, frozen, lorakit_engine, peft_model, torch_step
from lorakit.errors import RunError
from lorakit.lora import AdapterSpec, find_targets
from lorakit.parallel.single import SingleEngine
from lorakit.quant.published import quant_scheme

WARM = 2
AS_PEFT = "lorakit, as many rows at a time as peft"
RATIOS = {
    "tokens per second / peft": ("peft", "lorakit"),
    "tokens per second / peft defaults": ("peft defaults", "lorakit"),
    "tokens per second, nf4 / bf16": ("lorakit", "lorakit nf4"),
    "lorakit / floor": ("lorakit", "floor"),
}
"""Figure -> the sides whose seconds are divided."""
LOSS_AGREES, NORM_AGREES = 1e-3, 2e-2
"""Of a step in bfloat16. A random base's loss is near ln(vocabulary) with any adapter; the gradient's norm is not."""
Step = Callable[[Sequence[Rows]], tuple[float, float | None]]
"""The micro-batches of a step -> loss and gradient norm."""


@dataclass(frozen=True)
class Work:
    """``rows`` rows of ``length`` tokens in every step, and the sides that take it, in order."""

    shape: str
    rows: int
    length: int
    sides: tuple[str, ...]
    size: float = 1e-2
    """of the entries of B: large enough for another adapter to have another gradient norm"""


def measure(work: Work, device: torch.device, rounds: int) -> dict[str, Any]:
    """Every side in order, its base made anew; and whether all did the same work."""
    runs = [fitting(side, work, device, rounds) for side in work.sides]
    ours, theirs = first(runs, "lorakit"), first(runs, "peft")
    if ours and theirs and ours["rows_at_a_time"] != theirs["rows_at_a_time"]:
        runs.append(fitting(AS_PEFT, work, device, 1, theirs["rows_at_a_time"]))
    free(device)
    lengths = [work.length] * work.rows
    return {
        **asdict(work), "rank": RANK, "dtype": "bfloat16", "warm": WARM, "tokens": sum(lengths), "runs": runs,
        "differs": differences(runs), "flops_of_a_token": flops(hollow(work.shape, torch.bfloat16), lengths, RANK),
    }  # fmt: skip


def fitting(side: str, work: Work, device: torch.device, rounds: int, rows: int | None = None) -> dict[str, Any]:
    """A side's rounds with as many rows at a time as the memory takes: all, or half, and so on; or why it has none."""
    at_a_time = rows or work.rows
    while at_a_time:
        try:
            return {"side": side, "rows_at_a_time": at_a_time, **run(side, work, device, rounds, at_a_time)}
        except RunError as problem:
            return {"side": side, "failed": str(problem)}
        except torch.OutOfMemoryError:
            at_a_time //= 2  # the frames that hold tensors are gone once this block is left
    return {"side": side, "failed": f"out of memory, with one row of {work.length} tokens at a time too"}


def run(side: str, work: Work, device: torch.device, rounds: int, at_a_time: int) -> dict[str, Any]:
    """Seconds, loss and gradient norm of every round after the warm ones, and the most memory that steps took."""
    on_gpu = device.type == "cuda"
    free(device)
    step = build(side, work, device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    found = []
    for number in range(WARM + rounds):
        rows = rows_of(work, number)
        parts = [Rows(rows[start : start + at_a_time]) for start in range(0, work.rows, at_a_time)]
        began = now(device)
        loss, norm = step(parts)
        found.append({"seconds": now(device) - began, "loss": loss, "grad_norm": norm})
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else peak_bytes()
    return {"peak_bytes": peak, "rounds": found[WARM:]}


def free(device: torch.device) -> None:
    """Give back what the side before held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def rows_of(work: Work, number: int) -> Rows:
    """Rows of random tokens of one length, all label tokens."""
    return random_rows(SHAPES[work.shape]["vocab_size"], [work.length] * work.rows, number)


def build(side: str, work: Work, device: torch.device) -> Step:
    """A side's step, on a base of its own."""
    packing = quant_scheme("nf4") if side.endswith("nf4") else None
    model: Any = make_model(work.shape, torch.bfloat16, device, packing)
    adapter = random_adapter(find_targets(model, AdapterSpec(rank=RANK)), RANK, 0, work.size)
    if side.startswith("lorakit"):
        return lorakit_step(lorakit_engine(model, adapter, device))
    optimizer = None
    if side == "floor":
        frozen(model)
    else:
        model = peft_model(model, adapter, defaults=side == "peft defaults")
        optimizer = adamw(model, fused=side == "peft")
    model.train()

    def step(micro_batches: Sequence[Rows]) -> tuple[float, float | None]:
        loss, norm = torch_step(model, optimizer, [padded(rows, device) for rows in micro_batches])
        return float(loss), None if norm is None else float(norm)

    return step


def lorakit_step(engine: SingleEngine) -> Step:
    """lorakit's engine on packed rows."""
    index = itertools.count()

    def step(micro_batches: Sequence[Rows]) -> tuple[float, float | None]:
        report = engine.step(next(index), [packed(rows) for rows in micro_batches])
        return report.loss, report.grad_norm

    return step


def first(runs: Sequence[dict[str, Any]], side: str) -> dict[str, Any] | None:
    """A side's first run, if it came to an end."""
    return next((one for one in runs if one["side"] == side and "failed" not in one), None)


def differences(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Which sides did not do lorakit's work, going by the losses and the gradient norms of every round."""
    ours, found = first(runs, "lorakit"), []
    for name in ("peft", "peft defaults"):
        theirs = first(runs, name)
        if ours and theirs:
            loss, norm = (
                max(abs(a[what] / b[what] - 1) for a, b in zip(ours["rounds"], theirs["rounds"], strict=True))
                for what in ("loss", "grad_norm")
            )
            if not (loss <= LOSS_AGREES and norm <= NORM_AGREES):
                found.append(f"{name} did other work: losses differ by {loss:.1e}, gradient norms by {norm:.1e}")
    return found


def middle_of(runs: Sequence[dict[str, Any]]) -> float:
    """The median of the seconds of all rounds of some runs."""
    return float(statistics.median(one["seconds"] for run in runs for one in run["rounds"]))


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that targets speak of; none where the sides did not do the same work."""
    by_side: dict[str, list[dict[str, Any]]] = {}
    for one in result["runs"]:
        if "failed" not in one:
            by_side.setdefault(one["side"], []).append(one)
    ours = by_side.get("lorakit") or by_side.get("lorakit nf4")
    if ours is None or result["differs"]:
        return {}
    rate = result["tokens"] / middle_of(ours)
    found = {"tokens per second": rate}
    found["of the matmul ceiling"] = rate * result["flops_of_a_token"] / result["matmul_flops"]
    if all(one["rows_at_a_time"] == result["rows"] for one in ours):
        found["peak memory, GB"] = most(ours) / 1e9
    if "peft" in by_side:
        found["peak memory / peft"] = most(by_side.get(AS_PEFT, ours)) / most(by_side["peft"])
    for figure, (above, below) in RATIOS.items():
        if above in by_side and below in by_side:
            found[figure] = middle_of(by_side[above]) / middle_of(by_side[below])
    return found


def most(runs: Sequence[dict[str, Any]]) -> int:
    """Bytes at the peak."""
    return max(int(one["peak_bytes"]) for one in runs)


def fails(result: dict[str, Any]) -> str:
    """Why a result lacks a figure."""
    few = f"only {{rows_at_a_time}} of {result['rows']} rows fit at a time"
    failed = [
        f"{one['side']}: {one.get('failed') or few.format(**one)}"
        for one in result["runs"]
        if "failed" in one or one["rows_at_a_time"] < result["rows"]
    ]
    return "; ".join([*result["differs"], *dict.fromkeys(failed)])
