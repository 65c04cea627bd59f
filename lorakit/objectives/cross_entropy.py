"""The cross-entropy of every label token of a micro-batch, in float32. Objectives are made of these (objective.py).

Where no tensor of the output head is trainable, logits are computed in chunks of label positions, each with its
gradient: no tensor of tokens x vocabulary is ever formed (decision 0020). The gradient of any function of the losses is
that gradient, row by row, times the function's own.
"""

import math
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lorakit.data.batch import IGNORE_INDEX, Batch
from lorakit.objectives.objective import SFT, Objective, Scores
from lorakit.ops.head_exchange import HeadExchange
from lorakit.ops.packed_attention import RowLengths
from lorakit.ops.stage import Stage
from lorakit.ops.tensor_parallel import VocabularyPart
from lorakit.ops.token_parts import TokenParts
from lorakit.ops.varlen import KernelProbe, VarlenKernel

CHUNK_BYTES: Final = {"cpu": 1 << 25, "cuda": 1 << 29}
"""device type -> bytes of one chunk's float32 logits"""
CHUNK_MULTIPLE: Final = 64
"""a chunk's label positions are a multiple of this, because matrix products of such heights were the fastest"""
GRADIENT_SCALE: Final = {torch.float16: 1024.0}
"""dtype -> factor on gradients between forward and backward, against underflow: float16's smallest number is 6e-8"""
FACTOR_KEYS: Final = ("logit_scale", "lm_head_multiplier")
DIVISOR_KEYS: Final = ("logits_scaling",)
CAP_KEY: Final = "final_logit_softcapping"


@dataclass(frozen=True)
class LogitTransform:
    """The operation of a model on its head's output z: logits = cap tanh(scale z / cap); scale z without a cap."""

    scale: float = 1.0
    cap: float | None = None


@final
class LossModel(nn.Module):
    """A model as training calls it: token ids and labels in, the loss of each label token out, and if it was a hit.

    `chunked`: compute logits for a chunk of label positions at a time, never tokens x vocabulary.
    `packed_attention`: pass row lengths to the model, whose attention then goes row by row (`ops.packed_attention`).
    `kernel`: attends to all rows in one call; None for row by row. `kernel_problem`: why a device's kernel is not used.
    `stage`: the layers that are here, where other processes have the others; None if all are.
    `exchange`: the ranks that share the tokens of a line; None if there are none, or only full lines come.
    `vocabulary`: the tokens whose rows of the head are here; None: all of them.
    `token_parts`: the tokens that are here between the blocks; None: all of them.
    `objective`: what the engine minimises over these losses. `device_type`: the device whose chunks to compute, where
    that is not the one of the tensors (a plan's are on meta). `label_smoothing`: share of each label that is spread
    over all tokens of the vocabulary, in training mode alone.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective = SFT,
        *,
        device_type: str | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.model, self.objective, self.label_smoothing = model, objective, label_smoothing
        self._device_type, self.packed_attention = device_type, False
        self.vocabulary: VocabularyPart | None = None
        self.token_parts: TokenParts | None = None
        self.find_head()
        self.kernel: VarlenKernel | KernelProbe | None = None
        self.exchange: HeadExchange | None = None
        self.stage: Stage | None = None
        self.kernel_problem: str | None = None

    def find_head(self) -> None:
        """Read the model's head, and once more after its tensors were replaced."""
        self.head = loss_head(self.model, self._device_type, self.vocabulary)
        self.chunked = self.head is not None

    def forward(
        self,
        labels: Tensor | None = None,
        row_lengths: RowLengths | None = None,
        label_positions: Tensor | None = None,
        own_stage: bool = False,
        hidden: Tensor | None = None,
        **inputs: Tensor,
    ) -> Any:
        """Return (losses, hits), each (labels,) float32; without labels, the logits (lines, tokens, vocabulary).

        A hit is 1 where the label has the largest logit, else 0, without gradient. Where other processes have a part of
        the model, all compute in turn, without gradient, and all return the last one's result.

        own_stage: compute the part of the model that is here alone, for hidden (lines, tokens, width) of the stage
        before; a stage that is not the last returns hidden states too.
        """
        model_inputs: dict[str, Any] = {**inputs, "use_cache": False}
        if self.packed_attention and row_lengths is not None:
            row_lengths.kernel, row_lengths.exchange = self.kernel, self.exchange if row_lengths.is_part else None
            model_inputs["row_lengths"] = row_lengths
        if self.stage is None or own_stage:
            return self._outputs(model_inputs, labels, label_positions, hidden)
        link = self.stage.link
        with torch.no_grad():
            if not link.is_first:
                hidden = link.receive_hidden(inputs["input_ids"].shape)
            result = self._outputs(model_inputs, labels, label_positions, hidden)
            if not link.is_last:
                link.send_hidden(result).wait()
                result = None
            tensors = link.from_last([result] if isinstance(result, Tensor) else result)
            return tensors[0] if labels is None else tuple(tensors)

    def _outputs(
        self, model_inputs: dict[str, Any], labels: Tensor | None, label_positions: Tensor | None, hidden: Tensor | None
    ) -> Any:
        if self.stage is not None:
            model_inputs = self.stage.inputs(model_inputs, hidden)
            if not self.stage.link.is_last:
                self.model.base_model(**model_inputs)  # type: ignore[operator]
                return self.stage.output()
        if labels is None:
            logits: Tensor = self.model(**model_inputs).logits
            return logits
        smoothing = self.label_smoothing if self.training else 0.0
        if self.chunked:
            assert self.head is not None
            hidden = self.model.base_model(**model_inputs)[0]  # type: ignore[operator]
            if self.token_parts is not None:
                hidden = self.token_parts.gathered(hidden, summed=self.vocabulary is not None)
            return self.head(hidden, labels, label_positions, smoothing, self._sums_hidden_gradient())
        logits, labels = select_labelled(self.model(**model_inputs).logits, labels, label_positions)
        hits = (logits.detach().argmax(-1) == labels).float()
        return F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=smoothing), hits

    def _sums_hidden_gradient(self) -> bool:
        """True if the loss sums the ranks' gradients of hidden states; tokens in parts are summed when they part."""
        return self.token_parts is None or self.token_parts.problem is not None


def token_scores(model: nn.Module, batch: Batch) -> Scores:
    """Return what a `LossModel` says of a micro-batch. `model`: the engine's wrapper of it, or itself."""
    losses, hits = model(**loss_inputs(batch))
    return Scores(losses, hits, batch.label_weights)


def loss_inputs(batch: Batch) -> dict[str, Any]:
    """Return the arguments of a `LossModel` for a micro-batch."""
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids, "labels": batch.labels, "label_positions": batch.label_positions,
    }  # fmt: skip
    if batch.attention_mask is not None:
        inputs["attention_mask"] = batch.attention_mask
    else:
        inputs["position_ids"] = batch.position_ids
    if batch.row_lengths:
        inputs["row_lengths"] = RowLengths(batch.row_lengths, is_part=batch.start is not None)
    return inputs


def select_labelled(values: Tensor, labels: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the label tokens' part of values (..., size) and labels (...), as (labels, size) and (labels,).

    `positions`: flat indices of the label tokens, from the host. With None they are computed on the device, and Python
    waits for it, because the size of the result depends on them.
    """
    values, labels = values.flatten(0, -2), labels.flatten()
    selected = labels != IGNORE_INDEX if positions is None else positions
    return values[selected], labels[selected]


@final
class LossHead(nn.Module):
    """A frozen output head and the loss in one module.

    Its weight is the head's own parameter: engines gather a module's own parameters before its forward, and the head's
    forward itself is never called.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        head: nn.Linear,
        transform: LogitTransform,
        device_type: str | None = None,
        vocabulary: VocabularyPart | None = None,
    ) -> None:
        super().__init__()
        self.register_parameter("weight", head.get_parameter("weight"))
        self.register_parameter("bias", head.bias)
        self.transform, self.device_type, self.vocabulary = transform, device_type, vocabulary

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        positions: Tensor | None = None,
        smoothing: float = 0.0,
        sums_gradient: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return (losses, hits) of the label tokens, each (labels,), for hidden (..., width) and labels (...).

        smoothing: share of each label that is spread over all tokens of the vocabulary. sums_gradient: sum the gradient
        of `hidden` over the ranks that have parts of the vocabulary; otherwise it is this rank's part of the sum.
        """
        hidden, labels = select_labelled(hidden, labels, positions)
        weight = self.get_parameter("weight")
        chunk_bytes = CHUNK_BYTES.get(self.device_type or hidden.device.type, CHUNK_BYTES["cpu"])
        settings = (self.transform, chunk_bytes, smoothing, self.vocabulary, sums_gradient)
        losses, hits = _LinearCrossEntropy.apply(hidden, weight, self.bias, labels, *settings)  # type: ignore[no-untyped-call]
        return losses, hits


def loss_head(
    model: nn.Module, device_type: str | None = None, vocabulary: VocabularyPart | None = None
) -> LossHead | None:
    """Return a model's head for the chunked loss; None if it is trainable, adapted, or no plain linear layer."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    is_plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
    backbone = getattr(model, "base_model", model)
    if not is_plain or backbone is model or any(p.requires_grad for p in head.parameters()):
        return None
    return LossHead(head, logit_transform(model), device_type, vocabulary)


def logit_transform(model: nn.Module) -> LogitTransform:
    """Return the operation on the head's output that a model's config describes.

    A config may be incomplete: a run first compares the chunked loss with the loss of the model's own logits.
    """
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    values = {name: getattr(config, name, None) for name in (*FACTOR_KEYS, *DIVISOR_KEYS, CAP_KEY)}
    factors = [values[name] or 1.0 for name in FACTOR_KEYS] + [1.0 / (values[name] or 1.0) for name in DIVISOR_KEYS]
    return LogitTransform(math.prod(factors), values[CAP_KEY])


@final
class _LinearCrossEntropy(torch.autograd.Function):
    """Linear layer and cross-entropy of each label. Forward computes the gradient of `hidden` too, from these logits.

    Saved for backward is that gradient, (labels, width), instead of logits, (labels, vocabulary). A label's loss
    depends on its own hidden state alone, so backward multiplies each row by the gradient of that label's loss.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        transform: LogitTransform,
        chunk_bytes: int,
        smoothing: float,
        vocabulary: VocabularyPart | None,
        sums_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        losses, hits = (torch.empty(len(labels), dtype=torch.float32, device=hidden.device) for _ in range(2))
        gradient_scale = GRADIENT_SCALE.get(hidden.dtype, 1.0)
        num_tokens = weight.shape[0] if vocabulary is None else vocabulary.count
        size = chunk_bytes // (4 * (weight.shape[0] if vocabulary is None else vocabulary.max_rows))
        size = max(1, size - size % CHUNK_MULTIPLE or size)
        for start in range(0, len(labels), size):
            chunk = slice(start, start + size)
            targets, is_here = _own_targets(labels[chunk, None], weight.shape[0], vocabulary)
            z, slope = _transformed(F.linear(hidden[chunk], weight, bias).float(), transform)
            # in place from here, because torch.logsumexp would allocate a second chunk
            largest, target_logits = z.amax(1, keepdim=True), z.gather(1, targets)
            mean = z.sum(1, keepdim=True).div_(num_tokens) if smoothing else None
            if vocabulary is not None:
                vocabulary.group.maximum(largest)
            total = z.sub_(largest).exp_().sum(1, keepdim=True)
            if vocabulary is not None:
                own = [total, target_logits * is_here, *([] if mean is None else [mean])]
                total, target_logits, *means = vocabulary.group.sum(torch.cat(own, 1)).split(1, dim=1)
                mean = means[0] if means else None
            hits[chunk] = (target_logits == largest)[:, 0]
            if mean is not None:
                # -log p is log-sum-exp minus logit: averaged over all tokens with the share, of the label with the rest
                target_logits = torch.lerp(target_logits, mean, smoothing)
            losses[chunk] = (total.log() + largest - target_logits)[:, 0]
            if gradient is not None:
                # d loss / d logits = softmax - one-hot, or the smoothed label
                z.div_(total).scatter_add_(1, targets, is_here * (smoothing - 1.0))
                if smoothing:
                    z.sub_(smoothing / num_tokens)
                if slope is not None:
                    z.mul_(slope)
                if transform.scale * gradient_scale != 1.0:
                    z.mul_(transform.scale * gradient_scale)
                torch.mm(z.to(weight.dtype), weight, out=gradient[chunk])
            del z, slope  # before the next chunk's logits are computed, or two chunks would be there at once
        ctx.save_for_backward(gradient)
        ctx.gradient_scale, ctx.vocabulary = gradient_scale, vocabulary if sums_gradient else None
        ctx.mark_non_differentiable(hits)
        return losses, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        factors = (outer[0] / ctx.gradient_scale)[:, None]
        dhidden = (gradient.float() * factors).to(gradient.dtype)
        if ctx.vocabulary is not None:
            dhidden = ctx.vocabulary.group.sum(dhidden)
        return dhidden, *[None] * 8


def _own_targets(labels: Tensor, num_rows: int, vocabulary: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """Return the labels as rows of the head that are here, and 1.0 for each that is, else 0.0; both (labels, 1)."""
    if vocabulary is None:
        return labels, torch.ones_like(labels, dtype=torch.float32)
    rows = labels - vocabulary.start
    is_here = (rows >= 0) & (rows < num_rows)
    return rows.masked_fill(~is_here, 0), is_here.float()


def _transformed(z: Tensor, transform: LogitTransform) -> tuple[Tensor, Tensor | None]:
    """Return the logits for z, which is overwritten, and the cap's slope d logits / d (scale z); None without a cap."""
    if transform.scale != 1.0:
        z = z.mul_(transform.scale)
    if transform.cap is None:
        return z, None
    tanh = z.div_(transform.cap).tanh_()
    return tanh * transform.cap, 1 - tanh.square()
