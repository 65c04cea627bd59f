"""All rows of a CPU machine in one go: `make bench`, or `python -m benchmarks [--compare FILE]`.

Every figure is a ratio to something measured in the same run; the targets are those the project set itself. The result
is kept as benchmarks/results/all-HARDWARE.json, and one of the same hardware can be compared with. Some rows alone:
`--only NAME ... --keep AS`, kept as benchmarks/results/AS-HARDWARE.json.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import (
    gathers,
    long_streams,
    merge,
    mesh,
    mixed,
    pairs,
    pipeline,
    pool,
    prompts,
    ragged,
    registered,
    save,
    scale,
    sequence,
    serving,
    startup,
    step,
    stream,
    tensor,
    unequal,
    vector,
)
from benchmarks.machine import hardware, keep
from benchmarks.targets import Target, summary

PROGRAMS: Mapping[str, tuple[Callable[[], dict[str, Any]], Any]] = {
    "even": (lambda: step.measure("100M", "even", 5), step),
    "half": (lambda: step.measure("100M", "half", 5), step),
    "chat": (lambda: step.measure("100M", "chat", 5), step),
    "pairs": (lambda: pairs.measure("100M", 5), pairs),
    "prompts": (lambda: prompts.measure("100M", 5), prompts),
    "vector": (lambda: vector.measure("100M", 7), vector),
    "startup": (lambda: startup.measure(5), startup),
    "merge": (lambda: merge.measure("1.1B", 5, "bfloat16", 16), merge),
    "save": (lambda: save.measure(5), save),
    "gathers": (gathers.measure, gathers),
    "sequence": (sequence.measure, sequence),
    "pipeline": (pipeline.measure, pipeline),
    "tensor": (tensor.measure, tensor),
    "mesh": (mesh.measure, mesh),
    "mixed": (lambda: mixed.measure("1.1B", 5), mixed),
    "ragged": (lambda: ragged.measure("100M", 5), ragged),
    "stream": (lambda: stream.measure("100M", 7), stream),
    "serving": (lambda: serving.measure("100M", 7), serving),
    "pool": (lambda: pool.measure("1.1B", 1000, 9), pool),
    "unequal": (lambda: unequal.measure("100M", 3), unequal),
    "long streams": (lambda: long_streams.measure("100M", 3), long_streams),
    "registered": (lambda: registered.measure(10_000), registered),
    "scale": (lambda: scale.measure(1_000_000), scale),
}
TARGETS = (
    Target("C1", "even", "lorakit / floor", at_most=0.95),
    Target("C2", "half", "tokens per second / peft", at_least=1.4),
    Target("C3", "chat", "tokens per second / peft", at_least=3.0),
    Target("C3", "chat", "tokens per second / rows of one length", at_least=0.95),
    Target("C4", "even", "memory / peft", at_most=0.4),
    Target("C5", "startup", "start to first step / peft", at_most=0.5),
    Target("C5b", "startup", "check / import torch", at_most=1.07),
    Target("C5b", "startup", "show / import torch", at_most=1.07),
    Target("C5b", "startup", "plan / import torch", at_most=2.86),
    Target("C5b", "startup", "generate / import torch", at_most=2.14),
    Target("C6", "merge", "merge / (cp + fsync)", at_most=1.6),
    Target("C6", "merge", "merge memory / allowed", at_most=1.0),
    Target("C11", "save", "patch save, of disk speed", at_least=0.9),
    Target("C12", "gathers", "zero3: gathered / base", at_most=2.1),
    Target("C12", "gathers", "fsdp2: gathered / base", at_most=2.1),
    Target("C12", "gathers", "zero3: added up / adapter", at_most=1.05),
    Target("C12", "gathers", "fsdp2: added up / adapter", at_most=1.05),
    Target("P1", "sequence", "sequence 2: activations / one process", at_most=0.55),
    Target("P2", "pipeline", "2 stages: base of a process / all", at_most=0.55),
    Target("P2", "pipeline", "2 stages: idle share - (p - 1) / (m + p - 1)", at_most=0.001),
    Target("P3", "tensor", "ddp, tensor 2: base / one process", at_most=0.55),
    Target("P3", "tensor", "ddp, tensor 2: messages beyond the base's own", at_most=1.0),
    Target("P3", "tensor", "fsdp2, data 2 x tensor 2: messages beyond the base's own", at_most=1.0),
    Target("P4", "mesh", f"ddp, 2 x 2 x 2: {mesh.FIGURE}", at_most=2.0),
    Target("P4", "mesh", f"fsdp2, 2 x 2 x 2: {mesh.FIGURE}", at_most=2.0),
    Target("O1", "pairs", "DPO step / trl", at_most=0.6),
    Target("O1", "pairs", "DPO memory / trl", at_most=0.4),
    Target("O2", "prompts", "step with a shared prompt / apart", at_most=0.45),
    Target("O3", "vector", "SFT through the vector of losses / their sum", at_most=1.02),
    Target("O3", "vector", "gradients that are other bits", at_most=0),
    Target("S1", "mixed", "8 adapters: tokens per second / base", at_least=0.9),
    Target("S2", "ragged", "ragged: tokens per second / generate", at_least=2.0),
    Target("S2", "ragged", "ragged: tokens per second / continuous batching", at_least=1.2),
    Target("S3", "stream", "time per token over HTTP / bare loop", at_most=1.05),
    Target("S3", "stream", "ms that HTTP adds to the first token", at_most=3.0),
    Target("S4", "serving", "first token, 512 tokens cached / cold", at_most=0.05),
    Target("S4", "serving", "first token, 512 tokens cached / forward of the other 16", at_most=1.2),
    Target("S5", "pool", "1,000 adapters, 16 in memory: MB above those", at_most=200.0),
    Target("S5", "pool", "wait for an adapter on disk / reading its file", at_most=1.5),
    Target("S7", "stream", "1,000 clients left: rows, tensors, bytes of KV more", at_most=0.0),
    Target("S7", "stream", "1,000 clients left: MB of memory more", at_most=1.0),
    Target("S8", "unequal", f"{unequal.UNEQUAL}: memory / their sum", at_most=1.3),
    Target("S8", "unequal", f"{unequal.UNEQUAL}: tokens per second / 16 of 200", at_least=0.7),
    Target("S9", "long streams", "token 4,000 / token 100, without attention", at_most=1.1),
    Target("S9", "long streams", "ms that a stream pauses for a large request", at_most=20.0),
    Target("S10", "registered", "10,000 adapters: seconds to start", at_most=10.0),
    Target("S10", "registered", "10,000 adapters: ms of their list", at_most=100.0),
    Target("S10", "registered", "10,000 adapters: bytes of one on disk", at_most=4000.0),
    Target("Z1", "scale", "second start: read / base", at_most=1.05),
    Target("Z2", "scale", "a row: large / small", at_most=1.1),
    Target("Z4", "scale", "step 1,000,000 / step 1,000", at_most=1.05),
    Target("Z5", "scale", "plan: processor seconds", at_most=15.0),
    Target("Z5", "scale", "plan: GB", at_most=1.5),
)


def run(names: list[str]) -> dict[str, Any]:
    """The programs, one after the other: every raw figure, and the rates that targets speak of."""
    found: dict[str, Any] = {"rates": {}, "raw": {}}
    for name in names:
        measure, program = PROGRAMS[name]
        print(f"\n== {name}: {program.__name__}", flush=True)
        result = measure()
        program.show(result)
        found["raw"][name], found["rates"][name] = result, program.rates(result)
    return found


def earlier(path: Path) -> dict[str, Any]:
    """A kept result to compare with, of all programs and of this hardware; ends the program when it is another."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        raise SystemExit(f"{path} cannot be read as a result: {problem}") from None
    if "rates" not in found:
        raise SystemExit(f"{path} is of one program; --compare wants a result of all: benchmarks/results/all-*.json")
    if found["hardware"] != hardware():
        raise SystemExit(f"{path} was measured on {found['hardware']}, and this is {hardware()}: no comparison")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--keep", metavar="AS", help="the name of the result of --only; without a name it is not kept")
    parser.add_argument("--compare", type=Path, help="an earlier result of the same hardware")
    options = parser.parse_args()
    complete = options.only == list(PROGRAMS)
    if options.keep == "all" or (complete and options.keep):
        parser.error("--keep: the result of all programs is kept as `all`, and no other is")
    before = earlier(options.compare) if options.compare else None
    print(hardware())
    everything = run(options.only)
    summary(TARGETS, everything, before)
    if name := "all" if complete else options.keep:
        keep(name, everything)
