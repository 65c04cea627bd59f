"""Parts with a fused form: replaced where their code is known, counted, visible, and never against a later patch."""

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from lorakit.lora import inject
from lorakit.ops.fuse import FusedParts, FuseReport, fuse_model
from tests.helpers.models import SMALL, build

IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
LAYERS = SMALL["num_hidden_layers"]


def test_the_report_counts_what_was_replaced_and_names_what_was_not() -> None:
    assert fuse_model(build("llama")).parts == {
        "mlp": FusedParts(LAYERS, LAYERS), "rms_norm": FusedParts(2 * LAYERS + 1, 2 * LAYERS + 1),
        "rope": FusedParts(LAYERS, LAYERS),
    }  # fmt: skip
    unknown = "0/2 (Phi3{}: slower, the same results)"
    expected = f"mlp {unknown.format('MLP')}, rms_norm 5/5, rope {unknown.format('Attention')}"
    assert str(fuse_model(build("phi3"))) == expected
    assert str(fuse_model(build("gpt2"))) == "mlp none, rms_norm none, rope none"


def test_a_second_call_counts_the_same_and_replaces_nothing() -> None:
    model = build("llama")
    first = fuse_model(model)
    classes = [type(module) for module in model.modules()]
    assert fuse_model(model) == first
    assert [type(module) for module in model.modules()] == classes


def test_replaced_parts_are_visible_and_still_of_their_class() -> None:
    model = build("llama")
    fuse_model(model)
    shown = repr(model)
    assert all(f"Fused{name}(" in shown for name in ("LlamaMLP", "LlamaRMSNorm", "LlamaAttention"))
    assert isinstance(model.model.layers[0].mlp, modeling_llama.LlamaMLP)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_inject_adapts_and_replaces_nothing_else() -> None:
    model = build("llama")
    classes = {name: type(module) for name, module in model.named_modules() if not isinstance(module, nn.Linear)}
    adapted = inject(model, rank=2)
    kept = {name: type(adapted.get_submodule(name)) for name in classes}
    assert kept == classes
    assert not any("forward" in vars(module) for module in adapted.modules())


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "rotate_half", "eager_attention_forward"])
def test_a_patch_of_the_models_module_made_later_is_obeyed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    model.config._attn_implementation = "eager"
    fuse_model(model)
    module: ModuleType = modeling_llama
    original, calls = getattr(module, name), []

    def patched(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    expected = model(input_ids=IDS).logits
    monkeypatch.setattr(module, name, patched)
    torch.testing.assert_close(model(input_ids=IDS).logits, expected)
    assert calls


def test_a_report_reads_as_one_line() -> None:
    report = FuseReport({"mlp": FusedParts(1, 3, ("A", "B")), "rms_norm": FusedParts(0, 0)})
    assert str(report) == "mlp 1/3 (A, B: slower, the same results), rms_norm none"
