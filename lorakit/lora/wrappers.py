"""Models in the wrappers of other training loops: DDP, DeepSpeed, torch.compile, FSDP2, recomputation.

An adapter is put on a model before a wrapper lists its parameters, and is read in it under the names it had before.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Final

import torch
from torch import Tensor, nn

from lorakit.errors import PatchError, TargetError
from lorakit.ops._internals import is_zero3_parameter

INNER: Final = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "DeepSpeedEngine": "module",
    "_FabricModule": "_forward_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
"""wrapper's class in torch, DeepSpeed or Lightning -> its attribute that is the wrapped module"""
REPLICATING: Final = ("DistributedDataParallel", "DeepSpeedEngine")  # wrappers whose processes have equal adapters
MEET_SECONDS: Final = 300.0  # for which a process waits for the others before tensors are gathered


def inner_name(module: nn.Module) -> str | None:
    """Return the attribute of a wrapper that is the wrapped module; None if the module is no wrapper."""
    return next((INNER[each.__name__] for each in type(module).__mro__ if each.__name__ in INNER), None)


def unwrapped(module: nn.Module) -> tuple[nn.Module, bool]:
    """Return the module in all the wrappers around it, and True if one of them keeps it equal in several processes."""
    is_replicated = False
    while (name := inner_name(module)) is not None:
        is_replicated = is_replicated or any(each.__name__ in REPLICATING for each in type(module).__mro__)
        module = getattr(module, name)
    return module, is_replicated


def named_unwrapped(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what ``model.named_modules`` would if nothing were wrapped."""
    names: dict[str, str] = {}
    hidden = set()
    for name, module in model.named_modules():
        parent, _, child = name.rpartition(".")
        is_inner = name in hidden
        names[name] = names[parent] if is_inner else f"{names[parent]}.{child}".lstrip(".") if name else ""
        if (inner := inner_name(module)) is None:
            yield names[name], module
        else:
            hidden.add(f"{name}.{inner}".lstrip("."))


def check_unwrapped(model: object, call: str) -> None:
    """Raise TargetError unless this is a torch model without wrapped or sharded parts. call: to change its layers."""
    if not isinstance(model, nn.Module):
        remedy = "lorakit.load takes a base's name, and its result has load_adapter, unload_adapter and merged"
        raise TargetError(f"{call}: a torch model expected, got a {type(model).__name__}; {remedy}")
    wrapper = next((module for module in model.modules() if inner_name(module)), None)
    if wrapper is not None:
        raise TargetError(f"{call}: {type(wrapper).__name__} wraps this model; call {call} on the model without it")
    on_meta = {parameter.is_meta: name for name, parameter in model.named_parameters()}
    if len(on_meta) == 2:  # some values are offloaded
        raise TargetError(f"{call}: {on_meta[True]} is on the meta device, its values elsewhere; load the base whole")
    if sharded := [name for name, parameter in model.named_parameters() if is_sharded(parameter)]:
        raise TargetError(f"{call}: {sharded[0]} is sharded over processes; call {call} before you shard the model")


def reshard(model: nn.Module) -> None:
    """Free the gathered copies of FSDP2, which may be older or rounded, so that parameters are the shards."""
    for module in model.modules():
        if hasattr(module, "set_reshard_after_backward"):
            module.reshard()  # type: ignore[operator]


def meet(call: str) -> None:
    """Wait for the other processes. Raises PatchError, with their ranks, where they do not make the same call."""
    if torch.distributed.get_backend() != "gloo":  # NCCL ends a process whose message waits for minutes
        return
    try:
        torch.distributed.monitored_barrier(timeout=timedelta(seconds=MEET_SECONDS), wait_all_ranks=True)
    except RuntimeError as problem:
        what = f"tensors are gathered from all processes, and one did not call it within {MEET_SECONDS:g} s"
        raise PatchError(f"{call}: {what}; call it on every rank ({problem})") from None


def is_sharded(tensor: Tensor) -> bool:
    """True for a parameter of FSDP2 or of ZeRO-3."""
    return hasattr(tensor, "full_tensor") or is_zero3_parameter(tensor)


def full_value(tensor: Tensor) -> Tensor:
    """Return the value of a parameter, of a sharded one the full tensor: then all its processes must call this."""
    # recognised by a method, because importing the class DTensor takes 0.7 s
    gather = getattr(tensor.detach(), "full_tensor", None)
    if gather is not None:
        return gather()
    if is_zero3_parameter(tensor):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor.detach()
