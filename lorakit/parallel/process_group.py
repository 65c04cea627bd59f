"""Several processes become one group: accelerate starts torch's process group, and we look at what came of it."""

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from lorakit.errors import RunError
from lorakit.launch.environment import World
from lorakit.parallel.accounting import process_group_name
from lorakit.parallel.group import Group

if TYPE_CHECKING:
    from lorakit.recipe import ParallelSection


def device_of(local_rank: int) -> torch.device:
    """The GPU of this process when there are GPUs, else the CPU.

    Raises:
        RunError: more processes than GPUs on this machine.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise RunError(
            f"parallel.processes: local rank {local_rank} has no GPU, this machine has {torch.cuda.device_count()};"
            " one process per GPU"
        )
    return torch.device("cuda", local_rank)


def collective_backend(parallel: "ParallelSection", device: torch.device) -> str:
    """nccl on GPUs, gloo on CPUs, or what the recipe asks for.

    Raises:
        RunError: this torch has no such backend, or it cannot serve the device.
    """
    asked = parallel.communication
    if asked == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if asked == "nccl" and device.type == "cpu":
        raise RunError("parallel.communication: nccl talks between GPUs and there is none here; gloo or auto")
    if not dist.is_backend_available(asked):
        raise RunError(f"parallel.communication: this torch was built without {asked}; auto chooses what it has")
    return asked


def init_process_group(
    world: World, parallel: "ParallelSection", device: torch.device, handlers: Sequence[Any] = (), **plugins: Any
) -> tuple[Any, Group]:
    """Accelerate's Accelerator over all processes, and our Group of them.

    Raises:
        RunError: the processes found each other in another way than asked for.
    """
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    talk = collective_backend(parallel, device)
    waits = InitProcessGroupKwargs(
        backend=talk, timeout=timedelta(seconds=parallel.stuck_seconds + 60)
    )  # the watch speaks first
    accelerator = Accelerator(
        cpu=device.type == "cpu" and not plugins, mixed_precision="no", kwargs_handlers=[waits, *handlers], **plugins
    )
    if not dist.is_initialized() or dist.get_world_size() != world.size or dist.get_rank() != world.rank:
        raise RunError(f"the processes did not form a group of {world.size}: {accelerator.state}")
    if process_group_name() != talk:
        raise RunError(f"the processes talk through {process_group_name()}, not {talk}")
    if (accelerator.process_index, accelerator.num_processes) != (world.rank, world.size):
        raise RunError(
            f"accelerate takes this process for {accelerator.process_index} of {accelerator.num_processes},"
            f" it is {world.rank} of {world.size}"
        )
    small = None if talk == "gloo" else dist.new_group(backend="gloo")
    return accelerator, Group(world.rank, world.size, world.local_rank, small)


def destroy_process_group() -> None:
    """End the process group, after the last message of every rank.

    A moment first: gloo's thread drops finished messages by itself, and ending the group while it does so, in a
    destructor that holds the interpreter's lock the thread waits for, hangs (seen with torch 2.13).
    """
    if dist.is_initialized():
        time.sleep(0.3)
        dist.destroy_process_group()


def torch_environment(world: World) -> Mapping[str, str]:
    """The variables torch and accelerate read, whatever launched this process."""
    found = {
        "RANK": str(world.rank), "WORLD_SIZE": str(world.size), "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size), "MASTER_ADDR": world.address, "MASTER_PORT": str(world.port),
    }  # fmt: skip
    if world.size > world.local_size and "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = interface_towards(world.address)
        found |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    return found


def interface_towards(address: str) -> str | None:
    """This machine's network interface on the way to ``address``, or that of its other ways out; None if it has none.

    Gloo would take the one its own name leads to: often 127.0.0.1. Nothing is sent.
    """
    for towards in (address, "192.0.2.1"):  # a name may lead home on its own machine; then the default route
        with contextlib.suppress(OSError):
            family, kind, _, _, place = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(place)
                own = probe.getsockname()[0]
            for name, addresses in psutil.net_if_addrs().items():
                known = {entry.address.partition("%")[0] for entry in addresses}
                if own in known and not ipaddress.ip_address(own).is_loopback:
                    return str(name)
    return None
