"""One fact that another server's tests check, and how `lorakit serve` meets it.

Invariant: every case is executed, a refusal too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from conformance.server import Server

VLLM: Final = "vLLM"
LLAMA: Final = "llama.cpp"
FOLDERS: Final = {VLLM: "tests/entrypoints", LLAMA: "tools/server/tests/unit"}
"""suite -> the folder that its files are relative to"""


@dataclass(frozen=True)
class Case:
    """One row of docs/conformance.md.

    claim: a sentence. suite, test: the source, ``file: function``. why_refused: None if the case passes. note: how
    the server differs where it passes; empty: it does not. check: raises if the server does something else.
    """

    claim: str
    suite: str
    test: str
    check: Callable[[Server], object]
    why_refused: str | None = None
    note: str = ""

    @property
    def outcome(self) -> str:
        return "passes" if self.why_refused is None else "refuses on purpose"


Register = Callable[[Callable[[Server], object]], Callable[[Server], object]]


def case(cases: list[Case], suite: str, test: str, *, note: str = "") -> Register:
    """Register a function as a case that passes; its name is the claim."""

    def register(check: Callable[[Server], object]) -> Callable[[Server], object]:
        claim = getattr(check, "__name__", "").replace("_", " ").strip()
        cases.append(Case(claim, suite, test, check, note=note))
        return check

    return register


@dataclass(frozen=True)
class Request:
    """A request that is refused: these fields beside those of a valid body, if the path has one.

    names: text that the error's message has, such as the field's name.
    """

    path: str
    fields: dict[str, Any]
    status: int
    names: str
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()

    def __call__(self, server: Server) -> None:
        body = None if self.method == "GET" else server.body(self.path) | self.fields
        reply = server.http.request(self.method, self.path, json=body, headers=dict(self.headers))
        assert reply.status_code == self.status, (reply.status_code, reply.text)
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert self.names in error["message"], error
        assert len(error["message"]) < 5000, "a message repeats what was sent"


def refusals(suite: str, rows: Sequence[tuple[str, str, Request, str]]) -> list[Case]:
    """Return the cases of (claim, test, request, why it is refused)."""
    return [Case(claim, suite, test, request, why) for claim, test, request, why in rows]


def errors(suite: str, rows: Sequence[tuple[str, str, Request]]) -> list[Case]:
    """Return the cases of (claim, test, request) which both servers refuse."""
    return [Case(claim, suite, test, request) for claim, test, request in rows]
