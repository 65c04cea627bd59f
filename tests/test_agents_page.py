"""What docs/agents.md and llms.txt tell a coding agent is there: files, commands with their options, names of Python."""

import re
import shlex

import pytest

import lorakit
from lorakit.cli.main import build_parser
from tests.test_docs_site import ROOT, links

AGENTS = (ROOT / "docs" / "agents.md").read_text()
COMMANDS = [line for line in AGENTS.splitlines() if line.startswith("lorakit ")]


def test_the_index_leads_to_files() -> None:
    found = links((ROOT / "llms.txt").read_text())
    assert len(found) > 8
    for link in found:
        assert (ROOT / link).is_file(), link


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_understood(line: str) -> None:
    assert build_parser().parse_args(shlex.split(line)[1:]).command


def test_the_names_of_python_are_there() -> None:
    names = re.findall(r"lorakit\.(\w+)", re.sub(r"`lorakit\.(cli|md)", "", AGENTS))
    assert names
    for name in names:
        assert hasattr(lorakit, name), name
