"""The head that a patch of a classifier or of a reward brings, beside the updates of the base's layers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mode
from typing import Any, Final

import torch
from torch import Tensor, nn

from lorakit.errors import PatchError, TargetError, translate_error
from lorakit.files.base_files import open_base_files
from lorakit.lora.own_head import OF_ENCODER, OWN_HEAD, stored_part
from lorakit.ops.encoder_head import LAST, EncoderHead, is_encoder
from lorakit.patch.patch import Patch
from lorakit.patch.pooling import Pooling

TASK_TYPE: Final = "SEQ_CLS"  # PEFT's word for it
WEIGHT: Final = f"{OWN_HEAD}.weight"


@dataclass(frozen=True)
class OwnHead:
    """A head: it gives values for the pooled hidden states of a row, (width,)."""

    tensors: Mapping[str, Tensor]  # of the patch, in float32
    num_values: int
    labels: tuple[str, ...]  # the label of each value; () of a single value, a reward or a number
    problem_type: str | None = None  # as of the recipe; None: of a reward, or another program's, one of the labels
    of_encoder: EncoderHead | None = None  # computes the values; None: the values are weight @ h

    @property
    def kind(self) -> str | None:
        """transformers' word for the problem; None of a reward."""
        return self.problem_type or ("single_label_classification" if self.labels else None)

    @property
    def has_several(self) -> bool:
        """True if a row may have several labels."""
        return self.problem_type == "multi_label_classification"

    @property
    def pooling(self) -> Pooling:
        """Which hidden states it reads."""
        if self.of_encoder is None:
            return Pooling(LAST, False, None, ())
        return Pooling(self.of_encoder.mode, False, None, (), self.of_encoder.separator)

    @torch.no_grad()
    def values(self, state: Tensor) -> Tensor:
        """Return the values, (values,), for a pooled state (width,)."""
        return self.tensors[WEIGHT] @ state if self.of_encoder is None else self.of_encoder(state[None])[0]

    def on(self, model: nn.Module, tokenizer: Any, folder: Path) -> "OwnHead":
        """Return the head as a model computes it, perhaps an encoder. folder: of the patch.

        What a patch of an encoder lacks, such as the pooler of one of PEFT's, is its base's.
        Raises PatchError: it has other sizes.
        """
        config: Any = model.config
        if self.labels[:1] == ("LABEL_0",) and config.num_labels == self.num_values:  # of a patch that names none
            self = replace(self, labels=tuple(map(str, config.id2label.values())), problem_type=config.problem_type)
        if not is_encoder(model):
            width = config.get_text_config().hidden_size
            weight = self.tensors.get(WEIGHT)
            if weight is None or weight.shape[1] != width:
                kind = "of an encoder" if weight is None else f"for {weight.shape[1]} values"
                raise PatchError(f"{folder}: its head is {kind}, the base has {width}")
            return self
        with translate_error(TargetError, PatchError, str(folder)):
            head = EncoderHead(config, self.num_values)
        own = {f"model.{name.removeprefix(OF_ENCODER)}": tensor for name, tensor in self.tensors.items()}
        files = open_base_files(Path(str(model.name_or_path)))
        shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
        lacking = {name: stored_part(files, name) for name in shapes.keys() - own.keys()}
        own |= {name: tensor.float() for name, tensor in lacking.items() if tensor is not None}
        if shapes != (given := {name: tuple(tensor.shape) for name, tensor in own.items()}):
            raise PatchError(f"{folder}: has another head than its base's classifier: {given}; expected {shapes}")
        head.load_state_dict(own, assign=True)
        head.separate(tokenizer)
        return replace(self, of_encoder=head.eval())


def head_names(patch: Patch) -> tuple[str, ...]:
    """Return the full tensors that are a head's: `score.weight`, or those of an encoder's classifier and its pooler."""
    names = [name for name in patch.full_shapes if name not in patch.bias_scales]
    if patch.config.raw.get("task_type") != TASK_TYPE:
        return ()
    if WEIGHT in names:
        return (WEIGHT,)
    if named := tuple(name for name in names if name.startswith(OF_ENCODER)):
        return named
    encoder = encoder_name(patch)
    return tuple(name for name in names if name.partition(".")[0] != encoder or ".pooler." in name)


def encoder_name(patch: Patch) -> str:
    """Return the encoder's name in a patch of its classifier, such as `bert`; "" without layers."""
    return mode([name.partition(".")[0] for name in patch.layers] or [""])


def head_parts(patch: Patch) -> tuple[str, ...]:
    """Return the modules of a head among the config's `modules_to_save`."""
    names = [f".{name}" for name in head_names(patch)]
    return tuple(one for one in patch.config.modules_to_save if any(f".{one}." in name for name in names))


def has_own_head(patch: Patch) -> bool:
    return bool(head_names(patch))


def own_head(patch: Patch) -> OwnHead | None:
    """Return a patch's head; None if it has none. One without a recipe has transformers' names of labels.

    Raises PatchError: the patch records other labels than its head has rows.
    """
    tensors = {name: patch.full_tensors[name].float() for name in head_names(patch)}
    if not tensors:
        return None
    objective = patch.metadata.get("recipe", {}).get("objective", {})
    labels = objective.get("labels") or ()
    matrices = [len(tensor) for tensor in tensors.values() if tensor.dim() == 2]
    if not matrices:
        number = len(next(iter(tensors.values())))
        raise PatchError(f"{patch.folder}: a head of {number} values, and no weights for them")
    num_values = len(labels) if len(labels) in matrices else min(matrices)
    if not labels and num_values > 1:
        labels = [f"LABEL_{number}" for number in range(num_values)]
    if labels and len(labels) != num_values:
        raise PatchError(f"{patch.folder}: a head of {num_values} values, and its recipe has {len(labels)} labels")
    return OwnHead(tensors, num_values, tuple(map(str, labels)), objective.get("problem_type"))


def without_own_head(patch: Patch) -> Patch:
    """Return the updates of the base's layers alone."""
    head = head_names(patch)
    return patch.with_full_tensors(name for name in patch.full_shapes if name not in head) if head else patch
