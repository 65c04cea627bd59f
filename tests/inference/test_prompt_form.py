"""A patch is asked as its rows were in training: as plain text, or by the template after its system prompt."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import lorakit
from lorakit.base.transformers_io import load_tokenizer
from lorakit.cli import main
from lorakit.patch import read_patch
from lorakit.patch.prompting import PromptForm, trained_form
from tests.helpers.patches import make_patch
from tests.helpers.rows import chat, write_rows

TEXT = {"prompt": "hi ", "completion": "yes"}
KIND = {"role": "system", "content": "Be kind."}


def with_system(row: dict[str, Any], text: str) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": text}, *row["messages"]]}


def trained(recipe: Any, tmp_path: Path, rows: list[Any], name: str) -> Path:
    out = tmp_path / name
    file = write_rows(tmp_path / f"{name}.jsonl", rows)
    path = recipe(data={"train": str(file)}, train={"steps": 1, "warmup_steps": 0}, output=str(out))
    assert main(["train", str(path), "data.eval=null"]) == 0
    return out


@pytest.mark.parametrize(
    ("rows", "form"),
    [
        ([TEXT, TEXT], PromptForm(raw=True)),
        ([{"text": "hi"}, TEXT], PromptForm(raw=True)),
        ([chat("a", "b"), TEXT], PromptForm()),
        ([chat("a", "b")], PromptForm()),
        ([with_system(chat("a", "b"), "Be kind."), chat("c", "d") | {"system": "Be kind."}], PromptForm(False, "Be kind.")),
        ([with_system(chat("a", "b"), "Be kind."), with_system(chat("a", "b"), "Be brief.")], PromptForm()),
        ([with_system(chat("a", "b"), "Be kind."), chat("a", "b")], PromptForm()),
    ],
    ids=["plain", "texts", "mixed", "chat", "one system prompt", "two", "one in some rows"],
)  # fmt: skip
def test_the_form_of_the_rows_is_recorded(
    rows: list[Any], form: PromptForm, recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = trained(recipe, tmp_path, rows * 4, "out")
    assert trained_form(read_patch(out).metadata) == form
    card = (out / "README.md").read_text()
    assert ("- its rows were plain text: " in card) is form.raw
    assert ('system prompt "Be kind."' in card) is (form.system is not None)


def test_each_row_of_a_batch_is_asked_as_its_adapter_was_trained(base: Path, recipe: Any, tmp_path: Path) -> None:
    plain = trained(recipe, tmp_path, [TEXT] * 8, "plain")
    kind = trained(recipe, tmp_path, [with_system(chat("a", "b"), "Be kind.")] * 8, "kind")
    unknown = make_patch(base, tmp_path / "unknown")
    model = lorakit.load(base, {"plain": plain, "kind": kind, "unknown": unknown}, dtype="float32")
    asked = {"role": "user", "content": "say it"}

    def answer(prompt: Any, name: str | None, **how: Any) -> str:
        return model.generate([prompt], name, max_new_tokens=8, **how)[0]

    assert answer("say it", "plain") == answer("say it", "plain", raw=True) != answer("say it", "plain", raw=False)
    assert answer("say it", "kind") == answer([KIND, asked], "kind") != answer([asked], "kind")
    assert answer("say it", "unknown") == answer([asked], "unknown")
    assert answer("say it", None) == answer([asked], None)
    names = ["plain", "kind", None, "unknown"]
    assert model.generate(["say it"] * 4, names, max_new_tokens=8) == [answer("say it", name) for name in names]
    with model.merged("plain") as merged:
        assert merged.generate(["say it"], max_new_tokens=8) == [answer("say it", "plain")]


@pytest.mark.matrix
def test_a_merged_model_is_prompted_as_its_adapters_rows_were(
    base: Path, recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = trained(recipe, tmp_path, [TEXT] * 8, "plain")
    kind = trained(recipe, tmp_path, [with_system(chat("a", "b"), "Be kind.")] * 8, "kind")
    said = {}
    for name, patches in {"raw": [plain], "kind": [kind], "both": [plain, kind]}.items():
        capsys.readouterr()
        assert main(["merge", str(base), *map(str, patches), "--out", str(tmp_path / f"merged-{name}")]) == 0
        said[name] = capsys.readouterr().out
    asked = {"role": "user", "content": "say it"}

    def answers(name: str, *prompts: Any, **how: Any) -> list[str]:
        model = lorakit.load(tmp_path / f"merged-{name}", dtype="float32")
        return [model.generate([prompt], max_new_tokens=8, **how)[0] for prompt in prompts]

    assert answers("raw", "say it") == answers("raw", "say it", raw=True) != answers("raw", "say it", raw=False)
    assert "prompted as its patches: its rows were plain text: " in said["raw"]
    by_default, with_prompt, without = answers("kind", "say it", [KIND, asked], [asked])
    assert by_default == with_prompt != without
    assert 'began with the system prompt "Be kind.", which' in said["kind"]
    assert answers("both", "say it") == answers("both", [asked])
    assert "rows of different forms" in said["both"]


def test_a_base_without_a_template_needs_no_word_on_templates(base: Path, recipe: Any, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(base, tmp_path / "bare"))
    (bare / "chat_template.jinja").unlink()
    plain = trained(recipe, tmp_path, [TEXT] * 8, "plain")
    said: list[str] = []

    lorakit.merge(bare, plain, out=tmp_path / "merged", say=said.append)

    assert not [line for line in said if "template" in line]


def test_a_changed_template_does_not_matter_to_a_patch_of_plain_text(base: Path, recipe: Any, tmp_path: Path) -> None:
    plain = trained(recipe, tmp_path, [TEXT] * 8, "plain")
    other = Path(shutil.copytree(base, tmp_path / "other"))
    template = other / "chat_template.jinja"
    template.write_text(template.read_text() + "\n")

    assert lorakit.load(other, {"plain": plain}).adapters


def test_the_printed_line_asks_in_the_trained_form(
    base: Path, recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = trained(recipe, tmp_path, [TEXT] * 8, "plain")
    assert load_tokenizer(base).chat_template
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if line.startswith("try it"))
    command = [*line.split()[3:-1], "say it", "--max-new-tokens", "8", "--dtype", "float32"]

    def answers(*flags: str) -> str:
        assert main([*command, *flags]) == 0
        return capsys.readouterr().out

    assert str(plain) in line
    assert answers() == answers("--raw") != answers("--no-raw")
