"""What is exported is what the other program computes the same with; the rest is refused by name."""

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from gguf import GGUFReader

import lorakit
from lorakit.cli import main
from lorakit.patch.prompting import prompt_digest
from tests.helpers.gguf import split_as
from tests.helpers.patches import make_patch, without_facts

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


def test_vllm_serves_adapters_of_several_ranks_and_alphas(run: Run, base: Path, tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"up_proj": 12}, "alpha_pattern": {"q_proj": 2.0}}
    uneven = make_patch(base, tmp_path / "uneven", targets=["q_proj", "up_proj"], **patterns)

    code, out, _ = run(base, "--adapter", f"uneven={uneven}", "--vllm")

    assert code == 0
    assert "# for vLLM 0.32 or newer" in out.splitlines()
    words = shlex.split(out.splitlines()[-1])
    assert words[words.index("--max-lora-rank") + 1] == "16"


def test_adapters_that_another_program_would_compute_otherwise_are_refused_together(
    run: Run, base: Path, tmp_path: Path
) -> None:
    good, dora = make_patch(base, tmp_path / "good"), make_patch(base, tmp_path / "dora", method="dora")
    adapters = ["--adapter", f"good={good}", "--adapter", f"dora={dora}"]
    for kind, program in ((["--vllm"], "vLLM"), (["--gguf", "--out", tmp_path / "out"], "llama.cpp")):
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

    code, out, _ = run(tmp_path / "base", *claim[1:], "--folder", tmp_path)
    assert code == 0
    assert f'"{tmp_path}/base"' in out
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    for path in (tmp_path / "base", "../base"):
        code, _, err = run(path, *claim[3:])
        assert code == 2
        assert f"{path} is a path of this machine, and is not in the claim" in err


def test_a_path_that_only_looks_like_one_in_the_claim_is_refused(
    run: Run, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorakit.cli.export.MOUNTED_AT", str(base.parent))
    code, _, err = run(base, "--k8s", "--image", "server:1", "--claim", "models")
    assert code == 2
    assert "is a path of this machine" in err


@pytest.fixture
def unended(base: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A base whose chat template ends answers with a token that is not in its eos_token_id, and a patch on it."""
    folder = Path(shutil.copytree(base, tmp_path / "unended"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content + '<|user|>' }}{% endfor %}")
    return folder, make_patch(folder, tmp_path / "patch")


def test_vllm_is_told_of_the_end_token_of_training(
    run: Run, unended: tuple[Path, Path], tokenizer: Any, tmp_path: Path
) -> None:
    base, patch = unended
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|user|>")]
    assert run(base, "--adapter", f"a={patch}", "--vllm", "--out", tmp_path / "serve.sh")[0] == 0
    (tmp_path / "vllm").write_text(  # stands where vLLM would: shows the file that it is given
        '#!/bin/sh\nwhile [ "$1" != --generation-config ]; do shift; done\ncat "$2/generation_config.json"\n'
    )
    (tmp_path / "vllm").chmod(0o755)

    done = subprocess.run(
        ["sh", tmp_path / "serve.sh"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True, capture_output=True
    )

    settings = json.loads((base / "generation_config.json").read_text())
    settings.pop("_from_model_config", None)
    assert json.loads(done.stdout) == settings | {"eos_token_id": ends}
    assert f"# answers end with '<|user|>' ({ends[1]})" in (tmp_path / "serve.sh").read_text()


def test_a_pod_of_vllm_gets_the_end_token_in_a_config_map(
    run: Run, unended: tuple[Path, Path], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["unended", "--adapter", "a=patch", "--k8s", "--image", "server:1", "--claim", "models"]

    code, out, _ = run(*words, "--vllm")

    assert code == 0
    deployment, _, config_map = yaml.safe_load_all(out)
    pod = deployment["spec"]["template"]["spec"]
    (volume,) = (one for one in pod["volumes"] if one.get("configMap") == {"name": config_map["metadata"]["name"]})
    command = pod["containers"][0]["command"]
    mounted = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    assert command[command.index("--generation-config") + 1] == mounted[volume["name"]]
    settings = json.loads(config_map["data"]["generation_config.json"])
    assert settings["eos_token_id"][-1] == tokenizer.convert_tokens_to_ids("<|user|>")
    assert len([*yaml.safe_load_all(run(*words)[1])]) == 2  # lorakit reads the chat template


@pytest.mark.parametrize("merged", [True, False])
def test_the_next_commands_for_llama_cpp_are_printed_to_the_end(
    run: Run, unended: tuple[Path, Path], tokenizer: Any, tmp_path: Path, merged: bool
) -> None:
    base, patch = unended
    split_as(tokenizer, "smollm").save_pretrained(base)
    (base / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content + '<|user|>' }}{% endfor %}")
    out = tmp_path / "with space"
    words = [base, "--adapter", f"one={patch}"]
    if merged:
        words = [lorakit.merge(base, patch, out=tmp_path / "merged")]

    code, said, _ = run(*words, "--gguf", "--out", out)

    assert code == 0
    serve = shlex.split(said.splitlines()[-1].split(maxsplit=1)[1])
    assert serve == ["llama-server", "--jinja", "-m", str(out / "base.gguf")] + (
        [] if merged else ["--lora", str(out / "one.gguf")]
    )
    end = GGUFReader(str(out / "base.gguf")).fields["tokenizer.ggml.eot_token_id"].contents()
    assert end == tokenizer.convert_tokens_to_ids("<|user|>")


def test_a_patch_that_brings_its_template_is_merged_before_its_export(run: Run, base: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content + '<|end|>' }}{% endfor %}"

    def bring(facts: dict[str, Any]) -> None:
        facts["chat_template"] = template
        facts["base"]["chat_template"] = prompt_digest(template)

    patch = without_facts(make_patch(base, tmp_path / "one"), tmp_path / "own", bring)
    code, _, err = run(base, "--adapter", f"one={patch}", "--vllm")
    assert code == 2
    assert "merge it, because the patch brings its own chat template" in err


def test_an_export_for_llama_cpp_says_how_a_merged_model_is_prompted(
    run: Run, base: Path, tokenizer: Any, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(base, tmp_path / "base"))
    split_as(tokenizer, "smollm").save_pretrained(base)

    def with_system(facts: dict[str, Any]) -> None:
        facts["data"] = {"train": {"sources": [], "rows": 1, "system": "Be kind.\nSay it."}}

    patch = without_facts(make_patch(base, tmp_path / "one"), tmp_path / "kind", with_system)
    merged = lorakit.merge(base, patch, out=tmp_path / "merged")
    adapted = [base, "--adapter", f"kind={patch}"]
    for words, name in (([merged], "the merged model"), (adapted, "kind")):
        out = tmp_path / f"out of {name}"
        code, said, _ = run(*words, "--gguf", "--out", out)
        note = f'{name}: its rows began with the system prompt "Be kind.\\nSay it.", which every request needs'
        assert (code, f"note       {note}" in said.splitlines()) == (0, True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "say for what: --vllm, --k8s or --gguf"),
        (["--gguf"], "name it with --out"),
        (["--k8s"], "needs --image"),
        (["--vllm", "--out", "."], "exists already"),
        (["--vllm", "--k8s", "--image", "i", "--claim", "c"], "vLLM does not know builtin:tiny; copy its folder"),
    ],
)
def test_options_that_do_not_go_together_are_refused(run: Run, flags: list[str], words: str) -> None:
    code, _, err = run("builtin:tiny", *flags)
    assert code == 2
    assert words in err
