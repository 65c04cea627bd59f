"""Read rank and rendezvous of this process from its launcher's environment variables. Imports no torch.

Invariant: under every launcher the processes of a run get one size, one address, one port and distinct ranks. Every
task of a Slurm step computes the same first host and the same port. Variables that are missing or contradict each other
are refused by name and value.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, NoReturn

from lorakit.backends import BACKENDS
from lorakit.errors import RunError
from lorakit.files.text import count_of

LAUNCHER_VARIABLE: Final = "LORAKIT_PARENT"
"""Set by lorakit's launcher for its workers: its process id, and the descriptor of the worker's message pipe."""
DEFAULT_PORT: Final = 29500  # torch's own default, used if neither launcher nor recipe gives a port.
HINT: Final = "Start with `lorakit train`, torchrun, accelerate launch, deepspeed, mpirun or srun (docs/clusters.md)"


@dataclass(frozen=True)
class World:
    """This process's rank among ``size``, which meet at ``address``:``port``. launcher: a name, or `environment`."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    address: str
    port: int

    def variables(self) -> dict[str, str]:
        """Return the environment variables that torch and DeepSpeed read, as torchrun sets them."""
        numbers = map(str, (self.rank, self.size, self.local_rank, self.local_size))
        meeting = {"MASTER_ADDR": self.address, "MASTER_PORT": str(self.port)}
        return dict(zip(TORCH, numbers, strict=True)) | meeting


class _Variables(NamedTuple):
    """Names of the variables that hold the four numbers."""

    rank: str
    size: str
    local_rank: str
    local_size: str


TORCH: Final = _Variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPI: Final = {
    "openmpi": _Variables(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    "mvapich": _Variables(*(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    "mpich": _Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Hydra: MPICH, Intel MPI
}
SLURM: Final = _Variables("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")

ACCELERATE_CHOICES: Final = tuple(
    f"ACCELERATE_USE_{name}" for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")
)
"""variables with which `accelerate launch` chooses a backend"""


def detect_world(environment: Mapping[str, str], rendezvous: str | None = None) -> World | None:
    """Return this process's World; None without a launcher. Raises RunError: variables lack, or contradict."""
    env = _set_variables(environment)
    launcher, names = _find_launcher(env)
    if launcher is None and env.get("PET_NNODES", "1") not in ("1", "1:1"):
        raise RunError(f"PET_NNODES={env['PET_NNODES']} is meant for torchrun; let the pod run it (docs/clusters.md)")
    if launcher is None:  # `accelerate launch` gives one process no rank
        is_accelerate = {"ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"} <= env.keys()
        return World(0, 1, 0, 1, "accelerate", "127.0.0.1", DEFAULT_PORT) if is_accelerate else None
    rank, size, local_rank, local_size = _read_ranks(env, launcher, names)
    address, port = _rendezvous_address(env, rendezvous, one_machine=local_size == size, of_step=launcher == "slurm")
    return World(rank, size, local_rank, local_size, launcher, address, port)


def launched_size(environment: Mapping[str, str]) -> dict[str, int] | None:
    """Return `processes` and `nodes` as launched; None without a launcher. Raises as `detect_world`."""
    env = _set_variables(environment)
    launcher, names = _find_launcher(env)
    if launcher is None:
        return None
    _, size, _, local_size = _read_ranks(env, launcher, names)
    return {"processes": size, "nodes": _num_nodes(launcher, size, local_size, env)}


def split_endpoint(text: str) -> tuple[str, int | None]:
    """Return host and port of ``host:port``, ``host`` (port None) or ``[IPv6]:port``, or raise RunError."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:\[\]]+))(?::(\d{1,5}))?", text.strip())
    if match is None or not 0 <= int(match[3] or 1) < 2**16:
        raise RunError(f"parallel.rendezvous: {text!r} is no host:port; write it as node01:{DEFAULT_PORT}")
    return match[1] or match[2], int(match[3]) if match[3] else None


def _set_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are not blank."""
    return {name: value.strip() for name, value in environment.items() if value.strip()}


def _find_launcher(env: Mapping[str, str]) -> tuple[str | None, _Variables]:
    """Return launcher and variables, of the innermost one, which gave the ranks: torchrun inside a Slurm step."""
    if LAUNCHER_VARIABLE in env:
        return "lorakit", TORCH
    if "TORCHELASTIC_RUN_ID" in env and any(name in env for name in TORCH):  # alone it is left over
        return ("accelerate" if "ACCELERATE_MIXED_PRECISION" in env else "torchrun"), TORCH
    if {"CROSS_RANK", "CROSS_SIZE", "RANK"} <= env.keys():
        return "deepspeed", TORCH._replace(local_size="LOCAL_SIZE")
    for launcher, names in MPI.items():
        # srun --mpi=pmi2 sets PMI_RANK too, but no local rank
        in_slurm = launcher == "mpich" and "SLURM_STEP_ID" in env and names.local_rank not in env
        if not in_slurm and (names.rank in env or names.size in env):
            return launcher, names
    # SLURM_PROCID is set in scripts and shells too, and `srun --pty bash` has one task
    if {"SLURM_STEP_ID", "SLURM_PROCID"} <= env.keys() and env.get("SLURM_STEP_NUM_TASKS") != "1":
        return "slurm", SLURM
    return ("environment" if any(name in env for name in TORCH[:3]) else None), TORCH


def _read_ranks(env: Mapping[str, str], launcher: str, names: _Variables) -> tuple[int, int, int, int]:
    """Return rank, size, local rank and local size, checked against each other and against torch's variables."""
    if launcher == "slurm":
        env = {**env, SLURM.local_size: str(_tasks_on_this_node(env))}
    if names == TORCH and env.get("WORLD_SIZE") == "1":  # the other numbers follow
        env = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **env}
    if missing := [name for name in names if name not in env]:
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
    for plain, name in zip(TORCH[:3], names[:3], strict=True):
        if plain in env and env[plain] != env[name]:  # one of the two is left over
            _refuse(f"{plain}={env[plain]} contradicts {name}={env[name]}: unset {plain}.")
    return rank, size, local_rank, local_size


def _refuse(problem: str) -> NoReturn:
    raise RunError(f"{problem} {HINT}")


def _rendezvous_address(
    env: Mapping[str, str], rendezvous: str | None, *, one_machine: bool, of_step: bool
) -> tuple[str, int]:
    """Return the rendezvous: the first of MASTER_ADDR, the recipe, 127.0.0.1 (one machine) and Slurm's first host.

    ``of_step``: read the node list of the Slurm step instead of the job. Under mpirun the job's list counts, because
    mpirun's daemons run in a step that leaves the first host out.
    """
    host, host_port = split_endpoint(rendezvous) if rendezvous else (None, None)
    address = env.get("MASTER_ADDR") or host
    nodes = env.get("SLURM_STEP_NODELIST" if of_step else "SLURM_JOB_NODELIST")
    if not address and one_machine:
        address = "127.0.0.1"
    elif not address and nodes:
        address = first_node(nodes)
    if not address:
        remedy = "set parallel.rendezvous to host:port of the machine of rank 0, or MASTER_ADDR and MASTER_PORT"
        raise RunError(f"the processes are on several machines, and nobody says where they meet: {remedy}")
    port = env.get("MASTER_PORT") or str(host_port or _job_port(env, of_step=of_step) or DEFAULT_PORT)
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise RunError(f"MASTER_PORT={port!r} is no port; a number from 1 to {2**16 - 1}")
    return address, int(port)


def contradictions(
    world: World | None, environment: Mapping[str, str], *, backend: str, processes: int, nodes: int, neighbours: int
) -> list[str]:
    """Return a line for each contradiction with the recipe. neighbours: processes that share tokens or weights."""
    env = _set_variables(environment)
    lines = []
    if world is not None:
        num_nodes = _num_nodes(world.launcher, world.size, world.local_size, env)
        if world.size != processes:
            started = count_of(world.size, "process")
            lines.append(f"{world.launcher} started {started}, parallel.processes is {processes}")
        elif num_nodes != nodes:
            lines.append(f"{world.launcher} uses {count_of(num_nodes, 'machine')}, parallel.nodes is {nodes}")
        elif neighbours > 1 and world.rank % world.local_size != world.local_rank:
            lines.append(
                f"{world.launcher} made rank {world.rank} number {world.local_rank} of the {world.local_size} processes"
                f" of its machine, so the {neighbours} that share tokens or weights (parallel.sequence x"
                " parallel.tensor) are on several; number the processes machine by machine"
                " (srun --distribution=block, mpirun --map-by slot)"
            )
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        lines.append(
            f"torchrun restarts up to {env['TORCHELASTIC_MAX_RESTARTS']} times and keeps one store for all starts,"
            " where processes read the addresses of those before and wait for ever; set"
            " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for every torchrun"
        )
    allowed = BACKENDS[backend].accelerate_variable if backend in BACKENDS else None
    for name in ACCELERATE_CHOICES:
        if name != allowed and env.get(name, "").lower() == "true":
            lines.append(f"{name}={env[name]} makes accelerate use another backend than {backend}; unset it")
    return lines


def _num_nodes(launcher: str, size: int, local_size: int, env: Mapping[str, str]) -> int:
    """Return the launcher's number of machines, or else size / local size, rounded up."""
    variable = {"deepspeed": "CROSS_SIZE", "slurm": "SLURM_STEP_NUM_NODES"}.get(launcher, "GROUP_WORLD_SIZE")
    number = env.get(variable, "")
    return int(number) if number.isdecimal() else -(-size // local_size)


FIRST_PORT: Final = 20000
NUM_PORTS: Final = 9000  # ends below torch's default ports 29400 and 29500, and below Linux's ephemeral ports (32768)


def _tasks_on_this_node(env: Mapping[str, str]) -> int:
    """Return this node's entry of ``SLURM_STEP_TASKS_PER_NODE``, such as ``2(x3),1``, or raise RunError."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE", "")
    node = env.get("SLURM_NODEID", "0")
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        counts += [int(match[1])] * int(match[2] or 1) if match else []
    if not node.isdecimal() or int(node) >= len(counts):
        raise RunError(f"SLURM_NODEID={node} with SLURM_STEP_TASKS_PER_NODE={text!r}: start with `srun lorakit train`")
    return counts[int(node)]


def _job_port(env: Mapping[str, str], *, of_step: bool) -> int | None:
    """Return a port from job and step, alike in every task, because they cannot exchange one; None outside Slurm."""
    job = env.get("SLURM_JOB_ID", "")
    step = env.get("SLURM_STEP_ID", "") if of_step else "0"
    if not (job.isdecimal() and step.isdecimal()):
        return None
    return FIRST_PORT + (int(job) * 31 + int(step)) % NUM_PORTS


def first_node(text: str) -> str:
    """Return the first host of a list: of ``node[01-03,7],login`` node01. Raises RunError: no node list."""
    host = r"(?:[^,\[\]]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
    match = re.fullmatch(f"({host})(?:,{host})*", text)
    if match is None:
        raise RunError(f"{text!r} is no Slurm node list")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[1])
