"""The axis `tensor`, as an engine uses it."""

from collections.abc import Callable
from typing import ClassVar, final

from torch import Tensor, nn

from lorakit.base.lazy import LazyBase
from lorakit.lora.spec import AdapterSpec
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.axis import Axis
from lorakit.parallel.tensor.cut import TensorShards, cut_weights
from lorakit.parallel.tensor.plan import checked_plan
from lorakit.parallel.tensor.probe import Probe
from lorakit.parallel.tensor.shards import CutTensors


@final
class TensorAxis(Axis):
    """Ranks with other parts of each weight."""

    name: ClassVar[str] = "tensor"
    shards: TensorShards  # the parts that are here, from `cut` on

    @staticmethod
    def check_fits(model: nn.Module, spec: AdapterSpec | None, num_ranks: int) -> None:
        checked_plan(model, num_ranks)

    def cut(self, loss_model: LossModel, weights: LazyBase | None, label_share: float) -> LazyBase | None:
        assert weights is not None
        self._probe = Probe(loss_model.model, weights, self.device)
        self.shards = self.world.run_on_all(lambda: cut_weights(loss_model, self.group))
        return CutTensors(weights, self.shards.cuts)

    def check_cut(self, loss_model: LossModel) -> None:
        self._probe.check(loss_model, self.world)
        del self._probe  # frees the copies
        self.shards.choices.take()  # those of the comparison do not count

    def gather(self, name: str, value: Tensor) -> Tensor:
        cut = self.shards.cuts.get(name)
        if cut is None or value.shape != cut.part_shape:
            return value
        return cut.gather(value, self.shards.group.concatenated)

    def scatter(self, name: str, full: Tensor) -> Tensor:
        cut = self.shards.cuts.get(name)
        return full if cut is None or full.shape != cut.shape else cut.scatter(full)

    def sum_gradients(self, local: Callable[[Tensor], Tensor]) -> float:
        return self.shards.sum_gradients(local)
