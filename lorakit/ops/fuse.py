"""Replace the parts of a model that have a fused form, and report which were replaced and which were not.

The parts are the gated MLP of most language models, RMS norms with frozen weights, and rotary positions. A part is
replaced by giving its module a subclass of its own class (`FusedLlamaMLP`), which `print(model)` shows. Its parameters
and its other attributes stay as they are. A fused form replaces a forward of equal source code only, because that
computes the same bits; a class name does not show it, because authors change formulas without renaming classes.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from types import FunctionType
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lorakit.ops._internals import storage_id

EXPRESSION: Final = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
GATED_MLP: Final = {f"return {EXPRESSION}", f"down_proj = {EXPRESSION}; return down_proj"}
NORMALIZE: Final = (
    "input_dtype = hidden_states.dtype; hidden_states = hidden_states.to(torch.float32);"
    " variance = hidden_states.pow(2).mean(-1, keepdim=True);"
    " hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon); "
)
ROUNDED_LAST: Final = {
    NORMALIZE + "return self.weight * hidden_states.to(input_dtype)": False,
    NORMALIZE + "return (self.weight * hidden_states).to(input_dtype)": True,
}
"""source of a norm's forward -> True if it multiplies by w in float32 and rounds to x's dtype last (OLMo 2)"""
ROPE: Final = "apply_rotary_pos_emb"
ROPE_SOURCES: Final = {
    ROPE: "cos = cos.unsqueeze(unsqueeze_dim); sin = sin.unsqueeze(unsqueeze_dim); q_embed = q * cos + rotate_half(q)"
    " * sin; k_embed = k * cos + rotate_half(k) * sin; return (q_embed, k_embed)",
    "rotate_half": "x1 = x[..., :x.shape[-1] // 2]; x2 = x[..., x.shape[-1] // 2:];"
    " return torch.cat((-x2, x1), dim=-1)",
}
"""name of a function in a model's file -> its source; each file of transformers has a copy of both"""


def forward_source(module: nn.Module) -> str:
    """Return the statements of a module's forward on one line; empty if the instance's forward was replaced."""
    return "" if "forward" in vars(module) else normalized_source(type(module).forward)


@cache
def normalized_source(function: Callable[..., Any]) -> str:
    """Return a function's statements on one line, without comments and docstring; empty without a source file."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError):
        return ""
    if not isinstance(tree, ast.FunctionDef):
        return ""
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    return "; ".join(ast.unparse(statement) for statement in body)


def is_gated_mlp(module: nn.Module) -> bool:
    """True if a module's forward has the code of a gated MLP, and its activation is a module without parameters."""
    activation = getattr(module, "act_fn", None)
    if not isinstance(activation, nn.Module) or any(True for _ in activation.parameters()):
        return False  # `_GatedProduct` returns no gradient for an activation's own parameters
    return forward_source(module) in GATED_MLP


def _resembles_gated_mlp(module: nn.Module) -> bool:
    has_gate = any(isinstance(getattr(module, name, None), nn.Module) for name in ("gate_proj", "gate_up_proj"))
    return has_gate and isinstance(getattr(module, "down_proj", None), nn.Module)


def _mlp_forward(module: Any, x: Tensor) -> Any:
    return module.down_proj(_GatedProduct.apply(module.gate_proj(x), module.up_proj(x), module.act_fn))  # type: ignore[no-untyped-call]


@final
class _GatedProduct(torch.autograd.Function):
    """act(gate) * up, with neither act(gate) nor the product saved: half of the bytes that autograd saves of an MLP.

    `ctx.recompute` lets `ops.recompute` compute the product once more for down_proj's A gradient.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: nn.Module) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        ctx.activated = None
        ctx.recompute = _recompute_product
        # act.forward, not act(): hooks of an engine gather a module's parameters, and an activation has none to gather
        activated = act.forward(gate)
        # multiply in place to save one tensor, but not where the activation returned `gate` itself, which is saved
        is_new = storage_id(activated) != storage_id(gate)
        if is_new and torch.result_type(activated, up) == activated.dtype:
            return activated.mul_(up)
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        (dy,) = outer
        gate, up = ctx.saved_tensors
        leaf, activated = ctx.activated or _activate(gate, ctx.act)
        ctx.activated = None
        (dgate,) = torch.autograd.grad(activated, leaf, dy * up)
        return dgate, dy * activated.detach(), None


def _recompute_product(ctx: Any) -> Tensor:
    """Compute the product once more, and save the activated gate in `ctx`: this node's own backward comes next."""
    gate, up = ctx.saved_tensors
    ctx.activated = _activate(gate, ctx.act)
    return ctx.activated[1].detach() * up


def _activate(gate: Tensor, act: nn.Module) -> tuple[Tensor, Tensor]:
    """Return gate as a leaf of a graph of its own, and act(gate) on that graph."""
    with torch.enable_grad():  # autograd runs backward functions without a graph
        leaf = gate.detach().requires_grad_()
        return leaf, act.forward(leaf)


def is_rms_norm(module: nn.Module) -> bool:
    """True if a module's forward has the code of an RMS norm, with either order of product and rounding."""
    return forward_source(module) in ROUNDED_LAST


def _norm_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    """Return the forward that replaces a norm's own where w is frozen."""
    rounded_last = ROUNDED_LAST[normalized_source(cls.forward)]

    def forward(module: Any, hidden_states: Tensor) -> Any:
        if module.weight.requires_grad:  # read in every call, because a norm may become trainable after it was fused
            return cls.forward(module, hidden_states)
        return _RMSNorm.apply(hidden_states, module.weight, module.variance_epsilon, rounded_last)  # type: ignore[no-untyped-call]

    return forward


@final
class _RMSNorm(torch.autograd.Function):
    """y = w * x / sqrt(mean(x^2) + eps) for a frozen w, in float32 (Zhang and Sennrich 2019, arXiv 1910.07467).

    Saves x and one number per token; autograd would also save float32 and normalised copies. `ctx.recompute` returns y.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, rounded_last: bool) -> Tensor:
        x32 = x.to(torch.float32)
        squares = x32.pow(2)
        inverse_rms = torch.rsqrt(squares.mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, inverse_rms, weight)
        ctx.rounded_last = rounded_last
        ctx.recompute = _recompute_norm
        # write into `squares`, not into x32: where x is float32 already, x32 is x itself
        return _weighted(torch.mul(x32, inverse_rms, out=squares), weight, x.dtype, rounded_last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        # with n = x / rms and d = w dy:  dx = (d - n mean(d n)) / rms
        x, inverse_rms, weight = ctx.saved_tensors
        d = outer[0].to(torch.float32) * weight
        normed = x.to(torch.float32) * inverse_rms
        mean = (d * normed).mean(-1, keepdim=True)
        return d.addcmul_(normed, mean, value=-1).mul_(inverse_rms).to(x.dtype), None, None, None


def _weighted(normed: Tensor, weight: Tensor, dtype: torch.dtype, rounded_last: bool) -> Tensor:
    """Return w * normed in `dtype`, with the rounding of the model's own code. Overwrites `normed`."""
    rounded = normed if rounded_last else normed.to(dtype)
    overwrites = torch.result_type(rounded, weight) == rounded.dtype
    product = rounded.mul_(weight) if overwrites else rounded * weight
    return product.to(dtype) if rounded_last else product


def _recompute_norm(ctx: Any) -> Tensor:
    x, inverse_rms, weight = ctx.saved_tensors
    return _weighted(x.to(torch.float32) * inverse_rms, weight, x.dtype, ctx.rounded_last)


def _resembles_rope(module: nn.Module) -> bool:
    forward = type(module).forward
    return isinstance(forward, FunctionType) and "forward" not in vars(module) and ROPE in forward.__code__.co_names


def uses_rope(module: nn.Module) -> bool:
    """True if a module's forward calls the global `apply_rotary_pos_emb`, and that has the known code."""
    names = type(module).forward.__globals__ if _resembles_rope(module) else {}
    return all(name in names and normalized_source(names[name]) == source for name, source in ROPE_SOURCES.items())


def _rope_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    """Return a copy of a class's forward in which the name `apply_rotary_pos_emb` means `_apply_rope`.

    It has a copy of its file's globals, which other models share. Once another library has patched one of them, the
    class's own forward runs instead.
    """
    forward = cls.forward
    assert isinstance(forward, FunctionType)
    names = forward.__globals__
    used = {name: names[name] for name in (*forward.__code__.co_names, *ROPE_SOURCES) if name in names}
    copied = FunctionType(
        forward.__code__, names | {ROPE: _apply_rope}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copied.__kwdefaults__ = forward.__kwdefaults__

    @wraps(forward)
    def fused(*args: Any, **kwargs: Any) -> Any:
        is_patched = any(names.get(name) is not value for name, value in used.items())
        return (forward if is_patched else copied)(*args, **kwargs)

    return fused


def _apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate q and k (batch, heads, tokens, d). Name and order of the parameters are those of transformers."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    return _Rope.apply(q, cos, sin), _Rope.apply(k, cos, sin)  # type: ignore[no-untyped-call]


@final
class _Rope(torch.autograd.Function):
    """(a, b) -> (a cos - b sin, b cos + a sin) for the halves a, b of every head (Su et al. 2021, arXiv 2104.09864).

    It allocates 1.5 tensors of the size of x instead of 4.5. Backward is the rotation by the opposite angle.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        half = x.shape[-1] // 2
        y = x * cos
        y[..., :half] -= x[..., half:] * sin[..., :half]
        y[..., half:] += x[..., :half] * sin[..., half:]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        (dy,) = outer
        cos, sin = ctx.saved_tensors
        half = dy.shape[-1] // 2
        dx = dy * cos
        dx[..., :half] += dy[..., half:] * sin[..., half:]
        dx[..., half:] -= dy[..., :half] * sin[..., :half]
        return dx.to(ctx.dtype), None, None  # cos and sin may be float32 beside a 16-bit x


@dataclass(frozen=True)
class PartKind:
    """A kind of part: how to recognise one, and its fused forward."""

    resembles: Callable[[nn.Module], bool]  # True if a module is such a part by its looks, whatever its code
    has_known_code: Callable[[nn.Module], bool]  # True if the fused forward computes the same bits as the module's own
    fused_forward: Callable[[type[nn.Module]], Callable[..., Any]]  # class -> the forward that replaces its own


PART_KINDS: Final[Mapping[str, PartKind]] = {
    "mlp": PartKind(_resembles_gated_mlp, is_gated_mlp, lambda cls: _mlp_forward),
    "rms_norm": PartKind(lambda module: type(module).__name__.endswith("RMSNorm"), is_rms_norm, _norm_forward),
    "rope": PartKind(_resembles_rope, uses_rope, _rope_forward),
}


@dataclass(frozen=True)
class FusedParts:
    """How many parts of one kind a model has, and how many of them run fused. unknown: classes of the others."""

    fused: int
    total: int
    unknown: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.total == 0:
            return "none"
        counts = f"{self.fused}/{self.total}"
        return f"{counts} ({', '.join(self.unknown)}: slower, the same results)" if self.unknown else counts


@dataclass(frozen=True)
class FuseReport:
    """What `fuse_model` replaced and what it could not, by kind of part."""

    parts: Mapping[str, FusedParts]

    def __str__(self) -> str:
        """Return such as `mlp 0/32 (Phi3MLP: slower, the same results), rms_norm 65/65, rope none`."""
        return ", ".join(f"{kind} {part}" for kind, part in self.parts.items())


def fuse_model(model: nn.Module) -> FuseReport:
    """Replace every part of known code by its fused form, in place."""
    fused = dict.fromkeys(PART_KINDS, 0)
    unknown: dict[str, list[str]] = {kind: [] for kind in PART_KINDS}
    for module in list(model.modules()):
        for name, kind in PART_KINDS.items():
            if getattr(type(module), "fused_kind", None) == name:
                fused[name] += 1
            elif kind.has_known_code(module):
                cls: Any = type(module)
                module.__class__ = fused_class(cls, name)
                fused[name] += 1
            elif kind.resembles(module):
                unknown[name].append(type(module).__name__)
    return FuseReport({
        name: FusedParts(fused[name], fused[name] + len(unknown[name]), tuple(dict.fromkeys(unknown[name])))
        for name in PART_KINDS
    })  # fmt: skip


@cache
def fused_class(cls: type[Any], kind: str) -> type[Any]:
    """Return a subclass with the fused forward; its instances differ from those of `cls` in nothing else."""
    attributes = {"forward": PART_KINDS[kind].fused_forward(cls), "fused_kind": kind, "__module__": cls.__module__}
    return type(f"Fused{cls.__name__}", (cls,), attributes)
