"""Lists in messages say how many of them are not shown."""

import pytest

from lorakit.files.text import first_of


@pytest.mark.parametrize(
    ("between", "shown"),
    [(", ", "a, b and 2 more"), ("; ", "a; b; ... and 2 more"), ("\n  ", "a\n  b\n  ... and 2 more")],
)
def test_the_others_are_counted_where_a_reader_looks_for_them(between: str, shown: str) -> None:
    assert first_of(["a", "b", "c", "d"], 2, between) == shown
    assert first_of(["a", "b"], 2, between) == between.join("ab")
