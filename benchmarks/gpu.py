"""The rows of one GPU, G1 to G9, in one go: `python -m benchmarks.gpu [--rows G1 G4 ...] [--keep]`.

Bases are random Llamas of named shapes in bfloat16, made on the GPU; rank 16 on all linear layers, B non-zero. It needs
torch, transformers, accelerate, PEFT and safetensors, and bitsandbytes where a base is packed. The sides of a row do
not fit beside each other, so they run one after the other in this process, lorakit first and last; one that runs out of
memory takes half as many rows at a time. Beside PEFT a row counts if losses and gradient norms agree. In its best form
PEFT keeps the adapter in bfloat16, lorakit in float32; the floor is the frozen base in transformers with its own loss.
The targets are those of an H200. What cannot be measured is listed with the reason.

Up to now this program has run on a CPU alone, with `--tiny`; on no GPU has it ever been tried.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu_sides import Work, fails, measure, middle_of, rates
from benchmarks.machine import CPU, copy_rate, hardware, keep, matmul_rate, table
from benchmarks.models import SHAPES
from benchmarks.targets import Target, measured, summary

WORKS: Mapping[str, Work] = {
    "8B-2048": Work("8B", 8, 2048, ("lorakit", "peft", "peft defaults", "floor", "lorakit")),
    "8B-8192": Work("8B", 2, 8192, ("lorakit", "peft", "lorakit")),
    "1B-2048": Work("1B", 8, 2048, ("lorakit", "peft", "lorakit")),
    "8B-nf4": Work("8B", 4, 2048, ("lorakit", "lorakit nf4", "lorakit")),
    "70B-nf4": Work("70B", 2, 2048, ("lorakit nf4",)),
}
TARGETS = (
    Target("G1", "8B-2048", "tokens per second", at_least=17_000),
    Target("G1", "8B-2048", "tokens per second / peft", at_least=1.3),
    Target("G2", "8B-8192", "tokens per second", at_least=14_000),
    Target("G4", "1B-2048", "tokens per second", at_least=75_000),
    Target("G5", "8B-2048", "peak memory, GB", at_most=72),
    Target("G5", "8B-2048", "peak memory / peft", at_most=0.55),
    Target("G6", "8B-nf4", "tokens per second, nf4 / bf16", at_least=0.92),
    Target("G7", "70B-nf4", "tokens per second", at_least=1_600),
    Target("G9", "8B-2048", "lorakit / floor", at_most=1.08),
)
MISSING: Sequence[tuple[str, str]] = (
    ("G3", "8B on a base in FP8: lorakit has no base in FP8"),
    ("G7", "70B on a base in FP8: lorakit has no base in FP8"),
    ("G8", "70B streamed from host memory: every layer is streamed, and 141 GB are more than the hosts at hand have"),
)
ROWS = sorted({target.row for target in TARGETS} | {row for row, _ in MISSING})
TINY_TOKENS = 32


def run(found: dict[str, Any], rows: Sequence[str], device: torch.device, rounds: int, *, tiny: bool) -> None:
    """Every raw figure of these rows, the rates that targets speak of, and why there is none where there is none."""
    found |= {"rates": {}, "raw": {}, "skipped": [[row, why] for row, why in MISSING if row in rows]}
    wanted = {target.program for target in TARGETS if target.row in rows}
    for name, work in WORKS.items():
        if name not in wanted:
            continue
        if tiny:
            work = replace(work, shape="tiny", length=TINY_TOKENS)
        result = measure(work, device, rounds)
        shape = SHAPES[work.shape]
        result["matmul_flops"] = matmul_rate(shape, work.rows * work.length, torch.bfloat16, device)
        found["raw"][name], found["rates"][name] = result, rates(result)
        show(name, work, result, found["rates"][name])
    found["copy_bytes_per_second"] = copy_rate(device)
    found["skipped"] += unmeasured(rows, found)


def unmeasured(rows: Sequence[str], found: dict[str, Any]) -> list[list[str]]:
    """Targets of these rows without a figure, and why."""
    had = {(target.program, target.figure) for target, _ in measured(TARGETS, found)}
    return [
        [target.row, f"{target.figure}: {fails(found['raw'][target.program])}"]
        for target in TARGETS
        if target.row in rows and (target.program, target.figure) not in had
    ]


def show(name: str, work: Work, result: dict[str, Any], found: Mapping[str, float]) -> None:
    """Every run of every side, and the rates."""
    print(f"\n== {name}: {work.shape}, {work.rows} rows of {work.length} tokens a step, bfloat16", flush=True)
    lines: list[tuple[str, ...]] = [("", "rows at a time", "seconds", "tokens/s", "peak GB", "of every round")]
    for one in result["runs"]:
        if "failed" in one:
            print(f"{one['side']}: {one['failed']}")
            continue
        seconds, times = middle_of([one]), " ".join(f"{r['seconds']:.4g}" for r in one["rounds"])
        peak, rate = f"{one['peak_bytes'] / 1e9:.2f}", f"{result['tokens'] / seconds:.0f}"
        lines.append((one["side"], str(one["rows_at_a_time"]), f"{seconds:.4f}", rate, peak, times))
    table(lines)
    for figure, value in found.items():
        print(f"{figure:<36} {value:.3f}")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--rounds", type=int, default=5, help="counted steps of every side")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, to see that it runs")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/")
    options = parser.parse_args(arguments)
    if not options.tiny and not torch.cuda.is_available():
        print(f"{', '.join(options.rows)} not measured: there is no CUDA device here")
        return
    device = CPU if options.tiny else torch.device("cuda", torch.cuda.current_device())
    print(hardware())
    found: dict[str, Any] = {}
    try:
        run(found, options.rows, device, options.rounds, tiny=options.tiny)
    finally:  # what was measured before a row broke is worth keeping
        if options.keep and not options.tiny:
            keep("gpu", found)
    print("\ntargets are those of an H200" + ("; figures of --tiny say nothing" if options.tiny else ""))
    summary([target for target in TARGETS if target.row in options.rows], found)
    print(f"copy {found['copy_bytes_per_second'] / 1e9:.1f} GB/s, read and written\n")
    for row, why in found["skipped"]:
        print(f"{row} not measured: {why}")


if __name__ == "__main__":
    main()
