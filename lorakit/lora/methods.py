"""The LoRA formula: how an adapter changes a linear layer, one row of pure functions per method.

Plain LoRA is y = x W^T + b + s (x A^T) B^T, as in Hu et al. 2021 (arXiv 2106.09685): x is (..., in), the frozen weight
W (out, in), A (r, in), B (out, r), and the scale s = alpha / r. A starts random and B at zero, so that training starts
at the base.

A row's `apply` is the formula in plain operations, and its `fused` the same in one autograd function that saves less
for backward. A layer runs `fused` where it can, and `apply` for embeddings, for PiSSA and OLoRA, under autocast, under
torch.compile, and where x and W have different dtypes. The tests compare the two.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorakit.lora.layer_kinds import LayerKind, weight_of
from lorakit.ops.dropout import DrawnMask, DropoutMask, dropped
from lorakit.ops.lora_linear import can_fuse, lora_linear

Tensors = Mapping[str, Tensor]
"""an adapter's tensors for one layer, by PEFT's names: lora_A (r, in), lora_B (out, r), and others of the method"""
MAGNITUDE: Final = "lora_magnitude_vector"
Axis = Literal["out", "in", "rank"]
Slot = tuple[Tensor, Tensor, Tensor | None]
"""A (r, in), B (out, r), and a gain (out,) or None: how a method is served, y = b + g (y0 - b) + s (x A^T) B^T"""


@dataclass(frozen=True)
class MethodTensor:
    """One tensor of a method, by what its dimensions run over."""

    axes: tuple[Axis, ...]
    """of each dimension: the rows of W (out), its columns (in), or the components of the update (rank)"""
    trainable: bool = True
    stored: bool = True  # False: computed from W at any time, so that no file and no checkpoint holds it

    def shape(self, sizes: tuple[int, int], rank: int) -> tuple[int, ...]:
        """Return the tensor's shape. sizes: (out, in) of W."""
        lengths = {"out": sizes[0], "in": sizes[1], "rank": rank}
        return tuple(lengths[axis] for axis in self.axes)

    def part(self, tensor: Tensor, axis: Axis, part: slice) -> Tensor:
        """Return a part of the tensor along an axis; all of it if no dimension runs over that axis."""
        return tensor[tuple(part if own == axis else slice(None) for own in self.axes)]


FACTORS: Final[Mapping[str, MethodTensor]] = {
    "lora_A": MethodTensor(("rank", "in")),
    "lora_B": MethodTensor(("out", "rank")),
}
"""the tensors of every method. Files name them by the kind of their layer, and other tensors by their own name."""
STARTS: Final = {f"{name}0": replace(tensor, trainable=False) for name, tensor in FACTORS.items()}
"""A0 and B0 of an adapter that starts at a part of W (`lora.spec`)"""


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One forward call of an adapted layer. x' is x after dropout."""

    layer: nn.Module  # holds W, perhaps quantised
    kind: LayerKind
    x: Tensor  # (..., in); token ids for an embedding
    bias: Tensor | None
    mask: DropoutMask | DrawnMask | None = None  # the zeros of x'; None: x' is x

    def y(self) -> Tensor:
        """Return x W^T + b, (..., out)."""
        return self.kind.run(self.layer, self.x, self.bias)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x W^T without b, for x or x'. `y`: of `self.y()`, from which the product of x is known."""
        if x is not self.x:
            return self.kind.run(self.layer, x, None)
        return y if self.bias is None else y - self.bias

    def low_rank(self, x: Tensor, A: Tensor, B: Tensor, dtype: torch.dtype) -> Tensor:
        """Return (x A^T) B^T, (..., out), for x or x'. dtype: of y."""
        # A and B are cast to x's dtype, not x to theirs: they are small, and x would be copied in every layer
        return F.linear(self.kind.shrink(self.layer, x, A.to(dtype)), B.to(dtype))

    def change_of_squared_norms(self, A: Tensor, B: Tensor, s: float) -> Tensor:
        """Return |W + s B A|^2 - |W|^2 of each row, (out,): 2 s (W A^T . B) + s^2 (B A A^T . B). A, B: float32."""
        W = self.kind.read(self.layer)
        inner = ((A.to(W.dtype) @ W.T).T.float() * B).sum(1)
        squares = ((B @ (A @ A.T)) * B).sum(1)
        return 2 * s * inner + s * s * squares


def serve_low_rank(tensors: Tensors, W: Callable[[], Tensor], s: float) -> Slot:
    """Return A and B as they are."""
    return tensors["lora_A"], tensors["lora_B"], None


@dataclass(frozen=True)
class Method:
    """The functions of a method, and its tensors. Laws: untrained, it changes no bit; `merge` agrees with `apply`."""

    scale: Callable[[float, int], float]  # (alpha, r) -> s
    apply: Callable[[LayerCall, Tensors, float], Tensor]  # (inputs, tensors, s) -> the adapted y
    fused: Callable[[LayerCall, Tensors, float], Tensor | None] | None
    """the same, saving less for backward; returns None where only `apply` can; None: the method has no such form"""
    merge: Callable[[Tensor, Tensors, float], Tensor]
    """(W or full rows of W, float64; tensors; s) -> the same rows of the merged W; may overwrite W"""
    serve: Callable[[Tensors, Callable[[], Tensor], float], Slot] = serve_low_rank
    """(tensors, function that returns W in float64, s) -> how a server computes it beside other adapters"""
    tensors: Mapping[str, MethodTensor] = field(default_factory=lambda: FACTORS)
    """all of its tensors by name, A and B among them"""
    start: Callable[[Tensor], dict[str, Tensor]] | None = None
    """W as floats -> the first values, float32, of its tensors beside A and B; None: it has none"""
    peft: Mapping[str, bool] = field(default_factory=dict)
    """the settings of adapter_config.json that name the method; a setting that is not here is off"""
    saved_as: str | None = None
    """another method as which its patches are saved, because files do not show the difference; None: itself"""

    @property
    def additive(self) -> bool:
        """True if the change of W is s B A, whatever W is."""
        return self.tensors.keys() == FACTORS.keys()

    def stored_shapes(self, sizes: tuple[int, int], rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that a file holds. sizes: (out, in) of W."""
        return {name: tensor.shape(sizes, rank) for name, tensor in self.tensors.items() if tensor.stored}


def apply_low_rank(inputs: LayerCall, tensors: Tensors, s: float) -> Tensor:
    """Return y + s (x' A^T) B^T in y's dtype; minus s (x A0^T) B0^T for an adapter that started at A0 and B0.

    Both terms are computed alike, so they cancel to the bit until A or B is trained (decision 0017).
    """
    y = inputs.y()
    x = dropped(inputs.x, inputs.mask)
    delta = inputs.low_rank(x, tensors["lora_A"], tensors["lora_B"], y.dtype)
    if "lora_A0" in tensors:
        delta = delta - inputs.low_rank(inputs.x, tensors["lora_A0"], tensors["lora_B0"], y.dtype)
    return torch.add(y, delta, alpha=s)


def fused_low_rank(inputs: LayerCall, tensors: Tensors, s: float) -> Tensor | None:
    """Return `apply_low_rank` by `ops.lora_linear`, or None where that cannot compute it."""
    if "lora_A0" in tensors or not can_fuse(inputs.x, weight_of(inputs.layer)):
        return None
    return fused_product(inputs, tensors, s, None)


def fused_product(inputs: LayerCall, tensors: Tensors, s: float, gain: Tensor | None) -> Tensor:
    """Return x W^T + b + s (x' A^T) B^T, times a gain if there is one."""
    assert not isinstance(inputs.mask, DrawnMask)  # torch.compile's, under which nothing is fused
    return lora_linear(
        inputs.x,
        partial(inputs.kind.read, inputs.layer),  # not a method of `inputs`, which would hold x until backward
        inputs.bias,
        tensors["lora_A"],
        tensors["lora_B"],
        s,
        mask=inputs.mask,
        gain=gain,
        by_onednn=getattr(inputs.layer, "by_onednn", False),
    )


def merge_low_rank(W: Tensor, tensors: Tensors, s: float) -> Tensor:
    """Return W + s B A for a float64 W, which is overwritten. `lora.merge_weight` rounds the sum to the stored dtype.

    In bfloat16 that rounding loses every entry with |s B A| < 2**-9 |W|. Source: Hu et al. 2021, section 4.1.
    """
    W = W.addmm_(tensors["lora_B"].double(), tensors["lora_A"].double(), alpha=s)
    if "lora_A0" in tensors:
        W = W.addmm_(tensors["lora_B0"].double(), tensors["lora_A0"].double(), alpha=-s)
    return W


def row_norms(W: Tensor) -> dict[str, Tensor]:
    """Return the norms of W's rows, (out,), twice: a trainable magnitude, and a copy that stays |W|."""
    norm = torch.linalg.vector_norm(W, dim=1, dtype=torch.float64).float()
    return {MAGNITUDE: norm, "weight_norm": norm.clone()}


def apply_dora(inputs: LayerCall, tensors: Tensors, s: float) -> Tensor:
    """Return b + (m / |V|) x V^T with V = W + s B A, where m is the trainable magnitude of each row.

    |V| has no gradient, as in section 4.3 of the source. Dropout acts on the change of y alone, as in PEFT.
    Source: Liu et al. 2024 (arXiv 2402.09353), equation 5.
    """
    y = inputs.y()
    x = dropped(inputs.x, inputs.mask)
    gain = dora_gain(inputs, tensors, s)
    delta = inputs.low_rank(x, tensors["lora_A"], tensors["lora_B"], y.dtype)
    # y plus a change, not g (x V^T): an untrained adapter has g = 1 and B = 0, and y keeps its bits
    return y + (gain - 1).to(y.dtype) * inputs.product(x, y) + (gain * s).to(y.dtype) * delta


def fused_dora(inputs: LayerCall, tensors: Tensors, s: float) -> Tensor | None:
    """Return `apply_dora` fused. None with a bias, by which an untrained y would change, or dropout (two products)."""
    if inputs.bias is not None or inputs.mask is not None or not can_fuse(inputs.x, weight_of(inputs.layer)):
        return None
    return fused_product(inputs, tensors, s, dora_gain(inputs, tensors, s))


def dora_gain(inputs: LayerCall, tensors: Tensors, s: float) -> Tensor:
    """Return m / |V|, (out,) float32, without forming V."""
    with torch.no_grad():
        change = inputs.change_of_squared_norms(tensors["lora_A"].float(), tensors["lora_B"].float(), s)
        # clamped, because rounding may leave a sum below zero where V is close to zero
        norm = (tensors["weight_norm"].square() + change).clamp(min=0).sqrt()
    return row_gain(tensors[MAGNITUDE], norm)


def merge_dora(W: Tensor, tensors: Tensors, s: float) -> Tensor:
    """Return (m / |V|) V with V = W + s B A, for full rows of a float64 W, which are overwritten."""
    V = merge_low_rank(W, tensors, s)
    return V.mul_(row_gain(tensors[MAGNITUDE].double(), torch.linalg.vector_norm(V, dim=1))[:, None])


def serve_dora(tensors: Tensors, W: Callable[[], Tensor], s: float) -> Slot:
    """Return A, B times the gain m / |V|, and that gain, with |V| computed in float64."""
    stored = W()
    own = {name: tensor.to(stored.device) for name, tensor in tensors.items()}
    norm = torch.linalg.vector_norm(merge_low_rank(stored.clone(), own, s), dim=1)
    gain = row_gain(own[MAGNITUDE].double(), norm).float()
    return own["lora_A"], gain[:, None] * own["lora_B"], gain


def row_gain(magnitude: Tensor, norm: Tensor) -> Tensor:
    """Return m / |V| of each row, (out,); 1 where a row of V is zero, because no magnitude has a direction there."""
    zero = norm == 0
    return torch.where(zero, 1.0, magnitude / norm.masked_fill(zero, 1.0))


LORA = Method(scale=lambda alpha, r: alpha / r, apply=apply_low_rank, fused=fused_low_rank, merge=merge_low_rank)
RSLORA = replace(  # Kalajdzievski 2023 (arXiv 2312.03732)
    LORA, scale=lambda alpha, r: alpha / math.sqrt(r), peft={"use_rslora": True}
)
DORA = replace(
    LORA,
    apply=apply_dora,
    fused=fused_dora,
    merge=merge_dora,
    serve=serve_dora,
    tensors={
        **FACTORS,
        MAGNITUDE: MethodTensor(("out",)),
        "weight_norm": MethodTensor(("out",), trainable=False, stored=False),
    },
    start=row_norms,
    peft={"use_dora": True},
)
METHODS: Final[Mapping[str, Method]] = {
    "lora": LORA,
    "rslora": RSLORA,
    "lora_fa": replace(  # Zhang et al. 2023 (arXiv 2308.03303)
        LORA, tensors={**FACTORS, "lora_A": MethodTensor(("rank", "in"), trainable=False)}, saved_as="lora"
    ),
    "dora": DORA,
    "rsdora": replace(DORA, scale=RSLORA.scale, peft={**DORA.peft, **RSLORA.peft}),
}
PLAIN: Final = "lora"  # the method as which any s B A can be saved, with alpha = s r


def saved_as(name: str) -> str:
    """Return the method that the patches of a method name."""
    return METHODS[name].saved_as or name


def peft_keys() -> list[str]:
    """Return the settings of adapter_config.json by which methods differ."""
    return sorted({key for method in METHODS.values() for key in method.peft})


def method_of(settings: Mapping[str, object]) -> str | None:
    """Return the method that settings of adapter_config.json name; None if no method has all of them."""
    chosen = {key for key in peft_keys() if settings.get(key)}
    stored = (name for name, method in METHODS.items() if method.saved_as is None)
    return next((name for name in stored if {key for key, on in METHODS[name].peft.items() if on} == chosen), None)


def own_tensor_names() -> list[str]:
    """Return the names, in files too, of the tensors that methods have beside A and B."""
    return sorted({name for method in METHODS.values() for name in method.stored_shapes((1, 1), 1)} - FACTORS.keys())
