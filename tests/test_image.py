"""The image's recipe: what it copies is enough for the wheel, and what it installs exists. A builder is not needed."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COPIED = [name for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.M) for name in line.split()[:-1]]


def test_the_files_of_the_image_build_a_wheel_with_everything_in_it(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)],
        check=True, capture_output=True,
    )  # fmt: skip

    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())

    package = {str(path.relative_to(ROOT)) for path in (ROOT / "lorakit").rglob("*") if path.suffix in (".py", ".json")}
    recipes = {f"lorakit/assets/{path.relative_to(ROOT)}" for path in (ROOT / "recipes").rglob("*.yaml")}
    assert package | recipes <= names


def test_the_image_ignores_all_that_it_does_not_copy() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == set(COPIED)


def test_the_image_installs_extras_that_exist_and_the_torch_that_is_tested() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = re.findall(r"^ARG EXTRAS=(.*)$", DOCKERFILE, re.M)
    assert set(wanted.split(",")) <= extras.keys()
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    assert len(pins) == 1
