"""The loss of a micro-batch: cross-entropy summed over label tokens, in float32."""

import torch.nn.functional as F
from torch import Tensor, nn

from lorakit.batch import IGNORED, Batch


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """Sum of token losses (a scalar). The caller divides by the number of label tokens of the whole step."""
    if batch.attention_mask is None:
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    else:
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    labelled = batch.labels != IGNORED
    return F.cross_entropy(logits[labelled].float(), batch.labels[labelled], reduction="sum")
