"""A head of the adapter's own, beside the base's: it gives the logits of classes, or a reward, for a hidden state.

It is the layer ``score`` of transformers' classifiers, without a bias, so that PEFT and vLLM read a patch with one as
an adapter of such a classifier.
"""

from typing import Final

import torch
from torch import nn

from lorakit.errors import TargetError
from lorakit.lora.module import AdapterModule, beside
from lorakit.lora.modules_to_save import TrainableModule

OWN_HEAD: Final = "score"
STD: Final = 0.02  # of its first values, as in transformers' configs


def add_own_head(model: nn.Module, num_values: int, seed: int) -> None:
    """Put a trainable head, (..., width) -> (..., num_values), on a model, in place. Raises TargetError: no place."""
    own = model.get_output_embeddings()  # type: ignore[operator]
    name = type(model).__name__
    if getattr(model, "base_model", model) is model or not hasattr(own, "in_features"):
        raise TargetError(f"{name}: no place for a head of the adapter's own, beside the base's")
    check_head_unadapted(model)
    like = next(model.parameters())
    head = TrainableModule(nn.Linear(own.in_features, num_values, bias=False, device="meta", dtype=like.dtype))
    weight = torch.empty(num_values, own.in_features)  # on the CPU, so that it is the same on every device
    weight.normal_(0.0, STD, generator=torch.Generator().manual_seed(seed))
    head.make_trainable("weight", beside(like, weight))
    model.add_module(OWN_HEAD, head)


def check_head_unadapted(model: nn.Module) -> None:
    """Raise TargetError if something on the base's output head learns, which the run would not use."""
    own = model.get_output_embeddings()  # type: ignore[operator]
    if isinstance(own, AdapterModule) and own.adapter_tensors():
        raise TargetError(f"adapter: the output head of {type(model).__name__} is not used here; leave it out")


def own_head_of(model: nn.Module) -> nn.Module | None:
    """Return the head that `add_own_head` put on a model, or None."""
    head = getattr(model, OWN_HEAD, None)
    return head if isinstance(head, TrainableModule) else None
