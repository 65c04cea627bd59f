"""Open a run's engine and close it: from the rendezvous of its processes to their common end.

The record of each backend, and the file of its engine, are in `lorakit/backends.py`.

Invariant: all processes of a run end for the same reason, with the same exit code.
"""

import importlib.util
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Final

import psutil
import torch
import torch.distributed as dist

from lorakit.base.device import UNTESTED, find_gpus
from lorakit.errors import LorakitError, PeerFailure, RunError, TemporaryFailure
from lorakit.files.text import count_of, flatten
from lorakit.launch.environment import World
from lorakit.launch.interrupts import waiting
from lorakit.launch.libraries import quiet_libraries, without_deprecations
from lorakit.launch.watchdog import HeartbeatStore, Watchdog
from lorakit.launch.workers import usable_cores
from lorakit.parallel._internals import default_store, set_message_timeout
from lorakit.parallel.engine import Engine
from lorakit.parallel.group import Group, make_mesh, message_timeout
from lorakit.version import versions

if TYPE_CHECKING:  # at run time the recipe comes from the caller, so a training loop without one needs no pydantic
    from lorakit.recipe import ParallelSection, Recipe

LONGEST_WAIT: Final = timedelta(days=30)


@contextmanager
def distributed_engine(recipe: "Recipe", world: World | None, on_failure: Callable[[], None]) -> Iterator[Engine]:
    """Yield the recipe's engine, once all its processes have joined and agree on recipe and versions.

    If one process fails, all raise its reason. `on_failure` is called first, before the ranks exchange reasons: a
    signal in the middle of that exchange would end this process for another reason than the others.
    Raises RunError: they differ in recipe or versions. TemporaryFailure: another one ended or stopped answering.
    """
    if keys := ", ".join(recipe.auto_keys):
        how = "is chosen by the `lorakit train` that starts the processes; name what `lorakit plan` advises"
        raise RunError(f"{keys}: `auto` {how}")
    if not recipe.parallel.is_distributed:
        yield open_engine(recipe.parallel)
        return
    if world is None:
        raise RunError("nothing launched this run's processes: start it with `lorakit train`")
    os.environ.update(torch_environment(world))  # DeepSpeed reads its ranks from nowhere else
    with quiet_libraries(), rendezvous_errors_explained(world):
        engine = open_engine(recipe.parallel, world)
    store = HeartbeatStore(default_store(), f"{world.address}:{world.port}")
    watchdog = Watchdog(store, world.rank, world.size, recipe.parallel.silent_seconds, recipe.parallel.stuck_seconds)
    watchdog.start()
    # a rank may wait for another one's work as long as that makes progress, and the watchdog ends all other waiting
    set_message_timeout(LONGEST_WAIT)
    engine.set_phase = watchdog.set_phase
    try:
        values = flatten(recipe.model_dump(mode="json", exclude={"output"}))
        engine.group.check_same("what they run", versions() | values)
        with without_deprecations():
            yield engine
        engine.group.any(False)  # all ranks arrive here, and only then may one of them end
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
def rendezvous_errors_explained(world: World) -> Iterator[None]:
    """Turn torch's errors of a rendezvous into errors with address and remedy. Raises RunError, TemporaryFailure."""
    where = f"{world.address}:{world.port}"
    try:
        yield
    except RuntimeError as problem:
        if not is_collective_error(problem):
            raise
        if "EADDRINUSE" in str(problem) and world.launcher == "lorakit":  # every start chooses another port
            raise TemporaryFailure(f"port {where} was taken by another program; the same command goes on") from None
        if "EADDRINUSE" in str(problem):
            raise RunError(f"{where} is in use by another program: choose another port (MASTER_PORT)") from None
        here = {name for _, name in socket.if_nameindex()}
        if unknown := {*os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")} - {"", *here}:
            known = ", ".join(sorted(here))
            raise RunError(f"GLOO_SOCKET_IFNAME: no interface {min(unknown)!r} is here; there are {known}") from None
        raise TemporaryFailure(
            f"rank {world.rank} and the other {world.size - 1} did not find each other at {where}:"
            f" {str(problem).splitlines()[0][:300]}. One of them did not start or has gone, or this machine cannot be"
            " reached: if it has several networks, name one in GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME)"
        ) from None


def final_error(watchdog: Watchdog, problem: Exception) -> Exception:
    """Return the error this process ends with: its own problem, or that of the rank which failed first."""
    if is_out_of_memory(problem):
        problem = RunError(
            f"out of memory ({str(problem).splitlines()[0][:300]}). `lorakit plan` says what would fit: a lower"
            " train.micro_batch_size, train.activation_checkpointing: layers, or the base in parts with zero3 or fsdp2"
        )
    if is_collective_error(problem):
        reason = watchdog.explain(problem)
    elif isinstance(problem, LorakitError):
        reason = watchdog.fail(str(problem), problem.exit_code)
    else:
        reason = watchdog.fail(f"{type(problem).__name__}: {problem}", exit_code=1)
    return problem if reason.rank == watchdog.rank else PeerFailure(str(reason), reason.exit_code)


def is_collective_error(error: BaseException) -> bool:
    """True if another rank's failure may be the cause, by messages of torch 2.13's gloo and by NCCL's error class."""
    is_from_backend = any(word in str(error) for word in ("gloo/", "monitoredBarrier", "NCCL"))
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and is_from_backend)


def is_out_of_memory(problem: Exception) -> bool:
    """True if a tensor did not fit."""
    # CPU allocators raise plain RuntimeErrors: only their text distinguishes them from failed collectives
    return isinstance(problem, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(problem)


def open_engine(parallel: "ParallelSection", world: World | None = None) -> Engine:
    """Build the engine of a recipe. Raises RunError: as `check_prerequisites`, or processes do not meet."""
    device = device_of(world.local_rank if world else 0)
    if device.type in UNTESTED and parallel.is_distributed:
        where = f"between CPUs or CUDA's GPUs, and this machine has {device.type}"
        raise RunError(f"parallel.backend: {parallel.backend} sends {where}; choose single, which is one process")
    check_prerequisites(parallel)
    # each backend is imported only when chosen, because torch's part of fsdp2 alone takes 0.7 s to import
    name = "streaming.StreamingEngine" if parallel.offloads.streams else parallel.facts.engine
    file, _, class_name = name.partition(".")
    engine_class: type[Engine] = getattr(import_module(f"lorakit.parallel.{file}"), class_name)
    if not parallel.facts.is_distributed:
        return engine_class(parallel, device, Group())
    assert world is not None
    group = form_group(world, parallel, device)
    return engine_class(parallel, device, group, make_mesh(group, parallel))


def check_prerequisites(parallel: "ParallelSection") -> None:
    """Raise RunError unless this machine has what the recipe's backend needs."""
    if not parallel.is_auto and parallel.facts.package and importlib.util.find_spec(parallel.facts.package) is None:
        remedy = "pip install 'lorakit[deepspeed]', or choose ddp or fsdp2"
        raise RunError(f"parallel.backend: {parallel.backend} needs DeepSpeed: {remedy}")


def device_of(local_rank: int) -> torch.device:
    """Return this process's GPU, on a machine without one the CPU. Raises RunError: more processes than GPUs."""
    gpus = find_gpus()
    if not gpus:
        return torch.device("cpu")
    if local_rank >= len(gpus):
        raise RunError(f"parallel.processes: local rank {local_rank} has no GPU, this machine has {len(gpus)}")
    return gpus[local_rank]


def collective_backend(parallel: "ParallelSection", device: torch.device) -> str:
    """Return the recipe's `communication`. Raises RunError: torch has no such backend, or not for the device."""
    requested = parallel.communication
    if requested == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if requested == "nccl" and device.type == "cpu":
        raise RunError("parallel.communication: nccl talks between GPUs and there is none here; gloo or auto")
    if not dist.is_backend_available(requested):
        raise RunError(f"parallel.communication: this torch was built without {requested}; auto chooses what it has")
    return requested


def form_group(world: World, parallel: "ParallelSection", device: torch.device) -> Group:
    """Start torch's process group, unless the program has, and wait for all. Raises RunError: it needs another one."""
    backend = collective_backend(parallel, device)
    timeout = message_timeout(parallel)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:  # each process would use all cores of the machine
        torch.set_num_threads(max(1, usable_cores() // world.local_size))
    if not dist.is_initialized():
        where = f"{world.address}:{world.port}, where rank 0 listens"
        with waiting(f"rank {world.rank} waits for {count_of(world.size - 1, 'other rank')} at {where}"):
            dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=timeout)
    formed = (dist.get_rank(), dist.get_world_size(), dist.get_backend())
    needed = (world.rank, world.size, backend)
    if formed != needed:
        raise RunError(f"this program's process group has (rank, size, backend) {formed}, and the run needs {needed}")
    # nccl sends tensors of GPUs only, and Group's are on the CPU
    on_cpu = None if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
    return Group(world.rank, world.size, world.local_rank, on_cpu)


def destroy_process_group() -> None:
    """End the process group, if there is one. Call it after the last message of every rank."""
    if dist.is_initialized():
        # gloo's thread frees finished messages by itself. Ending the group meanwhile hangs: its destructor holds the
        # interpreter's lock, for which that thread waits (seen with torch 2.13)
        time.sleep(0.3)
        dist.destroy_process_group()


def torch_environment(world: World) -> Mapping[str, str]:
    """Return the environment variables that torch, gloo and DeepSpeed read, for any launcher."""
    variables = world.variables()
    if world.size > world.local_size and "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = interface_towards(world.address)
        variables |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    return variables


def interface_towards(address: str) -> str | None:
    """Return this machine's network interface towards `address`; gloo would use its own name's, often 127.0.0.1."""
    # on the machine with that name, it may resolve to 127.0.0.1; 192.0.2.1 (reserved, RFC 5737) gives the default route
    for target in (address, "192.0.2.1"):
        with suppress(OSError):
            family, kind, _, _, target_address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target_address)  # UDP: this looks up a route and sends nothing
                own = probe.getsockname()[0]
            for name, addresses in psutil.net_if_addrs().items():
                known = {entry.address.partition("%")[0] for entry in addresses}
                if own in known and not ipaddress.ip_address(own).is_loopback:
                    return str(name)
    return None
