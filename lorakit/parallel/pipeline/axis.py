"""The axis `pipeline`, as an engine uses it."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, final

from torch import Tensor, nn

from lorakit.base.lazy import LazyBase
from lorakit.lora.spec import AdapterSpec
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.axis import Axis
from lorakit.parallel.pipeline.cut import check_known_tokens, check_stages_fit, cut_stage
from lorakit.parallel.pipeline.stage import Stage, StageLink, StageLossModel


@final
class PipelineAxis(Axis):
    """Ranks with other layers, in the layers' order."""

    name: ClassVar[str] = "pipeline"
    stage: Stage | None = None
    """the layers that are here; None before `cut`"""

    def check_fits(self, model: nn.Module, spec: AdapterSpec | None = None) -> None:
        check_stages_fit(model, self.group.size)
        if spec is not None:
            check_known_tokens(spec, self.group.size)

    def cut(self, loss_model: LossModel, weights: LazyBase | None, label_share: float) -> LazyBase | None:
        model: Any = loss_model.model
        width = model.config.get_text_config().hidden_size
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point() and not p.requires_grad)
        groups = (self.group.device_group, self.mesh.pipeline_backward.device_group)
        link = StageLink(self.group.rank, self.group.size, width, dtype, self.device, *groups)
        self.stage = self.world.run_on_all(lambda: cut_stage(model, link, label_share))
        StageLossModel.of(loss_model, self.stage)
        return weights

    def gather_layers(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.group.all_gather_tensors(tensors)

    def norm_over_layers(self, norm: float) -> float:
        return math.sqrt(self.group.all_reduce_sum(norm * norm)[0])

    def facts(self) -> dict[str, Any]:
        return {} if self.stage is None else {"stage": self.stage.facts()}

    def describe(self) -> str:
        return f"stage {self.group.rank + 1} of {self.group.size}"
