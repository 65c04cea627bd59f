"""Each launcher's processes are recognised by their environment variables; contradictions are refused by name."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lorakit.errors import RunError
from lorakit.launch.environment import World, contradictions, detect_world, first_node, launched_size, split_endpoint

ROOT = Path(__file__).parents[2]

# Recorded under OpenMPI 4.1, MPICH 4.0, Slurm 22.05, torch 2.13, accelerate 1.15 and DeepSpeed 0.19, shortened to the
# relevant variables. MVAPICH and Intel MPI follow their manuals.
TORCHRUN = {
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node7",
    "MASTER_PORT": "29400", "RANK": "3", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "4",
}  # fmt: skip
ACCELERATE = {"ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_MIXED_PRECISION": "no"}
DEEPSPEED = {
    "CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "4",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_num_nodes": "1", "PMIX_RANK": "1",
}  # fmt: skip
MPICH = {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_FD": "8", "PMI_RANK": "1", "PMI_SIZE": "2"}
MVAPICH = {
    "MV2_COMM_WORLD_LOCAL_RANK": "0", "MV2_COMM_WORLD_LOCAL_SIZE": "2", "MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "4",
}  # fmt: skip
SBATCH = {
    "SLURM_GTIDS": "0", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_NODELIST": "node[1-2]", "SLURM_NPROCS": "4", "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
SALLOC = {
    name: value for name, value in SBATCH.items() if name not in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
}
SRUN = {
    **SBATCH, "SLURM_GTIDS": "2,3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_PROCID": "3", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
ONE_TASK = {
    "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node2",
    "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
}  # fmt: skip
SUBSTEP = {
    **SRUN, "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "1", "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "node1",
    "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
}  # fmt: skip
FOUR_BY_MPI = {**OPENMPI, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
PYTORCHJOB = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "PET_NNODES": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"MASTER_ADDR": "node7", "OMP_NUM_THREADS": "4", "RANK": ""}, None),
        (TORCHRUN, World(3, 4, 1, 2, "torchrun", "node7", 29400)),
        ({**TORCHRUN, **ONE_TASK, **OPENMPI}, World(3, 4, 1, 2, "torchrun", "node7", 29400)),  # inside a step or mpirun
        ({**TORCHRUN, "LORAKIT_PARENT": "7 9"}, World(3, 4, 1, 2, "lorakit", "node7", 29400)),
        ({**TORCHRUN, **ACCELERATE}, World(3, 4, 1, 2, "accelerate", "node7", 29400)),
        ({**ACCELERATE, "MASTER_ADDR": "127.0.0.1"}, World(0, 1, 0, 1, "accelerate", "127.0.0.1", 29500)),
        (DEEPSPEED, World(3, 4, 1, 2, "deepspeed", "10.0.0.1", 29500)),
        (OPENMPI, World(1, 2, 1, 2, "openmpi", "127.0.0.1", 29500)),
        ({**FOUR_BY_MPI, "MASTER_ADDR": "n1", "MASTER_PORT": "99"}, World(3, 4, 1, 2, "openmpi", "n1", 99)),
        ({**FOUR_BY_MPI, **SALLOC, **ONE_TASK}, World(3, 4, 1, 2, "openmpi", "node1", 20031)),  # the job's first host
        ({**FOUR_BY_MPI, **SBATCH}, World(3, 4, 1, 2, "openmpi", "node1", 20031)),  # the same without mpirun's own step
        (MPICH, World(1, 2, 1, 2, "mpich", "127.0.0.1", 29500)),
        ({**MPICH, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}, World(1, 2, 1, 2, "mpich", "127.0.0.1", 29500)),
        ({**MVAPICH, "MASTER_ADDR": "n1"}, World(2, 4, 0, 2, "mvapich", "n1", 29500)),
        (SBATCH, None),
        (SALLOC, None),
        ({**SALLOC, **ONE_TASK}, None),  # srun --pty bash
        (SRUN, World(3, 4, 1, 2, "slurm", "node1", 20031)),
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "13"}, World(3, 4, 1, 2, "slurm", "node1", 20031)),
        ({**SRUN, "WORLD_SIZE": "4", "MASTER_ADDR": "n9", "MASTER_PORT": "1234"}, World(3, 4, 1, 2, "slurm", "n9", 1234)),
        (SUBSTEP, World(1, 2, 1, 2, "slurm", "127.0.0.1", 20032)),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1,3", "SLURM_LOCALID": "2"}, World(3, 4, 2, 3, "slurm", "node1", 20031)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, World(0, 1, 0, 1, "environment", "127.0.0.1", 29500)),
        ({"TORCHELASTIC_RUN_ID": "left"}, None),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": ""}, World(3, 4, 1, 2, "environment", "node7", 29400)),
    ],
)  # fmt: skip
def test_each_launchers_processes_get_their_rank(environment: dict[str, str], expected: World | None) -> None:
    assert detect_world(environment) == expected


def test_the_recipes_rendezvous_serves_where_the_launcher_names_no_address() -> None:
    for environment in (FOUR_BY_MPI, {**MVAPICH}, SRUN):
        world = detect_world(environment, "head:4321")
        assert world is not None
        assert (world.address, world.port) == ("head", 4321)
    world = detect_world(TORCHRUN, "head:4321")
    assert world is not None
    assert (world.address, world.port) == ("node7", 29400)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "3"}, "WORLD_SIZE and LOCAL_RANK and LOCAL_WORLD_SIZE are not set beside RANK=3"),
        ({"WORLD_SIZE": "8"}, "RANK and LOCAL_RANK and LOCAL_WORLD_SIZE are not set beside WORLD_SIZE=8"),
        (PYTORCHJOB, "let each pod run torchrun"),
        ({"PET_NNODES": "2"}, "PET_NNODES=2 is meant for torchrun"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 with WORLD_SIZE=4: ranks go from 0 to 3"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1' is no whole number"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "WORLD_SIZE='four' is no whole number"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 and WORLD_SIZE=4"),
        ({**TORCHRUN, "MASTER_PORT": "x"}, "MASTER_PORT='x' is no port"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE and"),
        ({**OPENMPI, "RANK": "0"}, "RANK=0 contradicts OMPI_COMM_WORLD_RANK=1: unset RANK"),
        ({**SRUN, "WORLD_SIZE": "8"}, "WORLD_SIZE=8 contradicts SLURM_STEP_NUM_TASKS=4"),
        ({**SRUN, "SLURM_NODEID": "2"}, "SLURM_NODEID=2 with SLURM_STEP_TASKS_PER_NODE='2(x2)'"),
        ({**SRUN, "SLURM_STEP_NODELIST": "node[1-"}, "'node[1-' is no Slurm node list"),
        (FOUR_BY_MPI, "set parallel.rendezvous to host:port of the machine of rank 0, or MASTER_ADDR"),
        (MVAPICH, "set parallel.rendezvous"),
    ],
)  # fmt: skip
def test_variables_that_contradict_each_other_are_refused_by_name_and_value(
    environment: dict[str, str], message: str
) -> None:
    with pytest.raises(RunError) as caught:
        detect_world(environment)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("n1", "n1"),
        ("node[01-03,7],login", "node01"),
        ("login,node[01-03]", "login"),
        ("a[9-11]", "a9"),
        ("b[7,9-11],c", "b7"),
        ("rack[0-1]n[1-2]-ib,b", "rack0n1-ib"),
    ],
)
def test_the_first_host_of_a_node_list_is_spelt_out(text: str, name: str) -> None:
    assert first_node(text) == name


@pytest.mark.parametrize("text", ["", "node[1-2", "node]1[", "node[a-b]", "node[]", "a,b[1-", "a,", "n[1-2],b[x]"])
def test_a_malformed_node_list_is_refused(text: str) -> None:
    with pytest.raises(RunError, match="is no Slurm node list"):
        first_node(text)


def test_endpoints() -> None:
    assert split_endpoint("node1:29500") == ("node1", 29500)
    assert split_endpoint("[fe80::1]:7") == ("fe80::1", 7)
    assert split_endpoint("node1") == ("node1", None)
    for wrong in ("node1:", ":1", "a b:1", "node1:99999", "fe80::1:7"):
        with pytest.raises(RunError, match="is no host:port"):
            split_endpoint(wrong)


DDP: dict[str, Any] = {"backend": "ddp", "processes": 4, "nodes": 2, "neighbours": 1}


@pytest.mark.parametrize(
    ("environment", "recipe", "expected"),
    [
        (TORCHRUN, {}, []),
        (DEEPSPEED, {}, []),
        (SRUN, {}, []),
        ({**TORCHRUN, **ACCELERATE, "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_FSDP": "false"}, {}, []),
        (TORCHRUN, {"processes": 8}, ["torchrun started 4 processes, parallel.processes is 8"]),
        (ACCELERATE, {}, ["accelerate started 1 process, parallel.processes is 4"]),
        (TORCHRUN, {"nodes": 1}, ["torchrun uses 2 machines, parallel.nodes is 1"]),
        ({**FOUR_BY_MPI, "MASTER_ADDR": "n1"}, {"nodes": 4}, ["openmpi uses 2 machines, parallel.nodes is 4"]),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, {}, ["ACCELERATE_USE_DEEPSPEED=true makes accelerate use another backend than ddp; unset it"]),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, {"backend": "zero2"}, []),
        ({"ACCELERATE_USE_FSDP": "true"}, {"backend": "fsdp2"}, []),
        ({"ACCELERATE_USE_FSDP": "TRUE"}, {"backend": "zero3"}, ["ACCELERATE_USE_FSDP=TRUE makes accelerate use another backend than zero3; unset it"]),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, {}, ["ACCELERATE_USE_MEGATRON_LM=true makes accelerate use another backend than ddp; unset it"]),
        (
            {**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "8"}, {},
            ["torchrun restarts up to 8 times and keeps one store for all starts, where processes read the addresses of those"
             " before and wait for ever; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for every torchrun"],
        ),
        ({**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "8", "TORCHELASTIC_USE_AGENT_STORE": "False"}, {}, []),
        (SRUN, {"neighbours": 2}, []),
        (
            SRUN | {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}, {"neighbours": 2},  # srun --distribution=cyclic
            ["slurm made rank 1 number 0 of the 2 processes of its machine, so the 2 that share tokens or weights"
             " (parallel.sequence x parallel.tensor) are on several; number the processes machine by machine"
             " (srun --distribution=block, mpirun --map-by slot)"],
        ),
        (SRUN | {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}, {}, []),
    ],
)  # fmt: skip
def test_settings_that_contradict_the_recipe_are_listed(environment: Any, recipe: Any, expected: list[str]) -> None:
    assert contradictions(detect_world(environment), environment, **{**DDP, **recipe}) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (TORCHRUN, {"processes": 4, "nodes": 2}),
        (SRUN, {"processes": 4, "nodes": 2}),
        (FOUR_BY_MPI, {"processes": 4, "nodes": 2}),  # no address is needed to count
    ],
)  # fmt: skip
def test_the_processes_that_a_launcher_started_are_counted(environment: Any, expected: dict[str, int] | None) -> None:
    assert launched_size(environment) == expected


# ---------------------------------------------------------------------------------------------- real launchers

SHOW = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from lorakit.launch.environment import detect_world
os.write(1, f"{{detect_world(os.environ)}} {{'torch' in sys.modules}}\\n".encode())  # one write: lines never mix
"""
REAL = {
    "accelerate": ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"],
    "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--no_local_rank"],
}  # fmt: skip


def check_two_processes(command: list[str], tmp_path: Path, launcher: str, **environment: str) -> None:
    """Start SHOW with a real launcher: both processes are recognised, and torch is not imported for it."""
    (tmp_path / "show.py").write_text(SHOW)
    done = subprocess.run(
        [*command, str(tmp_path / "show.py")], capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, **environment},
    )  # fmt: skip
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("World("))
    for rank, line in enumerate(lines):
        assert line.startswith(f"World(rank={rank}, size=2, local_rank={rank}, local_size=2, launcher={launcher!r}")
        assert line.endswith("False"), "environment.py must import no torch"
    assert len(lines) == 2, done.stdout + done.stderr


@pytest.mark.matrix
@pytest.mark.slow  # the launchers import torch
@pytest.mark.spread
@pytest.mark.parametrize("launcher", list(REAL))
def test_real_launchers(launcher: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(launcher) is None:
        pytest.skip(f"{launcher} is not installed")
    check_two_processes([sys.executable, *REAL[launcher]], tmp_path, launcher, DS_ACCELERATOR="cpu")


@pytest.mark.matrix
@pytest.mark.slow  # the launchers import torch
@pytest.mark.spread
def test_real_torchrun_with_the_variables_of_a_train_jobs_pod(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    pod = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "localhost"}
    command = [sys.executable, "-m", "torch.distributed.run"]
    check_two_processes(command, tmp_path, "torchrun", **pod, PET_MASTER_PORT=port)


@pytest.mark.slow  # the launchers import torch
@pytest.mark.spread
@pytest.mark.parametrize(
    ("program", "launcher", "options"),
    [("mpirun.openmpi", "openmpi", ["--allow-run-as-root", "--oversubscribe"]), ("mpirun.mpich", "mpich", [])],
)
def test_real_mpirun(program: str, launcher: str, options: list[str], tmp_path: Path) -> None:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    check_two_processes([path, *options, "-n", "2", sys.executable], tmp_path, launcher)
