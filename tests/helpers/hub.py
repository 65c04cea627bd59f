"""A small hub on this machine: the part of its HTTP API that its clients call to push, to download and to stream.

It stores commits in memory. Faults are switched on by its attributes. Tests point the real client to its address.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_secretTokenOfThisTest"


@dataclass
class Repository:
    private: bool = False
    commits: list[tuple[str, str, dict[str, bytes]]] = field(default_factory=list)
    """(id, message, files)"""

    def commit(self, message: str, files: dict[str, bytes]) -> str:
        before = self.commits[-1][2] if self.commits else {}
        number = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits.append((number, message, before | files))
        return number

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        chosen = [c for c in self.commits if c[0] == revision] if revision != "main" else self.commits[-1:]
        return (chosen[0][0], chosen[0][2]) if chosen else None


class Hub:
    """The repositories of a hub, and the faults it shall have."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.stored: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.refuse: dict[str, int] = {}
        """start of a request, such as "POST /api/repos" -> status"""
        self.cut: str | None = None
        """start of the requests whose connection is closed without an answer"""
        self.cut_after: dict[str, int] = {}
        """start of a request -> bytes of its answer after which the connection is closed"""
        self.wait: dict[str, threading.Event] = {}
        """start of a request -> what its answer waits for"""
        self.address = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None: ...

    def reply(self, status: int, value: Any = None, **headers: str) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        cut = _of_start(self.hub.cut_after, f"{self.command} {unquote(self.path)}")
        if self.command != "HEAD":
            with contextlib.suppress(BrokenPipeError):  # the client did not wait
                self.wfile.write(content[:cut])
        self.close_connection |= cut is not None

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        line = f"{self.command} {path}"
        self.hub.requests.append(line)
        if (wait := _of_start(self.hub.wait, line)) is not None:
            wait.wait(60)
        if self.hub.cut is not None and line.startswith(self.hub.cut):
            self.close_connection = True
        elif (status := _of_start(self.hub.refuse, line)) is not None:
            self.reply(status, {"error": f"refused{' once more' * 100}\nsecond line"})
        else:
            self.answer(path, body)

    def answer(self, path: str, body: bytes) -> None:
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        parts = path.strip("/").removeprefix("datasets/").split("/")
        if parts[0] == "store":  # addresses of this store are signed, and have no token
            self.hub.stored[parts[1]] = body
            return self.reply(200, {})
        if path == "/api/repos/create":
            return self.create(json.loads(body)) if allowed else self.reply(401, {"error": "Invalid credentials"})
        if path == "/api/validate-yaml":
            return self.validate_card(json.loads(body)["content"])
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2]).removesuffix(".git")
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not allowed):
            return self.reply(404 if allowed else 401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        if self.command == "POST" and not allowed:
            return self.reply(403, {"error": "no write access"})
        if parts[0] == "api":
            return self.api(name, repository, parts[4:], body)
        if parts[2:] == ["info", "lfs", "objects", "batch"]:
            return self.batch(json.loads(body))
        return self.resolve(repository, parts[3], "/".join(parts[4:]))

    def validate_card(self, text: str) -> None:
        bad = [line for line in text.splitlines() if line.startswith("base_model:") and line.count("/") != 1]
        errors = [{"message": f'"base_model" is not valid: {line}'} for line in bad]
        self.reply(400 if bad else 200, {"errors": errors, "warnings": []})

    def create(self, wanted: dict[str, Any]) -> None:
        name = "/".join(filter(None, (wanted.get("organization"), wanted["name"])))
        if name in self.hub.repositories:
            return self.reply(409, {"error": "You already created this model repo", "url": name})
        self.hub.repositories[name] = Repository(
            "private" in (wanted.get("visibility"), wanted.get("private") and "private")
        )
        return self.reply(200, {"url": f"{self.hub.address}/{name}"})

    def api(self, name: str, repository: Repository, call: list[str], body: bytes) -> None:
        if call[:1] == ["preupload"]:
            files = [
                {
                    "path": file["path"], "shouldIgnore": False,
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                }
                for file in json.loads(body)["files"]
            ]  # fmt: skip
            return self.reply(200, {"files": files})
        if call[:1] == ["commit"]:
            return self.commit(name, repository, [json.loads(line) for line in body.splitlines()])
        if call == ["auth-check", "write"]:
            return self.reply(200, {})
        if call[:1] in (["tree"], ["paths-info"]):
            found = repository.at(call[1])
            wanted = parse_qs(body.decode())["paths"] if call[0] == "paths-info" else None
            files = [{"type": "file", "path": path, "size": len(data), "oid": _digest(data)}
                     for path, data in (found[1] if found else {}).items()
                     if wanted is None or path in wanted]  # fmt: skip
            return self.reply(200, files)
        found = repository.at(call[1] if call[:1] == ["revision"] else "main")
        if found is None and call:
            return self.reply(404, {"error": "no such revision"}, X_Error_Code="RevisionNotFound")
        return self.reply(200, {"id": name, "sha": found and found[0], "private": repository.private, "siblings": []})

    def commit(self, name: str, repository: Repository, lines: list[dict[str, Any]]) -> None:
        files, message = {}, ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self.hub.stored[value["oid"]]
        number = repository.commit(message, files)
        address = f"{self.hub.address}/{name}/commit/{number}"
        self.reply(200, {"commitUrl": address, "commitOid": number})

    def batch(self, wanted: dict[str, Any]) -> None:
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.hub.address}/store/{each['oid']}", "header": {}}}}
            for each in wanted["objects"]
        ]
        self.reply(200, {"transfer": "basic", "objects": objects})

    def resolve(self, repository: Repository, revision: str, file: str) -> None:
        found = repository.at(revision)
        if found is None or file not in found[1]:
            return self.reply(404, {"error": "no such file"}, X_Error_Code="EntryNotFound")
        data = found[1][file]
        headers = {"ETag": f'"{_digest(data)}"', "X_Repo_Commit": found[0]}
        if (part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")) is None:
            return self.reply(200, data, **headers)
        start, stop = int(part[1]), min(int(part[2] or len(data)) + 1, len(data))
        headers["Content_Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        return self.reply(206 if start < len(data) else 416, data[start:stop], **headers)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request


def _of_start(values: Mapping[str, Any], line: str) -> Any:
    """Return the value of the first start that a request has, or None."""
    return next((value for start, value in values.items() if line.startswith(start)), None)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """Run a hub in a thread."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
