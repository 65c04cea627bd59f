"""The loss of a micro-batch: cross-entropy summed over label tokens, in float32.

Where nothing on the output head learns, its product is made in chunks of label positions, and their gradient at once:
logits are never kept, so memory does not grow with vocabulary times tokens.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lorakit.data.batch import IGNORE_INDEX, Batch
from lorakit.ops.gated_mlp import choose, last_gate
from lorakit.ops.packed_attention import RowLengths
from lorakit.ops.varlen import KernelProbe, VarlenKernel

CHUNK_BYTES: Final = {"cpu": 1 << 25, "cuda": 1 << 29}
"""Of float32 logits that are there at a time."""
ROUND: Final = 64
"""Products of as many rows, or a multiple of them, are the fastest."""
GRADIENT_SCALE: Final = {torch.float16: 1024.0}
"""What gradients are multiplied by while they are in a dtype whose smallest number is not small."""
FACTORS: Final = ("logit_scale", "lm_head_multiplier")
DIVISORS: Final = ("logits_scaling",)
CAP: Final = "final_logit_softcapping"


@dataclass(frozen=True)
class LogitTransform:
    """What a model does with its head's product: logits = cap tanh(scale z / cap)."""

    scale: float = 1.0
    cap: float | None = None


@final
class LossModel(nn.Module):
    """A model as training calls it: token ids and labels in, the sum of its label tokens' losses out.

    ``chunked``: whether logits are made in chunks. ``leaves_out``: whether the last MLP may leave out tokens with no
    label. ``by_row``: whether packed rows attend row by row.
    ``kernel``: what then attends to all rows in one call; ``kernel_problem``: why none does, on a device that has one.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head = loss_head(model)
        self.chunked, self.by_row = self.head is not None, False
        gate = last_gate(model)
        self.leaves_out, self._choose = gate is not None, None if gate is None else partial(choose, gate)
        self._left: float | None = None
        self.kernel: VarlenKernel | KernelProbe | None = None
        self.kernel_problem: str | None = None

    @contextmanager
    def leaving_out(self, left: float = 0.0) -> Iterator[None]:
        """Around forward and backward: ``left`` is what the last MLP gives for tokens it leaves out, if it may."""
        if self._choose is None or not self.leaves_out:
            yield
            return
        self._left = left
        try:
            yield
        finally:
            self._left = None
            self._choose(None, 0, 0.0)

    def forward(
        self, labels: Tensor | None = None, row_lengths: RowLengths | None = None, label_positions: Tensor | None = None,
        **inputs: Tensor,
    ) -> Tensor:  # fmt: skip
        """The sum of token losses, a scalar; without labels the logits (lines, tokens, vocabulary)."""
        model_inputs: dict[str, Any] = {**inputs, "use_cache": False}
        if self.by_row and row_lengths is not None:
            row_lengths.kernel = self.kernel
            model_inputs["row_lengths"] = row_lengths
        if self._choose is not None and self._left is not None:
            self._choose(label_positions, 0 if labels is None else labels.numel(), self._left)
        if labels is None:
            logits: Tensor = self.model(**model_inputs).logits
            return logits
        if self.chunked:
            assert self.head is not None
            hidden: Tensor = self.model.base_model(**model_inputs)[0]  # type: ignore[operator]
            summed: Tensor = self.head(hidden, labels, label_positions)
            return summed
        logits, labels = select_labelled(self.model(**model_inputs).logits, labels, label_positions)
        return F.cross_entropy(logits.float(), labels, reduction="sum")


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """Sum of token losses (a scalar) of a ``LossModel``; the caller divides by the label tokens of the whole step."""
    inputs = {"input_ids": batch.input_ids, "labels": batch.labels}
    if batch.attention_mask is not None:
        inputs["attention_mask"] = batch.attention_mask
    else:
        inputs["position_ids"] = batch.position_ids
    rows = {"row_lengths": RowLengths(batch.row_lengths)} if batch.row_lengths else {}
    summed: Tensor = model(**inputs, **rows, label_positions=batch.label_positions)
    return summed


def select_labelled(values: Tensor, labels: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor]:
    """values (..., size) and labels (...) where there is a label: (labels, size) and (labels,).

    ``places``: where that is; without them the device is asked, and waited for.
    """
    values, labels = values.flatten(0, -2), labels.flatten()
    chosen = labels != IGNORE_INDEX if places is None else places
    return values[chosen], labels[chosen]


@final
class LossHead(nn.Module):
    """The output head and the loss in one. Its weight is the head's own, so that engines gather it for this."""

    bias: nn.Parameter | None

    def __init__(self, head: nn.Linear, rule: LogitTransform) -> None:
        super().__init__()
        self.register_parameter("weight", head.get_parameter("weight"))
        self.register_parameter("bias", head.bias)
        self.rule = rule

    def forward(self, hidden: Tensor, labels: Tensor, places: Tensor | None = None) -> Tensor:
        """hidden (..., width), labels (...) -> the sum of the losses where there is a label, float32."""
        hidden, labels = select_labelled(hidden, labels, places)
        weight = self.get_parameter("weight")
        summed: Tensor = _LinearCrossEntropy.apply(hidden, weight, self.bias, labels, self.rule)  # type: ignore[no-untyped-call]
        return summed


def loss_head(model: nn.Module) -> LossHead | None:
    """The head of a model when its loss can be made in chunks; None when something on it learns, or it is unlike."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
    backbone = getattr(model, "base_model", model)
    if not plain or backbone is model or any(p.requires_grad for p in head.parameters()):
        return None
    return LossHead(head, logit_rule(model))


def logit_rule(model: nn.Module) -> LogitTransform:
    """What the config says is done with the head's product. A run asks the model itself before it relies on it."""
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    model_inputs = {name: getattr(config, name, None) for name in (*FACTORS, *DIVISORS, CAP)}
    factors = [model_inputs[name] or 1.0 for name in FACTORS] + [1.0 / (model_inputs[name] or 1.0) for name in DIVISORS]
    return LogitTransform(math.prod(factors), model_inputs[CAP])


@final
class _LinearCrossEntropy(torch.autograd.Function):
    """Forward makes the gradient too: it needs the same logits, and the head itself does not learn."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, rule: LogitTransform
    ) -> Tensor:  # fmt: skip
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        summed = torch.zeros((), device=hidden.device)
        lift = GRADIENT_SCALE.get(hidden.dtype, 1.0)
        size = CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["cpu"]) // (4 * weight.shape[0])
        size = max(1, size - size % ROUND or size)
        for start in range(0, len(labels), size):
            part = slice(start, start + size)
            z = F.linear(hidden[part], weight, bias).float()
            wanted = labels[part, None]
            z, slope = _ruled(z, rule)
            largest, found = z.amax(1, keepdim=True), z.gather(1, wanted)
            total = z.sub_(largest).exp_().sum(1, keepdim=True)
            summed += (total.log() + largest - found).sum()
            if gradient is not None:
                z.div_(total).scatter_add_(1, wanted, z.new_full(wanted.shape, -1.0))
                if slope is not None:
                    z.mul_(slope)
                if rule.scale * lift != 1.0:
                    z.mul_(rule.scale * lift)
                torch.mm(z.to(weight.dtype), weight, out=gradient[part])
        ctx.save_for_backward(gradient)
        ctx.lift = lift
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return (gradient.float() * (outer[0] / ctx.lift)).to(gradient.dtype), None, None, None, None


def _ruled(z: Tensor, rule: LogitTransform) -> tuple[Tensor, Tensor | None]:
    """Logits, and what a cap makes of their gradient."""
    if rule.scale != 1.0:
        z = z.mul_(rule.scale)
    if rule.cap is None:
        return z, None
    bent = z.div_(rule.cap).tanh_()
    return bent * rule.cap, 1 - bent.square()
