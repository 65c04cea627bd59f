"""Read the requests of OpenAI's API. Imports no HTTP.

Invariant: every field of a request is used, or changes nothing about the answer, or is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from lorakit.decoding.sampling import MAX_SEED, SamplingSettings
from lorakit.errors import LorakitError

DEFAULT_TOKENS: Final = {"chat": 1024, "text": 16}
"""tokens of an answer, if the request does not say: OpenAI's 16 for texts; a chat's is bounded, so that its slot is"""
MAX_CHOICES: Final = 16
MAX_STOPS: Final = 16
"""texts of ``stop``; OpenAI has 4, and tasks of evaluation programs more"""
HARMLESS: Final = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""fields that change nothing about an answer"""
SAMPLING: Final[Mapping[str, type | tuple[type, ...]]] = {
    "temperature": (int, float), "top_p": (int, float), "top_k": int, "min_p": (int, float), "min_tokens": int,
    "repetition_penalty": (int, float), "presence_penalty": (int, float), "frequency_penalty": (int, float),
    "seed": int,
}  # fmt: skip
"""field -> its type; as SamplingSettings names them"""
COMMON: Final = ("model", "n", "stream", "stream_options", "stop", "stop_token_ids", "logit_bias", "max_tokens",
          "response_format")  # fmt: skip
MAX_INPUTS: Final = 2048
"""of one request for embeddings, as at OpenAI"""
FIELDS: Final = {
    "embedding": ("model", "input", "encoding_format", "dimensions"),
    "chat": (*COMMON, "messages", "tools", "max_completion_tokens", "logprobs", "top_logprobs"),
    "text": (*COMMON, "prompt", "logprobs", "echo"),
}


class RequestError(LorakitError):
    """A request that cannot be answered: its HTTP status, and OpenAI's ``param`` and ``code``."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True)
class CompletionRequest:
    """What a request asks for.

    prompts: messages for the chat template, a text as it is, or token ids. choices: answers of each prompt.
    sets_max_tokens: False if max_tokens is the default, which is less where the base has fewer positions left.
    """

    model: str
    prompts: list[Any]
    tools: list[Any] | None
    settings: SamplingSettings
    sets_max_tokens: bool
    choices: int
    stream: bool
    include_usage: bool
    echo: bool
    """True if the prompt is part of the answer; with ``max_tokens`` 0 it is all of it"""

    def settings_of(self, num_prompt: int, limit: float, index: int) -> SamplingSettings:
        """Return the settings of choice ``index`` of a prompt of so many tokens, if there are ``limit`` positions."""
        seed = self.settings.seed
        settings = self.settings
        if seed is not None and index > 0:  # a seed of its own for each choice, because they would all be the same
            settings = replace(settings, seed=(seed + index) % MAX_SEED)
        if self.sets_max_tokens or limit - num_prompt < 1:
            return settings
        return replace(settings, max_tokens=int(min(settings.max_tokens, limit - num_prompt)))


def parse_request(kind: str, body: Any) -> CompletionRequest:
    """Read the body of a ``chat`` or a ``text`` completion.

    Raises:
        RequestError: a field that is missing, of the wrong type, or not known here.
    """
    body = _known(body, (*FIELDS[kind], *SAMPLING))
    model, stream = typed_field(body, "model", str), typed_field(body, "stream", bool, default=False)
    options = typed_field(body, "stream_options", dict, default={})
    usage = options.get("include_usage")
    if options and (not stream or set(options) - {"include_usage"} or not isinstance(usage, bool | None)):
        raise RequestError("stream_options: include_usage, true or false, with stream: true", param="stream_options")
    choices = typed_field(body, "n", int, default=1)
    if not 1 <= choices <= MAX_CHOICES:
        raise RequestError(f"n: from 1 to {MAX_CHOICES}, got {choices}", param="n")
    prompts = [read_messages(body)] if kind == "chat" else _texts(body, "prompt")
    tools = typed_field(body, "tools", list, default=None) if kind == "chat" else None
    return CompletionRequest(
        model, prompts, tools, _settings(kind, body), "max_tokens" in body or "max_completion_tokens" in body,
        choices, stream, bool(usage), typed_field(body, "echo", bool, default=False),
    )  # fmt: skip


@dataclass(frozen=True)
class EmbeddingRequest:
    """What a request for embeddings asks for.

    inputs: texts, or lists of token ids. base64: float32 values as text instead of numbers. dimensions: None is all.
    """

    model: str
    inputs: list[Any]
    base64: bool
    dimensions: int | None


def parse_embedding_request(body: Any) -> EmbeddingRequest:
    """Read the body of a request for embeddings.

    Raises:
        RequestError: a field that is missing, of the wrong type, or not known here.
    """
    body = _known(body, FIELDS["embedding"])
    encoding = typed_field(body, "encoding_format", str, default="float")
    if encoding not in ("float", "base64"):
        raise RequestError(f"encoding_format: float or base64, got {encoding[:60]!r}", param="encoding_format")
    inputs = _texts(body, "input")
    if "" in inputs or len(inputs) > MAX_INPUTS:
        raise RequestError(f"input: up to {MAX_INPUTS} texts or lists of token ids, none of them empty", param="input")
    dimensions = typed_field(body, "dimensions", int, default=None)
    return EmbeddingRequest(typed_field(body, "model", str), inputs, encoding == "base64", dimensions)


def _known(body: Any, fields: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of a body that are set, without harmless ones, if all are known."""
    if not isinstance(body, dict):
        raise RequestError(f"the body is a JSON object, got a {type(body).__name__}")
    given = {name: value for name, value in body.items() if value is not None and name not in HARMLESS}
    for name in given:
        if name not in fields:
            raise RequestError(f"{name}: not supported here, and it may change the answer; leave it out", param=name)
    return given


def _settings(kind: str, body: Mapping[str, Any]) -> SamplingSettings:
    values = {name: typed_field(body, name, types) for name, types in SAMPLING.items() if name in body}
    tokens = body.get("max_completion_tokens", body.get("max_tokens", DEFAULT_TOKENS[kind]))
    if type(tokens) is not int:
        raise RequestError(f"max_tokens: a whole number, got {tokens!r}", param="max_tokens")
    stop = body.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > MAX_STOPS or not all(isinstance(text, str) for text in stop):
        raise RequestError(f"stop: a text, or a list of up to {MAX_STOPS} texts", param="stop")
    ids = typed_field(body, "stop_token_ids", list, default=[])
    if not all(type(token) is int for token in ids):
        raise RequestError("stop_token_ids: a list of token ids", param="stop_token_ids")
    return SamplingSettings(
        **{"temperature": 1.0} | values, max_tokens=tokens, stop=tuple(stop), stop_token_ids=tuple(ids),
        logit_bias=_logit_bias(body), logprobs=_logprobs(kind, body),
        response_format=typed_field(body, "response_format", dict, default=None),
    )  # fmt: skip


def _logprobs(kind: str, body: Mapping[str, Any]) -> int | None:
    """Return the number of most probable tokens to report; None: none. A chat has two fields for it."""
    wanted: bool
    number: int | None
    if kind == "text":
        number = typed_field(body, "logprobs", int, default=None)
        return number
    wanted, number = (
        typed_field(body, "logprobs", bool, default=False),
        typed_field(body, "top_logprobs", int, default=0),
    )
    if number and not wanted:
        raise RequestError("top_logprobs: goes with logprobs: true", param="top_logprobs")
    return number if wanted else None


def _logit_bias(body: Mapping[str, Any]) -> dict[int, float]:
    bias = typed_field(body, "logit_bias", dict, default={})
    try:
        return {int(token): float(value) for token, value in bias.items()}
    except (TypeError, ValueError, OverflowError):
        raise RequestError("logit_bias: a mapping of token ids to numbers", param="logit_bias") from None


def read_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a body, their contents as texts.

    Raises:
        RequestError: there are none, or one has another form.
    """
    messages: list[dict[str, Any]] = typed_field(body, "messages", list)
    if not messages:
        raise RequestError("messages: one message at least", param="messages")
    return [_message(number, message) for number, message in enumerate(messages)]


def _message(number: int, message: Any) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where}: an object with a role", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise RequestError(f"{where}: content has a part that is not text", param="messages")
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise RequestError(f"{where}: content is a text", param="messages")
    return {**message, "content": content or ""}


def _texts(body: Mapping[str, Any], name: str) -> list[Any]:
    """Return the texts of a field, or its lists of token ids."""
    given = body.get(name)
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        given = [given]
    if not isinstance(given, list) or not given or not all(isinstance(one, str) or _is_ids(one) for one in given):
        raise RequestError(f"{name}: a text, token ids, or a list of them", param=name)
    return given


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


_REQUIRED: Final = object()


def typed_field(body: Mapping[str, Any], name: str, types: type | tuple[type, ...], default: Any = _REQUIRED) -> Any:
    """Return a field's value, if it is of a type; a bool is no number."""
    if name not in body:
        if default is _REQUIRED:
            raise RequestError(f"{name}: is required", param=name)
        return default
    value = body[name]
    kinds = types if isinstance(types, tuple) else (types,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise RequestError(f"{name}: {wanted} expected, got {str(value)[:60]!r}", param=name)
    return value
