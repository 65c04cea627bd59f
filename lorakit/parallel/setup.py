"""A run's engine, from the processes finding each other to all of them ending, for the same reason."""

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_default_store

from lorakit.errors import LorakitError, PeerFailure, RunError, TemporaryFailure
from lorakit.launch.environment import World, contradictions, detect_world
from lorakit.launch.heartbeat import is_collective_error
from lorakit.launch.quiet import quiet_libraries, without_deprecations
from lorakit.launch.watchdog import Watchdog
from lorakit.parallel import open_engine
from lorakit.parallel.engine import Engine
from lorakit.parallel.process_group import destroy_process_group, torch_environment
from lorakit.recipe import Recipe
from lorakit.version import VERSION


def current_process(recipe: Recipe, environment: Mapping[str, str]) -> World | None:
    """Which process this is among those that were launched; None when it stands alone.

    Raises:
        RunError: the launcher, or variables of other tools, say something else than the recipe.
    """
    parallel = recipe.parallel
    world = detect_world(environment, parallel.rendezvous)
    lines = contradictions(
        world, environment, backend=parallel.backend, processes=parallel.processes, nodes=parallel.nodes,
        dtype=recipe.base.dtype,
    )  # fmt: skip
    if lines:
        raise RunError("launcher and recipe contradict each other:\n" + "\n".join(f"  {line}" for line in lines))
    return world


@contextmanager
def distributed_engine(recipe: Recipe, ending: Callable[[], None]) -> Iterator[Engine]:
    """The recipe's engine, once all its processes are there and agree on what they run.

    A failure of one ends all, with the same words and exit code; ``ending`` is called before they tell each other.

    Raises:
        RunError: launcher and recipe contradict each other, or the processes differ in recipe or versions.
        TemporaryFailure: another process is gone; what was saved is kept.
    """
    world = current_process(recipe, os.environ)
    if recipe.auto_keys:
        raise RunError(
            f"{', '.join(recipe.auto_keys)}: `auto` is chosen by the `lorakit train` that starts the processes, and"
            f" {world.launcher if world else 'nothing'} did: name what `lorakit plan` advises"
        )
    if world is None or not recipe.parallel.is_distributed:
        if recipe.parallel.is_distributed:
            raise RunError("nothing launched this run's processes: start it with `lorakit train`")
        yield open_engine(recipe.parallel)
        return
    os.environ.update(torch_environment(world))
    with quiet_libraries(), rendezvous_errors_explained(world):
        engine = open_engine(recipe.parallel, world)
    watch = Watchdog(
        _get_default_store(), world.rank, world.size,
        silent_seconds=recipe.parallel.silent_seconds, stuck_seconds=recipe.parallel.stuck_seconds,
    )  # fmt: skip
    watch.start()
    engine.phase = watch.set_phase
    try:
        engine.group.check_same("what they run", shared_facts(recipe))
        with without_deprecations():
            yield engine
        watch.close()
    except Exception as problem:
        ending()
        last = final_error(watch, problem)
        if last is problem:
            raise
        raise last from None
    finally:
        destroy_process_group()


@contextmanager
def rendezvous_errors_explained(world: World) -> Iterator[None]:
    """torch's errors, should the processes not find each other, in words."""
    where = f"{world.address}:{world.port}"
    try:
        yield
    except RuntimeError as problem:
        if not is_collective_error(problem):
            raise
        if "EADDRINUSE" in str(problem):
            raise RunError(
                f"{where}, where the processes are to meet, is in use by another program: choose another port"
                " (MASTER_PORT, or the launcher's)"
            ) from None
        raise TemporaryFailure(
            f"rank {world.rank} and the other {world.size - 1} did not find each other at {where}:"
            f" {str(problem).splitlines()[0][:300]}. One of them did not start or has gone, or this machine cannot be"
            " reached: if it has several networks, name one in GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME)"
        ) from None


def final_error(watch: Watchdog, problem: Exception) -> Exception:
    """What this process ends with, once all know: its own problem, or that of the rank which failed first."""
    if isinstance(problem, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(problem):
        problem = RunError(
            f"out of memory ({str(problem).splitlines()[0][:300]}). `lorakit plan` says what would"
            " fit: a lower train.micro_batch_size, train.activation_checkpointing: layers, or the base in parts with"
            " zero3 or fsdp2"
        )
    if isinstance(problem, LorakitError):
        reason = watch.fail(str(problem), problem.exit_code)
        own = reason.rank in (None, watch.rank)
    elif isinstance(problem, RuntimeError):  # torch.distributed's errors are: another rank may be gone
        reason = watch.explain(problem)
        own = reason.rank is None and not reason.num_lost
    else:
        reason = watch.fail(f"{type(problem).__name__}: {problem}", exit_code=1)
        own = True
    if own:
        return problem
    return PeerFailure(str(reason), reason.exit_code)


def shared_facts(recipe: Recipe) -> dict[str, Any]:
    """What must be the same everywhere: the recipe and the versions that decide the numbers."""
    from importlib.metadata import version

    sections = recipe.model_dump(mode="json", exclude={"output"})
    return {
        "lorakit": VERSION, "python": platform.python_version(), "torch": torch.__version__,
        "transformers": version("transformers"), "accelerate": version("accelerate"),
        **{f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()},
    }  # fmt: skip
