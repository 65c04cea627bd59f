"""No command and no call runs Python of a base, of a tokenizer, of rows or of the current folder, or offers to."""

import ast
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import lorakit
from lorakit.cli import main
from lorakit.data.rows import RowSource, read_rows
from lorakit.errors import DataError, LorakitError
from lorakit.launch.job_files import Job, kubernetes_job
from tests.helpers.patches import make_patch

PACKAGE = Path(lorakit.__file__).parent
LOADING = ("from_pretrained", "from_config", "_from_config")
CODE = "open({mark!r}, 'a').close()\nraise ImportError('this ran')\n"


def test_every_call_that_reads_a_model_or_a_tokenizer_forbids_its_code() -> None:
    calls = 0
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in LOADING:
                trusted = [
                    ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "trust_remote_code"
                ]
                assert trusted == ["False"], f"{path}:{node.lineno}"
                calls += 1
    assert calls >= 4


def unknown_model(folder: Path) -> dict[str, Any]:
    return {
        "config.json": {"model_type": "theirs", "architectures": ["Theirs"], "auto_map": auto_map("modeling.Theirs")}
    }


def known_model(folder: Path) -> dict[str, Any]:
    return {"config.json": {"auto_map": auto_map("modeling.Theirs")}}


def tokenizer_class(folder: Path) -> dict[str, Any]:
    classes = {"AutoTokenizer": ["modeling.Theirs", "modeling.Theirs"]}
    return {"tokenizer_config.json": {"tokenizer_class": "Theirs", "auto_map": classes}}


def own_generate(folder: Path) -> dict[str, Any]:
    (folder / "custom_generate").mkdir()
    shutil.copy(folder / "modeling.py", folder / "custom_generate" / "generate.py")
    return {"generation_config.json": {"custom_generate": str(folder)}}


def auto_map(name: str) -> dict[str, str]:
    return dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer"), name)


COMMANDS: dict[str, Callable[[str, str, str, str], list[str]]] = {
    "check": lambda base, patch, recipe, out: [recipe],
    "train": lambda base, patch, recipe, out: [recipe],
    "init": lambda base, patch, recipe, out: ["--base", base, "--data", "rows.jsonl", "--yes", "--out", f"{out}.yaml"],
    "generate": lambda base, patch, recipe, out: [base, "--prompt", "hi", "--max-new-tokens", "2"],
    "score": lambda base, patch, recipe, out: [base, "--data", "rows.jsonl", "--max-new-tokens", "2"],
    "show": lambda base, patch, recipe, out: [base],
    "merge": lambda base, patch, recipe, out: [base, patch, "--out", out, "--verify", "--allow", "base"],
    "extract": lambda base, patch, recipe, out: [base, base, "--rank", "2", "--out", out],
    "diff": lambda base, patch, recipe, out: [patch, patch],
    "convert": lambda base, patch, recipe, out: [patch, "--to", "mlx", "--base", base, "--out", out],
    "export": lambda base, patch, recipe, out: [base, "--vllm", "--adapter", f"a={patch}", "--out", out],
}


@pytest.mark.parametrize(
    "change",
    [
        unknown_model,
        tokenizer_class,
        *(pytest.param(one, marks=pytest.mark.matrix) for one in (known_model, own_generate)),
    ],
)
def test_no_command_runs_code_of_a_base_whatever_is_answered(
    change: Callable[[Path], dict[str, Any]], base: Path, recipe: Any, rows: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    theirs, patch, mark = tmp_path / "theirs", make_patch(base, tmp_path / "patch"), tmp_path / "ran"
    shutil.copytree(base, theirs)
    (theirs / "modeling.py").write_text(CODE.format(mark=str(mark)))
    for name, settings in change(theirs).items():
        file = theirs / name
        file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | settings))
    path = recipe(base={"model": str(theirs)}, train={"steps": 1, "warmup_steps": 0}, output=str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)

    codes = {}
    for command, arguments in COMMANDS.items():
        monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 99))
        codes[command] = main([command, *arguments(str(theirs), str(patch), str(path), str(tmp_path / command))])
        output = capfd.readouterr()
        assert "[y/N]" not in output.out + output.err, command
        assert not mark.exists(), command
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 99))
    if codes["generate"] == 0:
        lorakit.load(theirs)
    else:
        with pytest.raises(LorakitError, match="transformers cannot load it|has no tokenizer"):
            lorakit.load(theirs)
    assert "[y/N]" not in capfd.readouterr().out
    assert not mark.exists()
    if change in (known_model, own_generate):  # their code is not needed
        # two equal models differ in nothing
        assert [command for command, code in codes.items() if code != 0] == ["extract"]
    else:
        assert codes["generate"] == codes["train"] == 2


SCRIPTS = Path(sys.executable).parent
WITHOUT_FOLDER = "import sys; sys.path.remove(''); from lorakit.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.matrix
@pytest.mark.spread
@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-c", WITHOUT_FOLDER],
        pytest.param(
            [SCRIPTS / "torchrun", "--nproc-per-node", "2", "--no-python", SCRIPTS / "lorakit"],
            marks=pytest.mark.matrix,
        ),
    ],
    ids=["lorakit", "torchrun"],
)
def test_a_run_of_several_processes_runs_no_file_of_the_current_folder(
    recipe: Any, tmp_path: Path, command: list[str | Path]
) -> None:
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("numpy", "torch", "yaml"):
        (folder / f"{name}.py").write_text(CODE.format(mark=str(tmp_path / f"{name} ran")))
    path = recipe(parallel={"backend": "ddp", "processes": 2}, train={"steps": 1, "warmup_steps": 0})

    done = subprocess.run(
        [*command, "train", str(path)], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-2000:]
    assert list(tmp_path.glob("* ran")) == []


def test_a_pod_runs_no_file_of_its_folder() -> None:
    job = kubernetes_job(Job("a.yaml", 2, 1), image="i", claim="c")
    assert "'--no-python', 'lorakit', 'train'" in str(list(yaml.safe_load_all(job)))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_with_a_script_is_refused_and_not_run(
    tmp_path: Path, rows: Path, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, folder = tmp_path / "ran", tmp_path / "theirs"
    folder.mkdir()
    shutil.copy(rows, folder / "train.jsonl")
    (folder / "theirs.py").write_text(CODE.format(mark=str(mark)))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 99))

    with pytest.raises(DataError, match="scripts are no longer supported"):
        list(read_rows(RowSource(str(folder), None, "train", streaming)))

    assert not mark.exists()
