"""Start and end torch's process group, and choose its device, backend and network interface."""

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist

from lorakit.base.device import find_gpus
from lorakit.errors import RunError
from lorakit.files.text import count_of
from lorakit.launch.environment import World
from lorakit.launch.interrupts import waiting
from lorakit.launch.workers import usable_cores
from lorakit.parallel.group import Group

if TYPE_CHECKING:
    from lorakit.recipe import ParallelSection


def device_of(local_rank: int) -> torch.device:
    """Return this process's GPU, on a machine without one the CPU. Raises RunError: more processes than GPUs."""
    gpus = find_gpus()
    if not gpus:
        return torch.device("cpu")
    if local_rank >= len(gpus):
        raise RunError(
            f"parallel.processes: local rank {local_rank} has no GPU, this machine has {len(gpus)}; one process per GPU"
        )
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


def message_timeout(parallel: "ParallelSection") -> timedelta:
    """Return how long torch waits while the groups form, before the watchdog runs."""
    return timedelta(seconds=parallel.stuck_seconds + 60)


def form_group(world: World, parallel: "ParallelSection", device: torch.device) -> Group:
    """Start torch's process group, unless the program has, with the variables of `torch_environment`. Waits for all.

    Raises RunError: as `collective_backend`, or the program's own group is another one.
    """
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
    if formed != (world.rank, world.size, backend):
        raise RunError(
            "this program's process group has rank {}, size {} and backend {}, the run needs {}, {} and {}".format(
                *formed, world.rank, world.size, backend
            )
        )
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
        with contextlib.suppress(OSError):
            family, kind, _, _, target_address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target_address)  # UDP: this looks up a route and sends nothing
                own = probe.getsockname()[0]
            for name, addresses in psutil.net_if_addrs().items():
                known = {entry.address.partition("%")[0] for entry in addresses}
                if own in known and not ipaddress.ip_address(own).is_loopback:
                    return str(name)
    return None
