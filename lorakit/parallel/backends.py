"""Open the engine of a recipe's backend. The facts of each backend are in `lorakit/backends.py`."""

from importlib import import_module
from typing import TYPE_CHECKING

from lorakit.base.device import UNTESTED
from lorakit.errors import RunError
from lorakit.launch.environment import World
from lorakit.parallel.engine import Engine
from lorakit.parallel.group import Group
from lorakit.parallel.mesh import make_mesh
from lorakit.parallel.process_group import device_of, form_group, message_timeout

if TYPE_CHECKING:  # at run time the recipe comes from the caller, so a training loop without one needs no pydantic
    from lorakit.recipe import ParallelSection


def open_engine(parallel: "ParallelSection", world: World | None = None) -> Engine:
    """Build the engine that a recipe's `parallel` section names. Waits for the other processes, if any.

    Raises:
        RunError: as `check_prerequisites`, or the processes could not form a group.
    """
    device = device_of(world.local_rank if world else 0)
    if device.type in UNTESTED and parallel.is_distributed:
        raise RunError(
            f"parallel.backend: {parallel.backend} sends between CPUs or CUDA's GPUs, and this machine has"
            f" {device.type}; backend single uses it in one process"
        )
    check_prerequisites(parallel)
    # each backend is imported only when chosen, because torch's part of fsdp2 alone takes 0.7 s to import
    name = "streaming.StreamingEngine" if parallel.offloads.streams else parallel.facts.engine
    file, _, class_name = name.partition(".")
    engine_class: type[Engine] = getattr(import_module(f"lorakit.parallel.{file}"), class_name)
    if not parallel.facts.is_distributed:
        return engine_class(parallel, device, Group())
    assert world is not None
    group = form_group(world, parallel, device)
    return engine_class(parallel, device, group, make_mesh(group, parallel, message_timeout(parallel)))


def check_prerequisites(parallel: "ParallelSection") -> None:
    """Raise an error unless this machine has what the recipe's backend needs.

    Raises:
        RunError: a package, a compiler or a disk is missing. RecipeError: a key of `parallel.deepspeed` contradicts the
        recipe.
    """
    if not parallel.is_auto and parallel.facts.zero_stage is not None:
        from lorakit.parallel.deepspeed_setup import check_deepspeed

        check_deepspeed(parallel)
