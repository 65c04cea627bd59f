"""The ZeRO backends, which are DeepSpeed's: shard optimizer state (1), gradients too (2), the base too (3).

DeepSpeed runs in its float32 mode, because it casts nothing there: the base keeps its dtype, the adapter's float32
tensors are the masters, and gradients are reduced in float32. So the arithmetic is that of one process.

Invariant: in stage 3 no rank ever reads a full tensor of the base. DeepSpeed shards a parameter as equal ranges of its
flattened elements, the last ones padded. `partition` reads a rank's range from the base's files.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from lorakit.base.lazy import LazyBase
from lorakit.base.loading import return_freed_memory
from lorakit.base.quantized import move_buffers
from lorakit.errors import RunError
from lorakit.lora.inject import adapter_tensors
from lorakit.lora.layer_kinds import QuantizedExperts
from lorakit.lora.wrappers import full_value
from lorakit.objectives.cross_entropy import LossModel
from lorakit.ops._internals import is_zero3_parameter
from lorakit.ops.recompute import save_packed
from lorakit.parallel import _internals
from lorakit.parallel.adapter_state import BuildOptimizer, Wrapped, set_rate, to_cpu
from lorakit.parallel.engine import Engine
from lorakit.parallel.group import Group, Mesh
from lorakit.recipe import ParallelSection

MEGABYTE: Final = 1_000_000
MOMENTS = ("exp_avg", "exp_avg_sq")
MAX_COPIED_ELEMENTS: Final = 100_000  # of a 1-D weight


class ZeroEngine(Engine):
    """DeepSpeed's engine, which fuses clipping, update and the loss scale's division into its `step`."""

    def __init__(self, parallel: ParallelSection, device: torch.device, group: Group, mesh: Mesh) -> None:
        super().__init__(parallel, device, group, mesh)
        assert self.facts.zero_stage is not None
        self._stage = self.facts.zero_stage
        if (named := os.environ.get("DS_ACCELERATOR") or device.type) != device.type:
            raise RunError(f"DS_ACCELERATOR={named}: DeepSpeed would compute there, the run on {device.type}; unset it")
        _internals.forbid_operation("deepspeed_shm_comm")  # collectives that only its inference calls

    def wrap(self, loss_model: LossModel, build: BuildOptimizer, weights: LazyBase | None) -> Wrapped:
        import deepspeed

        deepspeed.init_distributed()  # takes torch's group over; `zero.Init` would count one rank without it
        model = loss_model.model
        config = deepspeed_config(self.parallel, self._settings.max_grad_norm)
        if self._stage == 3:
            return_freed_memory(self.device)  # layers are gathered and freed all the time
            partition(loss_model, config, self.mesh.replicas, weights)
            move_buffers(model, self.device)
        tensors = adapter_tensors(model)
        # hooks, because DeepSpeed moves each gradient to its own buffers: `tensor.grad` is empty after backward
        for name, tensor in tensors.items():
            tensor.register_hook(lambda gradient, name=name: self.adapter.without_gradient.discard(name))
        engine, self._zero, *_ = deepspeed.initialize(model=loss_model, optimizer=build(tensors), config=config)
        if self._stage == 3:
            _internals.gather_after_updates(self._zero, list(tensors.values()))
        return engine, self._zero

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        self._wrapped.set_gradient_accumulation_boundary(is_last)  # type: ignore[operator]
        return save_packed(pack_by_reference) if self._stage == 3 else nullcontext()

    def backward(self, loss: Tensor) -> None:
        # times the ranks, because DeepSpeed averages gradients over ranks and the loss is divided by all ranks' labels
        self._wrapped.backward(loss * self.mesh.replicas.size, scale_wrt_gas=False)  # type: ignore[operator]

    def update(self, rate: float) -> float:
        # DeepSpeed sums gradients in backward, and computes their norm here
        set_rate(self._zero.param_groups, rate)
        # only during the update: DeepSpeed divides by this scale there, but would also multiply the loss by it
        _internals.set_loss_scale(self._zero, self.adapter.scale.value)
        self._wrapped.step()  # type: ignore[operator]
        _internals.set_loss_scale(self._zero, 1.0)
        if self._zero.overflow:
            return math.nan
        self.adapter.step += 1
        return float(self._wrapped.get_global_grad_norm())  # type: ignore[operator]

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param

        for name, tensor in self.adapter.saved.items():
            is_trained = name in self.adapter.tensors
            full = safe_get_full_fp32_param(tensor) if is_trained else full_value(tensor)
            yield name, to_cpu(full).view(_internals.full_shape(tensor))

    def gather_optimizer(self) -> Iterator[tuple[str, str, Tensor]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        steps = self._steps()
        if steps is None:
            return
        for name, tensor in self.adapter.tensors.items():
            yield name, "step", torch.tensor(steps, dtype=torch.float32)
            for part in MOMENTS:
                full = to_cpu(safe_get_full_optimizer_state(tensor, part))
                yield name, part, full.view(_internals.full_shape(tensor))

    def _steps(self) -> float | None:
        """Return the number of updates; None before the first. One for all, because flat tensors join the adapter's."""
        return next((float(state["step"]) for state in self._zero.optimizer.state.values() if "step" in state), None)

    def scatter(self, name: str, full: Tensor) -> None:
        tensor = self.adapter.saved[name]
        if name in self.adapter.tensors:
            self._set_master(tensor, full)
        # the parameter, with which forward computes: in full while it is gathered, and this rank's shard
        if tensor.data.shape == full.shape:
            tensor.data.copy_(full)
        if (shard := _internals.shard_of(tensor)) is not None:
            shard.data.copy_(padded_shard(full, self.mesh.replicas))

    def scatter_optimizer(self, name: str, part: str, full: Tensor) -> None:
        if self._steps() is None:
            self._create_state()
        if part in MOMENTS:
            self._set_master(self.adapter.tensors[name], full, part)
        else:
            self._set_steps(full)

    def _set_master(self, tensor: Any, full: Tensor, part: str | None = None) -> None:
        """Set the values that DeepSpeed updates of a tensor, or one of their moments."""
        value = full.to(self.device)
        if self._stage == 3:  # its own range of the full tensor is short where the ranks do not divide the tensor
            self._zero.set_local_hp_param(padded_shard(value, self.mesh.replicas), tensor, part)
        else:
            tensor.set_full_hp_param(value, part)

    def _create_state(self) -> None:
        """Create the inner optimizer's state, for a checkpoint's moments, as its first update would."""
        self._set_steps(torch.tensor(0.0))
        for master in _internals.flat_masters(self._zero, self._stage):
            state = self._zero.optimizer.state[master]
            state.update((part, torch.zeros_like(master)) for part in MOMENTS if part not in state)
        if self._stage < 3:
            _internals.link_optimizer_state(self._zero)

    def _set_steps(self, steps: Tensor) -> None:
        """Set the number of updates so far."""
        for master in _internals.flat_masters(self._zero, self._stage):
            # on the device where AdamW's fused kernel reads it
            self._zero.optimizer.state[master]["step"] = steps.to(master.device, copy=True)

    def describe(self) -> dict[str, Any]:
        stage = self._wrapped.zero_optimization_stage()  # type: ignore[operator]
        return {"engine": type(self._wrapped).__name__, "backend": f"zero{stage}"}


def deepspeed_config(parallel: ParallelSection, max_grad_norm: float | None) -> dict[str, Any]:
    """Return DeepSpeed's configuration. It has every value that changes the result, which defaults would change."""
    stage = parallel.facts.zero_stage
    offloads = parallel.offloads
    bucket = max(1, round(parallel.bucket_mb * MEGABYTE / 4))  # in elements of float32
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": True,
    }
    if offloads.optimizer != "none":
        zero["offload_optimizer"] = {"device": offloads.optimizer}
    if stage == 3:
        prefetch = round(parallel.prefetch_mb * MEGABYTE / 2)  # in elements of two bytes
        zero |= {
            "stage3_prefetch_bucket_size": prefetch,
            # the default, 1e5 elements, would leave norms and small weights of the base gathered on every rank
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": max(1, prefetch),
            # free a layer right after use, though the next one to need it may be close: memory over messages
            "stage3_max_reuse_distance": 0,
        }
        if offloads.parameters != "none":
            zero["offload_param"] = {"device": offloads.parameters}
    return {
        # DeepSpeed must not divide by a number of micro-batches: the step divides by label tokens (engine.py)
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm or 0.0,  # 0.0: no clipping
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # True refuses torch's AdamW under offload
        "zero_optimization": zero,
    }


def partition(loss_model: LossModel, config: dict[str, Any], group: Group, weights: LazyBase | None) -> None:
    """Shard every parameter over the ranks, DeepSpeed's way. `weights` reads this rank's part of those on meta."""
    import deepspeed

    # of the embedding or the first layer; quantised weights are integers, and DeepSpeed's dtype must be a float
    dtype = next(p.dtype for p in loss_model.parameters() if p.is_floating_point() and not p.requires_grad)
    init = deepspeed.zero.Init(config_dict_or_path=config, dtype=dtype, enabled=True)
    for name, parameter in list(loss_model.model.named_parameters()):
        if parameter.is_meta:
            assert weights is not None
            # with values in this rank's range alone: `torch.empty` only reserves addresses for the rest
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            start, stop = shard_range(parameter.numel(), group)
            if start < stop:
                weights.fill(name, start, values.view(-1)[start:stop])
            # swapped, so that a tied parameter stays one in every module that has it
            torch.utils.swap_tensors(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))
        if parameter.requires_grad:
            parameter.data = parameter.data.to(init.local_device)
        # gathered with every layer, the adapter would be sent twice for a micro-batch
        _internals.partition_parameter(init, parameter, persistent=parameter.requires_grad)
        if parameter.device != init.local_device:
            # the shard was cut on the CPU; the parameter itself, empty until gathered, belongs to the computing device
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=init.local_device)
    for owner in loss_model.modules():
        for experts in (child for child in owner.children() if isinstance(child, QuantizedExperts)):
            for parameter in experts.parameters():  # which are never called, but read by their owner
                deepspeed.zero.register_external_parameter(owner, parameter)


def padded_shard(full: Tensor, group: Group) -> Tensor:
    """Return this rank's shard of a full tensor, flat, with zeros up to the size that it has on every rank."""
    start, stop = shard_range(full.numel(), group)
    padding = math.ceil(full.numel() / group.size) - (stop - start)
    return nn.functional.pad(full.reshape(-1)[start:stop], (0, padding))


def shard_range(num_elements: int, group: Group) -> tuple[int, int]:
    """Return start and end of this rank's shard within the flattened tensor."""
    size = math.ceil(num_elements / group.size)
    start = min(group.rank * size, num_elements)
    return start, min(start + size, num_elements)


def pack_by_reference(saved: Tensor) -> Tensor | Callable[[], Tensor]:
    """Return what autograd stores for a saved tensor: of a frozen weight a reference instead of its gathered copy.

    Needed around a micro-batch's forward and backward. DeepSpeed frees a layer's weights after its forward and gathers
    them once more before its backward; a saved copy would keep the full base in memory in between. 1-D weights (norms)
    are saved as copies, because ops/recompute.py recomputes a norm's output before that norm's weights are gathered.
    A view of a weight, such as W.T, is traced to its parameter.
    """
    parameter = saved if is_zero3_parameter(saved) else _internals.base_of_view(saved)
    if parameter is None or not is_zero3_parameter(parameter) or _internals.is_persistent(parameter):
        return saved
    if saved.dim() == 1 and saved.numel() <= MAX_COPIED_ELEMENTS:
        return saved.detach().clone()
    return partial(_view_of, parameter, saved.size(), saved.stride(), int(saved.storage_offset()))


def _view_of(parameter: Any, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    """Return a view of a sharded parameter that is gathered. stride, offset: in elements."""
    gathered: Tensor = parameter.data
    full = _internals.full_shape(parameter)
    if gathered.numel() != full.numel():  # as_strided over a freed weight would read other memory
        raise RuntimeError(f"parameter {tuple(full)} was not gathered for backward")
    return gathered.as_strided(shape, stride, offset)
