"""Merging equals adapting: each changed tensor is the exact sum rounded once, and no other tensor changes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import lorakit
from lorakit.base.transformers_io import load_base
from lorakit.errors import BaseModelError, LorakitError, MergeError, PatchError, TargetError
from lorakit.lora.methods import METHODS
from lorakit.patch import read_patch
from tests.helpers.bases import make_base
from tests.helpers.models import build
from tests.helpers.patches import CPU, IDS, exact, make_patch

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_merged_model_is_the_base_plus_the_patch(
    tmp_path: Path, tokenizer: Any, dtype: torch.dtype, method: str
) -> None:
    base = make_base(tmp_path / "base", tokenizer, dtype=dtype)
    load_base(base, dtype, CPU).save_pretrained(base, max_shard_size="40KB")
    (base / "model.safetensors").unlink()
    patch = make_patch(base, tmp_path / "patch", dtype, method=method, targets=["q_proj", "down_proj"])

    out = lorakit.merge(base, patch, out=tmp_path / "merged")

    before = {k: v for file in base.glob("*.safetensors") for k, v in load_file(file).items()}
    after = {k: v for file in out.glob("*.safetensors") for k, v in load_file(file).items()}
    assert {f.name for f in base.iterdir()} | {"merge.json"} == {f.name for f in out.iterdir()}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == 4
    for name in changed:
        assert torch.equal(after[name], exact(before[name], (patch, name.removesuffix(".weight"), 1.0)))
    plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ours = lorakit.load(base, {"x": patch}, dtype="float32")
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    assert (plain(IDS).logits - ours(IDS, adapters="x").logits).abs().max() < tolerance
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template
    ledger = json.loads((out / "merge.json").read_text())
    assert {line["tensor"] for line in ledger["merged"]} == changed


def test_the_ledger_has_a_line_for_every_part_of_every_patch(tmp_path: Path, tokenizer: Any) -> None:
    base = make_base(tmp_path / "biased", tokenizer, attention_bias=True)
    one = make_patch(base, tmp_path / "one", targets=["q_proj"], modules_to_save=["lm_head"], bias="all")
    two = make_patch(base, tmp_path / "two", seed=1, targets=["k_proj", "q_proj"], trainable_tokens=[3])

    out = lorakit.merge(base, one, two, out=tmp_path / "merged")

    lines = json.loads((out / "merge.json").read_text())["merged"]
    patches = [read_patch(one), read_patch(two)]
    parts = [{*patch.layers, *patch.full_shapes, *patch.token_rows} for patch in patches]
    for index, names in enumerate(parts):
        assert {line.get("layer") or line["parameter"] for line in lines if line["patch"] == index} == names
    assert patches[0].full_shapes
    assert patches[1].token_rows


def test_several_patches_merge_with_weights_in_one_rounding(base: Path, tmp_path: Path) -> None:
    one = make_patch(base, tmp_path / "one", targets=["q_proj", "k_proj"])
    two = make_patch(base, tmp_path / "two", seed=1, rank=3, targets=["q_proj"])

    out = lorakit.merge(base, (one, 0.7), (two, -0.3), out=tmp_path / "merged")

    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    q, k = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj"
    assert torch.equal(after[f"{q}.weight"], exact(before[f"{q}.weight"], (one, q, 0.7), (two, q, -0.3)))
    assert torch.equal(after[f"{k}.weight"], exact(before[f"{k}.weight"], (one, k, 0.7)))


def test_gpt2s_transposed_layers_merge_right(tmp_path: Path, tokenizer: Any) -> None:
    model = build("gpt2")
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    patch = make_patch(tmp_path / "base", tmp_path / "patch")

    out = lorakit.merge(tmp_path / "base", patch, out=tmp_path / "merged")

    plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ours = lorakit.load(tmp_path / "base", {"x": patch}, dtype="float32")
    assert torch.allclose(plain(IDS).logits, ours(IDS, adapters="x").logits, atol=1e-5)
    assert not torch.allclose(plain(IDS).logits, ours(IDS).logits, atol=1e-2)


def test_patches_that_cannot_be_merged_exactly_are_refused_and_leave_nothing(
    base: Path, tmp_path: Path, tokenizer: Any
) -> None:
    patch = make_patch(base, tmp_path / "patch")
    out = tmp_path / "merged"
    other = make_base(tmp_path / "other", tokenizer, seed=3)
    wide = make_base(tmp_path / "wide", tokenizer, intermediate_size=64)
    tied = make_base(tmp_path / "tied", tokenizer, tie_word_embeddings=True)
    head = make_patch(base, tmp_path / "head", targets=["lm_head"])
    with pytest.raises(TargetError, match="lm_head shares its weight with model.embed_tokens"):
        make_patch(tied, tmp_path / "tied_head", targets=["lm_head"])

    with pytest.raises(PatchError, match="trained on another base"):
        lorakit.merge(other, patch, out=out)
    with pytest.raises(
        PatchError, match=r"does not fit .*: 6 of its 14 parts\n.*down_proj is \(32, 64\) \(out, in\) in the base"
    ):
        lorakit.merge(wide, patch, out=out, allow={"base"})
    with pytest.raises(MergeError, match="changes lm_head and not model.embed_tokens in the same way"):
        lorakit.merge(tied, head, out=out, allow={"base"})
    with pytest.raises(MergeError, match="no adapter to merge"):
        lorakit.merge(base, out=out)
    overflowing = shutil.copytree(patch, tmp_path / "overflowing")
    tensors = load_file(overflowing / "adapter_model.safetensors")
    save_file({k: v * 1e30 for k, v in tensors.items()}, overflowing / "adapter_model.safetensors")
    (overflowing / "lorakit.json").unlink()
    with pytest.raises(MergeError, match="the merged values do not fit"):
        lorakit.merge(base, overflowing, out=out)
    assert not out.exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    accepted = lorakit.merge(other, patch, out=out, allow={"base"})
    assert json.loads((accepted / "merge.json").read_text())["allow"] == ["base"]
    with pytest.raises(MergeError, match="exists already"):
        lorakit.merge(base, patch, out=out)


def test_a_merge_that_would_change_nothing_is_refused(base: Path, tmp_path: Path) -> None:
    patch = make_patch(base, tmp_path / "patch")
    with pytest.raises(MergeError, match="nothing would change"):
        lorakit.merge(base, (patch, 0.0), out=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_quantised_base_is_refused(base: Path, tmp_path: Path) -> None:
    patch = make_patch(base, tmp_path / "patch")
    for name, change, message in (
        (
            "config",
            lambda config, _: config.update(quantization_config={"quant_method": "x"}),
            "quantised with 'x'; lorakit reads bitsandbytes",
        ),
        ("packed", lambda _, t: t.update({Q: torch.zeros(512, 1, dtype=torch.uint8)}), f"{Q} holds codes .uint8."),
        ("float8", lambda _, t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}), f"{Q} holds codes .float8_e4m3fn."),
    ):
        folder = shutil.copytree(base, tmp_path / name)
        config, tensors = json.loads((folder / "config.json").read_text()), load_file(base / "model.safetensors")
        change(config, tensors)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises((MergeError, BaseModelError), match=message):
            lorakit.merge(folder, patch, out=tmp_path / "merged", allow={"base"})


def test_a_full_disk_leaves_nothing_and_the_same_call_starts_over(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    patch = make_patch(base, tmp_path / "patch")
    fsync = os.fsync

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LorakitError, match="the disk is full") as caught:
        lorakit.merge(base, patch, out=tmp_path / "merged")
    assert caught.value.exit_code == 75
    assert sorted(path.name for path in tmp_path.iterdir()) == ["patch"]
    monkeypatch.setattr(os, "fsync", fsync)
    lorakit.merge(base, patch, out=tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged", "patch"]


@pytest.mark.parametrize("weights", [(1e-30,), (1e-12,)])
def test_a_merge_that_moves_no_stored_value_is_refused(
    tmp_path: Path, tokenizer: Any, weights: tuple[float, ...]
) -> None:
    base = make_base(tmp_path / "base", tokenizer, dtype=torch.bfloat16)
    patch = make_patch(base, tmp_path / "p", torch.bfloat16)
    with pytest.raises(MergeError, match="nothing would change"):
        lorakit.merge(base, (patch, weights[0]), out=tmp_path / "out")
    with pytest.raises(MergeError, match="named twice; to apply it with weight 2"):
        lorakit.merge(base, (patch, 1.0), (patch, -1.0), out=tmp_path / "out")


def test_a_small_update_survives_a_conversion(tmp_path: Path, tokenizer: Any) -> None:
    base = make_base(tmp_path / "base", tokenizer)
    patch = make_patch(base, tmp_path / "p")
    out = lorakit.merge(base, (patch, 1e-4), out=tmp_path / "out", dtype="bfloat16")
    assert any(line["changed"] for line in json.loads((out / "merge.json").read_text())["merged"])


def test_a_merge_of_which_no_layer_can_be_verified_is_refused_before_it_is_made(base: Path, tmp_path: Path) -> None:
    plain, dora = make_patch(base, tmp_path / "plain"), make_patch(base, tmp_path / "dora", method="dora", seed=1)
    for adapters in ((plain, (dora, 0.5)), (dora, plain), ((dora, 0.5),)):
        lines: list[str] = []
        with pytest.raises(MergeError, match=r"no layer could be compared .*\(model.layers.0.* changes it too\)"):
            lorakit.merge(base, *adapters, out=tmp_path / "merged", verify=True, say=lines.append)
        assert lines == []


def test_layers_that_cannot_be_verified_are_counted_by_name(base: Path, tmp_path: Path) -> None:
    plain = make_patch(base, tmp_path / "plain")
    other = make_patch(base, tmp_path / "other", targets=["k_proj"])
    full = make_patch(base, tmp_path / "full", targets=["q_proj"], modules_to_save=["lm_head"])
    dora = make_patch(base, tmp_path / "dora", targets=["o_proj"], method="dora", seed=1)
    layers = ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"]
    for number, (adapters, left_out) in enumerate(
        (
            ((full, other, (plain, 0.5)), []),
            ((full, (other, 2.0), (plain, -0.5), dora), layers),
            (((full, 0.5), (dora, 0.5), plain), ["lm_head", *layers]),
        )
    ):
        lines: list[str] = []
        out = lorakit.merge(base, *adapters, out=tmp_path / f"{number}", verify=True, say=lines.append)
        verified = json.loads((out / "merge.json").read_text())["verified"]
        assert (verified["layers"], [*verified["not_compared"]]) == (15 - len(left_out), left_out)
        said = next(line for line in lines if line.startswith("verified: "))
        assert said.startswith("verified: all 15 " if not left_out else f"verified: {15 - len(left_out)} of 15 merged")
        why = "its magnitude, token rows or full tensor have a weight, or another patch changes it too"
        assert not left_out or said.endswith(f"{len(left_out)} could not be compared, {left_out[0]} first ({why})")
