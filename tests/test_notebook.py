"""The notebook in docs/ runs as it stands, in an empty folder, and its adapter answers as its rows do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "docs" / "first-steps.ipynb"


@pytest.mark.matrix
@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert all(not cell.get("outputs") for cell in cells)

    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nprint(answers[0])"],
        cwd=tmp_path, env=os.environ | {"MPLBACKEND": "agg"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "3 lamps to Oslo, please!"
