"""Build the engine of a recipe's backend. The table below is the only list of backends and their classes."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Final

from lorakit.base.device import UNTESTED
from lorakit.errors import RunError, did_you_mean
from lorakit.launch.environment import World
from lorakit.parallel.engine import Engine
from lorakit.parallel.group import Group
from lorakit.parallel.process_group import device_of
from lorakit.parallel.single import SingleEngine

if TYPE_CHECKING:  # at run time the recipe comes from the caller, so a training loop without one needs no pydantic
    from lorakit.recipe import ParallelSection

BACKENDS: Final[Mapping[str, tuple[str, str]]] = {
    "ddp": ("ddp", "DdpEngine"),
    "zero1": ("zero", "ZeroEngine"),
    "zero2": ("zero", "ZeroEngine"),
    "zero3": ("zero", "ZeroEngine"),
    "fsdp2": ("fsdp2", "Fsdp2Engine"),
}
"""Backend of several processes -> (file in this folder, class)."""


def open_engine(parallel: "ParallelSection", world: World | None = None) -> Engine:
    """Build the engine that a recipe's `parallel` section names. Waits for the other processes, if any.

    Raises:
        RunError: the backend is unknown, or the processes could not form a group.
    """
    device = device_of(world.local_rank if world else 0)
    if device.type in UNTESTED and parallel.is_distributed:
        raise RunError(
            f"parallel.backend: {parallel.backend} sends between CPUs or CUDA's GPUs, and this machine has"
            f" {device.type}; backend single uses it in one process"
        )
    # each backend is imported only when chosen, because torch's part of fsdp2 alone takes 0.7 s to import
    if parallel.offloads.streams:
        from lorakit.parallel.streaming import StreamingEngine

        return StreamingEngine(device, Group(), parallel.backend)
    if parallel.backend == "single":
        return SingleEngine(device, Group(), parallel.backend)
    if parallel.backend not in BACKENDS:
        raise RunError(f"parallel.backend: {parallel.backend!r} is unknown.{did_you_mean(parallel.backend, BACKENDS)}")
    assert world is not None
    if parallel.elastic is not None:
        from lorakit.parallel.elastic import ElasticEngine

        return ElasticEngine(world, parallel, device)
    file, name = BACKENDS[parallel.backend]
    engine: Engine = getattr(import_module(f"lorakit.parallel.{file}"), name)(world, parallel, device)
    return engine
