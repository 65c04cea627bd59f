"""Experts and routers: products without the sum of weights, PEFT's own patches, and adapters chosen per token."""

from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

import lorakit
from lorakit.errors import TargetError
from lorakit.lora import adapter_tensors, inject
from lorakit.lora.experts import LazyLoraWeight
from lorakit.patch import read_patch
from lorakit.slots.hooks import PerAdapterExperts
from lorakit.slots.routing import Adapter, Route, Slot
from tests.helpers.models import build_variant
from tests.helpers.patches import save_trained_peft

IDS = torch.arange(3, 27).reshape(2, 12)
BASES = ["mixtral", "qwen3_moe", "gpt_oss"]
IMPLEMENTATIONS = ["eager", "grouped_mm", "batched_mm"]


def close(one: Tensor, two: Tensor, tolerance: float = 2e-5) -> None:
    assert torch.allclose(one, two, atol=tolerance), (one - two).abs().max()


def trained_experts(base: str, rank: int, implementation: str = "eager") -> Any:
    model = build_variant(base)
    model.set_experts_implementation(implementation)
    inject(model, targets=["q_proj"], rank=rank, alpha=2.0 * rank, target_parameters="all-experts", seed=1)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in adapter_tensors(model).items():
        if "lora_B" in name:
            tensor.data = torch.randn(tensor.shape, generator=generator) * 0.1
    return model


@pytest.mark.parametrize("rank", [2, 3, 8])
@pytest.mark.parametrize("base", BASES)
def test_every_way_to_run_experts_gives_the_outputs_and_gradients_of_the_summed_weights(
    base: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def result(implementation: str) -> dict[str, Tensor]:
        model = trained_experts(base, rank, implementation)
        logits = model(input_ids=IDS).logits
        logits.square().mean().backward()
        return {"logits": logits.detach()} | {name: t.grad for name, t in adapter_tensors(model).items()}

    ours = {implementation: result(implementation) for implementation in IMPLEMENTATIONS}
    with monkeypatch.context() as patched:
        patched.setattr("lorakit.lora.experts.torch.compiler.is_compiling", lambda: True)
        summed = result("eager")

    for implementation, found in ours.items():
        for name, tensor in summed.items():
            scale = float(tensor.abs().max())
            close(found[name] / scale, tensor / scale), implementation


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and not func.is_view]
        self.elements = max(self.elements, *(leaf.numel() for leaf in made), 0)
        return result


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("base", BASES)
def test_no_matrix_of_experts_weights_is_made_in_a_training_step(base: str, implementation: str) -> None:
    model = trained_experts(base, 2, implementation)
    block = model.model.layers[0].mlp
    smallest = min(p.numel() for p in block.experts.parameters() if p.dim() == 3)
    x = torch.randn(1, 3, 32, requires_grad=True)
    with Largest() as largest:
        output = block(x)
        (output[0] if isinstance(output, tuple) else output).square().sum().backward()
    assert 0 < largest.elements < smallest / 2  # the factors and their gradients, padded to rank 4


def test_an_operation_that_is_no_product_gets_the_sum() -> None:
    W, L, R = torch.randn(3, 4, 5), torch.randn(3, 4, 2), torch.randn(3, 2, 5)
    lazy: Any = LazyLoraWeight(W, L, R, 0.5)
    full = W + 0.5 * L @ R
    x = torch.randn(7, 5)

    close(torch.einsum("ti,eoi->teo", x, lazy), torch.einsum("ti,eoi->teo", x, full))
    close(torch.cat([lazy, lazy]), torch.cat([full, full]))
    close(lazy.sum(0), full.sum(0))
    close(lazy[:, 1], full[:, 1])
    close(lazy.transpose(0, 1), full.transpose(0, 1))
    close(x @ lazy[1].mT, x @ full[1].mT)
    close(torch.randn(2, 4, generator=torch.Generator().manual_seed(1)) @ lazy[torch.tensor(2)],
          torch.randn(2, 4, generator=torch.Generator().manual_seed(1)) @ full[2])  # fmt: skip
    close(torch.nn.functional.linear(x, weight=lazy[0]), torch.nn.functional.linear(x, full[0]))
    assert (lazy.shape, lazy.dtype, lazy.device) == (full.shape, full.dtype, full.device)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # PEFT's own
@pytest.mark.parametrize(
    "base", [base if base == "gpt_oss" else pytest.param(base, marks=pytest.mark.matrix) for base in BASES]
)
def test_what_peft_makes_of_all_linear_is_loaded_routed_and_merged(base: str, tmp_path: Path, tokenizer: Any) -> None:
    build_variant(base).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    for seed, rank in ((1, 2), (2, 3)):
        save_trained_peft(tmp_path / f"p{seed}", tmp_path / "base", r=rank, target_modules="all-linear")
    routers = [name for name in read_patch(tmp_path / "p1").layers if name.endswith("gate.weight")]
    assert len(routers) == (0 if base == "gpt_oss" else 2)

    model = lorakit.load(tmp_path / "base", {"one": tmp_path / "p1", "two": tmp_path / "p2"}, dtype="float32")
    for number, name in ((1, "one"), (2, "two")):
        oracle = peft_logits(tmp_path / "base", tmp_path / f"p{number}")
        close(model(IDS, adapters=name).logits, oracle)
        merged = lorakit.merge(tmp_path / "base", tmp_path / f"p{number}", out=tmp_path / f"m{number}", verify=True)
        close(AutoModelForCausalLM.from_pretrained(merged)(IDS).logits, oracle)
        with model.merged(name) as copied:
            close(copied(IDS).logits, oracle)
            close(copied(IDS, adapters=None).logits, oracle)

    rows = IDS.repeat(2, 1)
    names = ["two", "one", None, "two"]
    for ids in (rows, rows[:, :1]):
        together = model(ids, adapters=names).logits
        close(together, torch.cat([model(ids[i : i + 1], adapters=name).logits for i, name in enumerate(names)]))
    assert not torch.allclose(together[0], model(rows[:1, :1], adapters="one").logits[0], atol=1e-3)


def peft_logits(base: Path, patch: Path) -> Tensor:
    from peft import PeftModel

    logits: Tensor = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), patch)(input_ids=IDS).logits
    return logits.detach()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # PEFT's own
def test_experts_that_see_other_tokens_than_the_batch_are_refused_for_several_adapters(
    tmp_path: Path, tokenizer: Any
) -> None:
    build_variant("mixtral").save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    save_trained_peft(tmp_path / "p", tmp_path / "base", r=2, target_modules="all-linear")
    model = lorakit.load(tmp_path / "base", {"x": tmp_path / "p"}, dtype="float32")
    router = model.model.model.layers[0].mlp.gate
    with model.using(["x", None]), pytest.raises(TargetError, match=r"gate has states \(3, 32\) in a batch of 2 rows"):
        router(torch.randn(3, 32))
    with model.using("x"):
        router(torch.randn(3, 32))


def test_a_routers_bias_is_given_to_every_adapter_as_it_is() -> None:
    class Router(nn.Module):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            return x + bias

    route: ContextVar[Route | None] = ContextVar("route", default=None)
    layer, copied = Router(), Router()
    layer.__dict__["forward"] = PerAdapterExperts("gate", layer.forward, route)
    x, bias = torch.randn(2, 2), torch.tensor([10.0, 20.0])  # as many experts as tokens
    adapter = Adapter(0, {"gate": Slot(replacement=copied)})

    route.set(Route((adapter, None)))
    assert torch.equal(layer(x, bias), x + bias)
    assert torch.equal(layer(x, bias=bias), x + bias)
