"""Which process this is when something launched several: read from environment variables alone. Imports no torch.

Whatever the launcher, every process of a run finds one size, one address and one port, and a rank of its own. What
does not add up is refused, with the variable and its value.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, NoReturn

from lorakit.errors import RunError
from lorakit.launch import slurm

LAUNCHED_BY: Final = "LORAKIT_PARENT"
"""Set by lorakit's own launcher for its workers: its process id, and where their last words go."""
DEFAULT_PORT: Final = 29500
"""torch's own default; used where neither launcher nor recipe gives one."""
HOW: Final = "Start with `lorakit train`, torchrun, accelerate launch, deepspeed, mpirun or srun (docs/clusters.md)"


@dataclass(frozen=True)
class World:
    """One process among ``size``, started by ``launcher``; the processes meet at ``address``:``port``."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    address: str
    port: int


class _Names(NamedTuple):
    """Which variables hold the four numbers."""

    rank: str
    size: str
    local_rank: str
    local_size: str


TORCH: Final = _Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPI: Final = {
    "openmpi": _Names(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    "mvapich": _Names(*(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    "mpich": _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Hydra: MPICH, Intel MPI
}
SLURM: Final = _Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")


def detect_world(environment: Mapping[str, str], rendezvous: str | None = None) -> World | None:
    """The place of this process among those that were launched together, or None when nothing launched it.

    ``rendezvous`` is the recipe's host:port; it serves where the launcher names no address.

    Raises:
        RunError: variables that are half set, no numbers, or contradict each other; or no address to meet at.
    """
    env = {name: value.strip() for name, value in environment.items() if value.strip()}
    launcher, names = _launcher(env)
    if launcher is None:
        return _launched_alone(env)
    if launcher == "slurm":
        env[SLURM.local_size] = str(slurm.tasks_on_this_node(env))
    rank, size, local_rank, local_size = _read_ranks(env, names)
    if names != TORCH:
        _refuse_contradictory_variables(env, names)
    address, port = _rendezvous_address(env, rendezvous, alone=local_size == size, of_step=launcher == "slurm")
    return World(rank, size, local_rank, local_size, launcher, address, port)


def split_endpoint(text: str) -> tuple[str, int | None]:
    """host and port of ``host:port``, ``host`` or ``[IPv6]:port``.

    Raises:
        RunError: not of that form.
    """
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:\[\]]+))(?::(\d{1,5}))?", text.strip())
    if found is None or not 0 <= int(found[3] or 1) < 2**16:
        raise RunError(f"parallel.rendezvous: {text!r} is no host:port; write it as node01:{DEFAULT_PORT}")
    return found[1] or found[2], int(found[3]) if found[3] else None


def _launcher(env: Mapping[str, str]) -> tuple[str | None, _Names]:
    """Who started this process as one of several, and where it says so. Inner launchers come before outer ones."""
    if LAUNCHED_BY in env:
        return "lorakit", TORCH
    if "TORCHELASTIC_RUN_ID" in env:
        return ("accelerate" if "ACCELERATE_MIXED_PRECISION" in env else "torchrun"), TORCH
    if {"CROSS_RANK", "CROSS_SIZE", "RANK"} <= env.keys():
        return "deepspeed", TORCH._replace(local_size="LOCAL_SIZE")
    for launcher, names in MPI.items():
        in_slurm = launcher == "mpich" and "SLURM_STEP_ID" in env and names.local_rank not in env  # srun --mpi=pmi2
        if not in_slurm and (names.rank in env or names.size in env):
            return launcher, names
    if slurm.is_step(env):
        return "slurm", SLURM
    return ("environment" if any(name in env for name in TORCH[:3]) else None), TORCH


def _launched_alone(env: Mapping[str, str]) -> World | None:
    """Without any rank: the one process of `accelerate launch`, or None. A pod meant for torchrun is refused."""
    if env.get("PET_NNODES", "1") not in ("1", "1:1"):
        raise RunError(
            f"PET_NNODES={env['PET_NNODES']} is meant for torchrun, which did not start this process;"
            " let the pod run `torchrun -m lorakit.cli train RECIPE` (docs/clusters.md)"
        )
    if {"ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"} <= env.keys():
        return World(0, 1, 0, 1, "accelerate", "127.0.0.1", DEFAULT_PORT)
    return None


def _read_ranks(env: Mapping[str, str], names: _Names) -> tuple[int, int, int, int]:
    """Rank, size, local rank and local size, checked against each other."""
    if names == TORCH and env.get("WORLD_SIZE") == "1":
        env = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **env}
    missing = [name for name in names if name not in env]
    if missing:
        given = ", ".join(f"{name}={env[name]}" for name in names if name in env)
        pod = " If they count pods, as in a PyTorchJob, let each pod run torchrun." if names == TORCH else ""
        _refuse(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set beside {given}.{pod}")
    for name in names:
        if not env[name].isdecimal():
            _refuse(f"{name}={env[name]!r} is no whole number.")
    rank, size, local_rank, local_size = (int(env[name]) for name in names)
    if not rank < size:
        _refuse(f"{names.rank}={rank} with {names.size}={size}: ranks go from 0 to {size - 1}.")
    if not local_rank < local_size <= size:
        _refuse(
            f"{names.local_rank}={local_rank} with {names.local_size}={local_size} and {names.size}={size}:"
            " local ranks count the processes of one machine from 0."
        )
    return rank, size, local_rank, local_size


def _refuse_contradictory_variables(env: Mapping[str, str], names: _Names) -> None:
    """RANK and its like, where they are set besides, say the same."""
    for plain, name in zip(TORCH[:3], names[:3], strict=True):
        if plain in env and env[plain] != env[name]:
            _refuse(f"{plain}={env[plain]} contradicts {name}={env[name]}: unset {plain}.")


def _refuse(what: str) -> NoReturn:
    raise RunError(f"{what} {HOW}")


def _rendezvous_address(
    env: Mapping[str, str], rendezvous: str | None, *, alone: bool, of_step: bool
) -> tuple[str, int]:
    """The launcher's address, else the recipe's, else this machine if no other takes part, else Slurm's first host.

    The daemons of mpirun run in a Slurm step of their own, without the first host: for them the job's list counts.
    """
    wanted, wanted_port = split_endpoint(rendezvous) if rendezvous else (None, None)
    address = env.get("MASTER_ADDR") or wanted or ("127.0.0.1" if alone else slurm.first_host(env, of_step=of_step))
    if address is None:
        raise RunError(
            "the processes are on several machines and nobody says where they meet: set parallel.rendezvous to"
            f" host:port of the machine of rank 0, or MASTER_ADDR (and MASTER_PORT, else {DEFAULT_PORT})"
        )
    port = env.get("MASTER_PORT") or str(wanted_port or slurm.port_of(env, of_step=of_step) or DEFAULT_PORT)
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise RunError(f"MASTER_PORT={port!r} is no port; a number from 1 to {2**16 - 1}")
    return address, int(port)


def contradictions(
    world: World | None, environment: Mapping[str, str], *, backend: str, processes: int, nodes: int, dtype: str
) -> list[str]:
    """What launcher and environment say against the recipe, a line each; the recipe is the only channel."""
    lines = []
    if world is not None and world.size != processes:
        lines.append(f"{world.launcher} started {_count(world.size, 'process')}, parallel.processes is {processes}")
    elif world is not None and (num_nodes := _num_nodes(world, environment)) != nodes:
        lines.append(f"{world.launcher} uses {_count(num_nodes, 'machine')}, parallel.nodes is {nodes}")
    env = {name: value.strip().lower() for name, value in environment.items() if value.strip()}
    stage = env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", backend.removeprefix("zero"))
    against = {
        "ACCELERATE_USE_DEEPSPEED": ("true", backend != f"zero{stage}"),
        "ACCELERATE_USE_FSDP": ("true", backend != "fsdp2" or env.get("FSDP_VERSION", "1") != "2"),
        "ACCELERATE_USE_MEGATRON_LM": ("true", True),
        "ACCELERATE_USE_PARALLELISM_CONFIG": ("true", True),
    }
    for name, (value, differs) in against.items():
        if env.get(name) == value and differs:
            more = [f"{key}={env[key]}" for key in ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "FSDP_VERSION") if key in env]
            lines.append(f"{', '.join([f'{name}={value}', *more])}, parallel.backend is {backend}")
    precision = env.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no" and dtype not in ("auto", {"bf16": "bfloat16", "fp16": "float16"}.get(precision)):
        lines.append(f"ACCELERATE_MIXED_PRECISION={precision}, base.dtype is {dtype}")
    compiler = env.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if compiler != "no":
        lines.append(f"ACCELERATE_DYNAMO_BACKEND={compiler}, and a recipe compiles nothing")
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def _num_nodes(world: World, environment: Mapping[str, str]) -> int:
    """As the launcher counts them, else as many as local processes fit into all."""
    counted = {"deepspeed": "CROSS_SIZE", "slurm": "SLURM_STEP_NUM_NODES"}.get(world.launcher, "GROUP_WORLD_SIZE")
    env = environment.get(counted, "")
    return int(env) if env.isdecimal() else -(-world.size // world.local_size)
