"""Describe the routes as an OpenAPI document, from the tables that requests are read with."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lorakit.serving.openai_requests import FIELDS, HARMLESS, MAX_INPUTS, SAMPLING
from lorakit.serving.token_routes import TOKENIZE_FIELDS
from lorakit.version import VERSION

TYPES: Final[Mapping[str, Any]] = {
    "model": {"type": "string"}, "n": {"type": "integer", "minimum": 1, "maximum": 16},
    "stream": {"type": "boolean"}, "echo": {"type": "boolean"}, "tools": {"type": "array", "items": {}},
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 4}]},
    "stop_token_ids": {"type": "array", "items": {"type": "integer"}}, "logit_bias": {"type": "object"},
    "max_tokens": {"type": "integer"}, "max_completion_tokens": {"type": "integer"},
    "top_logprobs": {"type": "integer"}, "messages": {"type": "array", "minItems": 1, "items": {"type": "object"}},
    "prompt": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {}}]},
    "input": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": {}}]},
    "encoding_format": {"enum": ["float", "base64"]}, "dimensions": {"type": "integer"},
    "tokens": {"type": "array", "items": {"type": "integer"}}, "add_special_tokens": {"type": "boolean"},
    "add_generation_prompt": {"type": "boolean"}, "return_token_strs": {"type": "boolean"},
    "lora_name": {"type": "string"}, "lora_path": {"type": "string"}, "load_inplace": {"type": "boolean"},
}  # fmt: skip
"""field -> its schema"""
PATCH: Final = ("lora_name", "lora_path")
ROUTES: Final[Mapping[str, tuple[str, tuple[str, ...] | None, tuple[str, ...]]]] = {
    "/health": ("Status 200 while the engine computes, else 503.", None, ()),
    "/version": ("lorakit's version.", None, ()),
    "/metrics": ("Metrics in Prometheus' text format.", None, ()),
    "/openapi.json": ("This document.", None, ()),
    "/v1/models": ("The base and its adapters.", None, ()),
    "/v1/models/{name}": ("One of them.", None, ()),
    "/v1/adapters": ("The state of every adapter.", None, ()),
    "/v1/chat/completions": ("Answer messages.", (*FIELDS["chat"], *SAMPLING, *HARMLESS), ("model", "messages")),
    "/v1/completions": ("Continue texts or token ids.", (*FIELDS["text"], *SAMPLING, *HARMLESS), ("model", "prompt")),
    "/v1/embeddings": ("Embed texts or token ids.", (*FIELDS["embedding"], *HARMLESS), ("model", "input")),
    "/tokenize": ("The tokens of a text or of messages.", TOKENIZE_FIELDS, ()),
    "/detokenize": ("The text of tokens.", ("model", "tokens"), ("tokens",)),
    "/v1/load_lora_adapter": ("Load or replace an adapter.", (*PATCH, "load_inplace"), PATCH),
    "/v1/unload_lora_adapter": ("Unload an adapter.", ("lora_name",), ("lora_name",)),
}  # fmt: skip
"""path -> (summary, fields of the body, those that are required); a path without a body is read with GET"""


def openapi_document(paths: Sequence[str]) -> dict[str, Any]:
    """Return the document of the routes with these paths."""
    known = [path.replace("{name:path}", "{name}") for path in paths]
    return {
        "openapi": "3.1.0",
        "info": {"title": "lorakit serve", "version": VERSION},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
        "paths": {path: {"get" if ROUTES[path][1] is None else "post": _operation(path)} for path in known},
    }


def _operation(path: str) -> dict[str, Any]:
    summary, fields, required = ROUTES[path]
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "done"},
            "4XX": {"description": "refused; the message names the field", "content": {"application/json": {}}},
            "5XX": {"description": "failed"},
        },
    }
    if "{name}" in path:
        parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [parameter]
    if fields is not None:
        properties = {field: _schema(path, field) for field in fields}
        schema = {
            "type": "object", "properties": properties, "required": list(required), "additionalProperties": False
        }  # fmt: skip
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _schema(path: str, field: str) -> Any:
    """Return a field's schema; null is as if the field were not there, and harmless fields may be anything."""
    if field == "logprobs":
        return {"type": ["boolean" if path == "/v1/chat/completions" else "integer", "null"]}
    if field in SAMPLING:
        return {"type": ["integer" if SAMPLING[field] is int else "number", "null"]}
    return TYPES.get(field, {})
