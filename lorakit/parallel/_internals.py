"""Private names of torch and DeepSpeed that the engines need. No other file of this folder uses one.

Each heading names the version that was read, and each function the damage if a release removes the private name.
tests/parallel/test_internals.py checks that all of them still exist.
"""

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d

# --- torch 2.13.0 ----------------------------------------------------------------------------------------------------


def is_in_backward() -> bool:
    """True if this thread runs autograd's backward. Without it, streamed layers would be fetched in forward order."""
    return bool(torch._C._current_graph_task_id() != -1)


def base_of_view(tensor: Tensor) -> Tensor | None:
    """Return the tensor that a view is of, or None. Without `_base`, W.T is not traced to its sharded parameter."""
    return tensor._base


def map_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace every tensor of a module by `function` of it. Without `_apply`, shards stay on meta, or lose values."""
    module._apply(function)


def default_store() -> distributed_c10d.Store:
    """Return the key-value store of the default process group. Without it, ranks cannot exchange heartbeats."""
    return distributed_c10d._get_default_store()


def set_message_timeout(timeout: timedelta) -> None:
    """Set how long messages may take in every group; else the time that groups may take to form holds for them."""
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timeout, group)


# --- DeepSpeed 0.19.8: parameters of stage 3 -------------------------------------------------------------------------
# `zero.Init` adds attributes to a parameter: ds_id, ds_shape, ds_numel, ds_tensor (this rank's flat shard), ds_persist.
# If they are renamed, parameters look unsharded, and engine.py stops the run because of the bytes it counts.


def partition_parameter(init: Any, parameter: nn.Parameter, *, persistent: bool) -> None:
    """Shard a parameter, ``persistent`` ones gathered between steps; DeepSpeed's public way broadcasts full tensors."""
    init._convert_to_deepspeed_param(parameter)
    parameter.ds_persist = persistent  # type: ignore[attr-defined]
    parameter.partition()  # type: ignore[attr-defined]


def shard_of(tensor: Any) -> Tensor | None:
    """Return this rank's flat shard of a parameter; None if the parameter is not sharded."""
    return getattr(tensor, "ds_tensor", None)


def full_shape(tensor: Any) -> torch.Size:
    """Return the shape of the full tensor, of a sharded parameter too."""
    return getattr(tensor, "ds_shape", tensor.shape)


def is_persistent(tensor: Any) -> bool:
    """True if a sharded parameter stays gathered on every rank between steps."""
    return bool(tensor.ds_persist)


def gather_after_updates(optimizer: Any, tensors: list[nn.Parameter]) -> None:
    """Gather these parameters now and after every update, so that forward computes with the new ones. Collective."""
    optimizer.persistent_parameters = list(tensors)
    tensors[0].all_gather(tensors)  # type: ignore[attr-defined]


# --- DeepSpeed 0.19.8: its optimizers --------------------------------------------------------------------------------


def flat_masters(optimizer: Any, stage: int) -> Iterable[Tensor]:
    """Return the flat float32 tensors that the inner optimizer updates. Without them, no checkpoint can be restored."""
    return optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups


def link_optimizer_state(optimizer: Any) -> None:
    """Connect the inner optimizer's state to the adapter, as the first update would, to restore a checkpoint before."""
    optimizer._lazy_init_hp_params_optimizer_state()


def set_loss_scale(optimizer: Any, scale: float) -> None:
    """Set the number by which the next update divides gradients. Without it, float16 runs would not unscale."""
    optimizer.loss_scaler.cur_scale = scale


# --- DeepSpeed 0.19.8: compiled operations ---------------------------------------------------------------------------


def forbid_operation(name: str) -> None:
    """Make DeepSpeed treat a compiled operation as unavailable. Without it, the first run compiles it for nothing."""
    from deepspeed import ops

    ops.__compatible_ops__[name] = False
