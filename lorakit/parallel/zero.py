"""The ZeRO backends, DeepSpeed through accelerate: shard optimizer state (1), gradients too (2), the base too (3).

DeepSpeed runs in its float32 mode, because it casts nothing there: the base keeps its dtype, the adapter's float32
tensors are the masters, and gradients are reduced in float32. So the arithmetic is that of one process.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lorakit.base.lazy import LazyBase
from lorakit.base.loading import return_freed_memory
from lorakit.launch.environment import World
from lorakit.launch.quiet import quiet_libraries
from lorakit.lora.inject import adapter_tensors, fixed_tensors
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel._internals import (
    drop_transformers_config,
    flat_masters,
    full_shape,
    link_optimizer_state,
    set_loss_scale,
)
from lorakit.parallel.accounting import local_bytes
from lorakit.parallel.deepspeed_config import STAGES, deepspeed_config
from lorakit.parallel.deepspeed_requirements import announce_compile, check_deepspeed, disable_shm_comm
from lorakit.parallel.engine import BuildOptimizer
from lorakit.parallel.mesh import make_mesh
from lorakit.parallel.optimizer import set_rate
from lorakit.parallel.process_group import init_process_group, message_timeout
from lorakit.parallel.resident import move_buffers
from lorakit.parallel.stepping import BaseEngine, to_cpu
from lorakit.parallel.zero3 import full_tensor, local_tensors, make_adapter_persistent, partition, set_full_value
from lorakit.parallel.zero3_saved import save_weights_by_reference
from lorakit.recipe import ParallelSection

MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroEngine(BaseEngine):
    """DeepSpeed's engine, which fuses clipping, update and the loss scale's division into its `step`."""

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
        drop_transformers_config(plugin)  # transformers would shard the base while building it
        mesh = make_mesh(group, parallel, message_timeout(parallel))
        super().__init__(device, group, parallel.backend, mesh)

    def wrap(self, loss_model: LossModel, build: BuildOptimizer, weights: LazyBase | None) -> nn.Module:
        limit, model = self._settings.max_grad_norm, loss_model.model
        config = self._accelerator.state.deepspeed_plugin.deepspeed_config
        config["gradient_clipping"] = 0.0 if limit is None else limit
        if self._stage == 3:
            return_freed_memory(self.device)  # layers are gathered and freed all the time
            partition(loss_model, config, self.mesh.tokens, weights)
            move_buffers(model, self.device)
        adapter = adapter_tensors(model)
        # hooks, because DeepSpeed moves each gradient to its own buffers: `tensor.grad` is empty after backward
        for name, tensor in adapter.items():
            tensor.register_hook(lambda gradient, name=name: self.record_gradient([name]))
        engine, _ = self._accelerator.prepare(loss_model, build(adapter))
        self._zero = engine.optimizer
        if self._stage == 3:
            make_adapter_persistent(self._zero, adapter.values())
        prepared: nn.Module = engine
        return prepared

    def shard_numel(self, shape: Sequence[int]) -> int:
        return math.ceil(math.prod(shape) / (self.mesh.tokens.size if self.shards_base else 1))

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        self._wrapped.set_gradient_accumulation_boundary(last)  # type: ignore[operator]
        return save_weights_by_reference() if self._stage == 3 else nullcontext()

    def backward(self, loss: Tensor) -> None:
        # times the ranks, because DeepSpeed averages gradients over ranks and the loss is divided by all ranks' labels
        self._wrapped.backward(loss * self.mesh.tokens.size, scale_wrt_gas=False)  # type: ignore[operator]

    def update(self, rate: float) -> float:
        set_rate(self._zero.param_groups, rate)
        # only during the update: DeepSpeed divides by this scale there, but would also multiply the loss by it
        set_loss_scale(self._zero, self._scale.value)
        self._wrapped.step()  # type: ignore[operator]
        set_loss_scale(self._zero, 1.0)
        if self._zero.overflow:
            return math.nan
        return float(self._wrapped.get_global_grad_norm())  # type: ignore[operator]

    def stage_adapter(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        return {
            name: to_cpu(safe_get_full_fp32_param(tensor)).view(full_shape(tensor))
            for name, tensor in adapter_tensors(self._model).items()
        } | {name: to_cpu(full_tensor(tensor)) for name, tensor in fixed_tensors(self._model).items()}

    def stage_optimizer_state(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        steps = self._steps()
        if steps is None:
            return {}
        state = {}
        for name, tensor in adapter_tensors(self._model).items():
            state[f"{name}.step"] = torch.tensor(steps, dtype=torch.float32)
            for part in MOMENTS:
                state[f"{name}.{part}"] = to_cpu(safe_get_full_optimizer_state(tensor, part)).view(full_shape(tensor))
        return state

    def _steps(self) -> float | None:
        """Return the number of updates so far; None before the first.

        The inner optimizer updates flat tensors that join many adapter tensors, so there is one count for all.
        """
        return next((float(state["step"]) for state in self._zero.optimizer.state.values() if "step" in state), None)

    def load_state(self, adapter: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Tensor]]) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        steps = next((parts["step"] for parts in state.values()), None)
        if steps is not None:
            self._create_state(steps)
        for name, tensor in fixed_tensors(self._model).items():
            set_full_value(tensor, adapter[name], self.mesh.tokens)
        for name, tensor in adapter_tensors(self._model).items():
            safe_set_full_fp32_param(tensor, adapter[name].to(self.device))  # the master, which is updated
            set_full_value(tensor, adapter[name], self.mesh.tokens)  # the parameter, with which forward computes
            for part in MOMENTS if name in state else ():
                safe_set_full_optimizer_state(tensor, state[name][part].to(self.device), part)

    def _create_state(self, steps: Tensor) -> None:
        """Create the inner optimizer's state after `steps` updates, with moments of zero.

        AdamW creates its state at the first update, but a checkpoint's moments must have a tensor to be copied into.
        """
        for master in flat_masters(self._zero, self._stage):
            state = self._zero.optimizer.state[master]
            state["step"] = steps.to(master.device, copy=True)  # where AdamW's fused kernel reads it
            for part in MOMENTS:
                if part not in state:
                    state[part] = torch.zeros_like(master)
        if self._stage < 3:
            link_optimizer_state(self._zero)

    def resident_bytes(self) -> dict[str, int]:
        adapter = list(adapter_tensors(self._model).values())
        adapter_ids = {id(tensor) for tensor in adapter}
        base = [p for p in self._model.parameters() if id(p) not in adapter_ids]
        state = [v for values in self._zero.optimizer.state.values() for v in values.values()]
        return {
            "base": local_bytes(local_tensors(base)),
            "adapter": local_bytes(local_tensors(adapter)),
            "gradients": 0,  # DeepSpeed frees its gradient buffers in the update
            "optimizer": local_bytes(v for v in state if isinstance(v, Tensor)),
        }

    def describe(self) -> dict[str, Any]:
        return {
            "engine": type(self._wrapped).__name__,
            "backend": f"zero{self._wrapped.zero_optimization_stage()}",  # type: ignore[operator]
        }
