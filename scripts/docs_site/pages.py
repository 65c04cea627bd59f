"""Assemble the documentation site: its navigation, and the pages that exist elsewhere than in docs/.

MkDocs calls the functions ``on_...``. The front page is README.md with links that are relative to docs/. The list of
decisions and the page on Python are made here, from the files and from ``lorakit.__all__``.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import lorakit

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
NAVIGATION: Final = {
    "Train": [
        "recipes.md",
        "qwen3.md",
        "recipe-reference.md",
        "methods.md",
        "rates.md",
        "coming-from.md",
        "chat-templates.md",
        "support.md",
        "bases.md",
    ],
    "Scale": ["parallel.md", "clusters.md", "gpu.md", "performance.md"],
    "Use": ["adapters.md", "your-own-loop.md", "merging.md", "serving.md", "conformance.md", "python.md"],
    "Inside": ["agents.md", "ARCHITECTURE.md"],
}
"""section -> pages; one that does not exist is left out, and a page of docs/ that is missing here is an error"""


def on_config(config: Any) -> Any:
    """Set the navigation."""
    sections: list[Any] = [{"lorakit": "index.md"}]
    for title, names in NAVIGATION.items():
        pages: list[Any] = [name for name in names if (DOCS / name).exists() or name == "python.md"]
        if title == "Inside":
            pages.append({"Decisions": ["decisions/index.md", *(f"decisions/{path.name}" for path in decisions())]})
        sections.append({title: pages})
    config["nav"] = sections
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are no files of docs/."""
    from mkdocs.structure.files import File

    made = {"index.md": front_page(), "decisions/index.md": list_of_decisions(), "python.md": python_page()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def front_page() -> str:
    """Return README.md with links that are relative to docs/."""
    text = (ROOT / "README.md").read_text()
    return text.replace("](docs/decisions)", "](decisions/index.md)").replace("](docs/", "](")


def decisions() -> list[Path]:
    return sorted((DOCS / "decisions").glob("[0-9]*.md"))


def list_of_decisions() -> str:
    titles = [(path.name, path.read_text().splitlines()[0].lstrip("# ")) for path in decisions()]
    return "# Decisions\n\nWhat was chosen, measured and given up.\n\n" + "".join(
        f"- [{title}]({name})\n" for name, title in titles
    )


def python_page() -> str:
    """Return the page with the docstring of every public name, taken from the file that defines it.

    MkDocs reads the sources and imports nothing, so no package of lorakit is needed here.
    """
    defined = dict(_definitions())
    names = sorted((name for name in lorakit.__all__ if name in defined), key=str.lower)
    sections = (
        f"::: {defined[name]}.{name}\n    options:\n      heading: lorakit.{name}\n      toc_label: {name}\n"
        for name in names
    )
    return "\n".join(["# Python", "", *sections])


def _definitions() -> Iterator[tuple[str, str]]:
    """Yield every class and function of the package with its module."""
    for path in sorted((ROOT / "lorakit").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for name in re.findall(r"^(?:def|class) (\w+)", path.read_text(), flags=re.MULTILINE):
            yield name, module
