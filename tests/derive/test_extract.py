"""The difference of two models is extracted as a patch: all of it, or an error that names the rest."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

import lorakit
from lorakit.base.transformers_io import load_base
from lorakit.derive.extract import extract
from lorakit.errors import BaseModelError, LorakitError, MergeError, PatchError
from lorakit.inspection.diff import diff
from lorakit.lora.low_rank import nearest_low_rank
from lorakit.patch import check_base, read_patch
from tests.helpers.bases import make_base
from tests.helpers.changed_models import NORM, WEIGHTS, Q, add_noise, copy_changed
from tests.helpers.models import build
from tests.helpers.patches import CPU, IDS, deltas, make_patch, relative_error


@pytest.fixture
def tuned(base: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(a patch of rank 4, the base with this patch merged)."""
    patch = make_patch(base, tmp_path / "patch")
    return patch, lorakit.merge(base, patch, out=tmp_path / "tuned", dtype="float32")


def test_a_merged_patch_comes_back(base: Path, tuned: tuple[Path, Path], tmp_path: Path) -> None:
    said: list[str] = []
    out = extract(base, tuned[1], rank=4, out=tmp_path / "found", say=said.append)

    patch, expected_deltas = read_patch(out), deltas(tuned[0])
    assert patch.layers.keys() == expected_deltas.keys()
    assert all(relative_error(delta, expected_deltas[name]) < 1e-4 for name, delta in deltas(out).items())
    assert {(layer.rank, layer.scale) for layer in patch.layers.values()} == {(4, 1.0)}
    made = patch.metadata["extracted"]
    assert 1 - 1e-8 < made["energy"] <= 1
    assert made["energies"].keys() == expected_deltas.keys()
    assert made["unchanged"] == 2  # embedding and head
    assert said[0] == f"{len(expected_deltas)} layers changed, 2 unchanged; energy kept 1.000000"
    assert said[1].split() == ["most", "in", "rank", "off", "by"]
    assert len(said) == 2 + min(5, len(expected_deltas))
    repeated = lorakit.merge(base, out, out=tmp_path / "again", dtype="float32")
    expected = lorakit.load(tuned[1], dtype="float32")(IDS).logits
    assert relative_error(lorakit.load(repeated, dtype="float32")(IDS).logits, expected) < 1e-5
    assert relative_error(lorakit.load(base, {"x": out}, dtype="float32")(IDS, adapters="x").logits, expected) < 1e-5
    peft = PeftModel.from_pretrained(load_base(base, torch.float32, CPU), out).eval()
    assert relative_error(peft(input_ids=IDS).logits, expected) < 1e-5


def test_the_patch_stores_its_base(base: Path, tuned: tuple[Path, Path], tmp_path: Path, tokenizer: Any) -> None:
    patch = read_patch(extract(base, tuned[1], rank=2, out=tmp_path / "found"))

    check_base(patch, base, full=True)
    assert patch.config.base_model == str(base)
    assert patch.metadata["base"]["config"]
    with pytest.raises(PatchError, match="14 of 14 adapted weights"):
        check_base(patch, make_base(tmp_path / "other", tokenizer, seed=3))


def test_the_reported_energy_is_the_energy_of_the_patch(base: Path, tmp_path: Path) -> None:
    down = "model.layers.1.mlp.down_proj"
    full = copy_changed(base, tmp_path / "full", add_noise(f"{Q}.weight", f"{down}.weight"))

    out = extract(base, full, rank=5, out=tmp_path / "found")

    made, before, after = read_patch(out).metadata["extracted"], load_file(base / WEIGHTS), load_file(full / WEIGHTS)
    left = size = 0.0
    for name, delta in deltas(out).items():
        D = after[f"{name}.weight"].double() - before[f"{name}.weight"].double()
        best = torch.linalg.svdvals(D)[:5].square().sum() / D.square().sum()
        retained = 1 - (D - delta).square().sum() / D.square().sum()
        assert made["energies"][name] == pytest.approx(float(retained), rel=1e-9)
        assert float(retained) == pytest.approx(float(best), abs=1e-6)
        left, size = left + float((D - delta).square().sum()), size + float(D.square().sum())
    assert deltas(out).keys() == {Q, down}
    assert 0.2 < made["energy"] == pytest.approx(1 - left / size, rel=1e-9)


def test_a_change_of_full_rank_comes_back_at_full_rank(base: Path, tmp_path: Path) -> None:
    names = ["model.embed_tokens.weight", "lm_head.weight", f"{Q}.weight"]
    full = copy_changed(base, tmp_path / "full", add_noise(*names))

    out = extract(base, full, rank=32, out=tmp_path / "found")

    served = lorakit.load(base, {"x": out}, dtype="float32")(IDS, adapters="x").logits
    peft = PeftModel.from_pretrained(load_base(base, torch.float32, CPU), out).eval()
    expected = lorakit.load(full, dtype="float32")(IDS).logits
    assert relative_error(served, expected) < 1e-5
    assert relative_error(peft(input_ids=IDS).logits, expected) < 1e-5
    assert read_patch(out).layers["model.embed_tokens"].embedding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_models_of_other_dtypes_and_files_are_compared_by_their_values(
    tuned: tuple[Path, Path], base: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    def rounded(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    exact = copy_changed(base, tmp_path / "rounded", rounded)
    repeated = copy_changed(
        base, tmp_path / "widened", lambda t: t.update({k: v.to(dtype).float() for k, v in t.items()})
    )
    plus = copy_changed(repeated, tmp_path / "plus", add_noise(f"{Q}.weight"))
    load_base(plus, torch.float32, CPU).save_pretrained(tmp_path / "cut", max_shard_size="40KB")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 1

    out = extract(exact, tmp_path / "cut", rank=32, out=tmp_path / "found")

    D = load_file(plus / WEIGHTS)[f"{Q}.weight"].double() - load_file(exact / WEIGHTS)[f"{Q}.weight"].double()
    assert deltas(out).keys() == {Q}
    assert relative_error(deltas(out)[Q], D) < 1e-6


def test_a_change_of_no_linear_layer_is_refused_by_name_or_saved_in_full(base: Path, tmp_path: Path) -> None:
    full = copy_changed(base, tmp_path / "full", add_noise(f"{Q}.weight", NORM, "model.norm.weight"))

    with pytest.raises(
        PatchError, match=rf"in 2 tensors that get no low-rank update: {NORM}, model.norm.weight.*rest='save'"
    ):
        extract(base, full, rank=32, out=tmp_path / "found")
    assert not (tmp_path / "found").exists()

    out = extract(base, full, rank=32, out=tmp_path / "found", rest="save")
    check_same_function(base, full, out, tmp_path, load_base(base, torch.float32, CPU))
    assert read_patch(out).metadata["extracted"]["whole"] == [NORM, "model.norm.weight"]


def check_same_function(base: Path, full: Path, out: Path, folder: Path, plain: Any) -> None:
    """Check that the patch on the base equals the full model: served, merged and in PEFT."""
    expected = lorakit.load(full, dtype="float32")(IDS).logits
    merged = lorakit.merge(base, out, out=folder / "merged")
    assert relative_error(lorakit.load(base, {"x": out}, dtype="float32")(IDS, adapters="x").logits, expected) < 2e-5
    assert relative_error(lorakit.load(merged, dtype="float32")(IDS).logits, expected) < 2e-5
    assert relative_error(PeftModel.from_pretrained(plain, out).eval()(input_ids=IDS).logits, expected) < 2e-5


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("architecture", ["opt", "gpt2", "gpt_neox", "gemma3_text"])
def test_a_fully_trained_model_comes_back_on_every_kind_of_layer(
    tmp_path: Path, tokenizer: Any, architecture: str
) -> None:
    build(architecture).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    every = add_noise(*sorted(set(load_file(tmp_path / "base" / WEIGHTS)) - {"embed_out.weight"}))
    full = copy_changed(tmp_path / "base", tmp_path / "full", every)

    out = extract(tmp_path / "base", full, rank=32, out=tmp_path / "found", rest="save")

    check_same_function(tmp_path / "base", full, out, tmp_path, build(architecture))
    assert read_patch(out).config.raw["fan_in_fan_out"] is (architecture == "gpt2")


def test_a_tied_embedding_is_changed_once_and_in_full(tmp_path: Path, tokenizer: Any) -> None:
    base = make_base(tmp_path / "base", tokenizer, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(base / WEIGHTS)
    full = copy_changed(base, tmp_path / "full", add_noise(f"{Q}.weight", "model.embed_tokens.weight"))
    twice = copy_changed(
        full, tmp_path / "twice", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 0})
    )
    torn = copy_changed(
        full, tmp_path / "torn", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1})
    )
    untied = make_base(tmp_path / "untied", tokenizer)

    with pytest.raises(PatchError, match="in 1 tensors that get no low-rank update: model.embed_tokens.weight"):
        extract(base, full, rank=32, out=tmp_path / "found")
    with pytest.raises(
        BaseModelError, match="lm_head.weight and model.embed_tokens.weight are one tensor by its config"
    ):
        extract(base, torn, rank=32, out=tmp_path / "found")
    with pytest.raises(BaseModelError, match="tie_word_embeddings is True in .*, False in"):
        extract(base, untied, rank=32, out=tmp_path / "found")
    out = extract(base, twice, rank=32, out=tmp_path / "found", rest="save")

    patch = read_patch(out)
    assert patch.layers.keys() == {Q}
    assert torch.equal(patch.full_tensors["lm_head.weight"], patch.full_tensors["model.embed_tokens.weight"])
    check_same_function(base, full, out, tmp_path, load_base(base, torch.float32, CPU))
    head = copy_changed(
        full, tmp_path / "head", lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")})
    )
    repeated = extract(base, head, rank=32, out=tmp_path / "again", rest="save")
    assert diff(out, repeated, lambda text: None)


def test_models_that_are_not_the_same_but_for_values_are_refused_by_name(
    base: Path, tmp_path: Path, tokenizer: Any
) -> None:
    nan = float("nan")
    cases: dict[str, tuple[Path, str]] = {
        "a tensor less": (
            copy_changed(base, tmp_path / "a", lambda t: t.pop(f"{Q}.weight")), f"{Q}.weight is missing in .*a$"
        ),
        "a tensor more": (
            copy_changed(base, tmp_path / "b", lambda t: t.update(extra=torch.ones(1))), "extra is missing in .*llama$"
        ),
        "another shape": (
            copy_changed(base, tmp_path / "c", lambda t: t.update({NORM: torch.ones(31)})), rf"{NORM} is \(32,\) in .*, \(31,\)"
        ),
        "quantised": (
            copy_changed(base, tmp_path / "d", lambda t: t.update({f"{Q}.weight": torch.ones(32, 32).to(torch.int8)})),
            rf"{Q}.weight is stored as \(32, 32\) torch.float32 and torch.int8: quantised",
        ),
        "no number": (
            copy_changed(base, tmp_path / "e", lambda t: t[f"{Q}.weight"].fill_(nan)), f"e: {Q}.weight holds values that are not"
        ),
        "no number in a norm": (copy_changed(base, tmp_path / "f", lambda t: t[NORM].fill_(nan)), f"f: {NORM} holds values"),
        "another setting": (copy_changed(base, tmp_path / "g", add_noise(NORM), rms_norm_eps=0.5), "rms_norm_eps is 1e-06 in"),
        "another width": (make_base(tmp_path / "h", tokenizer, intermediate_size=64), "intermediate_size is 48 in"),
    }  # fmt: skip
    build("gpt2").save_pretrained(tmp_path / "gpt2")
    cases["another architecture"] = (tmp_path / "gpt2", "a LlamaForCausalLM, .* a GPT2LMHeadModel")
    for folder, message in cases.values():
        with pytest.raises(BaseModelError, match=message):
            extract(base, folder, rank=4, out=tmp_path / "found", rest="save")
    with pytest.raises(BaseModelError, match=f"{Q}.weight is missing in .*; extra is missing"):
        extract(cases["a tensor more"][0], cases["a tensor less"][0], rank=4, out=tmp_path / "found")
    more = cases["a tensor more"][0]
    other = copy_changed(more, tmp_path / "i", add_noise("extra"))
    with pytest.raises(PatchError, match="extra differs, and a patch cannot hold it: no layer has"):
        extract(more, other, rank=4, out=tmp_path / "found", rest="save")
    assert not (tmp_path / "found").exists()


def test_settings_that_change_no_logits_are_reported_and_not_refused(
    base: Path, tuned: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = copy_changed(tuned[1], tmp_path / "other", lambda t: None, eos_token_id=7, attention_dropout=0.5)
    (folder / "tokenizer.json").write_text('{"other": 1}')
    said: list[str] = []

    extract(base, folder, rank=2, out=tmp_path / "found", say=said.append)

    assert "attention_dropout is 0.0 in" in said[0]
    assert "eos_token_id" in said[1]
    assert said[2].startswith("the tokenizers of")


def test_nothing_to_extract_impossible_ranks_and_existing_folders_are_refused(
    base: Path, tuned: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "found"
    norms = copy_changed(base, tmp_path / "norms", add_noise(NORM))
    with pytest.raises(PatchError, match="no linear layer of .* differs"):
        extract(base, base, rank=4, out=out)
    with pytest.raises(PatchError, match="no linear layer of .* differs"):
        extract(base, norms, rank=4, out=out, rest="save")
    for rank in (0, 33):
        with pytest.raises(MergeError, match=f"rank: from 1 to 32, the smaller side of the largest layer, got {rank}"):
            extract(base, tuned[1], rank=rank, out=out)
    with pytest.raises(MergeError, match="rest: 'refuse' or 'save', got 'drop'"):
        extract(base, tuned[1], rank=4, out=out, rest="drop")  # type: ignore[arg-type]
    with pytest.raises(MergeError, match="exists already"):
        extract(base, tuned[1], rank=4, out=tuned[0])
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(MergeError, match="link exists already"):
        extract(base, tuned[1], rank=4, out=tmp_path / "link")
    with pytest.raises(LorakitError, match="no folder"):
        extract(base, tmp_path / "no such model", rank=4, out=out)
    assert not out.exists()


def test_the_same_models_give_the_same_bytes_and_nothing_is_drawn(
    base: Path, tuned: tuple[Path, Path], tmp_path: Path
) -> None:
    state = torch.random.get_rng_state()
    one, two = (extract(base, tuned[1], rank=3, out=tmp_path / name / "x") for name in ("a", "b"))
    assert all((two / path.name).read_bytes() == path.read_bytes() for path in one.iterdir())
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_matrix_without_change_keeps_all_its_energy() -> None:
    fit = nearest_low_rank(torch.zeros(5, 3, dtype=torch.float64), 2)
    assert (fit.target_norm, fit.residual_norm) == (0.0, 0.0)
