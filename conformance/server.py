"""Run `lorakit serve` in a process of its own, and send requests to it."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import httpx
import openai

ROOT: Final = Path(__file__).parents[1]
BASE: Final = "tiny"
API_KEY: Final = "secret"
ADMIN: Final = (("Authorization", "Bearer root"),)
CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
QUESTION: Final = "Mira from Oslo ordered 3 lamps on Monday."
MESSAGES: Final[list[dict[str, Any]]] = [{"role": "user", "content": QUESTION}]
START_SECONDS: Final = 120.0


@dataclass(frozen=True)
class Server:
    """A running server. address: without `/v1`. patches: the folder that adapters may be loaded from."""

    address: str
    patches: Path

    @cached_property
    def http(self) -> httpx.Client:
        """A client with the API key."""
        return httpx.Client(base_url=self.address, headers={"Authorization": f"Bearer {API_KEY}"}, timeout=60)

    @cached_property
    def openai(self) -> openai.OpenAI:
        """OpenAI's client, which refuses answers of another form."""
        return openai.OpenAI(
            base_url=f"{self.address}/v1", api_key=API_KEY, max_retries=0, _strict_response_validation=True
        )

    def body(self, path: str) -> dict[str, Any]:
        """Return a valid body for a path."""
        if path == CHAT:
            return {"model": BASE, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
        if path == TEXT:
            return {"model": BASE, "prompt": QUESTION, "max_tokens": 8, "temperature": 0}
        return {}

    def ask(self, path: str, **fields: Any) -> Any:
        """Return the reply to a valid body with these fields."""
        reply = self.http.post(path, json=self.body(path) | fields)
        assert reply.status_code == 200, (reply.status_code, reply.text)
        return reply.json()

    def content(self, **fields: Any) -> str:
        """Return the text of a chat's first choice."""
        return str(self.ask(CHAT, **fields)["choices"][0]["message"]["content"])

    def text(self, **fields: Any) -> str:
        """Return the text of a completion's first choice."""
        return str(self.ask(TEXT, **fields)["choices"][0]["text"])

    def stream(self, path: str, **fields: Any) -> list[Any]:
        """Return the chunks of a stream, which ends with [DONE]."""
        reply = self.http.post(path, json=self.body(path) | {"stream": True} | fields)
        assert reply.status_code == 200, (reply.status_code, reply.text)
        events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return list(self.http.post("/tokenize", json={"prompt": text}).json()["tokens"])

    def is_well(self) -> None:
        """Check that the base and an adapter still answer."""
        assert self.content(model=BASE, max_tokens=30) == "Thank you, I have noted that Mira ordered 3 lamps."
        assert json.loads(self.content(model="json", max_tokens=60))["name"] == "Mira"


@contextmanager
def running(log: Path, patches: Path, *options: str) -> Iterator[Server]:
    """Start the command with these options besides, and end it after the block."""
    command = [
        sys.executable, "-m", "lorakit.cli", "serve", "builtin:tiny", "--name", BASE, "--dtype", "fp32", "--port", "0",
        "--adapter", f"json={ROOT / 'adapters' / 'json'}", "--adapter", f"zo={ROOT / 'adapters' / 'zorvian'}",
        "--admin-key", "root", "--adapter-root", str(patches), "--max-logprobs", "4000", *options,
    ]  # fmt: skip
    with log.open("w") as stderr, subprocess.Popen(command, cwd=ROOT, stderr=stderr) as process:
        try:
            until = time.monotonic() + START_SECONDS
            while not (ready := [line for line in log.read_text().splitlines() if '"ready"' in line]):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.1)
            server = Server(json.loads(ready[0])["url"].removesuffix("/v1"), patches)
            with server.http, server.openai:
                yield server
        finally:
            process.terminate()
            assert process.wait(60) == 0, log.read_text()[-3000:]
