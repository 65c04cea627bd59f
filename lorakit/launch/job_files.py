"""Write job files for clusters as text: a Slurm script, or a Kubeflow TrainJob. Imports no torch.

Invariant: each job starts the recipe's processes, signals them in time to save, and then continues from the checkpoint.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lorakit.errors import RunError
from lorakit.files.text import yaml_text

SAVE_SECONDS: Final = 120
"""From the stop signal to the kill: enough for the step under way and its checkpoint."""
MAX_STARTS: Final = 100
"""Largest number of times that one Slurm job requeues itself."""
TRAINER: Final = "trainer.kubeflow.org"


def slurm_job(
    recipe: str,
    *,
    processes: int,
    nodes: int,
    gpus_per_process: int = 1,
    cpus_per_process: int = 8,
    time_limit: str = "24:00:00",
    name: str = "lorakit",
    overrides: Sequence[str] = (),
) -> str:
    """Return an sbatch script that runs one task per process, saves before the time limit and requeues itself.

    Every task can use all GPUs of its node and takes the one of its local rank. With ``--gpus-per-task`` each task
    would get one GPU only, and then NCCL cannot use NVLink between them. Ranks are numbered node by node, whatever the
    cluster's default, because processes that share tokens or weights are neighbours.

    Raises RunError: the processes do not divide over the nodes, or Slurm does not accept a name.
    """
    local = _processes_per_node(processes, nodes)
    if not re.fullmatch(r"[\w.+-]+", name) or not re.fullmatch(r"[\d:-]+", time_limit):
        raise RunError(f"job name {name!r}, time limit {time_limit!r}: letters and digits, and a time such as 24:00:00")
    gpus = f"#SBATCH --gpus-per-node={local * gpus_per_process}\n" if gpus_per_process else ""
    srun = '--kill-on-bad-exit=1 --distribution=block --cpus-per-task="$SLURM_CPUS_PER_TASK"'
    srun += " --gpu-bind=none" if gpus_per_process else ""
    return f"""\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={local}
{gpus}#SBATCH --cpus-per-task={cpus_per_process}
#SBATCH --time={time_limit}
#SBATCH --signal=TERM@{SAVE_SECONDS}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# srun starts one lorakit per process and gives each its rank; lorakit finds the rest in Slurm's variables.
# Two minutes before the time limit the tasks (not this script) get SIGTERM: they save and exit with 75.
export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
srun {srun} lorakit train {shlex.join([recipe, *overrides])}
code=$?

# 75 is "try again later": queue again, the same command goes on from the last checkpoint.
if [ "$code" -eq 75 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {MAX_STARTS} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def kubernetes_job(
    recipe: str,
    *,
    processes: int,
    nodes: int,
    image: str,
    claim: str,
    folder: str = "/work",
    name: str = "lorakit",
    gpus_per_process: int = 1,
    overrides: Sequence[str] = (),
) -> str:
    """Return a TrainJob of Kubeflow Trainer 2, and a TrainingRuntime for its volumes, as YAML.

    There is one pod per node, in which torchrun starts ``processes / nodes`` lorakit processes.

    claim: a PersistentVolumeClaim that every pod can write (ReadWriteMany), mounted at ``folder``.
    folder: where recipe, data, output and caches are.

    Raises RunError: the processes do not divide over the nodes, or Kubernetes does not accept a name.
    """
    local = _processes_per_node(processes, nodes)
    check_kubernetes_names(name, claim)
    limits = {"nvidia.com/gpu": local * gpus_per_process} if gpus_per_process else {}
    # not `-m lorakit.cli`, which would import a numpy.py or torch.py of the folder
    train = ["--no-python", "lorakit", "train", recipe, *overrides]
    pod = _pod(image, ["torchrun", *train], claim, folder, limits)
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {f"{TRAINER}/trainjob-ancestor-step": "trainer"}},
            "spec": {"backoffLimit": 0, "template": {"spec": pod}},
        },
    }
    runtime = {
        "apiVersion": f"{TRAINER}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": name, "labels": {f"{TRAINER}/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": nodes, "torch": {}},
            # if one pod fails, all are restarted
            "template": {"spec": {"failurePolicy": {"maxRestarts": 3}, "replicatedJobs": [node]}},
        },
    }
    job = {
        "apiVersion": f"{TRAINER}/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"apiGroup": TRAINER, "kind": "TrainingRuntime", "name": name},
            "trainer": {"numNodes": nodes, "numProcPerNode": local},
        },
    }
    return f"{yaml_text(runtime)}---\n{yaml_text(job)}"


def check_kubernetes_names(*names: str) -> None:
    """Raise RunError unless Kubernetes accepts the names."""
    for name in names:
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?", name):
            raise RunError(f"{name!r} is no name for Kubernetes: up to 42 small letters, digits and '-'")


def _processes_per_node(processes: int, nodes: int) -> int:
    if processes % nodes:
        raise RunError(f"parallel.processes: {processes} processes do not divide over {nodes} nodes")
    return processes // nodes


def _pod(image: str, command: list[str], claim: str, folder: str, limits: Mapping[str, int]) -> dict[str, Any]:
    """Return the pod of one node."""
    environment = {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVE_SECONDS),  # torchrun's own 30 s are too short for large checkpoints
        "XDG_CACHE_HOME": f"{folder.rstrip('/')}/.cache",
    }
    container = {
        "name": "node",
        "image": image,
        "command": command,  # torchrun reads PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK and PET_MASTER_*
        "workingDir": folder,
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        **({"resources": {"limits": limits}} if limits else {}),
        "volumeMounts": [{"name": "work", "mountPath": folder}, {"name": "memory", "mountPath": "/dev/shm"}],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SAVE_SECONDS + 30,  # torchrun ends after its processes
        "containers": [container],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},  # for NCCL: the default 64 MB are too small
        ],
    }
