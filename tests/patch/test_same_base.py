"""A patch knows its base by more than the weights it adapts: also by embedding, norms and head, and by how prompts are written."""

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lorakit
from lorakit.base.transformers_io import load_base, load_tokenizer
from lorakit.cli import main
from lorakit.errors import PatchError
from lorakit.files.base_files import open_base_files
from lorakit.patch import check_base, read_patch, write_patch
from lorakit.patch.fingerprint import BaseIdentity, fingerprint
from lorakit.patch.same_base import base_differences, compared_parts
from tests.helpers.patches import make_patch

Change = Callable[[Path], None]


def change_json(name: str, **values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def change_tensor(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        name = next(name for name in sorted(tensors) if part in name)
        save_file(tensors | {name: change(tensors[name]).contiguous()}, path, {"format": "pt"})

    return rewrite


def longer_template(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text() + "\n")


@pytest.fixture
def patch(base: Path, tmp_path: Path) -> Path:
    """A patch with the fingerprint of the base's files, as training writes it."""
    patch = read_patch(make_patch(base, tmp_path / "live", targets=["q_proj"]))
    patch.metadata["base"] = fingerprint(BaseIdentity(open_base_files(base)), patch.layers)  # type: ignore[index]
    return write_patch(tmp_path / "patch", patch)


@pytest.fixture
def other(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "other"))


@pytest.mark.parametrize(
    "change",
    [
        change_tensor("embed_tokens", lambda W: W.flip(0)),
        change_tensor("input_layernorm", lambda w: w * 1.01),
        change_tensor("model.norm", lambda w: w + 0.01),
        change_tensor("lm_head", lambda W: W * 2),
        change_tensor("layers.1.mlp.down_proj", lambda W: W * 2),
    ],
    ids=["embedding", "norm of a layer", "final norm", "head", "matrix of a layer"],
)
def test_a_base_that_differs_where_nothing_is_adapted_is_another_base(
    change: Change, patch: Path, base: Path, other: Path, request: pytest.FixtureRequest
) -> None:
    change(other)
    lorakit.load(base, {"a": patch})
    is_matrix = "matrix" in request.node.name
    kind = "weights that it does not adapt" if is_matrix else "embedding, norms or head"
    with pytest.raises(PatchError, match=f"{kind} differ"):
        lorakit.load(other, {"a": patch})
    lorakit.load(other, {"a": patch}, allow={"base"})


def test_an_adapted_weight_that_differs_says_nothing_of_others(patch: Path, other: Path) -> None:
    change_tensor("layers.0.self_attn.q_proj", lambda W: W * 1.01)(other)
    with pytest.raises(PatchError) as caught:
        lorakit.load(other, {"a": patch})
    assert f"than {other}: 1 of 2 adapted weights (model.layers.0.self_attn.q_proj first) differ." in str(caught.value)

    before, after = ({**read_patch(patch).metadata["base"], "tokenizer": None} for _ in range(2))
    after |= fingerprint(BaseIdentity(open_base_files(other)), read_patch(patch).layers)
    assert base_differences(before, after) == [
        "the weights of 1 of 2 shared layers (model.layers.0.self_attn.q_proj first)"
    ]


def test_a_config_that_differs_is_named_by_key_with_both_values(patch: Path, base: Path, other: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    rope = config["rope_parameters"] | {"rope_theta": 500.0}
    change_json("config.json", rms_norm_eps=0.5, rope_parameters=rope, use_cache=not config["use_cache"])(other)
    with pytest.raises(PatchError) as caught:
        lorakit.load(other, {"a": patch})
    assert (
        f": config (rms_norm_eps: {config['rms_norm_eps']} in training, 0.5 here; rope_parameters.rope_theta:"
        f" {config['rope_parameters']['rope_theta']} in training, 500.0 here) differ."
    ) in str(caught.value)

    earlier, changed = read_patch(patch), read_patch(patch)
    changed.metadata["base"] = fingerprint(BaseIdentity(open_base_files(other)), changed.layers)  # type: ignore[index]
    assert base_differences(*(each.metadata["base"] for each in (earlier, changed)))[0].startswith(
        f"config (rms_norm_eps: {config['rms_norm_eps']} in the first, 0.5 in the second; "
    )
    del earlier.metadata["base"]["config_values"]  # type: ignore[attr-defined]
    assert base_differences(*(each.metadata["base"] for each in (earlier, changed))) == ["config"]
    with pytest.raises(PatchError, match=": config differ"):
        check_base(earlier, other)

    change_json("config.json", **dict.fromkeys("abcd", 1))(other)
    with pytest.raises(PatchError, match=r"d: absent in training, 1 here; and 2 more\) differ"):
        lorakit.load(other, {"a": patch})


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (longer_template, "another chat template than"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "another chat template than"),
        (change_json("tokenizer_config.json", add_bos_token=True), "another tokenizer settings than"),
        (change_json("tokenizer_config.json", eos_token="<|user|>"), "another tokenizer settings than"),
    ],
    ids=["longer", "none", "begin token", "end token"],
)
def test_a_base_that_writes_prompts_in_another_way_is_refused_for_answers_and_told_for_merges(
    change: Change, names: str, patch: Path, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(other)
    asked = ["generate", str(other), "--adapter", f"a={patch}", "--prompt", "say", "--raw", "--max-new-tokens", "2"]
    assert main(asked) == 2
    assert names in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*asked, "--allow", "templates"])
    assert "argument --allow: 'templates' is none of base, template. Nearest: 'template'" in capsys.readouterr().err
    assert main([*asked, "--allow", "base"]) == main([*asked, "--allow", "template, base"]) == 0
    assert main([*asked, "--allow", "template"]) == 0
    capsys.readouterr()
    assert main(["merge", str(other), str(patch), "--out", str(tmp_path / "merged")]) == 0
    assert f"note: {patch} was trained with another" in capsys.readouterr().out


def test_a_base_that_transformers_saved_anew_is_the_same(patch: Path, base: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    load_base(base, torch.float32, torch.device("cpu")).save_pretrained(again)
    load_tokenizer(base).save_pretrained(again)
    check_base(read_patch(patch), again)
    one, two = (BaseIdentity(open_base_files(folder)) for folder in (base, again))
    assert one.chat_template == two.chat_template is not None
    assert one.tokenizer_settings == two.tokenizer_settings is not None
    assert one.unadapted == two.unadapted


def test_a_template_in_the_config_is_the_template_in_a_file(base: Path, other: Path) -> None:
    template = (other / "chat_template.jinja").read_text()
    (other / "chat_template.jinja").unlink()
    change_json("tokenizer_config.json", chat_template=template)(other)
    one, two = (BaseIdentity(open_base_files(folder)) for folder in (base, other))
    assert one.chat_template == two.chat_template is not None
    change_json("tokenizer_config.json", chat_template=template + " ")(other)
    assert BaseIdentity(open_base_files(other)).chat_template != one.chat_template


def test_a_patch_that_has_no_digests_of_other_weights_says_what_was_compared(patch: Path, base: Path) -> None:
    saved = read_patch(patch)
    assert compared_parts(saved) == "every value of 2 adapted weights and samples of all others"
    for part in ("unadapted", "full"):
        del saved.metadata["base"][part]  # type: ignore[attr-defined]

    check_base(saved, BaseIdentity(open_base_files(base)))

    assert compared_parts(saved).endswith("samples of 2 adapted weights alone, as the patch records no others")


def test_a_patch_of_an_earlier_version_is_compared_by_what_it_recorded(patch: Path, other: Path) -> None:
    longer_template(other)
    change_tensor("model.norm", lambda w: w + 0.01)(other)
    saved = read_patch(patch)
    for key in ("unadapted", "chat_template", "tokenizer_settings"):
        del saved.metadata["base"][key]  # type: ignore[attr-defined]
    check_base(saved, other)


def test_the_values_of_a_base_are_read_once_until_its_files_change(
    patch: Path, base: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digested = list[int]()
    module = import_module("lorakit.patch.fingerprint")  # of which the package has a function of this name
    digest = module.value_digests

    def counted(sources: Any) -> dict[str, str]:
        digested.append(len(sources))
        return digest(sources)

    monkeypatch.setattr(module, "value_digests", counted)
    for _ in range(2):
        lorakit.load(other, {"a": patch})
    assert digested == [2]
    (file,) = open_base_files(other).shards
    file.path.write_bytes(file.path.read_bytes())

    lorakit.load(other, {"a": patch})
    assert digested == [2, 2]


def test_digests_are_those_of_the_file_that_was_opened_also_where_another_took_its_name(
    base: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one, two = (f"model.layers.{number}.self_attn.q_proj" for number in range(2))
    opened = BaseIdentity(open_base_files(other))
    opened.full([one])
    changed = shutil.copytree(other, tmp_path / "changed")
    change_tensor("layers.1.self_attn.q_proj", lambda W: W * 2)(changed)
    (changed / "model.safetensors").rename(other / "model.safetensors")

    expected = BaseIdentity(open_base_files(base)).full([two])
    assert opened.full([two]) == expected
    assert BaseIdentity(open_base_files(other)).full([two]) != expected


@pytest.mark.parametrize("text", ["[", "{}", "[]", '{"answer": null}', '{"answer": "x"}', '{"answer": {}}'])
def test_a_damaged_cache_of_digests_is_computed_again(
    base: Path, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = "model.layers.0.self_attn.q_proj"
    expected = BaseIdentity(open_base_files(base)).full([name])
    (file,) = (tmp_path / "cache" / "lorakit" / "measured").iterdir()
    file.write_text(text)

    assert BaseIdentity(open_base_files(base)).full([name]) == expected
