"""The head that a patch of a classifier or of a reward brings, beside the updates of the base's layers."""

from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from lorakit.errors import PatchError
from lorakit.lora.own_head import OWN_HEAD
from lorakit.patch.patch import Patch

TASK_TYPE: Final = "SEQ_CLS"  # PEFT's word for it
WEIGHT: Final = f"{OWN_HEAD}.weight"


@dataclass(frozen=True)
class OwnHead:
    """A head: its values are weight @ h, for the hidden state h (width,) of a row's last token."""

    weight: Tensor  # (values, width) float32
    labels: tuple[str, ...]  # the label of each value; () of a single value, a reward or a number
    problem_type: str | None = None  # as of the recipe; None: of a reward, or another program's, one of the labels

    @property
    def kind(self) -> str | None:
        """transformers' word for the problem; None of a reward."""
        return self.problem_type or ("single_label_classification" if self.labels else None)

    @property
    def has_several(self) -> bool:
        """True if a row may have several labels."""
        return self.problem_type == "multi_label_classification"


def has_own_head(patch: Patch) -> bool:
    return WEIGHT in patch.full_shapes and patch.config.raw.get("task_type") == TASK_TYPE


def own_head(patch: Patch) -> OwnHead | None:
    """Return a patch's head; None if it has none. One without a recipe has transformers' names of labels.

    Raises PatchError: the patch records other labels than its head has rows.
    """
    if not has_own_head(patch):
        return None
    weight = patch.full_tensors[WEIGHT].float()
    recipe: Any = patch.metadata.get("recipe", {})
    objective = recipe.get("objective", {})
    labels = objective.get("labels") or ()
    if not labels and len(weight) > 1:
        labels = [f"LABEL_{number}" for number in range(len(weight))]
    if weight.dim() != 2 or (labels and len(labels) != len(weight)):
        raise PatchError(f"{patch.folder}: a head of {len(weight)} values, and its recipe has {len(labels)} labels")
    return OwnHead(weight, tuple(map(str, labels)), objective.get("problem_type"))


def without_own_head(patch: Patch) -> Patch:
    """Return the updates of the base's layers alone."""
    others = (name for name in patch.full_shapes if name != WEIGHT)
    return patch.with_full_tensors(others) if has_own_head(patch) else patch
