"""The table of a chat's fields by chat template in docs/serving.md is what the server's code does."""

from scripts.template_fields import PAGE, page


def test_the_table_of_fields_is_up_to_date() -> None:
    assert PAGE.read_text() == page()
