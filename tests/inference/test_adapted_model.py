"""Many adapters on one base: each row gets its own, and the base is never written."""

import gc
import hashlib
import json
import os
import shutil
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import lorakit
from lorakit.errors import LorakitError, PatchError, TargetError
from lorakit.inference import adapted_model
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.ops import products
from lorakit.ops._internals import has_onednn_linear
from lorakit.slots.routing import Adapter
from tests.helpers.bases import make_base
from tests.helpers.models import ARCHITECTURES, build
from tests.helpers.patches import make_patch, save_trained_peft

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


def test_the_repr_names_the_base_and_the_adapters(base: Path, tmp_path: Path) -> None:
    patch = make_patch(base, tmp_path / "patch")
    assert repr(lorakit.load(base, {"a": patch, "b": patch})) == "AdaptedModel(LlamaForCausalLM, adapters: a, b)"


def test_a_device_is_chosen_by_name_and_one_that_is_not_here_is_refused(base: Path) -> None:
    assert lorakit.load(base, device="cpu").model.device == torch.device("cpu")
    for name in ("cuda:99", "gpu"):
        with pytest.raises(LorakitError, match=f"device: '{name}' cannot be used here: "):
            lorakit.load(base, device=name)


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


def test_none_is_the_base_also_inside_of_a_block(model: Any) -> None:
    plain, one = model(IDS, adapters=None).logits, model(IDS, adapters="one").logits
    answers = {name: model.generate(["say it"], name, max_new_tokens=8) for name in (None, "one")}
    assert answers[None] != answers["one"]
    with model.using("one"):
        assert torch.equal(model(IDS, adapters=None).logits, plain)
        assert torch.equal(model(IDS).logits, one)
        assert model.generate(["say it"], None, max_new_tokens=8) == answers[None]
        assert model.generate(["say it"], adapters=None, max_new_tokens=8) == answers[None]
        assert model.generate(["say it"], max_new_tokens=8) == answers["one"]


def test_a_thread_that_does_not_choose_while_another_is_in_a_block_is_refused(model: Any) -> None:
    plain = model(IDS).logits

    def in_a_thread(work: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()

    with model.using("one"), model.merged("two") as merged:
        for work in (lambda: model(IDS), lambda: model.generate(["say it"]), lambda: model.model(IDS)):
            with pytest.raises(LorakitError, match="another thread is inside a `using` block"):
                in_a_thread(work)
        assert torch.equal(in_a_thread(lambda: model(IDS, adapters=None)).logits, plain)
        in_a_thread(lambda: merged(IDS))  # a merged model has routes of its own
        with pytest.raises(LorakitError, match="not loaded"), model.using("three"):
            pass
    assert torch.equal(in_a_thread(lambda: model(IDS)).logits, plain)
    assert torch.equal(in_a_thread(lambda: model.model(IDS)).logits, plain)


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
        (lambda: model.generate(["a"], max_new_tokens=0), "max_tokens: 1 or more"),
        (lambda: model.generate(["a"], temperature=float("nan")), "temperature: from 0 to 100, got nan"),
        (lambda: model.generate(["a"], max_new_tokens=1000), "at most 256 fit this base; request up to 25"),
        (lambda: model.generate(["say " * 400]), "at most 256 fit this base; shorten the prompt"),
        (lambda: model.generate([[{"role": "robot", "content": "x"}]]), "cannot be encoded"),
        (lambda: model.generate([""], raw=True), "at least 1 is needed"),
        (lambda: model.generate(["a"], raw=True, tools=[{}]), "tools: a chat template shows them"),
        (lambda: model.generate([[5, 6]], tools=[{}]), "tools: a chat template shows them"),
        (lambda: model.generate("a"), "a list of prompts, got 'a'; for one prompt write"),
        (lambda: model.generate(5), "a list of prompts, got 5"),  # type: ignore[arg-type]
        (lambda: model.generate([5]), "prompt 5: a text, a list of messages, or a list of token ids"),  # type: ignore[list-item]
        (lambda: model.unload_adapter("three"), "'three' is not loaded"),
        (lambda: model.load_adapter("one", foreign), "'one' is taken"),
    ]:
        with pytest.raises(LorakitError, match=message):
            call()
    with pytest.raises(PatchError, match="trained on another base"):
        model.load_adapter("foreign", foreign)
    with pytest.raises(PatchError, match="does not fit"):
        model.load_adapter("wide", wide, allow={"base"})
    assert model.adapters == ("one", "two")
    assert hashes(model) == before
    assert torch.equal(model(IDS).logits, plain)
    model.load_adapter("foreign", foreign, allow={"base"})


def test_a_layer_that_sees_mixed_rows_is_refused_for_several_adapters(model: Any) -> None:
    layer = model.model.model.layers[0].mlp.up_proj
    with model.using(["one", "two"]), pytest.raises(TargetError, match=r"has states \(3, 48\) in a batch of 2 rows"):
        layer(torch.randn(3, 32))
    with model.using("one"):
        layer(torch.randn(3, 32))


def test_replacing_is_all_or_nothing_and_calls_under_way_keep_what_they_began_with(
    model: Any, base: Path, tmp_path: Path
) -> None:
    before, after = model(IDS, adapters="one").logits, model(IDS, adapters="two").logits
    broken = shutil.copytree(tmp_path / "one", tmp_path / "broken")
    tensors = (broken / "adapter_model.safetensors").read_bytes()
    (broken / "adapter_model.safetensors").write_bytes(tensors[:-64])
    wide = make_patch(base, tmp_path / "wide", rank=3, targets=["q_proj"])
    config = json.loads((wide / "adapter_config.json").read_text())
    (wide / "adapter_config.json").write_text(json.dumps(config | {"r": 5}))
    for folder in (broken, wide, tmp_path / "absent"):
        with pytest.raises(PatchError):
            model.load_adapter("one", folder, replace=True)
        assert torch.equal(model(IDS, adapters="one").logits, before)

    with model.using("one"):
        model.load_adapter("one", tmp_path / "two", replace=True)
        assert torch.equal(model(IDS).logits, before)
    assert torch.equal(model(IDS, adapters="one").logits, after)
    assert model.adapters == ("one", "two")


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_row_is_the_same_in_any_company_and_after_any_history(data: st.DataObject, mixed: Any) -> None:
    """Random mixes of ranks, targets and methods, of one token and of many, with loads and unloads in between."""
    model, folders = mixed
    for name in model.adapters:
        model.unload_adapter(name)
    for name in ("a0", "a1", "a2"):
        model.load_adapter(name, folders[name])
    for _ in range(3):
        spare = data.draw(st.sampled_from([name for name in folders if name not in model.adapters] or [None]))
        if spare is not None and data.draw(st.booleans()):
            model.load_adapter(spare, folders[spare])
        elif len(model.adapters) > 2:
            model.unload_adapter(data.draw(st.sampled_from(model.adapters)))
        names = [None, *model.adapters]
        rows = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=6))
        num_tokens = data.draw(st.sampled_from([1, 1, 5]))
        ids = torch.randint(5, 500, (len(rows), num_tokens), generator=torch.Generator().manual_seed(len(rows)))

        together = model(ids, adapters=rows).logits

        alone = [model(ids[row : row + 1], adapters=name).logits for row, name in enumerate(rows)]
        assert (together - torch.cat(alone)).abs().max() <= 1e-5


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Any:
    folder = tmp_path_factory.mktemp("mixed")
    targets = ["all-linear", ["q_proj", "up_proj"], ["down_proj"], ["lm_head", "k_proj"], ["v_proj"]]
    folders = {
        f"a{seed}": make_patch(
            base, folder / f"a{seed}", seed=seed, rank=seed + 1, targets=targets[seed],
            method="rslora" if seed % 2 else "lora",
        )
        for seed in range(5)
    }  # fmt: skip
    return lorakit.load(base, {name: folders[name] for name in ("a0", "a1", "a2")}, dtype="float32"), folders


def test_an_overflow_in_one_row_does_not_reach_another(base: Path, tmp_path: Path) -> None:
    huge = make_patch(base, tmp_path / "huge", targets=["q_proj"])
    tensors = load_file(huge / "adapter_model.safetensors")
    save_file({key: t * 1e19 for key, t in tensors.items()}, huge / "adapter_model.safetensors")
    (huge / "lorakit.json").unlink()
    model = lorakit.load(base, {"huge": huge, "one": make_patch(base, tmp_path / "one")}, dtype="float32")
    for ids in (IDS[:3], IDS[:3, :1]):
        expected = model(ids[1:2], adapters="one").logits
        together = model(ids, adapters=["huge", "one", None]).logits
        assert torch.allclose(together[1:2], expected, atol=1e-5)
        assert torch.allclose(together[2:], model(ids[2:]).logits, atol=1e-5)


def test_a_merged_block_is_the_merge_command_and_leaves_the_base_alone(model: Any, base: Path, tmp_path: Path) -> None:
    before, plain = hashes(model), model(IDS).logits
    merged_folder = lorakit.merge(base, tmp_path / "one", out=tmp_path / "merged")
    stored = load_file(merged_folder / "model.safetensors")

    with model.merged("one") as merged:
        for name, tensor in merged.model.named_parameters():
            assert torch.equal(tensor, stored[name]), name
        assert torch.allclose(merged(IDS).logits, model(IDS, adapters="one").logits, atol=1e-5)
        assert torch.equal(model(IDS).logits, plain)
        assert merged.generate(["say it"], max_new_tokens=4) == model.generate(["say it"], "one", max_new_tokens=4)
        shared = {id(p) for p in model.model.parameters()} & {id(p) for p in merged.model.parameters()}
        assert len(shared) == len(stored) - 14
        with pytest.raises(PatchError, match="this is a merged model, which is another base"):
            merged.load_adapter("two", tmp_path / "two")

    assert hashes(model) == before
    with pytest.raises(LorakitError, match="'three' is not loaded"), model.merged("three"):
        pass
    shutil.copytree(tmp_path / "two", tmp_path / "one", dirs_exist_ok=True)
    with pytest.raises(PatchError, match="has changed since it was loaded as 'one'"), model.merged("one"):
        pass


@pytest.mark.skipif(not has_onednn_linear(), reason="this torch is built without oneDNN")
def test_prepacked_weights_answer_as_the_base_does_and_leave_it_alone(
    model: Any, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "MIN_NUMBERS", 0)
    monkeypatch.setattr(adapted_model, "decoding_products", lambda *given, prepack: "prepacked")
    route = ["one", None, "two", "one"]
    before, plain = hashes(model), model(IDS, adapters=route).logits
    own = products.onednn_linear
    calls: list[torch.Tensor] = []
    num_bytes = sum(one.weight.nbytes for one in model.model.modules() if type(one) is torch.nn.Linear)

    assert not model.prepack(num_bytes - 1)
    assert model.prepack(num_bytes)

    with torch.no_grad():
        with monkeypatch.context() as watching:
            watching.setattr(
                products, "onednn_linear", lambda x, weight, *rest: calls.append(weight) or own(x, weight, *rest)
            )
            assert torch.allclose(model(IDS, adapters=route).logits, plain, atol=1e-5)
        assert calls
        assert all(weight.is_mkldnn for weight in calls)
        with model.merged("one") as merged:
            assert torch.allclose(merged(IDS[:1]).logits, plain[:1], atol=1e-5)
    model.load_adapter("three", make_patch(base, tmp_path / "three", seed=2))
    assert model.generate(["say it"], "three", max_new_tokens=4)
    assert hashes(model) == before


@pytest.mark.matrix
def test_thousands_of_swaps_leave_base_and_memory_as_they_were(base: Path, tmp_path: Path) -> None:
    folders = [make_patch(base, tmp_path / f"p{seed}", seed=seed, rank=1, targets=["q_proj"]) for seed in range(2)]
    model = lorakit.load(base, {"x": folders[0], "y": folders[1]}, dtype="float32")
    first, before = model(IDS, adapters="x").logits, hashes(model)

    def swap(count: int) -> None:
        for number in range(count):
            model.load_adapter("x", folders[(number + 1) % 2], replace=True)
            with model.using(["x", "y"]):
                pass

    swap(200)
    began = memory_bytes()
    swap(2800)
    assert memory_bytes() - began < 4_000_000
    assert hashes(model) == before
    assert torch.equal(model(IDS, adapters="x").logits, first)
    assert sum(len(module._forward_hooks) for module in model.model.modules()) == 2


@pytest.mark.matrix
def test_an_unloaded_adapter_is_let_go(model: Any) -> None:
    def num_alive() -> int:
        gc.collect()
        return sum(type(thing) is Adapter for thing in gc.get_objects())

    model(IDS[:, :1], adapters=["one", "two", None, "one"])
    others = num_alive() - 2
    model.unload_adapter("two")
    assert num_alive() == others + 1


def memory_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's own
def test_a_position_embedding_saved_in_full_gets_all_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("opt").save_pretrained(tmp_path / "base")
    shutil.copy(Path(lorakit.__file__).parent / "assets" / "tiny" / "tokenizer.json", tmp_path / "base")
    shutil.copy(Path(lorakit.__file__).parent / "assets" / "tiny" / "tokenizer_config.json", tmp_path / "base")
    oracle = save_trained_peft(
        tmp_path / "p", tmp_path / "base", target_modules=["q_proj"], modules_to_save=["embed_positions"]
    )
    ours = lorakit.load(tmp_path / "base", {"x": tmp_path / "p"}, dtype="float32")
    ids = torch.arange(3, 17).reshape(2, 7)

    def cached(model: Any, **how: Any) -> torch.Tensor:
        start = model(input_ids=ids[:, :6], use_cache=True, **how)
        mask = torch.ones(2, 7, dtype=torch.long)
        step = model(input_ids=ids[:, 6:], past_key_values=start.past_key_values, attention_mask=mask, **how)
        result: torch.Tensor = step.logits
        return result

    with torch.no_grad():
        assert torch.allclose(cached(ours, adapters="x"), cached(oracle), atol=1e-5)
    with pytest.raises(LorakitError, match="mixes rows|adapters cannot be chosen per row"):
        ours(ids[:, :5].repeat(2, 1), adapters=["x", None, "x", None], position_ids=torch.arange(5)[None])


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's own
def test_a_layer_saved_in_full_that_is_read_without_a_call_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    ARCHITECTURES["mamba"] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    build("mamba").save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    del ARCHITECTURES["mamba"]
    save_trained_peft(tmp_path / "p", tmp_path / "base", target_modules=["in_proj"], modules_to_save=["conv1d"])
    with pytest.raises(PatchError, match="reads .* without calling the layer"):
        lorakit.load(tmp_path / "base", {"x": tmp_path / "p"}, dtype="float32")


def test_a_merged_block_ends_its_answers_where_the_base_does(tmp_path: Path, base: Path) -> None:
    own = shutil.copytree(base, tmp_path / "base")
    patch = make_patch(own, tmp_path / "p")
    free = lorakit.load(own, {"x": patch}, dtype="float32")
    answer = free.tokenizer(free.generate(["say it"], "x", max_new_tokens=12)[0], add_special_tokens=False)["input_ids"]
    (own / "generation_config.json").write_text(json.dumps({"eos_token_id": [answer[3]]}))

    model = lorakit.load(own, {"x": patch}, dtype="float32")

    expected = model.generate(["say it"], "x", max_new_tokens=12)
    with model.merged("x") as merged:
        assert (
            merged.generate(["say it"], max_new_tokens=12)
            == expected
            != free.generate(["say it"], "x", max_new_tokens=12)
        )


class Unloading(str):
    """A name that unloads its adapter when it is looked up, between the names that are known and the route."""

    def __new__(cls, name: str, model: AdaptedModel) -> "Unloading":
        self = super().__new__(cls, name)
        self.model = model
        return self

    model: AdaptedModel

    def __hash__(self) -> int:
        if self.model.adapters:
            self.model.unload_adapter(str(self))
        return super().__hash__()


def test_an_adapter_that_is_unloaded_while_a_call_resolves_it_leaves_the_memory(base: Path, tmp_path: Path) -> None:
    model = lorakit.load(base, {"a": make_patch(base, tmp_path / "a")}, dtype="float32")
    adapter = weakref.ref(model.adapter("a"))
    with model.using(Unloading("a", model)):
        assert model.adapters == ()
    gc.collect()
    assert adapter() is None
