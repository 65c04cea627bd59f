"""The requests of every route: strict models, from which the OpenAPI document is derived.

Invariant: every field of a request is used, or changes nothing about the answer, or is refused by name. A field of
null is a field that is absent.
"""

import json
import reprlib
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar, final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from lorakit.data.row_formats import arguments_of
from lorakit.decoding.grammar import MAX_PATTERN
from lorakit.decoding.sampling import MAX_SEED, RANGES, SamplingSettings
from lorakit.errors import translate_error
from lorakit.files.text import printable, unique_keys
from lorakit.serving.engine import CHAT_TOKENS
from lorakit.serving.errors import RequestError
from lorakit.serving.request_log import RequestRecord, record_of

MAX_BODY_BYTES: Final = 8_000_000
MAX_BODIES_BYTES: Final = 256_000_000  # of all bodies that are being read
MAX_DEPTH: Final = 100  # of lists and objects in each other; chat templates and grammars recurse into them
MAX_FIELDS: Final = 200  # of a body
MAX_BRACKETS: Final = 200_000  # that open a list or an object, each of which takes 40 times its bytes and holds threads
MAX_TOOLS: Final = 1024  # OpenAI has 128; each takes work before it is refused
TEXT_TOKENS: Final = 16  # tokens of a text's answer, if the request does not say, as at OpenAI
MAX_CHOICES: Final = 16
MAX_STOPS: Final = 16  # texts of ``stop``; OpenAI has 4, and tasks of evaluation programs more
MAX_STOP: Final = 1000  # characters of one of them, which every token of the answer is compared with
MAX_BIAS: Final = 1024  # tokens of ``logit_bias``; OpenAI has 300
MAX_INPUTS: Final = 2048  # of one request for embeddings, as at OpenAI
UNUSED: Final[dict[str, Any]] = {
    "priority": 0, "best_of": 1, "modalities": ["text"], "ignore_eos": False, "skip_special_tokens": True,
    "use_beam_search": False, "include_reasoning": True, "include_obfuscation": False, "continuous_usage_stats": False,
    "length_penalty": 1, "early_stopping": False, "spaces_between_special_tokens": True, "bad_words": [], "echo": False,
    "include_stop_str_in_output": False, "add_generation_prompt": True, "continue_final_message": False, "suffix": "",
    "return_token_ids": False, "return_tokens_as_token_ids": False, "functions": [], "verbosity": "medium",
}  # fmt: skip
"""field of OpenAI's and vLLM's -> its default value, which changes nothing, so it is taken"""


def _in_range(name: str) -> Any:
    low, high, _ = RANGES[name]
    return Field(None, ge=low, le=None if high == float("inf") else high)


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
OneText = Annotated[str, Field(min_length=1)]
OneInput = OneText | TokenIds  # to embed
Texts = str | TokenIds | Annotated[list[str | TokenIds], Field(min_length=1, fail_fast=True)]
TEXTS: Final = "a text, token ids, or a list of them"
PROMPTS: Final = ("messages", "prompt", "input", "query", "documents", "text_1", "text_2")  # fields that have them
Inputs = OneInput | Annotated[list[OneInput], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
PlainTexts = Annotated[list[OneText], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
INPUTS: Final = f"{TEXTS}, up to {MAX_INPUTS} and none of them empty"
TOOL_CHOICES: Final = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'
OneStop = Annotated[str, Field(max_length=MAX_STOP)]
Stops = OneStop | Annotated[list[OneStop], Field(max_length=MAX_STOPS)]
Bias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIAS),
]


class Body(BaseModel):
    """The body of a request, or a part of it. A field of null is a field that is absent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        used = body if cls.model_config["extra"] == "allow" else cls.model_fields
        return {key: one for key, one in body.items() if one is not None and (key in used or UNUSED.get(key) != one)}


def _json_object(text: str) -> str:
    """Return arguments; those that are cut or broken, as the text in an object, as pydantic-ai has them."""
    if not text or isinstance(arguments_of({"arguments": text}), dict):
        return text
    if not text.startswith("{"):  # a template would write it as a text
        raise ValueError(f"the text of a JSON object is required, got {reprlib.repr(text)}")
    return json.dumps({"INVALID_JSON": text}, ensure_ascii=False)


class CalledFunction(Body):
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: Annotated[str, AfterValidator(_json_object)]


class ToolCall(Body):
    """A call of an earlier answer."""

    id: str | None = None
    index: int | None = Field(None, exclude=True)  # of a streamed call, which some clients send back
    type: Literal["function"] = "function"
    function: CalledFunction


class Function(Body):
    """What a function is called, is for, and takes."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function that an answer may call."""

    type: Literal["function"]
    function: Function


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    for number, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part != {"type": "text", "text": text}:
            raise ValueError(f"part {number} is not text, {{'type': 'text', 'text': ...}}; got {reprlib.repr(part)}")
    return "".join(part["text"] for part in content)


class Message(Body, extra="allow"):
    """A message of a chat. Its other fields are for the chat template, which has to show them."""

    role: str
    content: Annotated[
        str | None, BeforeValidator(_content, json_schema_input_type=str | list[dict[str, Any]] | None)
    ] = None
    tool_calls: list[ToolCall] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("content: a text is required")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message without fields that are null or empty."""
        fields = self.model_dump(exclude={"role", "content"}, exclude_none=True)
        others = {key: value for key, value in fields.items() if value not in ("", [], {})}
        return {"role": self.role, "content": self.content or "", **others}


class _OpenAIBody(Body):
    """The model, and fields of OpenAI's and vLLM's that change nothing about an answer."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    request_id: Any = None
    model: str


class ResponseFormat(Body):
    """The form of an answer. Which keys go together is checked where the grammar is compiled."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: dict[str, Any] | None = None
    pattern: str | None = Field(None, max_length=MAX_PATTERN)


class StreamOptions(Body):
    """What a stream has beside the answer."""

    include_usage: bool | None = None


TemplateKwargs = dict[str, bool | int | float | str]  # variables for the chat template


class CompletionRequest(_OpenAIBody, ABC):
    """The fields that chats and texts share."""

    default_tokens: ClassVar[int]  # of an answer, if the request does not say
    prompt_field: ClassVar[str]
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stops | None = Field(
        None, description=f"a text, or a list of up to {MAX_STOPS} texts, of up to {MAX_STOP} characters each"
    )
    stop_token_ids: list[TokenId] | None = None
    logit_bias: Bias | None = Field(
        None, description=f"a mapping of up to {MAX_BIAS} token ids to numbers from -100 to 100"
    )
    max_tokens: int | None = Field(None, ge=0)
    response_format: ResponseFormat | None = None
    temperature: float | None = _in_range("temperature")
    top_p: float | None = _in_range("top_p")
    top_k: int | None = _in_range("top_k")
    min_p: float | None = _in_range("min_p")
    min_tokens: int | None = Field(None, ge=0)
    repetition_penalty: float | None = _in_range("repetition_penalty")
    presence_penalty: float | None = _in_range("presence_penalty")
    frequency_penalty: float | None = _in_range("frequency_penalty")
    seed: int | None = _in_range("seed")

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and self.stream_options.model_fields_set and not self.stream:
            raise RequestError("stream_options: goes with stream: true")
        return self

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def settings_of(self, num_prompt: int, limit: float, index: int) -> SamplingSettings:
        """Return the settings of a prompt's choice. limit: of positions, of which ``num_prompt`` are not left."""
        given = {name: value for name in RANGES if (value := getattr(self, name)) is not None}
        if self.seed is not None:  # another seed for each choice, or they would all be the same
            given["seed"] = (self.seed + index) % MAX_SEED if index else self.seed
        left = max(1, limit - num_prompt)  # a prompt that is too long is refused with the default
        max_tokens = getattr(self, self.length_field)
        form = self.response_format
        return SamplingSettings(
            **{"temperature": 1.0} | given,
            max_tokens=int(min(self.default_tokens, left)) if max_tokens is None else max_tokens,
            min_tokens=self.min_tokens or 0,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            logprobs=self.num_logprobs,
            response_format=None if form is None else form.model_dump(exclude_unset=True),
        )

    @property
    @abstractmethod
    def prompts(self) -> list[Any]:
        """Messages for the chat template, texts as they are, or token ids."""

    @property
    def length_field(self) -> str:
        """The field that says how long an answer may be."""
        return "max_tokens"

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Number of most probable tokens to report; None: none are reported."""


class ChatRequest(CompletionRequest):
    """The body of a chat."""

    default_tokens: ClassVar[int] = CHAT_TOKENS
    prompt_field: ClassVar[str] = "messages"
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = Field(None, description=TOOL_CHOICES)
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs: goes with logprobs: true")
        names = [tool.function.name for tool in self.tools or ()]
        choice = self.tool_choice
        if isinstance(choice, Tool) and choice.function.name not in names:
            raise RequestError(f"tool_choice: no tool is called {choice.function.name!r}")
        if choice == "required" and not names:
            raise RequestError("tool_choice: required goes with tools")
        if self.forced_tools and self.response_format is not None and self.response_format.type != "text":
            raise RequestError(f"response_format: not with tool_choice {choice!r}")
        if self.max_tokens not in (None, self.max_completion_tokens) and self.max_completion_tokens is not None:
            raise RequestError("max_tokens: not with another max_completion_tokens; send one of them")
        calls = {call.id for message in self.messages for call in message.tool_calls or ()} - {None}
        unknown = [one.tool_call_id for one in self.messages if one.tool_call_id not in (None, *calls)]
        if calls and unknown:
            raise RequestError(f"messages: no call has the id {unknown[0]!r} of a tool's result")
        return self

    @cached_property
    def prompts(self) -> list[Any]:
        return [[message.for_template() for message in self.messages]]

    @cached_property
    def used_tools(self) -> list[dict[str, Any]]:
        """The tools that the template shows; none with ``tool_choice: none``."""
        tools = () if self.tool_choice == "none" else self.tools or ()
        return [tool.model_dump(exclude_none=True) for tool in tools]

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """The tools of which the answer has to call one; none if it may answer otherwise."""
        if isinstance(self.tool_choice, Tool):
            return [tool for tool in self.used_tools if tool["function"]["name"] == self.tool_choice.function.name]
        return self.used_tools if self.tool_choice == "required" else []

    @property
    def template_kwargs(self) -> dict[str, dict[str, Any]]:
        """Field -> the variables that it has for the chat template; those of the last field come first."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {"reasoning_effort": effort, "chat_template_kwargs": self.chat_template_kwargs or {}}

    @property
    def length_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


class TextRequest(CompletionRequest):
    """The body of a completion of texts. With ``max_tokens`` 0 an echo is the prompt alone."""

    default_tokens: ClassVar[int] = TEXT_TOKENS
    prompt_field: ClassVar[str] = "prompt"
    prompt: Texts = Field(description=TEXTS)
    logprobs: int | None = Field(None, ge=0)
    echo: bool | None = None

    @property
    def prompts(self) -> list[Any]:
        return as_list(self.prompt)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class EmbeddingRequest(_OpenAIBody):
    """The body of a request for embeddings."""

    input: Inputs = Field(description=INPUTS)
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)


class HeadRequest(_OpenAIBody):
    """The body of a request to the head of an adapter: texts or token ids, or one conversation."""

    input: Inputs | None = Field(None, description=INPUTS)
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise RequestError("input: one of input and messages is required")
        return self

    @property
    def rows(self) -> list[Any]:
        """The inputs: texts, token ids or messages."""
        if self.messages is not None:
            return [[message.for_template() for message in self.messages]]
        return as_list(self.input or [])


class ScoreRequest(_OpenAIBody):
    """The body of `/score`: texts, and as many or one to compare each with; vLLM's names."""

    text_1: OneText | PlainTexts
    text_2: OneText | PlainTexts

    @property
    def pairs(self) -> list[tuple[str, str]]:
        one, two = as_list(self.text_1), as_list(self.text_2)
        if len(one) not in (1, len(two)):
            raise RequestError(f"text_1: one text, or as many as text_2; got {len(one)} and {len(two)}")
        return list(zip(one * len(two) if len(one) == 1 else one, two, strict=True))


class RerankRequest(_OpenAIBody):
    """The body of `/rerank`: documents to order by their relevance to a query; Jina's and Cohere's names."""

    query: OneText
    documents: PlainTexts
    top_n: int | None = Field(None, ge=1)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(self.query, document) for document in self.documents]


class TokenizeRequest(Body):
    """The body of `/tokenize`: a text, or messages with what a chat of them has."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt: one of prompt and messages is required")
        for name in ("add_generation_prompt", "tools", "chat_template_kwargs") if self.messages is None else ():
            if getattr(self, name) is not None:
                raise RequestError(f"{name}: goes with messages")
        if self.messages is not None and self.add_special_tokens:
            raise RequestError("add_special_tokens: not with messages, whose template has them")
        return self


class DetokenizeRequest(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class LoadRequest(Body):
    """The body that loads an adapter; ``load_inplace``: it replaces the adapter of that name."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadRequest(Body):
    """The body that unloads an adapter."""

    lora_name: str


AnyBody = TypeVar("AnyBody", bound=Body)


def as_list(given: str | list[Any]) -> list[Any]:
    return [given] if isinstance(given, str) or type(given[0]) is int else given


@final
class BodyReader:
    """Reads the bodies of requests, as many at a time as memory may hold."""

    def __init__(self) -> None:
        self._num_bytes = 0  # of bodies that are being read

    async def read(self, request: Request, model: type[AnyBody]) -> AnyBody:
        """Return the body of a request. Raises RequestError: 413, 503, or as `parse_body`. ClientDisconnect."""
        too_large = RequestError(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413)
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > MAX_BODY_BYTES:
            raise too_large
        content = bytearray()
        try:
            async for part in request.stream():
                content += part
                self._num_bytes += len(part)
                if len(content) > MAX_BODY_BYTES:
                    raise too_large
                if self._num_bytes > MAX_BODIES_BYTES:
                    raise RequestError("the server reads too many large bodies already; ask again later", status=503)
            return await run_in_threadpool(parse_body, bytes(content), model, record_of(request))
        finally:
            self._num_bytes -= len(content)


def parse_body(content: bytes, model: type[AnyBody], record: RequestRecord) -> AnyBody:
    """Return a body as its model, or raise RequestError; note which model it names, also where a field is wrong."""
    brackets = content.count(b"[") + content.count(b"{")
    if brackets > MAX_BRACKETS:
        raise RequestError(f"the body has {brackets} brackets [ and {{, and up to {MAX_BRACKETS} are read; send less")
    with translate_error((ValueError, RecursionError), RequestError, "the body is not JSON"):
        text = content.decode(json.detect_encoding(content), "surrogatepass")
        body = json.loads(text, object_pairs_hook=unique_keys)
    if brackets > MAX_DEPTH and _depth(body) > MAX_DEPTH:
        raise RequestError(f"the body has more than {MAX_DEPTH} levels of lists and objects")
    fields: dict[str, Any] = body if isinstance(body, dict) else {}
    if len(fields) > MAX_FIELDS:
        raise RequestError(f"the body has {len(fields)} fields, and no request has more than {MAX_FIELDS}")
    for key, value in fields.items() if r"\ud" in text.lower() or not text.isascii() else ():
        with translate_error(UnicodeEncodeError, RequestError, f"{printable(key)}: half a character, send all of it"):
            json.dumps([key, value], ensure_ascii=False).encode()
    name = fields.get("lora_name" if "lora_name" in model.model_fields else "model")
    record.model = name if isinstance(name, str) else None
    record.prompt_field = ", ".join(field for field in PROMPTS if fields.get(field) is not None)
    try:
        return model.model_validate(body)
    except ValidationError as problem:
        raise _request_error(problem.errors(include_url=False)[0], model) from None


def _depth(body: Any) -> int:
    depth = 0
    level = [body]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def _request_error(error: ErrorDetails, model: type[Body]) -> RequestError:
    """Return pydantic's error in OpenAI's form, with the field's name as ``param``."""
    if not error["loc"]:
        return RequestError(f"the body is a JSON object, got a {type(error['input']).__name__}")
    param = str(error["loc"][0])
    field = model.model_fields.get(param)
    where = param + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"][1:])
    if error["type"] == "extra_forbidden":
        return RequestError(f"{where}: not supported here, and it may change the answer; leave it out", param=param)
    if error["type"] == "missing":
        return RequestError(f"{where}: is required", param=param)
    if error["type"] == "value_error":
        return RequestError(f"{where}: {error['ctx']['error']}", param=param)
    given = reprlib.repr(error["input"])
    if field is not None and field.description:  # of a union, whose alternatives have an error each
        return RequestError(f"{param}: {field.description}; got {given}", param=param)
    message = error["msg"].removeprefix("Input ")
    return RequestError(f"{where}: {message[0].lower()}{message[1:]}, got {given}", param=param)
