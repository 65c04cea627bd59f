"""A stream's tokens late in a long answer, and while others send what takes long (S9).

    python -m benchmarks.long_streams [--shape 100M] [--pairs 3] [--keep]

Time per token around token 4,000 beside token 100, less what attention to more keys takes by itself. Then, on a tiny
base of 16,384 positions, the longest pause of a stream while another client sends a prompt of 1 MB, which is refused
once it has been tokenised, or a schema of 400 properties.
"""

import http.client
import json
import random
import shutil
import statistics
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.machine import program, scratch, table
from benchmarks.models import make_base
from benchmarks.stream import prompt_of, stream
from benchmarks.turns import Side
from lorakit.ops.openmp import limit_spinning

EARLY, LATE, AROUND = 100, 4000, 50
POSITIONS = 16_384  # so many that a prompt of 1 MB is tokenised before it is refused, and so few that it is refused
LARGE: dict[str, dict[str, Any]] = {
    "a prompt of 1 MB": {"prompt": "so many words " * 75_000},
    "a schema of 400 properties": {
        "prompt": "hi", "response_format": {"type": "json_schema", "json_schema": {"name": "large", "schema": {
            "type": "object", "properties": {f"key{number}": {"type": "string"} for number in range(400)},
        }}},
    },
}  # fmt: skip


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


@torch.no_grad()
def attention_seconds(config: dict[str, Any], keys: int) -> float:
    """Seconds that the attention of one token takes in all layers, each with keys and values of its own, the median."""
    width = config["hidden_size"] // config["num_attention_heads"]
    query = torch.randn(1, config["num_attention_heads"], 1, width)
    shape = int(config["num_hidden_layers"]), 2, 1, config["num_key_value_heads"], keys, width
    layers = torch.randn(shape)
    weights = torch.randn(1 << 26)  # read between two tokens, as a model's weights are
    found = []
    for _ in range(20):
        weights.sum()
        began = time.perf_counter()
        for key, value in layers:
            F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def send(port: int, body: dict[str, Any]) -> int:
    """Ask for one token; the reply's status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    text = json.dumps({"model": "base", "max_tokens": 1, **body})
    connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    reply.read()
    connection.close()
    return reply.status


def pause(port: int, body: dict[str, Any]) -> dict[str, float]:
    """The longest pause between two tokens of a stream while this request is under way, and a usual one."""
    times: list[float] = []
    thread = threading.Thread(target=lambda: times.extend(stream(port, prompt_of(random.Random(0)), 900)))
    began = time.perf_counter()
    thread.start()
    time.sleep(0.5)  # of the stream, which is under way then, and has seconds left
    sent = time.perf_counter() - began
    status = send(port, body)
    answered = time.perf_counter() - began
    thread.join()
    pairs = list(zip(times, gaps(times), strict=False))
    during = [gap for moment, gap in pairs if sent <= moment + gap and moment <= answered]
    alone = [gap for moment, gap in pairs if moment > answered + 0.5]
    return {"longest": max(during), "usual": statistics.median(alone), "longest alone": max(alone), "status": status}


def with_positions(base: Path) -> Path:
    """A copy of a base, with POSITIONS."""
    folder = base.with_name(f"{base.name}-{POSITIONS}")
    shutil.copytree(base, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": POSITIONS}))
    return folder


def measure(shape: str, pairs: int) -> dict[str, Any]:
    """One long answer, then pauses."""
    limit_spinning()  # of the servers' threads, as `lorakit serve` does
    base = make_base(scratch(), shape, torch.float32)
    server = Side("benchmarks.stream", "server", str(base))
    # the early tokens are those of another answer, right after the late ones, because a machine's rate drifts
    answers = [gaps(stream(server.ready["port"], prompt_of(random.Random(1)), at + AROUND)) for at in (LATE, EARLY)]
    server.end()
    config = json.loads((base / "config.json").read_text())
    late, early = (statistics.median(answer[-2 * AROUND :]) for answer in answers)
    server = Side("benchmarks.stream", "server", str(with_positions(make_base(scratch(), "tiny", torch.float32))))
    port = server.ready["port"]
    pauses = {name: [pause(port, body) for _ in range(pairs)] for name, body in LARGE.items()}
    server.end()
    return {
        "shape": shape, "dtype": "float32", "early": early, "late": late,
        "attention": [attention_seconds(config, keys) for keys in (EARLY, LATE)], "pauses": pauses,
    }  # fmt: skip


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that the targets speak of."""
    early, late = result["attention"]
    longest = max(
        statistics.median(one["longest"] - one["usual"] for one in rounds) for rounds in result["pauses"].values()
    )
    return {
        "token 4,000 / token 100, without attention": (result["late"] - late + early) / result["early"],
        "ms that a stream pauses for a large request": 1e3 * longest,
    }


def show(result: dict[str, Any]) -> None:
    """The table: medians."""
    early, late = result["attention"]
    lines: list[tuple[str, ...]] = [
        (f"{result['shape']}, float32", "ms"),
        ("token 100", f"{1e3 * result['early']:.2f}"),
        ("token 4,000", f"{1e3 * result['late']:.2f}"),
        ("attention more", f"{1e3 * (late - early):.2f}"),
    ]
    for name, rounds in result["pauses"].items():
        for key in ("usual", "longest alone", "longest"):
            value = statistics.median(one[key] for one in rounds)
            lines.append((f"{name} ({rounds[0]['status']:.0f}): {key} pause", f"{1e3 * value:.2f}"))
    table(lines)
    for name, rate in rates(result).items():
        print(f"{name:<64} {rate:.3f}")


if __name__ == "__main__":
    program("long-streams-{shape}", measure, show, shape="100M", pairs=3)
