"""Every case of docs/conformance.md is what the page says."""

import pytest

from conformance.case import Case
from conformance.cases import SECTIONS
from conformance.server import Server


@pytest.mark.parametrize("case", [case for cases in SECTIONS.values() for case in cases], ids=lambda case: case.claim)
def test_the_server_does_what_the_page_says(server: Server, case: Case) -> None:
    case.check(server)
