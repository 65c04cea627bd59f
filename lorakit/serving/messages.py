"""The parts of a chat's request: messages, tools, tool calls, and which tool an answer calls."""

import reprlib
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from lorakit.data.row_formats import arguments_of


class Body(BaseModel):
    """The body of a request, or a part of it. A field of null is a field that is absent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}


def _json_object(text: str) -> str:
    if text and not isinstance(arguments_of({"arguments": text}), dict):  # a template would write it as a text
        raise ValueError(f"the text of a JSON object is required, got {reprlib.repr(text)}")
    return text


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
