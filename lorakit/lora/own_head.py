"""A head of the adapter's own, beside the base's: it gives the logits of classes, or a reward, for a hidden state.

It is the layer ``score`` of transformers' classifiers, without a bias, so that PEFT and vLLM read a patch with one as
an adapter of such a classifier. That of an encoder is its own classifier's (ops/encoder_head.py).
"""

from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from lorakit.errors import TargetError
from lorakit.files.base_files import BaseFiles, open_base_files
from lorakit.lora.linear import AdapterModule, beside
from lorakit.lora.modules_to_save import TrainableModule
from lorakit.ops.encoder_head import EncoderHead, is_encoder
from lorakit.ops.stored_names import stored_name

OWN_HEAD: Final = "score"
OF_ENCODER: Final = f"{OWN_HEAD}.model."  # how the names of the tensors of an encoder's head begin
STD: Final = 0.02  # of its first values, as in transformers' configs


def add_own_head(model: nn.Module, num_values: int, seed: int) -> None:
    """Put a trainable head, (..., width) -> (..., num_values), on a model, in place. Raises TargetError: no place."""
    own = model.get_output_embeddings()  # type: ignore[operator]
    name = type(model).__name__
    if is_encoder(model):
        _add_encoder_head(model, num_values, seed)
        return
    if not hasattr(own, "in_features"):
        raise TargetError(f"{name}: no place for a head of the adapter's own, beside the base's")
    check_head_unadapted(model)
    like = next(model.parameters())
    head = TrainableModule(nn.Linear(own.in_features, num_values, bias=False, device="meta", dtype=like.dtype))
    weight = torch.empty(num_values, own.in_features)  # on the CPU, so that it is the same on every device
    weight.normal_(0.0, STD, generator=torch.Generator().manual_seed(seed))
    head.make_trainable("weight", beside(like, weight))
    model.add_module(OWN_HEAD, head)


def _add_encoder_head(model: nn.Module, num_values: int, seed: int) -> None:
    head = EncoderHead(model.config, num_values)
    like = next(model.parameters())
    has_values = torch.get_default_device().type != "meta"  # none are read of what only has shapes
    files = open_base_files(Path(str(model.name_or_path))) if has_values else None
    generator = torch.Generator().manual_seed(seed)
    for name, module in list(head.own_modules()):
        trained = TrainableModule(module.to(like.dtype))
        for key, parameter in module.named_parameters(recurse=False):
            stored = None if files is None else stored_part(files, f"{name}.{key}")
            start = torch.ones(parameter.shape) if key == "weight" else torch.zeros(parameter.shape)
            # the base's labels may be others, or in another order
            is_of_labels = num_values > 1 and len(parameter) == num_values
            if stored is not None and stored.shape == parameter.shape and not is_of_labels:
                start = stored
            elif parameter.dim() > 1:
                start.normal_(0.0, STD, generator=generator)
            trained.make_trainable(key, beside(like, start))
        head.set_submodule(name, trained)
    model.add_module(OWN_HEAD, head)


def stored_part(files: BaseFiles, name: str) -> Tensor | None:
    """Return a tensor of an encoder's head that its base has, such as BERT's pooler; None if it has none."""
    stored = stored_name(files, name.removeprefix("model."))
    return None if stored is None else files.shard_of[stored].read(stored)


def check_head_unadapted(model: nn.Module) -> None:
    """Raise TargetError if something on the base's output head learns, which the run would not use."""
    own = model.get_output_embeddings()  # type: ignore[operator]
    if isinstance(own, AdapterModule) and own.adapter_tensors():
        raise TargetError(f"adapter: the output head of {type(model).__name__} is not used here; leave it out")


def own_head_of(model: nn.Module) -> nn.Module | None:
    """Return the head that `add_own_head` put on a model, or None."""
    head = getattr(model, OWN_HEAD, None)
    return head if isinstance(head, TrainableModule | EncoderHead) else None
