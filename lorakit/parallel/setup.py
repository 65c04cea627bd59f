"""Open a run's engine and close it: from the rendezvous of its processes to their common end.

Invariant: all processes of a run end for the same reason, with the same exit code.
"""

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lorakit.errors import LorakitError, PeerFailure, RunError, TemporaryFailure
from lorakit.launch.environment import World
from lorakit.launch.quiet import quiet_libraries, without_deprecations
from lorakit.launch.watchdog import Watchdog, is_collective_error
from lorakit.parallel import open_engine
from lorakit.parallel._internals import default_store
from lorakit.parallel.engine import Engine
from lorakit.parallel.process_group import destroy_process_group, torch_environment
from lorakit.recipe import Recipe
from lorakit.version import VERSION


@contextmanager
def distributed_engine(recipe: Recipe, world: World | None, on_failure: Callable[[], None]) -> Iterator[Engine]:
    """Yield the recipe's engine, once all its processes have joined and agree on recipe and versions.

    world: this process's rank and group, or None if no launcher started it.
    If one process fails, all raise its reason. `on_failure` is called first, before the ranks exchange reasons: a
    signal in the middle of that exchange would end this process for another reason than the others.

    Raises:
        RunError: the processes differ in recipe or versions.
        TemporaryFailure: another process ended or stopped answering. Checkpoints stay.
    """
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
    if recipe.parallel.elastic is not None:
        with _elastic_engine(recipe, world, on_failure) as engine:
            yield engine
        return
    os.environ.update(torch_environment(world))  # accelerate and DeepSpeed read their ranks from nowhere else
    with quiet_libraries(), rendezvous_errors_explained(world):
        engine = open_engine(recipe.parallel, world)
    watchdog = Watchdog(
        default_store(),
        world.rank,
        world.size,
        silent_seconds=recipe.parallel.silent_seconds,
        stuck_seconds=recipe.parallel.stuck_seconds,
    )
    watchdog.start()
    engine.set_phase = watchdog.set_phase
    try:
        engine.group.check_same("what they run", shared_facts(recipe))
        with without_deprecations():
            yield engine
        watchdog.close()
    except Exception as problem:
        on_failure()
        error = final_error(watchdog, problem)
        if error is problem:
            raise
        raise error from None
    finally:
        destroy_process_group()


@contextmanager
def _elastic_engine(recipe: Recipe, world: World, on_failure: Callable[[], None]) -> Iterator[Engine]:
    """Yield the engine of an elastic run. The processes that it starts with have met, one that joins has not.

    No watchdog: whoever loses another goes on, and the launcher ends the run where too few are left.
    """
    from lorakit.parallel.elastic import ElasticEngine

    if world.launcher != "lorakit":
        raise RunError(
            f"parallel.elastic: {world.launcher} started this process, and only `lorakit train` itself starts processes"
            " that may be lost; leave the key out, or start the run with `lorakit train`"
        )
    engine = open_engine(recipe.parallel, world)
    assert isinstance(engine, ElasticEngine)
    try:
        if not engine.joins:
            engine.meet(0)
            engine.group.check_same("what they run", shared_facts(recipe))
        with without_deprecations():
            yield engine
    except Exception as problem:
        on_failure()
        if is_collective_error(problem):
            raise TemporaryFailure(
                f"another process was lost before the first step ({str(problem).splitlines()[0][:200]}); the same"
                " command begins again"
            ) from None
        if is_out_of_memory(problem):
            raise out_of_memory(problem) from None
        raise
    finally:
        engine.close()


@contextmanager
def rendezvous_errors_explained(world: World) -> Iterator[None]:
    """Turn torch's errors of a failed rendezvous into errors that name the address and the remedy.

    Raises:
        RunError: the port is in use, and the user chose it.
        TemporaryFailure: a process did not come, the address cannot be reached, or lorakit's own port was taken.
    """
    where = f"{world.address}:{world.port}"
    try:
        yield
    except RuntimeError as problem:
        if not is_collective_error(problem):
            raise
        if "EADDRINUSE" in str(problem) and world.launcher == "lorakit":  # every start chooses another port
            raise TemporaryFailure(f"port {where} was taken by another program; the same command goes on") from None
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


def final_error(watchdog: Watchdog, problem: Exception) -> Exception:
    """Return the error this process ends with: its own problem, or that of the rank which failed first.

    The ranks exchange their reasons here, so that all end with the same one.
    """
    if is_out_of_memory(problem):
        problem = out_of_memory(problem)
    if isinstance(problem, LorakitError):
        reason = watchdog.fail(str(problem), problem.exit_code)
        own = reason.rank in (None, watchdog.rank)
    elif isinstance(problem, RuntimeError):  # as torch.distributed's errors are, so another rank may be the cause
        reason = watchdog.explain(problem)
        own = reason.rank is None and not reason.num_lost
    else:
        reason = watchdog.fail(f"{type(problem).__name__}: {problem}", exit_code=1)
        own = True
    if own:
        return problem
    return PeerFailure(str(reason), reason.exit_code)


def is_out_of_memory(problem: Exception) -> bool:
    """True if a tensor did not fit."""
    # CPU allocators raise plain RuntimeErrors: only their text distinguishes them from failed collectives
    return isinstance(problem, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(problem)


def out_of_memory(problem: Exception) -> RunError:
    """Return the error for a tensor that did not fit, with what would help."""
    return RunError(
        f"out of memory ({str(problem).splitlines()[0][:300]}). `lorakit plan` says what would fit: a lower"
        " train.micro_batch_size, train.activation_checkpointing: layers, or the base in parts with zero3 or fsdp2"
    )


def shared_facts(recipe: Recipe) -> dict[str, Any]:
    """Return the facts that every rank must share: the recipe, and the versions that influence the numbers."""
    from importlib.metadata import version

    sections = recipe.model_dump(mode="json", exclude={"output"})
    return {
        "lorakit": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "accelerate": version("accelerate"),
        **{f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()},
    }
