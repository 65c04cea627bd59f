"""What a person types and reads: output, messages and exit codes."""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from lorakit.cli import generate, main, merge
from lorakit.cli.main import build_parser
from lorakit.derive.combine import DENSITIES
from lorakit.files.safetensors import MODEL_DTYPES
from lorakit.recipe import BaseSection
from tests.helpers.fork_server import PIPE, ROOT, start_python
from tests.helpers.patches import make_head_patch, make_patch
from tests.helpers.rows import chat, write_rows


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_check_says_what_a_recipe_would_do(run: Any, recipe: Any, rows: Path) -> None:
    code, out, _ = run("check", recipe())

    assert code == 0
    for part in (
        "q_proj            2   2",
        "lm_head           0   1",
        "fused      mlp 2/2, rms_norm 5/5",
        "steps      12, with up to 6 rows each; ",
        ", after 2 steps of warm-up",
    ):
        assert part in out, out
    assert f"first row ({rows}:1)" in out
    assert "say 0<|end|><|assistant|>[[so 0<|end|>]]" in out
    assert "nothing is wrong with this recipe" in out


def test_check_shows_any_row_with_its_labels(run: Any, recipe: Any, rows: Path, tmp_path: Path) -> None:
    code, out, _ = run("check", recipe(), "--rows", 3)
    assert code == 0
    assert [f"({rows}:{number}), label tokens between" in out for number in (1, 2, 3, 4)] == [True, True, True, False]

    turns = [{"role": role, "content": f"say {i}"} for i in range(2) for role in ("user", "assistant")]
    more = write_rows(tmp_path / "more.jsonl", [chat("hi", "yes"), {"messages": turns}, {"messages": turns[:1]}])
    data = {"train": str(rows), "eval": str(more), "turns": "each", "on_bad_rows": "skip", "max_tokens": 16}
    path = recipe(data=data | {"on_long_rows": "truncate"})
    code, out, _ = run("check", path, "--row", f"{more}:2", "--row", f"{rows}:7")
    assert code == 0
    assert out.count("label tokens between [[ and ]]") == 3
    assert re.search(rf"row {more}:2 \(held out, 1 of 2 rows, \d+ tokens\), label", out)
    assert re.search(
        rf"row {more}:2 \(held out, 2 of 2 rows, \d+ tokens, longer than data.max_tokens 16 \(on_long", out
    )
    assert f"row {rows}:7 (train, " in out

    code, _, err = run("check", path, "--row", f"{more}:3", "--row", f"{more}:4")
    assert code == 2
    assert f"{more}:3: has nothing to learn: no assistant message" in err
    assert f"--row {more}:4: no row of data.train or data.eval; they are named as in {rows}:1, {rows}:2" in err


def test_overrides_may_follow_a_flag_and_what_is_neither_is_refused(run: Any, recipe: Any, tmp_path: Path) -> None:
    code, said, _ = run("train", recipe(), "--fresh", "train.steps=3")
    assert code == 0
    assert "step 3 of 3" in said
    for wrong in ("--stepz=3", "another.yaml"):
        with pytest.raises(SystemExit) as caught:
            run("train", recipe(), "--fresh", wrong)
        assert caught.value.code == 2


def test_check_reports_base_targets_and_data_at_once(run: Any, recipe: Any) -> None:
    code, _, err = run("check", recipe(adapter={"targets": ["qproj"]}, data={"train": "absent.jsonl"}))

    assert code == 2
    assert "'qproj' matches none" in err
    assert f"looked for {Path.cwd()}/absent.jsonl" in err


@pytest.mark.parametrize(
    ("axis", "problem"),
    [
        ("sequence", "parallel.sequence: 3 processes cannot share the 4 heads of LlamaForCausalLM"),
        ("tensor", "parallel.tensor: 3 processes cannot share the 4 heads of model.layers.0.self_attn.q_proj"),
        ("pipeline", "parallel.pipeline: 3 stages"),
    ],
)
def test_check_refuses_an_axis_that_the_base_does_not_divide_by(run: Any, recipe: Any, axis: str, problem: str) -> None:
    code, _, err = run("check", recipe(parallel={"backend": "ddp", "processes": 3, axis: 3}))

    assert code == 2
    assert problem in err


@pytest.mark.parametrize(
    ("parallel", "problem"),
    [
        ({"backend": "auto"}, "parallel.backend: auto is chosen on one machine"),
        ({"backend": "ddp", "processes": "auto"}, "no launcher, such as torchrun, started this one; name a number"),
    ],
)
def test_jobs_that_every_task_would_refuse_are_not_written(
    run: Any, recipe: Any, parallel: dict[str, Any], problem: str
) -> None:
    for kind in (["--slurm"], ["--k8s", "--image", "i", "--claim", "c"]):
        code, out, err = run("launch", recipe(parallel=parallel), *kind)
        assert (code, out) == (2, "")
        assert problem in err


def test_train_show_generate_and_merge_from_the_command_line(run: Any, recipe: Any, base: Path, tmp_path: Path) -> None:
    path, out = recipe(train={"steps": 3}), tmp_path / "out"
    code, said, _ = run("train", path, "train.seed=3")
    assert code == 0
    assert f"patch      {out} (step 3 of 3)" in said

    code, said, _ = run("show", out, "--for", base)
    assert code == 0
    for part in (
        "status       finished",
        "rank         4",
        "layers       14",
        "made by      lorakit",
        f"fits {base}: the base it was trained on",
        "vLLM       yes: --enable-lora --max-lora-rank 8",
    ):
        assert part in said, said
    code, said, _ = run("show", base)
    assert "LlamaForCausalLM" in said
    assert "q_proj" in said

    assert run("merge", base, out, "--out", tmp_path / "merged")[0] == 0
    flags = ("--prompt", "say 1", "--max-new-tokens", 4, "--dtype", "float32")
    adapted = run("generate", base, "--adapter", f"x={out}", *flags)[1]
    assert run("generate", tmp_path / "merged", *flags)[1] == adapted
    each = run("generate", base, "--adapter", f"x={out}", "--each", *flags)[1]
    plain = run("generate", base, *flags)[1]
    assert each == f"base  {plain}x     {adapted}"
    assert run("generate", base, "--adapter", f"x={out}", "--use", "none", *flags)[1] == plain


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "absent.yaml"], 2, "absent.yaml: no such recipe"),
        (["show", "absent/thing/x"], 2, "no folder"),
        (["show", "."], 2, "neither a patch, nor a run, nor a model folder"),
        (["generate", "builtin:tinny", "--prompt", "x"], 2, "'builtin:tinny' is not built in. Nearest: 'builtin:tiny'"),
        (["generate", "builtin:tiny", "--adapter", "none=x"], 2, "'none' means the plain base"),
        (["show", "README.md"], 2, "README.md is a file; a base is a folder"),
        (["schema", "--out", "absent/folder/s.json"], 2, "No such file or directory"),
        (["generate", "builtin:tiny", "--adapter", "x"], 2, "--adapter 'x': write it as NAME=PATH"),
        (["generate", "builtin:tiny", "--adapter", "x=absent"], 2, "absent: no such folder; looked for"),
        (["generate", "builtin:tiny", "--adapter", "x=a", "--adapter", "x=b"], 2, "the name 'x' is given twice"),
        (["diff", "adapters/json", "absent/thing/x"], 2, "no such folder"),
        (["launch", "recipes/quickstart.yaml", "--slurm", "--out", "README.md"], 2, "README.md exists already"),
        (
            ["launch", "recipes/quickstart.yaml", "--slurm", "parallel.backend=ddp", "parallel.processes=12", "parallel.nodes=2", "parallel.tensor=4"], 2,
            "tensor: 4 does not divide the 6 processes of a machine, within which tokens or weights are shared",
        ),
        (
            ["launch", "recipes/quickstart.yaml", "--k8s", "parallel.backend=ddp", "parallel.processes=8", "parallel.nodes=2", "parallel.tensor=4",
             "parallel.sequence=2", "data.packing=true"], 2, "sequence: 2 x tensor: 4 does not divide the 4 processes of a machine",
        ),
        (["merge", "builtin:tiny", "absent", "--out", "lorakit"], 2, "lorakit exists already"),
        (["merge", "builtin:tiny", "--adapter", "a:b", "--out", "new"], 2, "write it as DIR or DIR:WEIGHT"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_block_and_exit_code_2(
    run: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, message: str
) -> None:
    monkeypatch.chdir(ROOT)
    found, out, err = run(*arguments)

    assert (found, out) == (code, "")
    assert err.startswith(f"lorakit {arguments[0]}:")
    assert message in err
    assert "Traceback" not in err


def test_a_missing_recipe_is_all_that_is_said_to_be_missing(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("train")
    said = "lorakit train: the following arguments are required: recipe; `lorakit train --help` explains it\n"
    assert capsys.readouterr().err == said


def test_a_missing_hub_base_says_what_was_tried(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    code, _, err = run("show", "nobody/nothing")

    assert code == 2
    assert f"no folder {Path.cwd()}/nobody/nothing. And the hub gave no 'nobody/nothing' (revision main)" in err


def test_an_unknown_option_is_one_line_as_every_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "r.yaml", "--train.steps=5"])
    assert ended.value.code == 2
    said = "lorakit train: unrecognized arguments: --train.steps=5; `lorakit train --help` explains it\n"
    assert capsys.readouterr().err == said


def test_the_help_of_an_option_has_its_default() -> None:
    (commands,) = build_parser()._subparsers._group_actions  # type: ignore[union-attr]
    for name, command in commands.choices.items():  # type: ignore[union-attr]
        for action in command._actions:
            has_default = action.default not in (None, False, {}, [], frozenset(), argparse.SUPPRESS)
            if has_default and action.help != argparse.SUPPRESS:
                assert "default" in (action.help or ""), f"{name} {action.option_strings}"


def test_doctor_finds_nothing_broken_here(run: Any) -> None:
    code, out, _ = run("doctor")

    assert code == 0
    assert "builtin:tiny is complete" in out
    assert "dtype auto is" in out


def test_doctor_lists_no_backend_whose_package_is_missing(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # an import fails, as without the package
    _, out, _ = run("doctor")

    backends = next(line for line in out.splitlines() if line.startswith("backends"))
    assert backends == "backends   ddp, fsdp2; not installed: zero1, zero2, zero3 (pip install 'lorakit[deepspeed]')"
    assert "deepspeed not installed" in out


@pytest.mark.spread
def test_sigterm_ends_training_with_exit_code_75_and_the_same_command_goes_on(recipe: Any, tmp_path: Path) -> None:
    path = recipe(train={"steps": 100_000, "save_every_steps": 1000, "eval_every_steps": 100_000})
    with start_python("-m", "lorakit.cli", "train", path, stdout=PIPE, stderr=PIPE) as process:
        assert process.stderr is not None
        while "step 1/" not in process.stderr.readline():
            pass
        process.terminate()
        _, err = process.communicate(timeout=60)

    assert process.returncode == 75
    assert "lorakit train: SIGTERM: saved after step" in err
    assert "Traceback" not in err
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "running"
    assert len(list((tmp_path / "out" / "checkpoints").iterdir())) == 1


def test_the_root_script_and_the_module_are_the_same_program() -> None:
    for command in (["cli.py"], ["-m", "lorakit.cli"]):
        done = subprocess.run(
            [sys.executable, *command, "--version"], capture_output=True, text=True, check=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.stdout.startswith("lorakit 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("export {base} --gguf --out {out} --name a --port 8000 --dtype auto", "--name, --port, --dtype: is for --vllm"),
        ("launch r.yaml --slurm --image i --claim c --folder /work", "--image, --claim, --folder: is for --k8s"),
        ("launch r.yaml --k8s --cpus-per-process 8 --time 1", "--cpus-per-process, --time: is for --slurm"),
        ("merge {base} p --out {out} --rank 2 --seed 0", "--rank, --seed: needs --as-patch"),
        ("merge p q --as-patch --out {out} --verify --onto original", "--verify, --onto: is for merging into a base"),
        ("init --from quickstart --out {out} --base {base} --data a", "--base, --data: --from copies a recipe"),
        ("check r.yaml --rows 1 --row a:1", "--rows: of the first rows, in whose place --row shows others"),
        ("plan r.yaml --gpus 2 --nodes 1", "--gpus, --nodes: describes a machine"),
        ("score {base} --data r --measure loss --max-new-tokens 9", "--max-new-tokens: --measure loss answers no row"),
        ("generate {base} --adapter a={head} --prompt x --temperature 0 --no-raw", "--temperature, --raw: goes with answers"),
        ("generate {base} --prompt x --seed 3", "--seed: goes with a --temperature above 0"),
        ("generate {base} --prompt x --seed 3 --temperature 0", "--seed: goes with a --temperature above 0"),
        ("score {base} --adapter a={head} --data a={rows} --max-new-tokens 9", "--max-new-tokens: of answers"),
        ("serve {base} --admin-key k --max-adapters 2", "--admin-key, --max-adapters: there is no adapter"),
    ],
    ids=lambda text: text.split()[0],
)  # fmt: skip
def test_options_that_would_change_nothing_are_refused_by_name(
    run: Any, base: Path, rows: Path, tmp_path: Path, arguments: str, message: str
) -> None:
    names = {"base": base, "out": tmp_path / "out", "rows": rows, "head": tmp_path / "head"}
    if "{head}" in arguments:
        make_head_patch(base, names["head"], 2)

    code, _, err = run(*arguments.format(**names).split())

    assert (code, message in err) == (2, True), err
    assert not (tmp_path / "out").exists()


def test_the_port_of_an_export_is_a_port(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("export", "builtin:tiny", "--vllm", "--port", "99999")
    assert ended.value.code == 2
    assert "argument --port: a port from 0 to 65535 expected" in capsys.readouterr().err


def test_the_choices_of_the_options_are_those_of_the_workflows() -> None:
    keys = {name: get_args(field.annotation) for name, field in BaseSection.model_fields.items()}

    assert tuple(DENSITIES) == merge.COMBINE_METHODS
    assert tuple(MODEL_DTYPES) == merge.DTYPES
    assert keys["quantize"] == generate.QUANTIZE
    assert set(generate.DTYPES) < set(keys["dtype"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["merge", "{base}", "{patch}", "--out", "{out}", "--seed", "0"],
        ["merge", "{base}", "{patch}:nan", "--out", "{out}"],
        ["merge", "{patch}", "builtin:tiny", "--out", "{out}"],
        ["merge", "{base}", "{patch}", "--out", "{base}/out"],
        ["generate", "{base}", "--prompt", "hi", "--temperature", "-1"],
        ["generate", "{base}", "--prompt", "hi", "--temperature", "1", "--seed", "99999999999999999999"],
        ["generate", "{base}", "--adapter", "a={patch}", "--each", "--use", "b", "--prompt", "x"],
        ["score", "{base}", "--adapter", "a={patch}", "--data", "a={empty}"],
        ["show", "{patches}"],
        ["diff", "{patch}", "{patch}x"],
    ],
    ids=lambda arguments: " ".join(arguments[:1] + arguments[-2:]),
)
def test_arguments_that_contradict_files_or_each_other_end_in_one_block(
    tmp_path: Path, base: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    patch = make_patch(base, tmp_path / "patches" / "p")
    (tmp_path / "empty.jsonl").write_text("")
    names = {"base": base, "patch": patch, "out": tmp_path / "out", "empty": tmp_path / "empty.jsonl",
             "patches": tmp_path / "patches"}  # fmt: skip

    assert main([argument.format(**names) for argument in arguments]) == 2
    assert capsys.readouterr().err.startswith(f"lorakit {arguments[0]}:")
    assert not (tmp_path / "out").exists()
