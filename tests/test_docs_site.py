"""The pages link to each other on GitHub and on the site that `make docs` builds, and none is left out."""

import re
from pathlib import Path

import pytest

import lorakit
from scripts.docs_site import pages

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def links(text: str) -> list[str]:
    """Return the links of a page to other files."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text))
    return [link.partition("#")[0] for link in found if not link.startswith(("http", "#"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_leads_to_a_file_and_from_docs_not_out_of_it(page: Path) -> None:
    for link in links(page.read_text()):
        target = (page.parent / link).resolve()
        assert target.exists(), link
        if page.name != "README.md":  # the site has the files of docs/ only
            assert target.is_relative_to(ROOT / "docs"), link


def test_the_links_of_the_front_page_lead_to_pages_of_the_site() -> None:
    made = {pages.DOCS / "decisions" / "index.md"}
    for link in links(pages.front_page()):
        target = pages.DOCS / link
        assert target.is_file() or target in made, link


def test_every_page_is_in_the_navigation_and_every_public_name_is_on_the_page_of_python() -> None:
    named = {name for names in pages.NAVIGATION.values() for name in names}
    assert {path.name for path in pages.DOCS.glob("*.md")} <= named
    assert len(pages.decisions()) == len(list((pages.DOCS / "decisions").iterdir()))
    assert f"({pages.decisions()[0].name})" in pages.list_of_decisions()
    text = pages.python_page()
    for name in lorakit.__all__:
        assert name == "__version__" or f"heading: lorakit.{name}\n" in text, name
    assert "::: lorakit.lora.inject.inject\n" in text
