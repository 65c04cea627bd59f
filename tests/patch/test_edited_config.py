"""A patch whose config was edited after it was saved is refused by name; without its record it is read as it is."""

import json
from pathlib import Path
from typing import Any

import pytest

from lorakit.cli import main
from lorakit.errors import PatchError
from lorakit.patch import read_patch
from lorakit.patch.read import open_patch
from tests.helpers.patches import make_patch


def edit(patch: Path, **settings: Any) -> Path:
    path = patch / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return patch


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"lora_alpha": 64}, "lora_alpha 64, saved with "),
        ({"use_rslora": True}, "use_rslora True, saved with False"),
        ({"alpha_pattern": {"q_proj": 64}}, "alpha_pattern {'q_proj': 64}, saved with {}"),
    ],
)
def test_an_edited_setting_is_named_with_both_values(
    settings: dict[str, Any], names: str, base: Path, tmp_path: Path
) -> None:
    patch = make_patch(base, tmp_path / "patch")
    saved = read_patch(patch)
    edit(patch, **settings)
    for read in (read_patch, open_patch):
        with pytest.raises(PatchError, match="was edited after the patch was saved") as caught:
            read(patch)
        assert names in str(caught.value)
    (patch / "lorakit.json").unlink()  # the message's remedy
    assert read_patch(patch).config.raw != saved.config.raw


def test_settings_that_multiply_nothing_may_be_edited(base: Path, tmp_path: Path) -> None:
    patch = make_patch(base, tmp_path / "patch")
    edit(patch, base_model_name_or_path="elsewhere", lora_dropout=0.5, inference_mode=False)
    assert read_patch(patch).config.base_model == "elsewhere"


def test_a_patch_without_the_record_is_read_as_it_is(base: Path, tmp_path: Path) -> None:
    patch = make_patch(base, tmp_path / "patch")
    record = json.loads((patch / "lorakit.json").read_text())
    del record["settings"]  # as earlier versions wrote it
    (patch / "lorakit.json").write_text(json.dumps(record))
    assert read_patch(edit(patch, lora_alpha=64)).config.alpha == 64
    (patch / "lorakit.json").write_text(json.dumps(record | {"settings": 3}))
    with pytest.raises(PatchError, match="cannot be read"):
        read_patch(patch)


def test_commands_name_the_remedy(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patch = edit(make_patch(base, tmp_path / "patch"), lora_alpha=64)
    asked = ["generate", str(base), "--adapter", f"a={patch}", "--prompt", "say", "--max-new-tokens", "2"]
    merged = ["merge", str(base), str(patch), "--out", str(tmp_path / "merged")]
    exported = ["export", str(base), "--adapter", f"a={patch}", "--vllm", "--out", str(tmp_path / "vllm")]
    for command in (asked, merged, exported):
        assert main(command) == 2
        assert f"delete {patch / 'lorakit.json'} to use the new ones" in capsys.readouterr().err
    (patch / "lorakit.json").unlink()
    assert [main(command) for command in (asked, merged, exported)] == [0, 0, 0]


def test_a_key_that_is_there_twice_is_refused(base: Path, tmp_path: Path) -> None:
    patch = make_patch(base, tmp_path / "patch")
    path = patch / "adapter_config.json"
    path.write_text(path.read_text().rstrip()[:-1] + ', "lora_alpha": 1000}')
    with pytest.raises(PatchError, match="key 'lora_alpha' appears twice"):
        read_patch(patch)


def test_what_moves_a_cursor_is_escaped(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patch = edit(make_patch(base, tmp_path / "patch"), **{"evil\x1b[2J": True, "base_model_name_or_path": "a\x1b[31mb"})
    assert main(["show", str(patch)]) == 2
    edited = json.loads((patch / "adapter_config.json").read_text())
    del edited["evil\x1b[2J"]
    (patch / "adapter_config.json").write_text(json.dumps(edited))
    assert main(["show", str(patch)]) == 2
    written = "".join(capsys.readouterr())
    assert "\x1b" not in written
    assert r"evil\x1b[2J" in written
    assert r"a\x1b[31mb" in written
