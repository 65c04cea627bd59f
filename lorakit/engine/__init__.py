"""Where training runs. Backends are looked up in one literal table."""

from collections.abc import Callable, Mapping
from typing import Final

import torch

from lorakit.engine.base import Engine, NonFiniteStep, ReadInto, StepReport, StepSettings
from lorakit.engine.ddp import ReplicatedEngine
from lorakit.engine.fsdp2 import ShardedEngine
from lorakit.engine.group import Group
from lorakit.engine.processes import device_of
from lorakit.engine.single import WholeEngine
from lorakit.engine.world import World
from lorakit.engine.zero import ZeroEngine
from lorakit.errors import RunError, nearest
from lorakit.recipe import ParallelSection

BACKENDS: Final[Mapping[str, Callable[[World, ParallelSection, torch.device], Engine]]] = {
    "ddp": ReplicatedEngine,
    "zero1": ZeroEngine,
    "zero2": ZeroEngine,
    "zero3": ZeroEngine,
    "fsdp2": ShardedEngine,
}


def open_engine(parallel: ParallelSection, world: World | None = None) -> Engine:
    """The engine of a backend; for more than one process it waits for the others.

    Raises:
        RunError: no such backend, or the processes did not find each other.
    """
    device = device_of(world.local_rank if world else 0)
    if parallel.backend == "single":
        return WholeEngine(device, Group(), parallel.backend)
    if parallel.backend not in BACKENDS:
        raise RunError(f"parallel.backend: {parallel.backend!r} is unknown.{nearest(parallel.backend, BACKENDS)}")
    assert world is not None
    return BACKENDS[parallel.backend](world, parallel, device)


__all__ = ["BACKENDS", "Engine", "Group", "NonFiniteStep", "ReadInto", "StepReport", "StepSettings", "open_engine"]
