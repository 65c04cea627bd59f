"""DeepSpeed's ZeRO through accelerate: optimizer state (1), gradients (2) and the base (3) in parts.

DeepSpeed runs in its float32 mode, which casts nothing: the base keeps its dtype, the adapter's float32 tensors are
its masters, and gradients are added up in float32. The same arithmetic as one process.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lorakit.base.loading import return_freed_memory
from lorakit.launch.environment import World
from lorakit.launch.quiet import quiet_libraries
from lorakit.lora.inject import adapter_tensors, fixed_tensors
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.accounting import bytes_held
from lorakit.parallel.deepspeed_config import STAGES, deepspeed_config
from lorakit.parallel.deepspeed_requirements import announce_compile, check_deepspeed, disable_shm_comm
from lorakit.parallel.engine import BuildOptimizer, FillParameter
from lorakit.parallel.optimizer import set_rate
from lorakit.parallel.process_group import init_process_group
from lorakit.parallel.stepping import BaseEngine, buffers_to, to_cpu
from lorakit.parallel.zero3 import full_tensor, keep_adapter_gathered, local_tensors, partition, set_full_value
from lorakit.parallel.zero3_saved import save_weights_by_reference
from lorakit.recipe import ParallelSection

MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroEngine(BaseEngine):
    """A DeepSpeedEngine."""

    def __init__(self, world: World, parallel: ParallelSection, device: torch.device) -> None:
        check_deepspeed(parallel)
        if world.rank == 0:
            announce_compile(parallel)
        with quiet_libraries():
            disable_shm_comm()
        from accelerate.utils import DeepSpeedPlugin

        self._stage = STAGES[parallel.backend]
        self.shards_base = self._stage == 3
        self._config = deepspeed_config(parallel, world.size)
        plugin = DeepSpeedPlugin(hf_ds_config=self._config)
        self._accelerator, group = init_process_group(world, parallel, device, deepspeed_plugin=plugin)
        plugin.dschf = None  # while it lives transformers builds every model in parts of its own
        super().__init__(device, group, parallel.backend)

    def wrap(self, loss_model: LossModel, build: BuildOptimizer, read: FillParameter | None) -> nn.Module:
        limit, model = self._settings.max_grad_norm, loss_model.model
        config = self._accelerator.state.deepspeed_plugin.deepspeed_config
        config["gradient_clipping"] = 0.0 if limit is None else limit
        if self._stage == 3:
            return_freed_memory(self.device)
            partition(loss_model, config, self.group, read)
            buffers_to(model, self.device)
        adapter = adapter_tensors(model)
        for name, tensor in adapter.items():  # sees gradients that DeepSpeed moves elsewhere at once
            tensor.register_hook(lambda gradient, name=name: self.mark_reached([name]))
        engine, _ = self._accelerator.prepare(loss_model, build(adapter))
        self._zero = engine.optimizer
        if self._stage == 3:
            keep_adapter_gathered(self._zero, adapter.values())
        prepared: nn.Module = engine
        return prepared

    def shard_numel(self, shape: Sequence[int]) -> int:
        return math.ceil(math.prod(shape) / (self.world_size if self.shards_base else 1))

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        self._forward.set_gradient_accumulation_boundary(last)  # type: ignore[operator]
        return save_weights_by_reference() if self._stage == 3 else nullcontext()

    def backward(self, loss: Tensor) -> None:
        self._forward.backward(loss * self.world_size, scale_wrt_gas=False)  # type: ignore[operator] # it averages

    def update(self, rate: float) -> float:
        set_rate(self._zero.param_groups, rate)
        self._zero.loss_scaler.cur_scale = self._scale.value
        self._forward.step()  # type: ignore[operator]
        self._zero.loss_scaler.cur_scale = 1.0
        if self._zero.overflow:
            return math.nan
        return float(self._zero._global_grad_norm)

    def gather(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        return {
            name: to_cpu(safe_get_full_fp32_param(tensor)).view(shape_of(tensor))
            for name, tensor in adapter_tensors(self._model).items()
        } | {name: to_cpu(full_tensor(tensor)) for name, tensor in fixed_tensors(self._model).items()}

    def optimizer_state(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        steps = self._steps()
        if steps is None:
            return {}
        found = {}
        for name, tensor in adapter_tensors(self._model).items():
            found[f"{name}.step"] = torch.tensor(steps, dtype=torch.float32)
            for part in MOMENTS:
                found[f"{name}.{part}"] = to_cpu(safe_get_full_optimizer_state(tensor, part)).view(shape_of(tensor))
        return found

    def _steps(self) -> float | None:
        """Updates so far, or None before the first. The optimizer's own tensors are flat parts of many tensors."""
        return next((float(state["step"]) for state in self._zero.optimizer.state.values() if "step" in state), None)

    def load_state(self, adapter: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Tensor]]) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        steps = next((parts["step"] for parts in state.values()), None)
        if steps is not None:
            self._begin_state(steps)
        for name, tensor in fixed_tensors(self._model).items():
            set_full_value(tensor, adapter[name], self.group)
        for name, tensor in adapter_tensors(self._model).items():
            safe_set_full_fp32_param(tensor, adapter[name].to(self.device))  # the masters; and what computes:
            set_full_value(tensor, adapter[name], self.group)
            for part in MOMENTS if name in state else ():
                safe_set_full_optimizer_state(tensor, state[name][part].to(self.device), part)

    def _begin_state(self, steps: Tensor) -> None:
        """The optimizer makes its state at the first update; there must be one to put moments into."""
        flat = (
            self._zero.fp32_partitioned_groups_flat if self._stage == 3 else self._zero.single_partition_of_fp32_groups
        )
        for tensor in flat:
            held = self._zero.optimizer.state[tensor]
            held["step"] = steps.clone()
            for part in MOMENTS:
                if part not in held:
                    held[part] = torch.zeros_like(tensor)
        if self._stage < 3:
            self._zero._lazy_init_hp_params_optimizer_state()  # ties it to the tensors, as the first update would

    def held_bytes(self) -> dict[str, int]:
        adapter = list(adapter_tensors(self._model).values())
        known = {id(tensor) for tensor in adapter}
        base = [p for p in self._model.parameters() if id(p) not in known]
        state = [v for values in self._zero.optimizer.state.values() for v in values.values()]
        return {
            "base": bytes_held(local_tensors(base)),
            "adapter": bytes_held(local_tensors(adapter)),
            "gradients": 0,
            "optimizer": bytes_held(v for v in state if isinstance(v, Tensor)),
        }

    def describe(self) -> dict[str, Any]:
        return {
            "engine": type(self._forward).__name__,
            "backend": f"zero{self._forward.zero_optimization_stage()}",  # type: ignore[operator]
        }


def shape_of(tensor: Tensor) -> torch.Size:
    """The whole tensor's shape, also of one that is in parts."""
    return getattr(tensor, "ds_shape", tensor.shape)
