"""The base class of recipe sections, and the types that their keys share."""

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from lorakit.files.patterns import check_expression


def _plain_name(text: str) -> str:
    if text.startswith("~"):
        raise ValueError("write the folder out: ~ is not expanded")
    if not text.strip() or any(ord(letter) < 32 or 0xD800 <= ord(letter) <= 0xDFFF for letter in text):
        raise ValueError("blank, or with characters that no name has")
    return text


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("blank")
    return text


Name = Annotated[str, StringConstraints(min_length=1, max_length=4096), AfterValidator(_plain_name)]
Pattern = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Expression = Annotated[Pattern, AfterValidator(check_expression)]
Token = Annotated[str, StringConstraints(min_length=1, max_length=1024), AfterValidator(_not_blank)]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]


class Section(BaseModel):
    """Base of every section: frozen, no type coercion, unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the keys of this section taken together."""
        return iter(())

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if problems := dict.fromkeys(self.problems()):  # each once, also where two checks find the same
            raise ValueError("; ".join(problems))
        return self
