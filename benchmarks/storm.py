"""A storm over HTTP: many clients, adapters that are loaded, replaced and unloaded all the while, answers compared.

    python -m benchmarks.storm [--requests 2000] [--clients 64] [--dtype bfloat16] [--keep]

The server is `lorakit serve` in a process of its own. Every streamed answer must be the one that Python gives with one
of the versions that the adapter's name had while the request was under way; "not here" must be true for a moment of it.
One client of eight reads slowly, and one leaves in the middle of its answers. What the server's process holds is read
before, and half a minute after.
"""

import bisect
import json
import random
import re
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import torch

from benchmarks.machine import program, python, scratch, table
from benchmarks.models import make_patch

BASE: Final = "builtin:tiny"
ADAPTERS, VERSIONS, RESIDENT, RANK, PROMPTS, NEW_TOKENS = 32, 40, 24, 8, 12, 24
MANNERS: Final = {0: "slow", 1: "leaves"}  # number of a client, modulo 8 -> what it does
SLOW_SECONDS: Final = 0.05  # between two pieces
SETTLE_SECONDS: Final = 30  # after which a thread of the pool that had nothing to do has ended
CHANGE_SECONDS: Final = 0.1  # between two changes of adapters


@dataclass
class Reply:
    """One request, and what came of it. gaps: (seconds, end) between two pieces of its stream."""

    name: str
    prompt: int
    began: float
    ended: float = 0.0
    status: int = 0
    left: bool = False  # the client left before the end
    text: str = ""
    gaps: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Adapter:
    """A name, and when it had which version; None: it was not there. A change counts from its beginning to its end."""

    changes: list[tuple[float, float, str | None]] = field(default_factory=list)

    def versions(self, began: float, ended: float) -> set[str | None]:
        """The versions that it had at any moment of an interval."""
        first = max(0, bisect.bisect_right([end for _, end, _ in self.changes], began) - 1)
        return {version for start, _, version in self.changes[first:] if start <= ended}


def measure(requests: int, clients: int, dtype: str) -> dict[str, Any]:
    """Start a server, storm it, and compare."""
    from lorakit.base.find import find_base

    folder = find_base(BASE)
    versions = [make_patch(scratch(), folder, rank=RANK, seed=seed) for seed in range(VERSIONS)]
    adapters = {f"n{number}": Adapter() for number in range(ADAPTERS)}
    command = python(
        "-m", "lorakit.cli", "serve", BASE, "--port", "0", "--name", "base", "--dtype", dtype,
        "--admin-key", "admin", "--adapter-root", str(scratch()), "--max-adapters", str(RESIDENT),
    )  # fmt: skip
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    line = next(line for line in server.stderr if "http://" in line)
    address = re.findall(r"http://\S+?(?=/v1)", line)[0]
    threading.Thread(target=lambda: [None for _ in server.stderr or ()], daemon=True).start()
    try:
        admin = Admin(address, adapters, versions)
        for name in adapters:
            admin.change(name, replace=True)
        stop = threading.Event()
        changing = threading.Thread(target=admin.run, args=(stop,))
        changing.start()
        storm(address, 4 * clients, clients, [*adapters, "base"])  # warms up
        before = held(server.pid)
        began = time.perf_counter()
        replies = storm(address, requests, clients, [*adapters, "base"])
        seconds = time.perf_counter() - began
        stop.set()
        changing.join()
        time.sleep(SETTLE_SECONDS)
        after = held(server.pid)
    finally:
        server.terminate()
        server.wait()
    wrong = compare(replies, adapters, versions, dtype)
    loads = sorted((start, end) for one in adapters.values() for start, end, version in one.changes if version)
    stalls = sorted(gap for reply in replies for gap, end in reply.gaps if _overlaps(loads, end - gap, end))
    gaps = sorted(gap for reply in replies for gap, _ in reply.gaps)
    return {
        "requests": requests, "clients": clients, "adapters": ADAPTERS, "resident": RESIDENT, "seconds": seconds,
        "changes": sum(len(one.changes) for one in adapters.values()), "wrong": wrong,
        "status": {str(code): sum(one.status == code for one in replies) for code in {one.status for one in replies}},
        "held": {key: (before[key], after[key]) for key in before},
        "p99_gap": gaps[int(len(gaps) * 0.99)],
        "p99_gap_with_a_load": stalls[int(len(stalls) * 0.99)] if stalls else None,
    }  # fmt: skip


class Admin:
    """Loads, replaces and unloads adapters, and notes when."""

    def __init__(self, address: str, adapters: dict[str, Adapter], versions: list[Path]) -> None:
        self._client = httpx.Client(base_url=address, headers={"Authorization": "Bearer admin"}, timeout=120)
        self._adapters, self._versions, self._chooser = adapters, versions, random.Random(1)

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(CHANGE_SECONDS):
            self.change(self._chooser.choice([*self._adapters]), replace=self._chooser.random() < 0.8)

    def change(self, name: str, *, replace: bool) -> None:
        """Load or replace an adapter, or unload it."""
        began, version = time.perf_counter(), None
        if replace:
            version = self._chooser.choice(self._versions).name
            body = {"lora_name": name, "lora_path": version, "load_inplace": True}
            self._client.post("/v1/load_lora_adapter", json=body).raise_for_status()
        elif self._adapters[name].changes[-1][2] is not None:
            self._client.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()
        self._adapters[name].changes.append((began, time.perf_counter(), version))


def storm(address: str, requests: int, clients: int, names: list[str]) -> list[Reply]:
    """All requests of all clients."""
    replies: list[Reply] = []
    left = iter(range(requests))
    lock = threading.Lock()

    def run(seed: int) -> None:
        chooser = random.Random(seed)
        with httpx.Client(base_url=address, timeout=300) as client:
            while True:
                with lock:
                    if next(left, None) is None:
                        return
                manner = MANNERS.get(seed % 8, "reads")
                replies.append(ask(client, chooser.choice(names), chooser.randrange(PROMPTS), manner))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return replies


def held(process: int) -> dict[str, int]:
    """What a process holds: threads, open files, and MB of resident memory."""
    folder = Path(f"/proc/{process}")
    resident = re.findall(r"VmRSS:\s+(\d+) kB", (folder / "status").read_text())
    return {
        "threads": len([*(folder / "task").iterdir()]), "files": len([*(folder / "fd").iterdir()]),
        "MB": int(resident[0]) // 1000,
    }  # fmt: skip


def ask(client: httpx.Client, name: str, prompt: int, manner: str) -> Reply:
    """One streamed chat. manner: reads, reads slowly, or leaves before the end."""
    body = {"model": name, "messages": [{"role": "user", "content": prompt_text(prompt)}], "temperature": 0,
            "max_tokens": NEW_TOKENS, "stream": True}  # fmt: skip
    reply = Reply(name, prompt, time.perf_counter())
    with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        reply.status, last = stream.status_code, 0.0
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            if manner == "slow":
                time.sleep(SLOW_SECONDS)
            now = time.perf_counter()
            chunk = json.loads(line.removeprefix("data: "))
            piece = chunk["choices"][0]["delta"].get("content", "") if "choices" in chunk else f"error: {chunk}"
            if piece and last and manner == "reads":  # not from the role to the first piece, which waits for a slot
                reply.gaps.append((now - last, now))
            reply.text, last = reply.text + piece, now if piece else last
            if manner == "leaves" and len(reply.text) > prompt:
                reply.left = True
                break
    reply.ended = time.perf_counter()
    return reply


def prompt_text(number: int) -> str:
    return f"Mira from Oslo ordered {number} lamps on Monday."


def compare(replies: list[Reply], adapters: dict[str, Adapter], versions: list[Path], dtype: str) -> int:
    """The number of replies that are neither Python's answer nor a true "not here"."""
    import lorakit

    torch.set_num_threads(2)
    model = lorakit.load(BASE, {path.name: path for path in versions}, dtype=dtype)
    prompts = [[{"role": "user", "content": prompt_text(number)}] for number in range(PROMPTS)]
    expected = {
        version: model.generate(prompts, version, max_new_tokens=NEW_TOKENS)
        for version in (None, *(path.name for path in versions))
    }
    wrong = 0
    for reply in replies:
        possible = {None} if reply.name == "base" else adapters[reply.name].versions(reply.began, reply.ended)
        if reply.status == 404:
            wrong += reply.name == "base" or None not in possible
        else:
            texts = {expected[version][reply.prompt] for version in possible if version or reply.name == "base"}
            texts = {text[: len(reply.text)] for text in texts} if reply.left else texts
            wrong += reply.status != 200 or reply.text not in texts
    return wrong


def _overlaps(intervals: list[tuple[float, float]], began: float, ended: float) -> bool:
    return any(start < ended and end > began for start, end in intervals)


def show(result: dict[str, Any]) -> None:
    """The table."""
    stall = result["p99_gap_with_a_load"]
    table([
        ("requests", f"{result['requests']}"),
        ("clients, adapters, resident", f"{result['clients']}, {result['adapters']}, {result['resident']}"),
        ("seconds", f"{result['seconds']:.1f}"),
        ("changes of adapters", f"{result['changes']}"),
        ("replies by status", ", ".join(f"{code}: {count}" for code, count in sorted(result["status"].items()))),
        ("wrong answers", f"{result['wrong']}"),
        *((f"{key}, before and after", f"{one}, {two}") for key, (one, two) in result["held"].items()),
        ("p99 between two pieces of a stream, ms", f"{result['p99_gap'] * 1e3:.0f}"),
        ("p99 of those with a load in them, ms", "none" if stall is None else f"{stall * 1e3:.0f}"),
    ])  # fmt: skip


if __name__ == "__main__":
    program("storm", measure, show, requests=2000, clients=64, dtype=("float32", "bfloat16"))
