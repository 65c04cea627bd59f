"""One request over HTTP, its tokens streamed, beside the same without HTTP; and clients that leave (S3, S7).

    python -m benchmarks.stream [--shape 100M] [--pairs 7] [--keep]

Time per token: the server beside a bare loop over the model's own forward and cache. First token: the server beside
the engine in process, on the built-in base. Then 200 clients come at once and each leaves in the middle of its answer,
five times, and twice before; what the server holds is counted before the first and after each.
"""

import gc
import http.client
import json
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.machine import program, scratch, table
from benchmarks.models import make_base
from benchmarks.pool import resident_bytes
from benchmarks.turns import Side, Step, middle, serve, take_turns

PROMPT_TOKENS, NEW_TOKENS, FIRST_TOKENS = 32, 32, 2
CLIENTS, WARM_STORMS, STORMS, LEAVER_PROMPT, LEAVER_TOKENS = 200, 2, 5, 16, 32
BUILT_IN, TOKEN = "builtin:tiny", 300
"""the token that every answer consists of, so that every token has text: random weights give tokens without"""


def server_side(base: str) -> None:
    """The HTTP server, in a thread; a round counts what it holds."""
    import asyncio
    import socket

    import uvicorn

    import lorakit
    from lorakit.decoding.generation import Generation
    from lorakit.serving.answer import ChoiceStream
    from lorakit.serving.app import OpenAIServer
    from lorakit.serving.engine import ServingEngine
    from lorakit.serving.request_log import RequestRecord

    model = lorakit.load(base, dtype="float32")
    engine = ServingEngine(model)
    listening = socket.create_server(("127.0.0.1", 0), backlog=2 * CLIENTS)
    config = uvicorn.Config(OpenAIServer(model, engine, "base").app, log_level="warning", access_log=False)
    threading.Thread(target=uvicorn.Server(config).run, kwargs={"sockets": [listening]}, daemon=True).start()
    kinds = (Generation, ChoiceStream, RequestRecord, asyncio.Task, torch.Tensor)

    def count() -> dict[str, Any]:
        while (rows := engine.counts())["decoding"] + rows["prefilling"] + rows["waiting"]:
            time.sleep(0.05)
        time.sleep(0.5)  # what the last disconnected client's handler does
        resident = resident_bytes()
        alive = Counter(type(one).__name__ for one in gc.get_objects() if isinstance(one, kinds))
        return {"rss": resident, **engine.counts(), **alive}

    serve(count, port=listening.getsockname()[1])


def engine_side(base: str) -> None:
    """The engine in process: the time to a first token."""
    import lorakit
    from lorakit.decoding.sampling import SamplingSettings
    from lorakit.serving.engine import ServingEngine

    engine = ServingEngine(lorakit.load(base, dtype="float32"))
    settings = SamplingSettings(max_tokens=FIRST_TOKENS, min_tokens=FIRST_TOKENS, logit_bias={TOKEN: 100.0})
    prompts = random.Random(2)

    def step() -> dict[str, Any]:
        prompt = prompt_of(prompts)
        began = time.perf_counter()
        generation = engine.submit(prompt, None, settings)
        next(iter(generation))
        first = time.perf_counter() - began
        generation.ids()
        return {"first": first}

    serve(step)


@torch.no_grad()
def loop_side(base: str) -> None:
    """A decode loop over the model's own forward and cache, and nothing else."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    prompts = random.Random(1)

    def step() -> dict[str, Any]:
        cache, ids, times = DynamicCache(), torch.tensor([prompt_of(prompts)]), []
        for _ in range(NEW_TOKENS):
            ids = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1)[:, None]
            times.append(time.perf_counter())
        return {"per_token": (times[-1] - times[0]) / (NEW_TOKENS - 1)}

    serve(step)


def side(kind: str, base: str) -> None:
    """One side."""
    {"server": server_side, "engine": engine_side, "loop": loop_side}[kind](base)


def prompt_of(chooser: random.Random, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    """Random tokens, so that no prefix of theirs is in the cache."""
    return [chooser.randrange(5, 500) for _ in range(num_tokens)]


def stream(port: int, prompt: list[int], new_tokens: int, leave_after: int | None = None) -> list[float]:
    """Ask for a streamed answer; the seconds to each of its tokens. ``leave_after``: tokens until the client leaves."""
    body = {"model": "base", "prompt": prompt, "max_tokens": new_tokens, "min_tokens": new_tokens, "temperature": 0,
            "stream": True, "logit_bias": {str(TOKEN): 100}}  # fmt: skip
    connection, times = http.client.HTTPConnection("127.0.0.1", port, timeout=300), []
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    for line in reply:
        if b'"text": "' in line and b'"text": ""' not in line:
            times.append(time.perf_counter() - began)
            if len(times) == leave_after:
                break
    reply.close()
    connection.close()
    assert leave_after or len(times) == new_tokens, f"{len(times)} events of {new_tokens} tokens"
    return times


def streaming(port: int) -> Step:
    """A round over HTTP: the time per token."""
    prompts = random.Random(1)

    def step() -> dict[str, Any]:
        times = stream(port, prompt_of(prompts), NEW_TOKENS)
        return {"per_token": (times[-1] - times[0]) / (NEW_TOKENS - 1)}

    return step


def first_token(port: int) -> Step:
    """A round over HTTP: the time to the first token."""
    prompts = random.Random(2)
    return lambda: {"first": stream(port, prompt_of(prompts), FIRST_TOKENS)[0]}


def leavers(port: int, leave: Callable[[random.Random], int | None]) -> None:
    """All clients at once, each with a prompt of its own, which is the same in every storm."""

    def run(number: int) -> None:
        prompt = prompt_of(random.Random(1000 + number), LEAVER_PROMPT)
        stream(port, prompt, LEAVER_TOKENS, leave(random.Random(time.perf_counter_ns())))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(shape: str, pairs: int) -> dict[str, Any]:
    """Time per token and to the first one, the sides in turn; then the clients that leave."""
    base = str(make_base(scratch(), shape, torch.float32))
    server, loop = Side("benchmarks.stream", "server", base), Side("benchmarks.stream", "loop", base)
    per_token = take_turns({"http": streaming(server.ready["port"]), "loop": loop.step}, pairs)
    server.end()
    loop.end()
    server, engine = Side("benchmarks.stream", "server", BUILT_IN), Side("benchmarks.stream", "engine", BUILT_IN)
    port = server.ready["port"]
    first = take_turns({"http": first_token(port), "engine": engine.step}, 10 * pairs, warm=5)
    engine.end()
    leavers(port, lambda chooser: None)  # all answers are in the prefix cache from here on
    held = []
    for _ in range(WARM_STORMS + STORMS):  # the first ones import code and start threads
        leavers(port, lambda chooser: chooser.randrange(1, LEAVER_TOKENS))
        held.append(server.step())
    server.end()
    return {"shape": shape, "dtype": "float32", "per_token": per_token, "first": first, "held": held[WARM_STORMS - 1 :]}


def stayed(result: dict[str, Any]) -> dict[str, int]:
    """What is held after the clients that left and was not before, or the other way round; resident memory aside."""
    before, after = result["held"][0], result["held"][-1]
    keys = (before.keys() | after.keys()) - {"rss", "peak_bytes"}
    return {key: after.get(key, 0) - before.get(key, 0) for key in keys if after.get(key, 0) != before.get(key, 0)}


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that the targets speak of."""
    token, first = result["per_token"], result["first"]
    pairs = zip(first["http"], first["engine"], strict=True)
    return {
        "time per token over HTTP / bare loop": statistics.median(
            one["per_token"] / other["per_token"] for one, other in zip(token["http"], token["loop"], strict=True)
        ),
        "ms that HTTP adds to the first token": 1e3 * statistics.median(a["first"] - b["first"] for a, b in pairs),
        "1,000 clients left: rows, tensors, bytes of KV more": float(sum(map(abs, stayed(result).values()))),
        "1,000 clients left: MB of memory more": (result["held"][-1]["rss"] - result["held"][0]["rss"]) / 1e6,
    }


def show(result: dict[str, Any]) -> None:
    """The table."""
    print(f"{result['shape']}, float32, one request of {PROMPT_TOKENS} + {NEW_TOKENS} tokens\n")
    lines: list[tuple[str, ...]] = [("", "ms")]
    for name in ("http", "loop"):
        lines.append((f"per token, {name}", f"{1e3 * middle(result['per_token'][name], 'per_token'):.2f}"))
    for name in ("http", "engine"):
        lines.append((f"first token, {BUILT_IN}, {name}", f"{1e3 * middle(result['first'][name], 'first'):.2f}"))
    table(lines)
    print(f"\nresident MB before, and after each {CLIENTS} clients that left:", end=" ")
    print(", ".join(f"{one['rss'] / 1e6:.1f}" for one in result["held"]), f"; stayed: {stayed(result) or 'nothing'}\n")
    for name, rate in rates(result).items():
        print(f"{name:<60} {rate:.3f}")


if __name__ == "__main__":
    program("stream-{shape}", measure, show, shape="100M", pairs=7)
