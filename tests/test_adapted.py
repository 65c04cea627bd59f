"""Many adapters on one base: each row gets its own, and the base is never written."""

import hashlib
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import lorakit
from lorakit.errors import LorakitError, PatchError, TargetError
from tests.conftest import make_base
from tests.test_merge import make_patch

IDS = torch.arange(5, 53).reshape(4, 12)


@pytest.fixture
def model(base: Path, tmp_path: Path) -> Any:
    one = make_patch(base, tmp_path / "one")
    two = make_patch(base, tmp_path / "two", seed=1, rank=2, targets=["q_proj", "up_proj"], method="rslora")
    return lorakit.load(base, {"one": one, "two": two}, dtype="float32")


def hashes(model: Any) -> dict[str, str]:
    return {n: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for n, p in model.model.named_parameters()}


def test_each_row_of_a_batch_gets_its_own_adapter(model: Any) -> None:
    check_route(model, ["one", None, "two", "one"])
    check_route(model, ["two", None, "one", "two"])


def check_route(model: Any, route: list[str | None]) -> None:
    each = [model(IDS[i : i + 1], adapters=name).logits for i, name in enumerate(route)]

    together = model(IDS, adapters=route).logits

    assert torch.allclose(together, torch.cat(each), atol=1e-5)
    assert not torch.allclose(each[0], model(IDS[:1], adapters=route[2]).logits, atol=1e-3)
    assert torch.allclose(each[1], model(IDS[1:2]).logits, atol=1e-6)


def test_a_block_chooses_for_every_call_in_it(model: Any) -> None:
    expected = model(IDS, adapters="one").logits
    with model.using("one"):
        assert torch.equal(model(IDS).logits, expected)
        with model.using(None):
            assert not torch.allclose(model(IDS).logits, expected, atol=1e-3)
        assert torch.equal(model(input_ids=IDS).logits, expected)
    assert not torch.allclose(model(IDS).logits, expected, atol=1e-3)


def test_generation_per_row_is_generation_alone(model: Any) -> None:
    prompts = ["say it", "say something much longer than that", "say it"]

    together = model.generate(prompts, adapters=["one", None, "two"], max_new_tokens=8)

    alone = [
        model.generate([prompt], adapters=name, max_new_tokens=8)[0]
        for prompt, name in zip(prompts, ("one", None, "two"), strict=True)
    ]
    assert together == alone
    assert together[0] != together[2]
    assert model.generate(prompts, max_new_tokens=3, temperature=1.0, seed=1) == model.generate(
        prompts, max_new_tokens=3, temperature=1.0, seed=1
    )


def test_the_base_is_the_same_after_any_number_of_loads_and_swaps(model: Any, tmp_path: Path) -> None:
    before, plain, with_two = hashes(model), model(IDS).logits, model(IDS, adapters="two").logits
    for _ in range(20):
        model.load_adapter("again", tmp_path / "one")
        model(IDS, adapters=["again", "two", None, "one"])
        model.unload_adapter("again")

    assert hashes(model) == before
    assert torch.equal(model(IDS).logits, plain)
    assert torch.equal(model(IDS, adapters="two").logits, with_two)
    assert model.adapters == ("one", "two")


def test_threads_do_not_mix_their_adapters(model: Any) -> None:
    names: list[str | None] = ["one", "two", None]
    expected = {name: model(IDS, adapters=name).logits for name in names}
    wrong: list[str | None] = []

    def work(name: str | None) -> None:
        with model.using(name):
            wrong.extend(name for _ in range(15) if not torch.equal(model(IDS).logits, expected[name]))

    threads = [threading.Thread(target=work, args=(name,)) for name in names * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_unloading_or_replacing_an_adapter_does_not_change_a_call_under_way(model: Any, tmp_path: Path) -> None:
    expected = model(IDS, adapters="one").logits
    with model.using("one"):
        model.unload_adapter("one")
        model.load_adapter("one", tmp_path / "two")
        assert torch.equal(model(IDS).logits, expected)
    assert not torch.allclose(model(IDS, adapters="one").logits, expected, atol=1e-3)


def test_adapters_loaded_at_the_same_time_are_all_whole(base: Path, tmp_path: Path) -> None:
    patches = [make_patch(base, tmp_path / f"p{seed}", seed=seed) for seed in range(4)]
    one_by_one = lorakit.load(base, {p.name: p for p in patches}, dtype="float32")
    together = lorakit.load(base, dtype="float32")
    threads = [threading.Thread(target=together.load_adapter, args=(p.name, p)) for p in patches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for p in patches:
        assert torch.equal(together(IDS, adapters=p.name).logits, one_by_one(IDS, adapters=p.name).logits)


def test_a_bases_own_generation_settings_do_not_leak_in(base: Path, tmp_path: Path) -> None:
    odd = shutil.copytree(base, tmp_path / "odd")
    settings = {"num_return_sequences": 2, "repetition_penalty": 9.0, "do_sample": True, "num_beams": 1}
    (odd / "generation_config.json").write_text(json.dumps(settings))
    prompts = ["say it", "say"]

    plain = lorakit.load(base, dtype="float32").generate(prompts, max_new_tokens=6)
    assert lorakit.load(odd, dtype="float32").generate(prompts, max_new_tokens=6) == plain
    assert len(lorakit.load(odd, dtype="float32").generate(prompts, max_new_tokens=6, temperature=1.0)) == 2


def test_mistakes_are_named_and_change_nothing(model: Any, base: Path, tmp_path: Path, tokenizer: Any) -> None:
    before, plain = hashes(model), model(IDS).logits
    other = make_base(tmp_path / "other", tokenizer, seed=7)
    foreign = make_patch(other, tmp_path / "foreign")
    wide = make_patch(make_base(tmp_path / "wide", tokenizer, intermediate_size=64), tmp_path / "wide_patch")
    for call, message in [
        (lambda: model(IDS, adapters="on"), r"adapter 'on' is not loaded \(loaded: 'one', 'two'\). Nearest: 'one'"),
        (lambda: model(IDS, adapters=["one"] * 3), "3 names for a batch of 4 rows"),
        (lambda: model.generate(["a", "b"], adapters=["one"]), "1 names for 2 prompts"),
        (lambda: model.generate(["a", "b"], adapters=["one"]), "1 names for 2 prompts"),
        (lambda: model.generate(["a"], max_new_tokens=0), "max_new_tokens >= 1"),
        (lambda: model.generate(["a"], temperature=float("nan")), "temperature >= 0"),
        (lambda: model.generate(["a"], max_new_tokens=1000), "at most 256 fit this base"),
        (lambda: model.generate([[{"role": "robot", "content": "x"}]]), "cannot be encoded"),
        (lambda: model.generate([""], raw=True), "at least 1 is needed"),
        (lambda: model.generate("a"), "a list of prompts, got one text"),
        (lambda: model.unload_adapter("three"), "'three' is not loaded"),
        (lambda: model.load_adapter("one", foreign), "'one' is taken"),
    ]:
        with pytest.raises(LorakitError, match=message):
            call()
    with pytest.raises(PatchError, match="trained on another base"):
        model.load_adapter("foreign", foreign)
    with pytest.raises(PatchError, match="does not fit"):
        model.load_adapter("wide", wide, allow_base_mismatch=True)
    assert model.adapters == ("one", "two")
    assert hashes(model) == before
    assert torch.equal(model(IDS).logits, plain)
    model.load_adapter("foreign", foreign, allow_base_mismatch=True)


def test_a_layer_that_sees_mixed_rows_is_refused_for_several_adapters(model: Any) -> None:
    layer = model.model.model.layers[0].mlp.up_proj
    with model.using(["one", "two"]), pytest.raises(TargetError, match="sees 3 rows of a batch of 2"):
        layer(torch.randn(3, 32))
    with model.using("one"):
        layer(torch.randn(3, 32))
