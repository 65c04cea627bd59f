"""Decoding over HTTP beside llama.cpp (S11): one stream, eight, and with one, two and eight adapters.

    python -m benchmarks.llama_cpp --llama-server PATH [--rounds 5] [--keep]

A model of SmolLM2-135M's shape with random weights, adapters of rank 16; llama.cpp has both from `lorakit export
--gguf`, in F16. All servers run all the while, each with two threads, and answer in turns.
"""

import json
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.machine import program, scratch, table
from benchmarks.models import SHAPES, make_base, make_patch

PROMPT_TOKENS, NEW_TOKENS, RANK, ADAPTERS = 16, 64, 16, 8
KINDS: Final[dict[str, Sequence[int | None]]] = {
    "one stream": [None],
    "8 streams": [None] * 8,
    "one adapter x 8": [0] * 8,
    "two adapters, 4 + 4": [0] * 4 + [1] * 4,
    "eight adapters": [*range(8)],
}
"""kind -> the adapter of each request"""
PORTS: Final = {"llama.cpp F16": 8151, "lorakit float32": 8152, "lorakit bfloat16": 8153}


def files() -> tuple[Path, list[Path], Path]:
    """The base with a tokenizer that llama.cpp knows, its patches, and the folder of both as GGUF."""
    base = make_base(scratch() / "llama", "135M", torch.float16)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<|end|>", *letters, "ab"]
    names += [f"<|{number}|>" for number in range(len(names), SHAPES["135M"]["vocab_size"])]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, [("a", "b")]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(base)
    patches = [make_patch(scratch() / "llama", base, rank=RANK, seed=seed) for seed in range(ADAPTERS)]
    out = scratch() / "llama" / "gguf"
    if not out.exists():
        export = lorakit("export", base, *adapter_options(patches), "--gguf", "--out", out)
        if export.wait():
            raise SystemExit("the export to GGUF failed")
    return base, patches, out


def lorakit(*arguments: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "lorakit.cli", *map(str, arguments)], stderr=subprocess.DEVNULL)


def adapter_options(patches: list[Path]) -> list[str]:
    return [part for number, path in enumerate(patches) for part in ("--adapter", f"a{number}={path}")]


@contextmanager
def running(process: "subprocess.Popen[bytes]", port: int) -> Iterator[None]:
    """A server that answers /health inside the block."""
    try:
        while process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        else:
            raise SystemExit(f"a server ended: {process.args!r}")
        yield
    finally:
        process.terminate()
        process.wait()


def ask(side: str, adapter: int | None, prompt: list[int]) -> int:
    """Send a request, and return the tokens of its answer."""
    body: dict[str, Any] = {"prompt": prompt}
    if side.startswith("lorakit"):
        path = "v1/completions"
        body |= {
            "model": "base" if adapter is None else f"a{adapter}",
            "max_tokens": NEW_TOKENS,
            "min_tokens": NEW_TOKENS,
            "temperature": 0,
        }
    else:
        path = "completion"
        scales = [{"id": number, "scale": float(number == adapter)} for number in range(ADAPTERS)]
        body |= {"n_predict": NEW_TOKENS, "ignore_eos": True, "temperature": 0, "cache_prompt": False, "lora": scales}
    url = f"http://127.0.0.1:{PORTS[side]}/{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        answer = json.load(reply)
    tokens: int = answer["usage"]["completion_tokens"] if "usage" in answer else answer["tokens_predicted"]
    return tokens


def measure(llama_server: str, rounds: int) -> dict[str, Any]:
    """Tokens per second of each side and kind, in rounds of all."""
    base, patches, gguf = files()
    loras = ",".join(str(gguf / f"a{number}.gguf") for number in range(ADAPTERS))
    own = ["--name", "base", *adapter_options(patches)]
    common = ["-t", "2", "-tb", "2", "-np", "8", "-c", "2048", "--lora-init-without-apply", "--lora", loras]
    llama = [llama_server, "-m", str(gguf / "base.gguf"), "--port", str(PORTS["llama.cpp F16"]), *common]
    found: dict[str, dict[str, list[float]]] = {kind: {side: [] for side in PORTS} for kind in KINDS}
    with ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        quiet = subprocess.DEVNULL
        stack.enter_context(running(subprocess.Popen(llama, stdout=quiet, stderr=quiet), PORTS["llama.cpp F16"]))
        for dtype in ("float32", "bfloat16"):
            port = PORTS[f"lorakit {dtype}"]
            server = lorakit("serve", base, *own, "--dtype", dtype, "--max-adapters", ADAPTERS, "--port", port)
            stack.enter_context(running(server, port))
        for _ in range(rounds + 1):  # the first warms up
            for kind, adapters in KINDS.items():
                for side in PORTS:
                    prompts = torch.randint(5, 250, (len(adapters), PROMPT_TOKENS)).tolist()
                    began = time.perf_counter()
                    num_tokens = sum(pool.map(ask, [side] * len(adapters), adapters, prompts))
                    assert num_tokens == len(adapters) * NEW_TOKENS, (side, kind, num_tokens)
                    found[kind][side].append(num_tokens / (time.perf_counter() - began))
    return {"tokens_per_second": found}


def show(result: dict[str, Any]) -> None:
    """The table: medians after the first round, and shares of llama.cpp's in the same round."""
    lines: list[tuple[str, ...]] = [
        ("SmolLM2-135M's shape, tokens per second", *PORTS, "float32 / llama", "bfloat16 / llama")
    ]
    for kind, sides in result["tokens_per_second"].items():
        speeds = [statistics.median(one[1:]) for one in sides.values()]
        peer, *ours = sides.values()
        shares = [statistics.median(a / b for a, b in zip(one[1:], peer[1:], strict=True)) for one in ours]
        lines.append((kind, *(f"{speed:.0f}" for speed in speeds), *(f"{share:.2f}" for share in shares)))
    table(lines)


if __name__ == "__main__":
    program("llama-cpp", measure, show, llama_server="llama-server", rounds=5)
