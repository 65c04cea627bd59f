"""Describe the routes as an OpenAPI document, from the tables that requests are read with."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lorakit.decoding.grammar import KEYS
from lorakit.decoding.sampling import RANGES
from lorakit.serving.openai_requests import FIELDS, HARMLESS, MAX_CHOICES, MAX_INPUTS, MAX_STOPS, SAMPLING
from lorakit.serving.token_routes import TOKENIZE_FIELDS
from lorakit.version import VERSION

TOKEN: Final[Mapping[str, Any]] = {"type": "integer", "minimum": 0}
TEXT: Final[Mapping[str, Any]] = {"type": "string", "minLength": 1}
TOKENS: Final[Mapping[str, Any]] = {"type": "array", "minItems": 1, "items": TOKEN}
TYPES: Final[Mapping[str, Any]] = {
    "model": {"type": "string"}, "n": {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
    "stream": {"type": "boolean"}, "echo": {"type": "boolean"}, "tools": {"type": "array", "items": {"type": "object"}},
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    "stop": {"anyOf": [TEXT, {"type": "array", "items": TEXT, "maxItems": MAX_STOPS}]},
    "stop_token_ids": {"type": "array", "items": TOKEN},
    "logit_bias": {
        "type": "object", "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "max_tokens": {"type": "integer", "minimum": 0}, "max_completion_tokens": {"type": "integer", "minimum": 1},
    "top_logprobs": {"type": "integer", "minimum": 0},
    "messages": {
        "type": "array", "minItems": 1, "items": {
            "type": "object", "required": ["role"],
            "properties": {"role": {"type": "string"}, "content": {"type": ["string", "array", "null"]}},
        },
    },
    "prompt": {"anyOf": [TEXT, TOKENS, {"type": "array", "minItems": 1, "items": {"anyOf": [TEXT, TOKENS]}}]},
    "response_format": {
        "type": "object", "required": ["type"], "additionalProperties": False,
        "properties": {
            "type": {"enum": list(KEYS)}, "json_schema": {"type": "object"}, "pattern": {"type": "string"},
        },
    },
    "input": {
        "anyOf": [
            TEXT, TOKENS,
            {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": {"anyOf": [TEXT, TOKENS]}},
        ],
    },
    "encoding_format": {"enum": ["float", "base64"]}, "dimensions": {"type": "integer", "minimum": 1},
    "tokens": {"type": "array", "items": TOKEN}, "add_special_tokens": {"type": "boolean"},
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
        if path.endswith("completions"):  # where null is as if the field were not there
            properties |= {field: _or_null(properties[field]) for field in fields if field not in required}
        schema: dict[str, Any] = {
            "type": "object", "properties": properties, "required": list(required), "additionalProperties": False
        }  # fmt: skip
        if path == "/tokenize":
            schema["oneOf"] = [{"required": ["prompt"]}, {"required": ["messages"]}]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _schema(path: str, field: str) -> Any:
    """Return a field's schema; harmless fields may be anything."""
    if field == "logprobs":
        return {"type": "boolean"} if path == "/v1/chat/completions" else {"type": "integer", "minimum": 0}
    if field == "prompt" and path == "/tokenize":
        return {"type": "string"}
    if field in SAMPLING:
        low, high, _ = RANGES.get(field, (0, math.inf, ""))
        limits = {"minimum": low, "maximum": high} if high < math.inf else {"minimum": low}
        return {"type": "integer" if SAMPLING[field] is int else "number", **limits}
    return TYPES.get(field, {})


def _or_null(schema: Any) -> Any:
    return {"anyOf": [schema, {"type": "null"}]} if schema else {}
