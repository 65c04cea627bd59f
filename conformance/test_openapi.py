"""A fuzzer sends what `/openapi.json` allows, and what it does not: no reply is a 500, and none is undocumented."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from conformance.server import Server

UNCHECKED = {  # because a schema does not say that min_tokens is at most max_tokens, or which roles there are
    "as it is": "positive_data_acceptance",
    "narrowed": "positive_data_acceptance,negative_data_rejection",  # the server takes more than it says then
}
"""form of the document -> checks that do not hold for it"""
MAX_TOKENS = 3199
"""the largest token id of the built-in base"""


MESSAGE: dict[str, Any] = {
    "type": "object", "required": ["role", "content"],
    "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": {"type": "string"}},
}  # fmt: skip
NARROW: dict[str, Any] = {
    "model": {"enum": ["tiny", "json"]}, "messages": {"type": "array", "minItems": 1, "maxItems": 5, "items": MESSAGE},
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 20}, "max_completion_tokens": {"type": "null"},
    "min_tokens": {"enum": [0]}, "n": {"enum": [1, 2]}, "stream_options": {"type": "null"},
    "top_logprobs": {"type": "null"}, "lora_name": {"enum": ["a", "b", "zo"]},
    "response_format": {"enum": [None, {"type": "text"}, {"type": "json_object"}, {"type": "regex", "pattern": "a*"}]},
    "lora_path": {"enum": ["json", "pirate", "damaged", "../x"]},
}  # fmt: skip
"""field -> the values of it that this server answers"""


def narrowed(schema: Any) -> Any:
    """Return the document with the names and numbers of this server, so that more requests are answered."""
    if isinstance(schema, list):
        return [narrowed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema == {"type": "integer", "minimum": 0}:
        return {**schema, "maximum": MAX_TOKENS}
    narrow = {name: narrowed(part) for name, part in schema.items()}
    if isinstance(fields := narrow.get("properties"), dict):
        narrow["properties"] = {name: NARROW.get(name, part) for name, part in fields.items()}
    return narrow


@pytest.mark.parametrize("document", UNCHECKED)
def test_no_request_gets_a_500_or_an_undocumented_reply(open_server: Server, tmp_path: Path, document: str) -> None:
    described = httpx.get(f"{open_server.address}/openapi.json").json()
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(narrowed(described) if document == "narrowed" else described))
    command: list[str | Path] = [
        Path(sys.executable).parent / "schemathesis", "run", path, "--url", open_server.address,
        "--header", "Authorization: Bearer root", "--max-examples", "40", "--generation-deterministic",
        "--phases", "coverage,fuzzing", "--exclude-checks", UNCHECKED[document], "--request-timeout", "60",
        "--continue-on-failure", "--no-color", "--output-sanitize", "false", "--warnings", "off",
    ]  # fmt: skip

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
    open_server.is_well()
    if document == "narrowed":
        text = httpx.get(f"{open_server.address}/metrics").text
        answered = [
            line for line in text.splitlines() if line.startswith("lorakit_requests_total") and 'status="200"' in line
        ]
        assert sum(float(line.split()[-1]) for line in answered) > 200, (
            "most were refused before they came to the engine"
        )
