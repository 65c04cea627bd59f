"""docs/conformance.md is what the cases of `make conformance` say, and its environment is that of the other tests."""

import re
from pathlib import Path

from conformance.cases import SECTIONS
from scripts.conformance_page import PAGE, page

ROOT = Path(__file__).parent.parent


def pins(path: Path) -> dict[str, str]:
    lines = [line.split("==") for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in lines}


def test_the_page_on_conformance_is_up_to_date() -> None:
    assert PAGE.read_text() == page()


def test_every_refusal_says_why_and_no_case_is_there_twice() -> None:
    cases = [case for cases in SECTIONS.values() for case in cases]
    assert [case.claim for case in cases if case.why_refused == ""] == []
    assert len({(case.suite, case.claim) for case in cases}) == len(cases) > 150
    assert all("|" not in f"{case.claim}{case.test}{case.why_refused}{case.note}" for case in cases)


def test_both_environments_have_the_same_versions_but_for_one() -> None:
    ours, theirs = pins(ROOT / "constraints.txt"), pins(ROOT / "conformance" / "constraints.txt")
    assert {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]} == {"python-dateutil"}
