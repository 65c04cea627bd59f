"""Many adapters on one base, beside PEFT: load, switch, a decode step with as many adapters as rows (C7, C8, C9).

    python -m benchmarks.adapters [--shape 1.1B] [--pairs 7] [--keep]

Both sides run in a process of their own on the same base and patches and take turns. PEFT is in its best form:
SDPA, autocast_adapter_dtype=False.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import keep, python, rss_bytes, scratch, table
from benchmarks.models import make_base, make_patch

ROWS, PROMPT_TOKENS, RANK = 8, 32, 16


class Lorakit:
    """lorakit's side."""

    def __init__(self, base: str) -> None:
        import lorakit

        self.model = lorakit.load(base, dtype="float32")

    def load(self, name: str, path: str) -> None:
        self.model.load_adapter(name, path)

    def switch(self, name: str) -> None:
        with self.model.using(name):
            pass

    def step(self, ids: torch.Tensor, cache: Any, adapters: list[str | None]) -> torch.Tensor:
        out: torch.Tensor = self.model(input_ids=ids, past_key_values=cache, adapters=adapters).logits
        return out


class Peft:
    """PEFT's side."""

    def __init__(self, base: str) -> None:
        from transformers import AutoModelForCausalLM

        self.base = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        self.model: Any = None

    def load(self, name: str, path: str) -> None:
        from peft import PeftModel

        if self.model is None:
            self.model = PeftModel.from_pretrained(self.base, path, adapter_name=name, autocast_adapter_dtype=False)
            self.model.eval()
        else:
            self.model.load_adapter(path, adapter_name=name, autocast_adapter_dtype=False)

    def switch(self, name: str) -> None:
        self.model.set_adapter(name)

    def step(self, ids: torch.Tensor, cache: Any, adapters: list[str | None]) -> torch.Tensor:
        if set(adapters) == {None}:
            with self.model.disable_adapter():
                return self._logits(ids, cache)
        if len(set(adapters)) == 1:
            self.model.set_adapter(adapters[0])
            return self._logits(ids, cache)
        names = [name or "__base__" for name in adapters]
        return self._logits(ids, cache, adapter_names=names)

    def _logits(self, ids: torch.Tensor, cache: Any, **more: Any) -> torch.Tensor:
        out: torch.Tensor = self.model(input_ids=ids, past_key_values=cache, **more).logits
        return out


def serve(kind: str, base: str) -> None:
    """One side: a command per line on standard input, an answer per line on standard output."""
    side: Any = {"lorakit": Lorakit, "peft": Peft}[kind](base)
    caches: dict[str, Any] = {}
    for line in sys.stdin:
        command, *rest = json.loads(line)
        before = rss_bytes()
        began = time.perf_counter()
        answer: dict[str, Any] = {}
        with torch.no_grad():
            if command == "step":
                key, adapters = rest
                if key not in caches:
                    caches[key] = prefill(side, adapters)
                ids = torch.full((ROWS, 1), 7)
                began = time.perf_counter()
                logits = side.step(ids, caches[key], adapters)
                answer["seconds"] = time.perf_counter() - began
                answer["checksum"] = float(logits.double().abs().mean())
                caches[key].crop(-1)
            else:
                getattr(side, command)(*rest)
        answer = {"seconds": time.perf_counter() - began, "rss_growth": rss_bytes() - before, **answer}
        print(json.dumps(answer), flush=True)


def prefill(side: Any, adapters: list[str | None]) -> Any:
    """A KV cache of the same prompt for every row."""
    from transformers import DynamicCache

    cache = DynamicCache()
    side.step(torch.arange(5, 5 + PROMPT_TOKENS).repeat(ROWS, 1), cache, adapters)
    return cache


class Side:
    """The other end of ``serve``."""

    def __init__(self, kind: str, base: Path) -> None:
        self._process = subprocess.Popen(
            python("-m", "benchmarks.adapters", "--serve", kind, "--base", str(base)),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, *command: Any) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(command), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def measure(shape: str, pairs: int, more: int) -> dict[str, Any]:
    """Every figure, both sides in turn."""
    base = make_base(scratch(), shape, torch.float32)
    patches = [make_patch(scratch(), base, rank=RANK, seed=seed) for seed in range(ROWS)]
    sides = {kind: Side(kind, base) for kind in ("lorakit", "peft")}
    result: dict[str, Any] = {"shape": shape, "rows": ROWS, "rank": RANK, "dtype": "float32"}
    result["patch_bytes"] = (patches[0] / "adapter_model.safetensors").stat().st_size
    names = [f"a{number}" for number in range(ROWS)]
    for kind in sides:
        result[kind] = {"load": [], "switch": [], "base": [], "one": [], "mixed": []}
    for name, patch in zip(names, patches, strict=True):
        for kind, side in sides.items():
            result[kind]["load"].append(side.ask("load", name, str(patch)))
    for pair in range(pairs):
        for kind, side in sides.items():
            result[kind]["switch"].append(side.ask("switch", names[pair % ROWS]))
        for what, route in (("base", [None] * ROWS), ("one", [names[0]] * ROWS), ("mixed", names)):
            for kind, side in sides.items():
                result[kind][what].append(side.ask("step", what, route))
    lorakit = sides["lorakit"]
    variants = [variant(patches[number % ROWS], number) for number in range(more)]
    result["many"] = [lorakit.ask("load", f"m{number}", str(folder)) for number, folder in enumerate(variants)]
    return result


def variant(patch: Path, number: int) -> Path:
    """A patch with the same file of tensors and another alpha: the same patch twice would be one adapter in memory."""
    folder = patch.parent / f"{patch.name}-variant{number}"
    if not folder.exists():
        shutil.copytree(patch, folder, copy_function=os.link)
        config = json.loads((patch / "adapter_config.json").read_text())
        for name in ("adapter_config.json", "lorakit.json"):  # the latter says that the former was not edited
            (folder / name).unlink()
        (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 1.0 + number}))
    return folder


def show(result: dict[str, Any]) -> None:
    """The table, and the checks that both sides did the same work."""

    def middle(kind: str, what: str, skip: int = 1) -> float:
        return float(statistics.median(one["seconds"] for one in result[kind][what][skip:]))

    for what in ("base", "one", "mixed"):
        sums = [result[kind][what][-1]["checksum"] for kind in ("lorakit", "peft")]
        assert abs(sums[0] - sums[1]) < 1e-4 * sums[1], f"{what}: not the same work: {sums}"
    rows: list[tuple[str, ...]] = [("", "lorakit", "peft", "peft / lorakit")]
    labels = {
        "load": "load an adapter, ms", "switch": "switch, ms", "base": "decode step, base, ms",
        "one": "decode step, one adapter, ms", "mixed": f"decode step, {ROWS} adapters, ms",
    }  # fmt: skip
    for what, label in labels.items():
        ours, theirs = middle("lorakit", what), middle("peft", what)
        rows.append((label, f"{ours * 1e3:.3f}", f"{theirs * 1e3:.1f}", f"{theirs / ours:.2f}"))
    for what in ("one", "mixed"):
        ratios = [
            statistics.median(
                a["seconds"] / b["seconds"]
                for a, b in zip(result[kind][what][1:], result[kind]["base"][1:], strict=True)
            )
            for kind in ("lorakit", "peft")
        ]
        rows.append((f"step with {what} / base", *(f"{ratio:.3f}" for ratio in ratios), ""))
    loads = [*result["lorakit"]["load"][1:], *result["many"]]  # together, because one load reserves for the next ones
    growth = sum(one["rss_growth"] for one in loads) / len(loads)
    rows.append(("memory per adapter / its tensors", f"{growth / result['patch_bytes']:.3f}", "", ""))
    many = [one["seconds"] for one in result["many"]]
    if many:
        tail = statistics.median(many[-10:])
        rows.append((f"load of number {ROWS + len(many)}, ms", f"{tail * 1e3:.1f}", "", ""))
    table(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="1.1B")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument(
        "--more", type=int, default=92, help="adapters loaded on top, to see whether loading gets slower"
    )
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--serve")
    parser.add_argument("--base")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.base)
    else:
        found = measure(options.shape, options.pairs, options.more)
        show(found)
        if options.keep:
            keep("adapters", found)
