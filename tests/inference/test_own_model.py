"""A patch on a model that the caller holds: put on, taken off, merged in."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import lorakit
from lorakit.errors import LorakitError, PatchError, TargetError
from lorakit.lora import adapter_modules

IDS = torch.arange(5, 25)[None]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"method": "dora", "targets": ["q_proj", "down_proj"]},
    {"method": "rslora", "rank_pattern": {"q_proj": 2}},
    {"init": "pissa", "targets": ["v_proj"]},
    {"targets": ["embed_tokens", "o_proj"], "tied_head": "untie"},
    {"trainable_tokens": [6, 7]},
    {"modules_to_save": ["norm"], "targets": ["k_proj"]},
]


def live(base: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    return model.eval()


def trained(model: nn.Module, **settings: Any) -> nn.Module:
    """Return the model with an adapter whose values are far from its start."""
    lorakit.inject(model, **{"rank": 3, **settings})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in lorakit.adapter_tensors(model).values():
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(IDS).logits
        return output


class Net(nn.Module):
    """No model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_patch_on_a_model_computes_what_was_saved_to_the_bit_and_goes_on_learning(
    base: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    first = trained(live(base), **settings)
    lorakit.save_patch(first, tmp_path / "patch")
    second = lorakit.load_patch(live(base), tmp_path / "patch")

    if settings.get("init") == "pissa":  # saved as one update of twice the rank
        assert torch.allclose(logits(second), logits(first), atol=1e-5)
    else:
        assert torch.equal(logits(second), logits(first))
    assert not torch.allclose(logits(second), logits(live(base)), atol=1e-3)
    second(IDS).logits.sum().backward()
    assert all(tensor.grad is not None for tensor in lorakit.adapter_tensors(second).values())
    assert {name for name, p in second.named_parameters() if p.requires_grad} >= set(lorakit.adapter_tensors(second))


@pytest.mark.parametrize("settings", SETTINGS[:-1], ids=str)
def test_a_model_without_its_adapter_is_the_base_to_the_bit_and_in_its_classes(
    base: Path, settings: dict[str, Any]
) -> None:
    plain = live(base)
    weights = {name: id(tensor) for name, tensor in plain.named_parameters()}
    before, shown = logits(plain), repr(plain)
    model = lorakit.remove(trained(plain, **settings))

    assert model is plain
    assert torch.equal(logits(model), before)
    assert repr(model) == shown
    assert {name: id(tensor) for name, tensor in model.named_parameters()} == weights
    assert not list(adapter_modules(model))
    assert logits(lorakit.inject(model, rank=2)).equal(before)  # and another adapter may come


@pytest.mark.parametrize(
    ("settings", "dtype"), [(s, torch.bfloat16) for s in SETTINGS] + [({}, torch.float32)], ids=str
)
def test_a_merge_in_memory_is_the_merge_of_files_to_the_bit(
    base: Path, tmp_path: Path, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    live(base, dtype).save_pretrained(tmp_path / "base")
    model = trained(live(tmp_path / "base", dtype), **settings)
    lorakit.save_patch(model, tmp_path / "patch")
    lorakit.merge(tmp_path / "base", tmp_path / "patch", out=tmp_path / "merged")
    expected = live(tmp_path / "merged", dtype)

    assert lorakit.merge_into(model) is model
    state = model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert state[name].dtype == dtype
        assert torch.equal(state[name], tensor), name
    assert repr(model) == repr(expected)


def test_any_torch_model_is_served_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, plain = torch.randn(4, 6), Net()
    values = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    lorakit.save_patch(trained(plain, modules_to_save=["last"], exclude=["last"]), tmp_path / "patch")
    other = Net()
    other.load_state_dict(values)
    lorakit.load_patch(other, tmp_path / "patch")

    assert torch.equal(other(x), plain(x))
    expected = plain(x)
    merged = lorakit.merge_into(other)
    assert type(merged.last) is nn.Linear
    assert torch.allclose(merged(x), expected, atol=1e-5)


def test_a_model_is_unchanged_by_a_patch_that_it_refuses(base: Path, tmp_path: Path) -> None:
    lorakit.save_patch(trained(live(base)), tmp_path / "patch")
    model = live(base)
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.q_proj.weight").add_(0.1)
    shown = repr(model)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    with pytest.raises(PatchError, match=r"another base than this model: 1 of 14 adapted weights \(.* first\) differ"):
        lorakit.load_patch(model, tmp_path / "patch")
    with pytest.raises(PatchError, match="14 layers of the adapter are not in it|does not fit"):
        lorakit.load_patch(Net(), tmp_path / "patch")

    assert repr(model) == shown
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trainable
    assert lorakit.load_patch(model, tmp_path / "patch", allow={"base"}) is model


def test_a_patch_with_a_part_that_the_adapter_has_not_leaves_the_base_to_the_bit(base: Path, tmp_path: Path) -> None:
    lorakit.save_patch(trained(live(base)), tmp_path / "patch")
    patch, name = lorakit.read_patch(tmp_path / "patch"), "model.embed_tokens.weight"
    tensor = live(base).get_parameter(name).detach()
    for folder, full in (("copy", tensor.clone()), ("other", tensor + 1)):
        changed = replace(patch, full_tensors={name: full}, full_shapes={name: tuple(full.shape)})
        lorakit.write_patch(tmp_path / folder, changed)
    model = live(base)
    before, shown = logits(model), repr(model)
    with pytest.raises(PatchError, match="1 parts are not in the adapter: model.embed_tokens.weight"):
        lorakit.load_patch(model, tmp_path / "other")

    assert repr(model) == shown
    assert torch.equal(logits(model), before)
    assert all(parameter.requires_grad for parameter in model.parameters())
    lorakit.load_patch(model, tmp_path / "copy")  # PEFT saves such copies, which change nothing


@pytest.mark.parametrize("call", [lorakit.load_patch, lorakit.remove, lorakit.merge_into], ids=lambda f: f.__name__)
def test_what_is_no_model_of_the_right_kind_is_one_line(call: Any, base: Path, tmp_path: Path) -> None:
    more = (tmp_path,) if call is lorakit.load_patch else ()
    with pytest.raises(TargetError, match="a torch model expected, got a str"):
        call("llama", *more)
    with pytest.raises(TargetError, match="got a AdaptedModel; .* unload_adapter"):
        call(lorakit.load(base), *more)
    with pytest.raises(TargetError, match="has an adapter already|and this one has no adapter"):
        call(lorakit.inject(live(base)) if more else live(base), *more)


def test_an_adapter_that_overwrote_the_base_cannot_be_taken_off(base: Path) -> None:
    model = trained(live(base), modules_to_save=["norm"], targets=["k_proj"])
    expected = logits(model)
    with pytest.raises(TargetError, match="trained model.norm.weight in full.*lorakit.merge_into"):
        lorakit.remove(model)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("device", ["cuda:99", "meta"])
def test_a_device_that_is_not_here_is_named(base: Path, device: str) -> None:
    with pytest.raises(LorakitError, match=f"device: '{device}' cannot be used here"):
        lorakit.load(base, device=device)
