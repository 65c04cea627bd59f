"""Fuse the gated MLP of most language models, down(act(gate(x)) * up(x)), so that it saves gate(x) and up(x) only.

Autograd would also save act(gate(x)) and the product: half of the MLP's saved bytes, for two elementwise operations.
An MLP is replaced only if its forward has exactly this code (`ops.source_match`), so its outputs keep their bits.
"""

from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lorakit.ops._internals import storage_id
from lorakit.ops.source_match import forward_source

EXPRESSION: Final = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
SOURCES: Final = {f"return {EXPRESSION}", f"down_proj = {EXPRESSION}; return down_proj"}


def resembles_gated_mlp(module: nn.Module) -> bool:
    """True if a module has the products of a gated MLP, by their usual names."""
    has_gate = any(isinstance(getattr(module, name, None), nn.Module) for name in ("gate_proj", "gate_up_proj"))
    return has_gate and isinstance(getattr(module, "down_proj", None), nn.Module)


def is_gated_mlp(module: nn.Module) -> bool:
    """True if a module's forward has the code of a gated MLP, and its activation is a module without parameters."""
    activation = getattr(module, "act_fn", None)
    if not isinstance(activation, nn.Module) or any(True for _ in activation.parameters()):
        return False  # `_GatedProduct` returns no gradient for an activation's own parameters
    return forward_source(module) in SOURCES


def fused_mlp_forward(cls: type[nn.Module]) -> Callable[..., Tensor]:
    """Return the forward that replaces a gated MLP's own."""
    return _forward


def _forward(module: Any, x: Tensor) -> Tensor:
    product: Tensor = _GatedProduct.apply(module.gate_proj(x), module.up_proj(x), module.act_fn)  # type: ignore[no-untyped-call]
    down: Tensor = module.down_proj(product)
    return down


@final
class _GatedProduct(torch.autograd.Function):
    """act(gate) * up. `ctx.recompute` lets `ops.recompute` compute the product once more for down_proj's A gradient."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: nn.Module) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        ctx.activated = None
        ctx.recompute = _recompute
        # act.forward, not act(): hooks of an engine gather a module's parameters, and an activation has none to gather
        activated = act.forward(gate)
        # multiply in place to save one tensor, but not where the activation returned `gate` itself, which is saved
        is_new = storage_id(activated) != storage_id(gate)
        if is_new and torch.result_type(activated, up) == activated.dtype:
            product: Tensor = activated.mul_(up)
            return product
        return activated * up  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        (dy,) = outer
        gate, up = ctx.saved_tensors
        leaf, activated = ctx.activated or _activate(gate, ctx.act)
        ctx.activated = None
        (dgate,) = torch.autograd.grad(activated, leaf, dy * up)
        return dgate, dy * activated.detach(), None


def _recompute(ctx: Any) -> Tensor:
    """Compute the product once more, and save the activated gate in `ctx`: this node's own backward comes next."""
    gate, up = ctx.saved_tensors
    ctx.activated = _activate(gate, ctx.act)
    return ctx.activated[1].detach() * up  # type: ignore[no-any-return]


def _activate(gate: Tensor, act: nn.Module) -> tuple[Tensor, Tensor]:
    """Return gate as a leaf of a graph of its own, and act(gate) on that graph."""
    with torch.enable_grad():  # autograd runs backward functions without a graph
        leaf = gate.detach().requires_grad_()
        return leaf, act.forward(leaf)
