"""The axis `tensor`, as an engine uses it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, final

from torch import Tensor, nn

from lorakit.base.lazy import LazyBase
from lorakit.lora.spec import AdapterSpec
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.axis import Axis
from lorakit.parallel.tensor.cut import TensorShards, cut_weights
from lorakit.parallel.tensor.plan import checked_plan
from lorakit.parallel.tensor.probe import check_layers, copy_layers


@final
class TensorAxis(Axis):
    """Ranks with other parts of each weight."""

    name: ClassVar[str] = "tensor"
    shards: TensorShards
    """the parts that are here, from `cut` on"""

    @staticmethod
    def check_fits(model: nn.Module, spec: AdapterSpec | None, num_ranks: int) -> None:
        checked_plan(model, num_ranks)

    def cut(self, loss_model: LossModel, weights: LazyBase | None, label_share: float) -> LazyBase | None:
        assert weights is not None
        self._full_weights = weights
        self._full_layers = copy_layers(loss_model.model)
        self.shards = self.world.run_on_all(lambda: cut_weights(loss_model, self.group))
        return self.shards.weights(weights)

    def check_cut(self, loss_model: LossModel) -> None:
        is_stage = self.mesh.pipeline.size > 1
        full = (self._full_layers, self._full_weights)
        region = self.shards.region
        self.shards.sum_trained(check_layers(loss_model, *full, region, self.device, self.world, is_stage=is_stage))
        self.shards.choices.take()  # those of the comparison do not count

    def before_backward(self, shape: tuple[int, ...]) -> None:
        self.shards.region.shape = shape  # recomputation in backward reads it

    def gather(self, name: str, value: Tensor) -> Tensor:
        return self.shards.gather(name, value)

    def scatter(self, name: str, full: Tensor) -> Tensor:
        return self.shards.scatter(name, full)

    def sum_gradients(self, local: Callable[[Tensor], Tensor]) -> float:
        return self.shards.sum_gradients(local)

    def decoding(self) -> AbstractContextManager[None]:
        return self.shards.region.disabled("single tokens are computed")

    def facts(self) -> dict[str, Any]:
        return {"tensor_parts": self.shards.facts()}

    def describe(self) -> str:
        return f"part {self.group.rank + 1} of {self.group.size}"
