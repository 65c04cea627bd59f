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


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_show_says_of_llama_cpp_what_its_export_does(
    run: Run, kind: str, base: Path, tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(base, tmp_path / "base")
    split_as(tokenizer, "smollm").save_pretrained(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    architecture = f"{kind.capitalize()}ForCausalLM"
    (tmp_path / "base/config.json").write_text(
        json.dumps(config | {"model_type": kind, "architectures": [architecture]})
    )
    patch = make_patch(tmp_path / "base", tmp_path / "patch")

    assert main(["show", str(patch)]) == 0
    verdict = next(line for line in capsys.readouterr().out.splitlines() if "llama.cpp" in line)
    code, _, err = run(tmp_path / "base", "--adapter", f"a={patch}", "--gguf", "--out", tmp_path / "out")

    assert (code, "yes: " in verdict) == ((0, True) if kind == "llama" else (2, False)), (verdict, err)
    if code:
        assert "no: its base is a mistral; lorakit writes GGUF files of llama, qwen2, qwen3" in verdict
        assert "a mistral; lorakit writes GGUF files of llama, qwen2, qwen3" in " ".join(err.split())


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
    ("flags", "words"), [(["--gguf"], "name it with --out"), (["--vllm", "--out", "."], "exists already")]
)
def test_options_that_do_not_go_together_are_refused(run: Run, flags: list[str], words: str) -> None:
    code, _, err = run("builtin:tiny", *flags)
    assert code == 2
    assert words in err


def test_the_program_that_is_exported_for_is_named(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("builtin:tiny")
    assert ended.value.code == 2
    assert "one of the arguments --vllm --gguf is required" in capsys.readouterr().err
