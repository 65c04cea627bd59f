"""A combined patch equals the requested combination of its sources, up to the error it reports."""

import math
import shutil
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

import lorakit
from lorakit.base.transformers_io import load_base
from lorakit.derive.combine import combine
from lorakit.errors import LorakitError, MergeError, PatchError
from lorakit.files.atomic import digest
from lorakit.lora import low_rank as algebra
from lorakit.lora.low_rank import LowRank
from lorakit.patch import check_base, read_patch
from tests.helpers.bases import make_base
from tests.helpers.models import build
from tests.helpers.patches import CPU, IDS, TENSORS, deltas, make_patch, relative_error, save_peft_patch, without_facts

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")  # PEFT's own, when it writes


def weighted(*pairs: tuple[Path, float]) -> dict[str, list[Tensor]]:
    """Return module -> the weighted deltas of all patches that adapt the module."""
    by_module: dict[str, list[Tensor]] = {}
    for folder, weight in pairs:
        for name, delta in deltas(folder).items():
            by_module.setdefault(name, []).append(weight * delta)
    return by_module


@pytest.fixture
def two(base: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two patches of one base, with different layers, ranks and methods."""
    one = make_patch(base, tmp_path / "one", targets=["q_proj", "k_proj", "down_proj"])
    other = make_patch(base, tmp_path / "two", seed=1, rank=3, alpha=5, method="rslora", targets=["q_proj", "up_proj"])
    return one, other


def test_a_sum_is_the_weighted_sum_of_all_updates(two: tuple[Path, Path], tmp_path: Path) -> None:
    out = combine((two[0], 0.7), (two[1], -0.3), out=tmp_path / "sum")

    expected, got = weighted((two[0], 0.7), (two[1], -0.3)), deltas(out)
    assert expected.keys() == got.keys()
    assert len(got) == 8
    for name, parts in expected.items():
        assert relative_error(got[name], sum(parts, torch.zeros(()))) < 1e-6
    layers = read_patch(out).layers
    assert {layers[Q].rank, layers[K].rank} == {7, 4}
    assert {layer.method for layer in layers.values()} == {"lora"}


def test_serving_the_combined_patch_is_serving_the_base_with_all_of_them_merged(
    base: Path, two: tuple[Path, Path], tmp_path: Path
) -> None:
    out = combine((two[0], 0.7), (two[1], 1.3), out=tmp_path / "sum")

    merged = lorakit.load(lorakit.merge(base, (two[0], 0.7), (two[1], 1.3), out=tmp_path / "merged"), dtype="float32")
    served = lorakit.load(base, {"both": out}, dtype="float32")
    peft = PeftModel.from_pretrained(load_base(base, torch.float32, CPU), out).eval()
    expected = merged(IDS).logits
    assert relative_error(served(IDS, adapters="both").logits, expected) < 1e-5
    assert relative_error(peft(input_ids=IDS).logits, expected) < 1e-5
    assert relative_error(served(IDS).logits, expected) > 1e-2


@pytest.mark.parametrize("options", [{}, {"rank": 2}, {"how": "ties"}, {"how": "dare"}], ids=str)
def test_the_same_call_writes_the_same_bytes_and_draws_nothing(
    two: tuple[Path, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    state = torch.random.get_rng_state()
    one, other = (combine(*two, out=tmp_path / name / "x", **options) for name in ("first", "second"))

    assert {path.name: path.read_bytes() for path in one.iterdir()} == {
        path.name: path.read_bytes() for path in other.iterdir()
    }
    assert torch.equal(state, torch.random.get_rng_state())


def test_tensors_keep_their_bits_where_no_factor_has_to_go_into_them(base: Path, tmp_path: Path) -> None:
    one = make_patch(base, tmp_path / "one", targets=["q_proj"])
    like = make_patch(base, tmp_path / "like", seed=1, rank=2, alpha=3, targets=["q_proj"])  # s = 1.5, as of the first
    strong = make_patch(base, tmp_path / "strong", seed=2, rank=2, alpha=2, targets=["q_proj"])  # s = 1

    def factors(folder: Path) -> tuple[Tensor, Tensor]:
        tensors = read_patch(folder).layers[Q].tensors
        return tensors["lora_A"], tensors["lora_B"]

    equal = combine((one, 0.5), (like, 0.5), out=tmp_path / "equal")
    mixed = combine(one, strong, out=tmp_path / "mixed")

    assert read_patch(equal).layers[Q].scale == 0.75
    assert torch.equal(factors(equal)[0], torch.cat([factors(one)[0], factors(like)[0]]))
    assert torch.equal(factors(equal)[1], torch.cat([factors(one)[1], factors(like)[1]], dim=1))
    assert read_patch(mixed).layers[Q].scale == 1.0
    assert torch.equal(factors(mixed)[0], torch.cat([factors(one)[0], factors(strong)[0]]))
    assert torch.equal(factors(mixed)[1][:, :4], (1.5 * factors(one)[1].double()).float())
    assert torch.equal(factors(mixed)[1][:, 4:], factors(strong)[1])


def test_a_weight_of_zero_leaves_a_patch_out(two: tuple[Path, Path], tmp_path: Path) -> None:
    out = combine(two[0], (two[1], 0), out=tmp_path / "sum")
    assert {name: relative_error(delta, deltas(two[0])[name]) for name, delta in deltas(out).items()} == dict.fromkeys(
        deltas(two[0]), 0.0
    )


def test_a_smaller_rank_gives_the_nearest_matrix_of_that_rank_and_reports_the_error(
    two: tuple[Path, Path], tmp_path: Path
) -> None:
    said: list[str] = []
    out = combine((two[0], 0.7), (two[1], 1.3), out=tmp_path / "small", rank=3, say=said.append)

    made, got = read_patch(out).metadata["combined"], deltas(out)
    left = size = 0.0
    for name, parts in weighted((two[0], 0.7), (two[1], 1.3)).items():
        exact = sum(parts, torch.zeros(()))
        best = float(torch.linalg.svdvals(exact)[3:].square().sum().sqrt())
        missing = float((exact - got[name]).norm())
        assert missing <= best * (1 + 1e-6) + 1e-6 * exact.norm()
        assert made["errors"][name] == pytest.approx(missing / float(exact.norm()), rel=1e-4, abs=1e-7)
        assert read_patch(out).layers[name].rank == 3
        left, size = math.hypot(left, missing), math.hypot(size, float(exact.norm()))
    assert made["error"] == pytest.approx(left / size, rel=1e-6)
    assert 0.05 < made["error"] < 1
    total, header, *worst = said[-7:]
    assert total.startswith(
        f"{len(made['errors'])} layers, ranks up to 3; {made['error']:.1%} off the sum of the patches"
    )
    assert header.split() == ["most", "in", "rank", "off", "by"]
    largest = sorted(made["errors"].values(), reverse=True)[:5]
    assert [line.split()[1:] for line in worst] == [["3", f"{error:.1%}"] for error in largest]


def test_one_patch_can_be_brought_to_a_smaller_rank(two: tuple[Path, Path], tmp_path: Path) -> None:
    out = combine((two[0], 0.5), out=tmp_path / "small", rank=2)
    for name, (exact,) in weighted((two[0], 0.5)).items():
        assert torch.linalg.matrix_rank(deltas(out)[name], rtol=1e-5) == 2
        assert relative_error(deltas(out)[name], exact) < 0.9


def ties_by_hand(parts: list[Tensor], density: float) -> Tensor:
    """Apply the paper's procedure entry by entry."""
    trimmed = []
    for part in parts:
        order = part.abs().flatten().argsort(descending=True)[: round(density * part.numel())]
        mask = torch.zeros(part.numel(), dtype=torch.bool)
        mask[order] = True
        trimmed.append(torch.where(mask.reshape(part.shape), part, 0.0))
    result = torch.zeros_like(parts[0])
    for row in range(result.shape[0]):
        for column in range(result.shape[1]):
            values = [float(part[row, column]) for part in trimmed]
            sign = math.copysign(1.0, sum(values)) if sum(values) else 0.0
            agreeing = [value for value in values if value * sign > 0]
            result[row, column] = sum(agreeing) / len(agreeing) if agreeing else 0.0
    return result


@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_ties_at_full_rank_is_the_papers_procedure_on_the_dense_updates(
    base: Path, tmp_path: Path, density: float
) -> None:
    patches = [make_patch(base, tmp_path / f"{n}", seed=n, targets=["k_proj", "q_proj"][: n + 1]) for n in range(3)]
    pairs = list(zip(patches, (1.0, 0.5, -2.0), strict=True))

    out = combine(*pairs, out=tmp_path / "ties", how="ties", density=density, rank=32)

    for name, parts in weighted(*pairs).items():
        assert relative_error(deltas(out)[name], ties_by_hand(parts, density)) < 1e-6
        assert read_patch(out).layers[name].rank == min(parts[0].shape)
    assert read_patch(out).metadata["combined"]["error"] < 1e-6


def test_ties_keeps_of_each_patch_what_no_other_contradicts(base: Path, tmp_path: Path) -> None:
    one, two = (make_patch(base, tmp_path / f"{n}", seed=n, targets=["q_proj"]) for n in range(2))
    a, b = (deltas(folder)[Q] for folder in (one, two))

    D = deltas(combine(one, two, out=tmp_path / "ties", how="ties", density=1, rank=32))[Q]

    agree = a.sign() == b.sign()
    assert torch.allclose(D[agree], ((a + b) / 2)[agree], atol=1e-6)
    assert torch.allclose(D[~agree], torch.where(a.abs() > b.abs(), a, b)[~agree], atol=1e-6)


@pytest.mark.parametrize("how", ["ties", "dare"])
def test_one_dense_update_is_in_memory_at_a_time(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    patches = [make_patch(base, tmp_path / f"{n}", seed=n, targets=["q_proj"]) for n in range(5)]
    living: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = []
    dense = LowRank.dense

    def watched(self: LowRank) -> Tensor:
        most.append(len(living))
        living.add(delta := dense(self))
        return delta

    monkeypatch.setattr(LowRank, "dense", watched)
    combine(*patches, out=tmp_path / "out", how=how, rank=8)

    assert len(most) >= 5
    assert max(most) <= 1  # the last one, while the next is formed


def test_an_exact_sum_needs_no_factorisation(
    two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.linalg, "qr")
    combine(*two, out=tmp_path / "sum")


def test_dare_keeps_a_random_share_of_each_update_and_scales_it_up(base: Path, tmp_path: Path) -> None:
    one, two = (make_patch(base, tmp_path / f"{n}", seed=n, targets=["q_proj"]) for n in range(2))
    a, b = 0.5 * deltas(one)[Q], 2.0 * deltas(two)[Q]

    D = deltas(combine((one, 0.5), (two, 2.0), out=tmp_path / "dare", how="dare", density=0.25, rank=32))[Q]

    cases = {"none": torch.zeros_like(a), "first": a / 0.25, "second": b / 0.25, "both": (a + b) / 0.25}
    nearest = torch.stack([(D - case).abs() for case in cases.values()]).min(dim=0)
    assert nearest.values.max() < 1e-5
    shares = [float((nearest.indices == number).double().mean()) for number in range(4)]
    for share, expected in zip(shares, (0.5625, 0.1875, 0.1875, 0.0625), strict=True):
        assert abs(share - expected) < 0.05  # 1024 entries: four standard deviations


def test_dare_depends_on_its_seed_and_on_the_layer_and_keeps_all_at_density_one(base: Path, tmp_path: Path) -> None:
    one, two = (make_patch(base, tmp_path / f"{n}", seed=n, targets=["q_proj"]) for n in range(2))
    exact = deltas(combine(one, two, out=tmp_path / "sum"))

    same, other, undropped = (
        deltas(combine(one, two, out=tmp_path / name, how="dare", rank=32, **options))
        for name, options in {"a": {"seed": 3}, "b": {"seed": 4}, "c": {"density": 1}}.items()
    )

    layers = [Q, Q.replace("layers.0", "layers.1")]
    assert all(relative_error(same[name], other[name]) > 0.5 for name in layers)
    assert not torch.equal(*(same[name].abs() < 1e-5 for name in layers))  # where neither patch kept an entry
    assert all(relative_error(undropped[name], exact[name]) < 1e-6 for name in layers)


@pytest.mark.parametrize("how", ["ties", "dare"])
def test_without_a_rank_the_result_gets_the_ranks_of_its_sources_and_reports_the_true_error(
    two: tuple[Path, Path], tmp_path: Path, how: Any
) -> None:
    small, full = (combine(*two, out=tmp_path / str(rank), how=how, rank=rank) for rank in (None, 32))

    made = read_patch(small).metadata["combined"]
    assert {name: layer.rank for name, layer in read_patch(small).layers.items()}[Q] == 7
    assert read_patch(small).layers[K].rank == 4
    for name, exact in deltas(full).items():
        missing = relative_error(deltas(small)[name], exact)
        rank = read_patch(small).layers[name].rank
        best = float(torch.linalg.svdvals(exact)[rank:].norm() / exact.norm())
        assert made["errors"][name] == pytest.approx(missing, abs=1e-6)
        assert missing == pytest.approx(best, abs=1e-5)
    assert made["error"] > 0.1


def test_embeddings_and_transposed_layers_of_other_programs_combine(tmp_path: Path, tokenizer: Any) -> None:
    base, one, first = save_peft_patch(
        tmp_path / "a", "gpt2", tokenizer, target_modules=["wte", "c_attn"], r=4, fan_in_fan_out=True
    )
    _, two, second = save_peft_patch(
        tmp_path / "b", "gpt2", tokenizer, target_modules=["wte", "c_fc"], r=3, fan_in_fan_out=True
    )
    said: list[str] = []

    out = combine((one, 0.6), (two, 0.4), out=tmp_path / "sum", say=said.append)
    small = combine((one, 0.6), (two, 0.4), out=tmp_path / "dare", how="dare", density=1.0)

    for folder in (out, small):
        expected = weighted((one, 0.6), (two, 0.4))
        assert all(
            relative_error(delta, sum(expected[name], torch.zeros(()))) < 1e-5 for name, delta in deltas(folder).items()
        )
        assert read_patch(folder).layers["transformer.wte"].embedding
        assert read_patch(folder).config.raw["fan_in_fan_out"] is True
        served = lorakit.load(base, {"x": folder}, dtype="float32")(IDS, adapters="x").logits
        peft = PeftModel.from_pretrained(build("gpt2"), folder).eval()
        assert relative_error(peft(input_ids=IDS).logits, served) < 1e-5
    parts = {"lora_embedding_A": "lora_A.weight", "lora_embedding_B": "lora_B.weight"}
    linear = shutil.copytree(two, tmp_path / "linear")
    tensors = load_file(two / TENSORS)
    for key in [key for key in tensors if key.rpartition(".")[2] in parts]:
        tensors[key.rpartition(".")[0] + "." + parts[key.rpartition(".")[2]]] = tensors.pop(key)
    save_file(tensors, linear / TENSORS)
    with pytest.raises(PatchError, match=r"wte is an embedding, \(32, 64\) .* linear, \(32, 64\)"):
        combine(one, linear, out=tmp_path / "none")
    facts = read_patch(out).metadata
    assert "base" not in facts
    assert len(facts["combined"]["bases_not_compared"]) == 2
    assert any("does not say which base it is for" in text for text in said)


def test_the_new_patch_stores_the_base_of_its_sources(
    base: Path, two: tuple[Path, Path], tmp_path: Path, tokenizer: Any
) -> None:
    other = make_base(tmp_path / "other", tokenizer, seed=3)

    patch = read_patch(combine(*two, out=tmp_path / "sum"))

    check_base(patch, base, full=True)
    with pytest.raises(PatchError, match="8 of 8 adapted weights"):
        check_base(patch, other)
    assert patch.config.base_model == read_patch(two[0]).config.base_model
    made = patch.metadata["combined"]
    assert [one["sha256"] for one in made["sources"]] == [digest(folder / TENSORS) for folder in two]
    assert "sum: 1 one + 1 two" in (patch.folder / "README.md").read_text()


def test_patches_of_different_bases_are_refused_by_name(
    base: Path, two: tuple[Path, Path], tmp_path: Path, tokenizer: Any
) -> None:
    other = make_base(tmp_path / "other", tokenizer, seed=3)
    foreign = make_patch(other, tmp_path / "foreign", seed=4, targets=["q_proj", "v_proj"])
    shaped = make_patch(
        make_base(tmp_path / "wide", tokenizer, intermediate_size=64), tmp_path / "shaped", targets=["down_proj"]
    )
    configured = without_facts(two[1], tmp_path / "configured", lambda facts: facts["base"].update(config="b"))
    labelled = without_facts(two[0], tmp_path / "told", lambda facts: facts["base"].update(config="a"))
    late = without_facts(two[0], tmp_path / "late", lambda facts: facts["base"].update(scheme="sampled-9"))
    out = tmp_path / "sum"

    with pytest.raises(
        PatchError,
        match=r"(?s)one and .*foreign were made for different bases: the weights of 2 of 2 shared layers \(model.layers.0.self_attn.q_proj first\) differ.*--allow base",
    ):
        combine(two[0], foreign, out=out)
    with pytest.raises(PatchError, match="different bases: config differ"):
        combine(labelled, configured, out=out)
    with pytest.raises(PatchError, match=r"down_proj is linear, \(32, 48\) \(out, in\) in .*one, linear, \(32, 64\)"):
        combine(two[0], shaped, out=out, allow={"base"})
    with pytest.raises(PatchError, match="unknown scheme 'sampled-9'"):
        combine(late, two[1], out=out)
    assert not out.exists()

    patch = read_patch(combine(two[0], foreign, out=out, allow={"base"}))
    assert patch.metadata["combined"]["allow"] == ["base"]
    assert "different bases" in patch.metadata["combined"]["bases_differ"][0]
    assert "base" not in patch.metadata  # no base has all of these weights


def test_full_digests_tell_bases_apart_that_their_samples_do_not(two: tuple[Path, Path], tmp_path: Path) -> None:
    def change(facts: dict[str, Any]) -> None:
        facts["base"]["full"]["weights"][Q] = "0" * 32

    with pytest.raises(PatchError, match="the weights of 1 of 2 shared layers"):
        combine(without_facts(two[0], tmp_path / "x", change), two[1], out=tmp_path / "sum")


def test_a_source_without_a_base_fingerprint_is_recorded(base: Path, two: tuple[Path, Path], tmp_path: Path) -> None:
    inside = make_patch(base, tmp_path / "inside", seed=5, targets=["q_proj"])
    stranger = without_facts(inside, tmp_path / "stranger")

    covered = read_patch(combine(two[0], stranger, out=tmp_path / "covered"))
    partly = read_patch(combine(stranger, without_facts(two[1], tmp_path / "x"), two[0], out=tmp_path / "partly"))

    check_base(covered, base, full=True)
    assert [text.split(": ")[1] for text in covered.metadata["combined"]["bases_not_compared"]] == [
        "does not say which base it is for; compared by its shapes alone"
    ]
    assert "base" not in partly.metadata


def test_patches_trained_in_other_dtypes_combine_where_nothing_contradicts(base: Path, tmp_path: Path) -> None:
    one = make_patch(base, tmp_path / "one", targets=["q_proj"])
    rounded = make_patch(base, tmp_path / "two", torch.bfloat16, seed=1, targets=["q_proj"])

    patch = read_patch(combine(one, rounded, out=tmp_path / "sum"))

    assert "bfloat16 and float32" in patch.metadata["combined"]["bases_not_compared"][0]
    check_base(patch, base, full=True)


def test_full_tensors_are_copied_from_one_patch_alone(tmp_path: Path, tokenizer: Any) -> None:
    config: dict[str, Any] = {"target_modules": ["q_proj"]}
    base, saved, _ = save_peft_patch(tmp_path / "a", "llama", tokenizer, **config, modules_to_save=["lm_head"])
    _, plain, _ = save_peft_patch(tmp_path / "b", "llama", tokenizer, target_modules=["q_proj", "v_proj"], r=3)
    _, biased, _ = save_peft_patch(tmp_path / "c", "opt", tokenizer, **config, bias="lora_only")
    _, other, _ = save_peft_patch(tmp_path / "d", "opt", tokenizer, **config, r=2)

    out = combine(saved, (plain, 0.5), out=tmp_path / "sum")
    bias = combine(other, biased, out=tmp_path / "bias")

    assert torch.equal(read_patch(out).full_tensors["lm_head.weight"], read_patch(saved).full_tensors["lm_head.weight"])
    served = lorakit.load(base, {"x": out}, dtype="float32")(IDS, adapters="x").logits
    peft = PeftModel.from_pretrained(build("llama"), out).eval()
    assert relative_error(peft(input_ids=IDS).logits, served) < 1e-5
    served = lorakit.load(tmp_path / "c" / "base", {"x": bias}, dtype="float32")(IDS, adapters="x").logits
    peft = PeftModel.from_pretrained(build("opt"), bias).eval()
    assert relative_error(peft(input_ids=IDS).logits, served) < 1e-5
    for adapters in ([(saved, 0.5), plain], [saved, without_facts(saved, tmp_path / "again", lambda f: f.update(x=1))]):
        with pytest.raises(MergeError, match=r"full tensors \(lm_head.weight\).* needs the base"):
            combine(*adapters, out=tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ((1, 1), {"how": "tied"}, "how: one of sum, ties, dare, got 'tied'. Nearest: 'ties'"),
        ((1, 1), {"density": 0.5}, "density: 0.5, but a sum keeps every entry"),
        (
            (1, 1),
            {"how": "ties", "density": 0.0},
            "density: the share of entries to keep, above 0 and at most 1, got 0.0",
        ),
        ((1, 1), {"how": "dare", "density": 1.5}, "at most 1, got 1.5"),
        ((1, 1), {"how": "dare", "density": math.nan}, "at most 1, got nan"),
        ((1, 1), {"rank": 0}, "rank: a whole number from 1, got 0"),
        ((1, 1), {"rank": 8}, "rank: 8, but no layer can use more than 7"),
        ((1, 1), {"rank": 33, "how": "ties"}, "rank: 33, but no layer can use more than 32"),
        ((1, math.nan), {}, "two: the weight must be a finite number, got nan"),
        ((math.inf, 1), {}, "one: the weight must be a finite number, got inf"),
        ((0, 0), {}, "every combined update is zero"),
        ((1,), {}, "1 patches: name two or more, or one with the rank"),
        ((), {"rank": 2}, "0 patches"),
    ],
)
def test_impossible_requests_are_refused_and_leave_nothing(
    two: tuple[Path, Path], tmp_path: Path, weights: tuple[float, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(MergeError) as caught:
        combine(*zip(two[: len(weights)], weights, strict=True), out=tmp_path / "sum", **options)
    assert message in str(caught.value)
    assert not (tmp_path / "sum").exists()


def test_doubles_zeros_and_existing_folders_are_refused(base: Path, two: tuple[Path, Path], tmp_path: Path) -> None:
    zero = make_patch(base, tmp_path / "zero", targets=["q_proj"])
    tensors = {key: tensor * ("lora_A" in key) for key, tensor in load_file(zero / TENSORS).items()}
    save_file(tensors, zero / TENSORS, metadata={"format": "pt"})
    (zero / "lorakit.json").unlink()
    large = without_facts(two[0], tmp_path / "large")
    save_file({key: tensor * 1e25 for key, tensor in load_file(large / TENSORS).items()}, large / TENSORS)

    with pytest.raises(MergeError, match="one and .*copy are one patch; name it once, with the sum of the weights"):
        combine(two[0], shutil.copytree(two[0], tmp_path / "copy"), out=tmp_path / "sum")
    with pytest.raises(MergeError, match="nothing would change: every combined update is zero"):
        combine(zero, out=tmp_path / "sum", rank=2)
    with pytest.raises(PatchError, match="not finite; nothing was saved"):
        combine((large, 1e20), two[1], out=tmp_path / "sum")
    with pytest.raises(MergeError, match="out: .*two exists already"):
        combine(*two, out=two[1])
    with pytest.raises(LorakitError, match="not a patch"):
        combine(base, two[0], out=tmp_path / "sum")
    assert not (tmp_path / "sum").exists()


def test_a_rank_that_could_not_be_read_back_is_refused(base: Path, tmp_path: Path, monkeypatch: Any) -> None:
    one, two = (make_patch(base, tmp_path / f"{n}", seed=n, targets=["q_proj"]) for n in range(2))
    monkeypatch.setattr(sys.modules["lorakit.derive.combine"], "MAX_RANK", 7)
    with pytest.raises(MergeError, match="rank: 8 in a layer, and a patch holds at most 7"):
        combine(one, two, out=tmp_path / "sum")


def test_norms_of_differences_are_exact_where_the_factors_differ_and_the_product_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    B, A, mix = (torch.randn(shape, generator=generator).double() for shape in ((40, 5), (5, 30), (5, 5)))
    one, same = LowRank(B, A), LowRank(B @ mix, torch.linalg.solve(mix, A))
    other = LowRank(A.T[:, :3].repeat(2, 1)[:40], B.T[:3, :30])

    assert algebra.frobenius_norm(one) == pytest.approx(float((B @ A).norm()), rel=1e-12)
    assert algebra.frobenius_norm(algebra.subtract_low_rank(one, same)) < 1e-11 * algebra.frobenius_norm(one)
    assert algebra.inner_product(one, other) == pytest.approx(float((one.dense() * other.dense()).sum()), rel=1e-10)
    assert torch.allclose(algebra.truncated(one, 5).dense(), one.dense(), atol=1e-12)
    assert torch.allclose(algebra.truncated(LowRank(B[:3], A), 9).dense(), (B @ A)[:3], atol=1e-12)


def test_large_matrices_are_brought_down_by_random_projections_nearly_as_well(monkeypatch: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    D = torch.randn(300, 200, generator=generator).double() @ torch.diag(torch.logspace(0, -2, 200).double())
    best = algebra.nearest_low_rank(D, 10)
    monkeypatch.setattr(algebra, "EXACT_SIZE", 64)
    state = torch.random.get_rng_state()

    one, repeated, other = (algebra.nearest_low_rank(D, 10, seed) for seed in (1, 1, 2))

    assert best.residual_norm <= one.residual_norm < 1.01 * best.residual_norm
    assert one.residual_norm == pytest.approx(float((D - one.factors.to(torch.float64).dense()).norm()), rel=1e-6)
    assert torch.equal(one.factors.A, repeated.factors.A)
    assert not torch.equal(one.factors.A, other.factors.A)
    assert torch.equal(state, torch.random.get_rng_state())


def test_updates_with_more_than_two_factors_are_refused() -> None:
    tensors = {"lora_A": torch.ones(1, 2), "lora_B": torch.ones(3, 1), "magnitude": torch.ones(3)}
    with pytest.raises(PatchError, match="an update with magnitude is no product of two matrices"):
        algebra.low_rank(tensors, 1.0)
