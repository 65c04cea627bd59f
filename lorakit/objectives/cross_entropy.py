"""The cross-entropy of every label token of a micro-batch, in float32. Objectives are made of these (objective.py).

Where no tensor of the output head is trainable, logits are computed in chunks of label positions, each with its
gradient: no tensor of tokens x vocabulary is ever formed (decision 0020). The gradient of any function of the losses is
that gradient, row by row, times the function's own.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lorakit.data.batch import IGNORE_INDEX, Batch
from lorakit.lora.own_head import own_head_of
from lorakit.objectives.divergence import Divergence, Teacher
from lorakit.objectives.objective import SFT, Objective, Scores
from lorakit.ops.encoder_head import EncoderHead, pooled_rows, token_types
from lorakit.ops.packed_attention import RowLengths, VarlenKernel
from lorakit.ops.products import linear

CHUNK_BYTES: Final = {"cpu": 1 << 25, "cuda": 1 << 29}  # device type -> bytes of one chunk's float32 logits
CHUNK_MULTIPLE: Final = 64
"""a chunk's label positions are a multiple of this, because matrix products of such heights were the fastest"""
GRADIENT_SCALE: Final = {torch.float16: 1024.0}
"""dtype -> factor on gradients between forward and backward, against underflow: float16's smallest number is 6e-8"""
FACTOR_KEYS: Final = ("logit_scale", "lm_head_multiplier")
DIVISOR_KEYS: Final = ("logits_scaling",)
CAP_KEY: Final = "final_logit_softcapping"
ComputeLosses = Callable[[Tensor, slice, bool], tuple[Tensor, Tensor]]
"""(logits of a chunk, its labels, whether the logits become their gradient) -> losses and hits"""


@dataclass(frozen=True)
class LogitTransform:
    """The operation of a model on its head's output z: logits = cap tanh(scale z / cap); scale z without a cap."""

    scale: float = 1.0
    cap: float | None = None


class LossModel(nn.Module):
    """A model as training calls it: token ids and labels in, the loss of each label token out, and if it was a hit."""

    def __init__(self, model: nn.Module, objective: Objective = SFT, *, label_smoothing: float = 0.0) -> None:
        """Find the model's head.

        label_smoothing: share of each label that is spread over all tokens of the vocabulary, in training mode.
        """
        super().__init__()
        self.model = model
        self.objective = objective  # what the engine minimises over these losses
        self.label_smoothing = label_smoothing
        # computes the losses from hidden states, chunk by chunk; None if the model's own head must be called
        self.head = None if own_head_of(model) or objective.reads_states else loss_head(model)
        self.chunked = self.head is not None  # uses it, so that no tensor of tokens x vocabulary is formed
        self.packed_attention = False  # passes row lengths to the model, whose attention then goes row by row
        self.line_lengths: list[int] = []  # of the rows under way, for the parts of the model in `row_by_row`
        self.row_by_row: list[nn.Module] = []
        self.kernel: VarlenKernel | None = None  # attends to all rows in one call
        self.kernel_problem: str | None = None  # why a device's kernel is not used

    def forward(
        self,
        labels: Tensor | None = None,
        row_lengths: RowLengths | None = None,
        label_positions: Tensor | None = None,
        teacher: Teacher | None = None,
        **inputs: Tensor,
    ) -> Any:
        """Return (losses, hits), each (labels,) float32; without labels, the logits (lines, tokens, vocabulary), or the
        hidden states where these are read.

        For an objective that reads hidden states, those before the labels, (labels, width) float32, are a third value.

        teacher: what the labels' losses compare with, by the objective's divergence; None: the labels alone.

        A hit is 1 where the label is the argmax of the logits, the first of equal ones, else 0, without gradient. With
        a head of the adapter's own the logits are its values, whose losses the objective may compute.
        """
        model_inputs = self.model_inputs(inputs, row_lengths)
        if labels is None:
            return self._hidden(model_inputs) if self.reads_states else self.model(**model_inputs).logits
        smoothing = self.label_smoothing if self.training else 0.0
        divergence = self.objective.divergence
        if self.chunked:
            assert self.head is not None
            hidden = self._hidden(model_inputs)
            return self.head(hidden, labels, label_positions, smoothing, divergence, teacher)
        if self.objective.reads_states:
            hidden = self._hidden(model_inputs)
            states, _ = select_labelled(hidden, labels, label_positions)
            zeros = states.new_zeros(len(states), dtype=torch.float32)
            return zeros, zeros, states.float()
        if (own_head := own_head_of(self.model)) is not None:
            hidden = self._hidden(model_inputs)
            if isinstance(own_head, EncoderHead):  # each token has its row's, and one token of a row is a label
                of_rows = pooled_rows(hidden, inputs["attention_mask"], own_head.mode)
                hidden = of_rows[:, None].expand_as(hidden)
            hidden, labels = select_labelled(hidden, labels, label_positions)
            logits = own_head(hidden)
            if self.objective.head_loss is not None:
                return self.objective.head_loss(logits.float(), labels)
        else:
            logits, labels = select_labelled(self.model(**model_inputs).logits, labels, label_positions)
        hits = (logits.detach().argmax(-1) == labels).float()
        if divergence is not None and teacher is not None:
            return divergence.of_logits(logits.float(), labels, teacher), hits
        return F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=smoothing), hits

    @property
    def reads_states(self) -> bool:
        """True if the losses are of hidden states, which no head of tokens reads."""
        return self.objective.reads_states or isinstance(own_head_of(self.model), EncoderHead)

    def _hidden(self, model_inputs: Mapping[str, Any]) -> Tensor:
        """Return the hidden states after the last norm, (lines, tokens, width). An encoder is its own base model."""
        states: Tensor = self.model.base_model(**model_inputs)[0]  # type: ignore[operator]
        return states

    def model_inputs(self, inputs: Mapping[str, Tensor], row_lengths: RowLengths | None) -> dict[str, Any]:
        """Return the arguments of the model's forward, with the row lengths where its attention reads them."""
        model_inputs: dict[str, Any] = {**inputs, "use_cache": False}
        head = own_head_of(self.model)
        if isinstance(head, EncoderHead) and head.separator is not None:
            model_inputs["token_type_ids"] = token_types(inputs["input_ids"], head.separator)
        self.line_lengths[:] = () if row_lengths is None else row_lengths.lengths
        if self.packed_attention and row_lengths is not None:
            row_lengths.kernel = self.kernel
            model_inputs["row_lengths"] = row_lengths
        return model_inputs


def token_scores(model: nn.Module, batch: Batch) -> Scores:
    """Return the scores of a micro-batch. `model`: a `LossModel`, or the engine's wrapper of one."""
    losses, hits, *states = model(**loss_inputs(batch))
    return Scores(losses, hits, batch.label_weights, states=states[0] if states else None)


def loss_inputs(batch: Batch) -> dict[str, Any]:
    mask = batch.attention_mask
    tokens = {"input_ids": batch.input_ids, "labels": batch.labels, "label_positions": batch.label_positions}
    by_kind = {"position_ids": batch.position_ids} if mask is None else {"attention_mask": mask}
    rows = {"row_lengths": RowLengths(batch.row_lengths, shared=batch.row_shared)} if batch.row_lengths else {}
    teacher = {} if batch.teacher is None else {"teacher": batch.teacher}
    return {**tokens, **by_kind, **rows, **teacher}


def select_labelled(values: Tensor, labels: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the label tokens' part of values (..., size) and labels (...), as (labels, size) and (labels,).

    `positions`: flat indices of the label tokens, from the host. With None they are computed on the device, and Python
    waits for it, because the size of the result depends on them.
    """
    values = values.flatten(0, -2)
    labels = labels.flatten()
    selected = labels != IGNORE_INDEX if positions is None else positions
    return values[selected], labels[selected]


class HeadVocabulary:
    """The tokens whose logits a head computes: all ``size`` of them.

    A head with the rows of some tokens alone has a subclass, whose methods combine its logits with those of the others.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def enter(self, hidden: Tensor) -> Tensor:
        """Return the hidden states (labels, width); their gradient is the sum of those by all rows of the head."""
        return hidden

    def max_rows(self) -> int:
        """Return the number of logits of a label by which chunks are sized."""
        return self.size

    def rows_of(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head's row of each of these tokens (labels, any), and 1.0 where the head has it, else 0.0."""
        return labels, torch.ones_like(labels, dtype=torch.float32)

    def come_before(self, rows: Tensor, labels: Tensor) -> Tensor:
        """True where a row of the head is of an earlier token than the label, each (labels, 1)."""
        return rows < labels

    def maximum(self, largest: Tensor) -> Tensor:
        """Return the largest logit of each label, given that of the head's rows; may overwrite it."""
        return largest

    def sums(self, partial: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the sums over all tokens, given those over the head's rows, each (labels, any)."""
        return partial

    def hits(self, z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest logit of each label, and 1.0 where an earlier token than the label has it here.

        Logits z (labels, rows), labels (labels, 1); both results (labels, 1). A hit is the argmax, which of equal
        logits is the first: with ties counted, a model whose logits are all equal would have an accuracy of 1.
        """
        own, first = z.max(1, keepdim=True)
        largest = self.maximum(own.clone())
        return largest, ((own == largest) & self.come_before(first, labels)).float()


class LossHead(nn.Module):
    """A frozen output head and the loss in one module.

    Its weight is the head's own parameter: engines gather a module's own parameters before its forward, and the head's
    forward itself is never called.
    """

    bias: nn.Parameter | None
    by_onednn = False  # multiplies by the weight with oneDNN where it can (`ops.products`)
    device_type: str | None = None  # whose chunks to compute; None: of the tensors' own device (a plan's are on meta)

    def __init__(self, head: nn.Linear, transform: LogitTransform, vocabulary: HeadVocabulary | None = None) -> None:
        """Share the head's tensors. vocabulary: the tokens whose rows they are; None: all of them."""
        super().__init__()
        self.register_parameter("weight", head.get_parameter("weight"))
        self.register_parameter("bias", head.bias)
        self.transform = transform
        self.vocabulary = vocabulary or HeadVocabulary(head.out_features)

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        positions: Tensor | None = None,
        smoothing: float = 0.0,
        divergence: Divergence | None = None,
        teacher: Teacher | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (losses, hits) of the label tokens, each (labels,), for hidden (..., width) and labels (...).

        smoothing: share of each label that is spread over all tokens of the vocabulary. With a teacher, the losses are
        its divergence.
        """
        hidden, labels = select_labelled(hidden, labels, positions)
        hidden = self.vocabulary.enter(hidden)
        labels = labels[:, None]

        def compute(z: Tensor, chunk: slice, has_gradient: bool) -> tuple[Tensor, Tensor]:
            if divergence is None or teacher is None:
                return _cross_entropy_(z, labels[chunk], self.vocabulary, smoothing, has_gradient)
            part = teacher[0][chunk], teacher[1][chunk]
            return divergence.of_chunk(z, labels[chunk], part, self.vocabulary, has_gradient)

        losses, hits = _LinearLoss.apply(hidden, self, compute)  # type: ignore[no-untyped-call]
        return losses, hits

    def chunks(self, hidden: Tensor) -> Iterator[slice]:
        """Yield the parts of the label tokens whose logits are in memory at once."""
        chunk_bytes = CHUNK_BYTES.get(self.device_type or hidden.device.type, CHUNK_BYTES["cpu"])
        size = chunk_bytes // (4 * self.vocabulary.max_rows())
        size = max(1, size - size % CHUNK_MULTIPLE or size)
        return (slice(start, start + size) for start in range(0, len(hidden), size))

    def logits(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits (labels, rows) float32, and the cap's slope d logits / d (scale z); None without a cap."""
        weight = self.get_parameter("weight")
        z = linear(hidden, weight, self.bias, by_onednn=self.by_onednn).float()
        if self.transform.scale != 1.0:
            z = z.mul_(self.transform.scale)
        if self.transform.cap is None:
            return z, None
        tanh = z.div_(self.transform.cap).tanh_()
        return tanh * self.transform.cap, 1 - tanh.square()


def loss_head(model: nn.Module) -> LossHead | None:
    """Return a model's head for the chunked loss; None if it is trainable, adapted, or no plain linear layer.

    Its operation on logits is the one that the model's config describes. A config may be incomplete: a run first
    compares the chunked loss with the loss of the model's own logits.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    is_plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
    backbone = getattr(model, "base_model", model)
    if not is_plain or backbone is model or any(p.requires_grad for p in head.parameters()):
        return None
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    values = {name: getattr(config, name, None) for name in (*FACTOR_KEYS, *DIVISOR_KEYS, CAP_KEY)}
    factors = [values[name] or 1.0 for name in FACTOR_KEYS] + [1.0 / (values[name] or 1.0) for name in DIVISOR_KEYS]
    return LossHead(head, LogitTransform(math.prod(factors), values[CAP_KEY]))


@final
class _LinearLoss(torch.autograd.Function):
    """Linear layer and loss of each label. Forward computes the gradient of `hidden` too, from these logits.

    Saved for backward is that gradient, (labels, width), instead of logits, (labels, vocabulary). A label's loss
    depends on its own hidden state alone, so backward multiplies each row by the gradient of that label's loss.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: LossHead, compute: ComputeLosses) -> tuple[Tensor, Tensor]:
        weight = head.get_parameter("weight")
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        hits = torch.empty_like(losses)
        gradient_scale = GRADIENT_SCALE.get(hidden.dtype, 1.0)
        for chunk in head.chunks(hidden):
            z, slope = head.logits(hidden[chunk])
            losses[chunk], hits[chunk] = compute(z, chunk, gradient is not None)
            if gradient is not None:
                if slope is not None:
                    z.mul_(slope)
                if head.transform.scale * gradient_scale != 1.0:
                    z.mul_(head.transform.scale * gradient_scale)
                if head.by_onednn:
                    gradient[chunk] = linear(z.to(weight.dtype), weight.T, None, by_onednn=True)
                else:
                    torch.mm(z.to(weight.dtype), weight, out=gradient[chunk])
            del z, slope  # before the next chunk's logits are computed, or two chunks would be there at once
        ctx.save_for_backward(gradient)
        ctx.gradient_scale = gradient_scale
        ctx.mark_non_differentiable(hits)
        return losses, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        factors = (outer[0] / ctx.gradient_scale)[:, None]
        return (gradient.float() * factors).to(gradient.dtype), None, None


def _cross_entropy_(
    z: Tensor, labels: Tensor, vocabulary: HeadVocabulary, smoothing: float, has_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return (losses, hits), each (labels,), for logits z (labels, rows) and labels (labels, 1).

    Overwrites z, with d loss / d logits where it has a gradient.
    """
    rows, is_here = vocabulary.rows_of(labels)
    target_logits = z.gather(1, rows) * is_here
    mean = z.sum(1, keepdim=True).div_(vocabulary.size) if smoothing else None
    # in place from here, because torch.logsumexp would allocate a second chunk
    largest, earlier = vocabulary.hits(z, labels)
    total = z.sub_(largest).exp_().sum(1, keepdim=True)
    partial = [total, target_logits, earlier, *([] if mean is None else [mean])]
    total, target_logits, earlier, *means = vocabulary.sums(partial)
    hits = (target_logits == largest) & (earlier == 0)
    if smoothing:
        # -log p is log-sum-exp minus logit: averaged over all tokens with the share, of the label with the rest
        target_logits = torch.lerp(target_logits, means[0], smoothing)
    if has_gradient:  # softmax - one-hot, or the smoothed label
        z.div_(total).scatter_add_(1, rows, is_here * (smoothing - 1.0))
    if has_gradient and smoothing:
        z.sub_(smoothing / vocabulary.size)
    return (total.log() + largest - target_logits)[:, 0], hits[:, 0]
