"""The architecture: which room may import which, what the wheel holds, which names are public, how large files grow."""

import ast
import functools
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import lorakit
from lorakit.backends import BACKENDS
from scripts import architecture

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lorakit"
# bottom to top; a room may import from itself and from the levels below, never from above or beside
LEVELS: list[list[str]] = [
    ["errors", "version", "backends"],
    ["files"],
    ["recipe", "ops", "launch"],
    ["data", "lora"],
    ["quant", "patch", "objectives", "slots"],
    ["base"],
    ["decoding", "parallel", "derive", "formats"],
    ["run", "inference"],
    ["merging", "serving", "planning"],
    ["export", "training"],
    ["inspection"],
    ["cli"],
]
ONLY = {  # the only importers of a package
    "accelerate": {"run"},
    "deepspeed": {"parallel", "lora"},  # lora: to gather what a training loop of others shards
    "bitsandbytes": {"quant"},
    "peft": set(),
    "pickle": set(),
    "yaml": {"recipe"},
    "pydantic": {"recipe", "serving", "patch"},
    "datasets": {"data"},
    "huggingface_hub": {"files"},
    "transformers": {"ops", "base", "decoding"},
    "rich": {"run"},
    "matplotlib": {"run"},
    "llguidance": {"decoding"},
    "prometheus_client": {"serving"},
    "rouge_score": {"inference"},
    "sacrebleu": {"inference"},
}
BANNED = {  # words with a plainer standard one: DESIGN's list of words, and what stands there instead
    "whole": "full", "learnt": "trainable or label", "kept": "saved or resident", "told": "the noun", "asked": "requested",
    "found": "the noun that was found", "held": "resident or held_bytes", "place": "position, index or path",
    "places": "positions, indices or paths", "hollow": "on meta", "calm": "quiet", "again": "recompute",
}  # fmt: skip
KNOW_BACKENDS = {
    "recipe/parallel.py",
}  # fmt: skip
FILES = sorted(PACKAGE.rglob("*.py"))


def room(module: str) -> str:
    return [*module.split("."), ""][1]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def level(name: str) -> int:
    return next(number for number, names in enumerate(LEVELS) if name in names)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def constants(path: Path) -> set[object]:
    return {node.value for node in ast.walk(parsed(path)) if isinstance(node, ast.Constant)}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def identifiers(path: Path) -> Iterator[tuple[str, int]]:
    """Every name that a file defines or assigns, with its line."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    here = room(module_of(path))
    for imported in imports(path):
        top = imported.split(".")[0]
        if top in ONLY:
            assert here in ONLY[top], f"{path}: imports {imported}"
        if top == "lorakit" and here:
            there = room(imported)
            assert there == here or level(there) < level(here), f"{path}: imports {imported}"


def test_every_room_has_a_level_and_there_are_at_most_12() -> None:
    rooms = {room(module_of(path)) for path in FILES} - {""}
    assert rooms == {name for names in LEVELS for name in names}
    assert len(LEVELS) <= 12
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "errors.py", "version.py", "backends.py"}


def test_no_room_has_the_name_of_a_public_function() -> None:
    assert not {path.name for path in PACKAGE.iterdir()} & set(lorakit.__all__)


def test_a_public_name_is_defined_once() -> None:
    counts: Counter[str] = Counter()
    for path in FILES:
        for node in parsed(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                counts[node.name] += 1
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_names_use_the_fields_words(path: Path) -> None:
    wrong = [
        f"{path}:{line}: {name}: say {BANNED[word.lower()]}"
        for name, line in identifiers(path)
        for word in re.findall(r"[a-z]+|[A-Z][a-z]*", name)
        if word.lower() in BANNED
    ]
    assert wrong == []


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_its_record_and_the_file_of_its_engine(name: str) -> None:
    """Adding one touches no other file."""
    engine = f"parallel/{BACKENDS[name].engine.partition('.')[0]}.py"
    for path in FILES:
        file = path.relative_to(PACKAGE).as_posix()
        assert name not in constants(path) or file in {"backends.py", engine, *KNOW_BACKENDS}, path


AXES = re.compile(r"parallel\.(sequence|pipeline|tensor)|token_?parts|tensor_?parallel|ulysses|head_?exchange|vocabulary_?(part|shard)|stage_?link|column_ranks", re.I)  # fmt: skip


@pytest.mark.parametrize("name", ["ops", "lora", "quant", "objectives", "base", "data"])
def test_the_rooms_below_parallel_know_no_axis(name: str) -> None:
    found = {str(path.relative_to(PACKAGE)) for path in (PACKAGE / name).rglob("*.py") if AXES.search(path.read_text())}
    assert not found


def test_functions_stay_small_and_files_say_what_they_are() -> None:
    for path in FILES:
        assert ast.get_docstring(parsed(path)), path
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno <= 70, f"{path}: {node.name}"


def test_the_page_on_architecture_is_what_the_code_is() -> None:
    assert architecture.PICTURE.read_text() == architecture.picture()
    text = architecture.PAGE.read_text()
    assert text == architecture.page(text)
    missing = [
        name for name in re.findall(r"`((?:tests|lorakit|scripts)/[\w/]+\.py)`", text) if not (ROOT / name).exists()
    ]
    assert missing == []


def test_nothing_opens_pickles_or_runs_text() -> None:
    banned = {"eval", "exec", "torch.load", "pickle.load", "os.system"}
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in banned, path
                values = [ast.unparse(k.value) for k in node.keywords if k.arg == "trust_remote_code"]
                assert values in ([], ["False"]), path


def test_public_names_are_sorted_and_there() -> None:
    assert lorakit.__all__ == sorted(lorakit.__all__)
    for name in lorakit.__all__:
        assert getattr(lorakit, name) is not None
    for name in ("combine", "convert", "diff", "extract", "merge", "train"):
        assert callable(getattr(lorakit, name))
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        lorakit.absent  # noqa: B018


@pytest.mark.parametrize(
    "module",
    [
        "lorakit",
        "lorakit.cli",
        "lorakit.recipe",
        "lorakit.launch.launcher",
        "lorakit.training.start",
        "lorakit.data.token_cache",
    ],
)
def test_what_runs_before_a_model_imports_no_torch(module: str) -> None:
    code = f"import {module}, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


@pytest.mark.matrix
@pytest.mark.slow
def test_the_wheel_holds_lorakit_with_its_assets_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: a build leaves its folders behind, and would pick up stale ones
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "cli.py"):
        shutil.copy(ROOT / name, source)
    for name in ("lorakit", "recipes", "adapters", "tests", "data", "scripts"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)],
        check=True, capture_output=True,
    )  # fmt: skip
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()

    assert {name.split("/")[0].removesuffix(f"-{lorakit.__version__}.dist-info") for name in names} == {"lorakit"}
    assets = {name.removeprefix("lorakit/assets/") for name in names if name.startswith("lorakit/assets/")}
    folder = PACKAGE / "assets"
    recipes = {str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*.yaml")}
    assert assets == recipes | {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert "lorakit/py.typed" in names
    sources = {str(path.relative_to(ROOT)) for path in FILES}
    assert {name for name in names if name.endswith(".py")} == sources


@pytest.mark.xdist_group("architecture")
def test_tests_of_one_group_run_in_one_worker(request: pytest.FixtureRequest) -> None:
    """pytest 9.2 with pytest-xdist 3.8 does not, and each worker computes all that they share once more."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@architecture")
