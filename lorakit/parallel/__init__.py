"""Where training runs. Backends are looked up in one literal table."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Final

from lorakit.errors import RunError, did_you_mean
from lorakit.launch.environment import World
from lorakit.parallel.engine import Engine, FillParameter, NonFiniteStep, StepReport, StepSettings
from lorakit.parallel.group import Group
from lorakit.parallel.process_group import device_of
from lorakit.parallel.single import SingleEngine

if TYPE_CHECKING:  # a step needs no recipe, and none of what reads one
    from lorakit.recipe import ParallelSection

BACKENDS: Final[Mapping[str, tuple[str, str]]] = {
    "ddp": ("ddp", "DdpEngine"),
    "zero1": ("zero", "ZeroEngine"),
    "zero2": ("zero", "ZeroEngine"),
    "zero3": ("zero", "ZeroEngine"),
    "fsdp2": ("fsdp2", "Fsdp2Engine"),
}
"""Backend -> file and class, imported when it is asked for: torch's part of fsdp2 alone takes 0.7 s."""


def open_engine(parallel: "ParallelSection", world: World | None = None) -> Engine:
    """The engine of a backend; for more than one process it waits for the others.

    Raises:
        RunError: no such backend, or the processes did not find each other.
    """
    device = device_of(world.local_rank if world else 0)
    if parallel.offloads.streams:
        from lorakit.parallel.streaming import StreamingEngine

        return StreamingEngine(device, Group(), parallel.backend)
    if parallel.backend == "single":
        return SingleEngine(device, Group(), parallel.backend)
    if parallel.backend not in BACKENDS:
        raise RunError(f"parallel.backend: {parallel.backend!r} is unknown.{did_you_mean(parallel.backend, BACKENDS)}")
    assert world is not None
    file, name = BACKENDS[parallel.backend]
    engine: Engine = getattr(import_module(f"lorakit.parallel.{file}"), name)(world, parallel, device)
    return engine


__all__ = ["BACKENDS", "Engine", "FillParameter", "Group", "NonFiniteStep", "StepReport", "StepSettings", "open_engine"]
