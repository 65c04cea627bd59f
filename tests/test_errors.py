"""An exception of a library becomes one that a user can fix, and a bug stays a bug."""

import json
import traceback

import pytest

from lorakit.errors import BaseModelError, PatchError, translate_error


def read(text: str) -> object:
    with translate_error((ValueError, RecursionError), PatchError, "a.json: not JSON"):
        return json.loads(text)


def test_an_exception_of_a_named_kind_or_derived_from_it_is_translated() -> None:
    with pytest.raises(PatchError) as caught:
        read("{")  # a JSONDecodeError
    assert type(caught.value) is PatchError
    assert str(caught.value).startswith("a.json: not JSON: Expecting property name")


def test_the_translated_exception_is_not_printed() -> None:
    with pytest.raises(PatchError) as caught:
        read("{")
    assert "JSONDecodeError" not in "".join(traceback.format_exception(caught.value))


def test_without_more_words_the_message_stays() -> None:
    with pytest.raises(BaseModelError, match=r"^the file ended$"), translate_error(PatchError, BaseModelError):
        raise PatchError("the file ended")


def test_other_exceptions_and_results_pass() -> None:
    assert read("[1]") == [1]
    with pytest.raises(TypeError) as caught:
        read(None)  # type: ignore[arg-type]
    assert caught.value.__cause__ is None
    assert not caught.value.__suppress_context__
