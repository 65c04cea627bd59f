"""The gated MLP of most language models, down(act(gate(x)) * up(x)), keeping gate(x) and up(x) and nothing else.

Autograd alone keeps act(gate(x)) and the product too: half of what such a layer keeps, for two passes over it.
Recognised by its code, word for word, because what it computes must stay what it computed. The last one of a model may
leave out the tokens whose outputs nobody reads.
"""

from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lorakit.ops.source_match import forward_source

CODE: Final = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
BODIES: Final = {f"return {CODE}", f"down_proj = {CODE}; return down_proj"}


def fuse_gated_mlps(model: nn.Module) -> None:
    """Let every gated MLP of a model keep less; its outputs are the same bits."""
    for module in model.modules():
        if is_gated_mlp(module):
            module.forward = partial(_forward, module)


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether a module is a gated MLP by its code, with an activation that has nothing to learn."""
    activation = getattr(module, "act_fn", None)
    if not isinstance(activation, nn.Module) or any(True for _ in activation.parameters()):
        return False
    return forward_source(module) in BODIES


def last_gate(model: nn.Module) -> nn.Module | None:
    """The gated MLP at the end of a model's layers, of whose outputs only those with a label may be needed."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0)
    found = [child for layers in lists for child in layers[-1].children() if _keeps_less(child)]
    return found[0] if len(found) == 1 else None


def choose(gate: nn.Module, places: Tensor | None, num_tokens: int, left: float) -> None:
    """Let a ``last_gate`` compute these tokens alone in the next pass and give ``left`` for others; None: all.

    One token where there is none to choose, and a choice also of all: ranks whose graphs differ gather in other orders.
    """
    if places is not None and not len(places):
        places = places.new_zeros(1)
    vars(gate)["chosen"] = None if places is None else (places, num_tokens, left)


def _keeps_less(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "func", None) is _forward


def _forward(module: Any, x: Tensor) -> Tensor:
    tokens = x.flatten(0, -2)
    places, num_tokens, left = vars(module).get("chosen") or (None, 0, 0.0)
    if places is None or len(tokens) != num_tokens:
        return _all(module, x)
    return torch.full_like(tokens, left).index_copy(0, places, _all(module, tokens[places])).view(x.shape)


def _all(module: Any, x: Tensor) -> Tensor:
    made: Tensor = _Gated.apply(module.gate_proj(x), module.up_proj(x), module.act_fn)  # type: ignore[no-untyped-call]
    down: Tensor = module.down_proj(made)
    return down


@final
class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: nn.Module) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act, ctx.opened = act, None
        ctx.again = _again
        activated = act.forward(gate)  # not by its hooks: engines have some that bring parameters, and it has none
        own = activated.untyped_storage()._cdata != gate.untyped_storage()._cdata
        fits = own and torch.result_type(activated, up) == activated.dtype
        product: Tensor = activated.mul_(up) if fits else activated * up
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        (dy,) = outer
        gate, up = ctx.saved_tensors
        leaf, activated = ctx.opened or _opened(gate, ctx.act)
        ctx.opened = None
        (dgate,) = torch.autograd.grad(activated, leaf, dy * up)
        return dgate, dy * activated.detach(), None


def _again(ctx: Any) -> Tensor:
    """The product once more; the opened gate stays for the backward that comes next."""
    gate, up = ctx.saved_tensors
    ctx.opened = _opened(gate, ctx.act)
    return ctx.opened[1].detach() * up  # type: ignore[no-any-return]


def _opened(gate: Tensor, act: nn.Module) -> tuple[Tensor, Tensor]:
    """The gate as a leaf, and what the activation makes of it."""
    with torch.enable_grad():
        leaf = gate.detach().requires_grad_()
        return leaf, act.forward(leaf)
