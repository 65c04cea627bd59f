"""The shape of the house: who may import whom, what the wheel holds, which names are public."""

import ast
import importlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import lorakit

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lorakit"
# bottom to top; a file may import from its own group and from groups below, never above or beside
LAYERS: list[list[str]] = [
    ["errors", "version", "resident"],
    ["recipe", "lora", "durable"],
    ["quant", "varlen"],
    ["batch", "dtype", "optim", "attention"],
    ["loss", "patch"],
    ["model", "data", "engine", "origin"],
    ["model_parts"],
    ["sharded"],
    ["packed_files"],
    ["quantized"],
    ["loading"],
    ["adapting", "compiling", "isolation"],
    ["run.lock", "run.stop", "run.metrics", "run.record", "run.display", "run.checkpoint"],
    ["run.report", "job"],
    ["run.summary"],
    ["binding", "prompts", "finish"],
    ["train", "merge", "adapted", "combine", "extract", "diff", "convert"],
    ["plan"],
    ["start", "clusters"],
    ["check", "show", "score", "doctor"],
    ["commands"],
    ["cli"],
]
ONLY = {  # the only importers of a package
    "accelerate": {"engine"},
    "deepspeed": {"engine"},
    "bitsandbytes": {"quant"},
    "peft": set(),
    "pickle": set(),
    "yaml": {"recipe"},
    "pydantic": {"recipe"},
    "datasets": {"data"},
    "transformers": {"attention", "model", "model_parts"},
    "rich": {"run"},
    "matplotlib": {"run"},
}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def group(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[1:3]) if parts[1:2] == ["run"] and len(parts) > 2 else ".".join(parts[1:2])


def level(name: str) -> int:
    return next(number for number, names in enumerate(LAYERS) if name in names)


FILES = [path for path in PACKAGE.rglob("*.py") if "assets" not in path.parts]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    here = group(module)
    for imported in imports(path):
        top = imported.split(".")[0]
        if top in ONLY:
            assert here.split(".")[0] in ONLY[top], f"{module} imports {imported}"
        if top != "lorakit" or here in ("", "run"):
            continue
        there = group(imported)
        assert there == here or level(there) < level(here), f"{module} imports {imported}"


def test_the_layers_name_every_file() -> None:
    named = {name for names in LAYERS for name in names}
    found = {group(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in FILES}
    assert found - {"__init__", "run.__init__"} == named


def test_a_backends_name_appears_only_in_engine_and_recipe() -> None:
    for path in FILES:
        if (
            path.relative_to(PACKAGE).parts[0] in ("engine", "recipe", "doctor.py")
            or path == PACKAGE / "planning/backends.py"
        ):
            continue
        words = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not words & {"single", "ddp", "zero1", "zero2", "zero3", "fsdp2"}, path


def test_files_and_functions_stay_small() -> None:
    for path in FILES:
        text = path.read_text()
        assert len(text.splitlines()) <= 260, path
        assert ast.get_docstring(ast.parse(text)), path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno <= 70, f"{path}: {node.name}"


def test_nothing_opens_pickles_or_runs_text() -> None:
    banned = {"eval", "exec", "torch.load", "pickle.load", "os.system"}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in banned, path
                told = [ast.unparse(k.value) for k in node.keywords if k.arg == "trust_remote_code"]
                assert told in ([], ["False"]), path


def test_public_names_are_sorted_and_there() -> None:
    assert lorakit.__all__ == sorted(lorakit.__all__)
    for name in lorakit.__all__:
        assert getattr(lorakit, name) is not None
    for name in (
        "combine",
        "convert",
        "diff",
        "extract",
        "merge",
        "train",
    ):  # also after the file of the same name was imported
        importlib.import_module(f"lorakit.{name}")
        assert callable(getattr(lorakit, name))
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        lorakit.absent  # noqa: B018


def test_importing_lorakit_imports_no_torch() -> None:
    code = "import lorakit, sys; print('torch' in sys.modules, lorakit.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", lorakit.__version__]


@pytest.mark.slow
def test_the_wheel_holds_lorakit_with_its_assets_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: a build leaves its folders behind, and would pick up stale ones
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "cli.py"):
        shutil.copy(ROOT / name, source)
    for name in ("lorakit", "recipes", "adapters", "tests", "data"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)],
        check=True, capture_output=True,
    )  # fmt: skip
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()

    assert {name.split("/")[0].removesuffix(f"-{lorakit.__version__}.dist-info") for name in names} == {"lorakit"}
    inside = {name.removeprefix("lorakit/assets/tiny/") for name in names}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= inside
    assert "lorakit/py.typed" in names
