"""What is exported is what the other program computes the same with; the rest is refused by name."""

import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import Environment

from lorakit.cli import main
from lorakit.errors import BaseModelError
from lorakit.export.ollama import ANSWER, NEXT, ROLES, SYSTEM, USER, go_template, message_texts, modelfile
from lorakit.patch.prompting import CHAT, PromptForm
from tests.helpers.patches import make_patch

Run = Callable[..., tuple[int, str, str]]
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}",
    "chatml with a default system prompt": "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nHelp.<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}",
    "instructions": "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'system' %}{{ '<<SYS>>' + m.content + '<</SYS>>' }}{% else %}{{ m.content + '</s>' }}{% endif %}"
    "{% endfor %}",
    "an end that earlier answers lack": "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
    "{{ '<assistant><think></think>' }}",
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: object) -> tuple[int, str, str]:
        code = main(["export", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def renderer(template: str) -> Callable[[Sequence[str]], str]:
    compiled = Environment().from_string(template)
    return lambda contents: compiled.render(messages=[{"role": ROLES[c], "content": c} for c in contents])


def go_rendered(template: str, contents: Sequence[str]) -> str:
    """Evaluate the little of Go's template language that `go_template` writes."""
    system = next((c for c in contents if c == SYSTEM), "")
    head, loop, tail = re.fullmatch(
        r"(.*?)\{\{ range \.Messages \}\}(.*)\{\{ end \}\}\{\{ end \}\}(.*)", template, re.DOTALL
    ).groups()  # type: ignore[union-attr]
    with_system, without = re.fullmatch(
        r"\{\{ if \.System \}\}(.*)\{\{ else \}\}(.*)\{\{ end \}\}", head, re.DOTALL
    ).groups()  # type: ignore[union-attr]
    user, answer = re.fullmatch(
        r'\{\{ if eq \.Role "user" \}\}(.*)\{\{ else if eq \.Role "assistant" \}\}(.*)', loop, re.DOTALL
    ).groups()  # type: ignore[union-attr]
    text = with_system.replace("{{ .System }}", system) if system else without
    for content in contents:
        text += {"user": user, "assistant": answer, "system": ""}[ROLES[content]].replace("{{ .Content }}", content)
    return str(text + tail)


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_ollama_template_makes_the_prompts_of_the_bases_own(name: str) -> None:
    render = renderer(TEMPLATES[name])
    template = go_template(message_texts(render))
    for contents in ([USER], [SYSTEM, USER], [USER, ANSWER, NEXT, ANSWER, USER], [SYSTEM, USER, ANSWER, NEXT]):
        assert go_rendered(template, contents) == render(contents)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.index ~ m.content }}{% endfor %}",
        "{% for m in messages %}{% if not loop.last %}{{ '<old>' }}{% endif %}{{ m.role + m.content }}{% endfor %}",
        "{% if messages | length > 3 %}{{ 'long' }}{% endif %}{% for m in messages %}{{ m.role + m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | upper | replace('\ue002', 'x') }}{% endfor %}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_that_does_more_than_put_texts_around_messages_is_refused(template: str) -> None:
    with pytest.raises(BaseModelError, match="cannot be written for Ollama"):
        message_texts(renderer(template))


def test_a_modelfile_prompts_as_the_rows_were(tokenizer: Any) -> None:
    plain = modelfile("./m.gguf", "./a.gguf", tokenizer, PromptForm(raw=True))
    assert plain == 'FROM ./m.gguf\nADAPTER ./a.gguf\nTEMPLATE """{{ .Prompt }}"""\n'
    kind = modelfile("./m.gguf", None, tokenizer, PromptForm(system="Be kind."))
    assert 'SYSTEM """Be kind."""' in kind
    assert "ADAPTER" not in kind
    assert f"PARAMETER stop {tokenizer.eos_token}" in modelfile("./m.gguf", None, tokenizer, CHAT)


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

    modelfiles = [out / "Modelfile"] if merged else [out / "Modelfile.one"]
    for file in modelfiles:
        sources = re.findall(r"^(?:FROM|ADAPTER) \./(.*)$", file.read_text(), re.MULTILINE)
        assert len(sources) == 2 - merged
        assert all((out / source).is_file() for source in sources)


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
