"""What is exported is what the other program computes the same with; the rest is refused by name."""

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lorakit.cli import main
from tests.helpers.patches import make_patch

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: object) -> tuple[int, str, str]:
        code = main(["export", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_vllms_command_has_every_adapter_and_the_smallest_rank_that_takes_them(
    run: Run, base: Path, tmp_path: Path
) -> None:
    one, two = make_patch(base, tmp_path / "one", rank=4), make_patch(base, tmp_path / "two", rank=9)

    code, out, _ = run(base, "--adapter", f"one={one}", "--adapter", f"two={two}", "--vllm", "--name", "tiny")

    assert code == 0
    words = shlex.split(out.splitlines()[-1])
    assert words[:4] == ["exec", "vllm", "serve", str(base)]
    assert words[words.index("--max-lora-rank") + 1] == "16"
    modules = [yaml.safe_load(word) for word in words[words.index("--lora-modules") + 1 :]]
    assert modules == [
        {"name": name, "path": str(path), "base_model_name": "tiny"} for name, path in (("one", one), ("two", two))
    ]


def test_adapters_that_another_program_would_compute_otherwise_are_refused_together(
    run: Run, base: Path, tmp_path: Path
) -> None:
    good, dora = make_patch(base, tmp_path / "good"), make_patch(base, tmp_path / "dora", method="dora")
    adapters = ["--adapter", f"good={good}", "--adapter", f"dora={dora}"]
    for kind, program in ((["--vllm"], "vLLM"), (["--gguf-ready", "--out", tmp_path / "out"], "llama.cpp")):
        code, out, err = run(base, *adapters, *kind)
        assert (code, out) == (2, "")
        assert f"{program} would compute other answers" in err
        assert "dora: magnitudes of DoRA" in err
        assert "good:" not in err
    assert not (tmp_path / "out").exists()


def test_kubernetes_gets_a_deployment_and_a_service_of_either_server(
    run: Run, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_patch(base, tmp_path / "one")
    (tmp_path / "base").symlink_to(base)
    monkeypatch.chdir(tmp_path)
    claim = ["base", "--adapter", "one=one", "--k8s", "--image", "server:1", "--claim", "models"]

    for flags, words in (([], ["lorakit", "serve", "base"]), (["--vllm"], ["vllm", "serve", "base"])):
        code, out, _ = run(*claim, *flags)
        assert code == 0
        deployment, service = yaml.safe_load_all(out)
        pod = deployment["spec"]["template"]["spec"]
        assert pod["containers"][0]["command"][:3] == words
        assert pod["containers"][0]["workingDir"] == "/work"
        assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
        assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]

    code, _, err = run(tmp_path / "base", *claim[1:])
    assert code == 2
    assert "is not in the claim" in err


@pytest.mark.parametrize("merged", [True, False])
def test_a_folder_for_ggufs_has_all_that_its_script_reads(run: Run, base: Path, tmp_path: Path, merged: bool) -> None:
    patch = make_patch(base, tmp_path / "one")
    out = tmp_path / "out"
    code, said, _ = run(base, "--adapter", f"one={patch}", "--gguf-ready", "--out", out, *(["--merged"] * merged))
    assert (code, "convert.sh" in said) == (0, True)
    converters = tmp_path / "llama.cpp"
    converters.mkdir()
    for script in ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py"):  # stand where llama.cpp's would: copy a file
        (converters / script).write_text(
            "import shutil, sys\nfolder, out = sys.argv[1], sys.argv[sys.argv.index('--outfile') + 1]\n"
            "name = 'adapter_model' if 'lora' in sys.argv[0] else 'model'\n"
            "shutil.copyfile(f'{folder}/{name}.safetensors', out)\n"
        )

    subprocess.run(["sh", out / "convert.sh"], env={"LLAMA_CPP": str(converters), "PATH": "/usr/bin:/bin"}, check=True)

    assert {file.name for file in out.glob("*.gguf")} == ({"model.gguf"} if merged else {"base.gguf", "one.gguf"})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "say for what: --vllm, --k8s or --gguf-ready"),
        (["--gguf-ready"], "name it with --out"),
        (["--k8s"], "needs --image"),
        (["--vllm", "--merged"], "goes with --gguf-ready"),
        (["--gguf-ready", "--merged", "--out", "x"], "merges one adapter"),
        (["--vllm", "--out", "."], "exists already"),
        (["--vllm", "--k8s", "--image", "i", "--claim", "c"], "vLLM does not know builtin:tiny; copy its folder"),
    ],
)
def test_options_that_do_not_go_together_are_refused(run: Run, flags: list[str], words: str) -> None:
    code, _, err = run("builtin:tiny", *flags)
    assert code == 2
    assert words in err
