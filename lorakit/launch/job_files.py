"""Job files for clusters: a Slurm script, a Kubeflow TrainJob or PyTorchJob, as text. Imports no torch.

Each starts the processes the recipe asks for, tells them in time when they have to stop, and goes on afterwards.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from lorakit.errors import RunError

SAVE_SECONDS: Final = 120
"""Between the signal and the end: for the step under way and its checkpoint."""
MAX_STARTS: Final = 100
TRAINER: Final = "trainer.kubeflow.org"


def slurm_job(
    recipe: str, *, processes: int, nodes: int, gpus_per_process: int = 1, cpus_per_process: int = 8,
    time_limit: str = "24:00:00", name: str = "lorakit", overrides: Sequence[str] = (),
) -> str:  # fmt: skip
    """An sbatch script that runs one task per process, saves before the time limit and queues itself again.

    Every task of a node sees all its GPUs and takes the one of its local rank: with ``--gpus-per-task`` each would see
    one, which keeps NCCL from using NVLink between them.

    Raises:
        RunError: the processes do not divide over the nodes, or a name Slurm does not take.
    """
    local = _per_node(processes, nodes)
    if not re.fullmatch(r"[\w.+-]+", name) or not re.fullmatch(r"[\d:-]+", time_limit):
        raise RunError(f"job name {name!r}, time limit {time_limit!r}: letters and digits, and a time such as 24:00:00")
    gpus = f"#SBATCH --gpus-per-node={local * gpus_per_process}\n" if gpus_per_process else ""
    bind = " --gpu-bind=none" if gpus_per_process else ""
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
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK"{bind} lorakit train {shlex.join([recipe, *overrides])}
code=$?

# 75 is "try again later": queue again, the same command goes on from the last checkpoint.
if [ "$code" -eq 75 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {MAX_STARTS} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def kubernetes_job(
    recipe: str, *, processes: int, nodes: int, image: str, claim: str, folder: str = "/work", name: str = "lorakit",
    kind: Literal["TrainJob", "PyTorchJob"] = "TrainJob", gpus_per_process: int = 1, overrides: Sequence[str] = (),
) -> str:  # fmt: skip
    """YAML for Kubeflow: a pod per node, in each torchrun starts ``processes / nodes`` lorakit processes.

    ``claim`` is a PersistentVolumeClaim that every pod can write (ReadWriteMany); it is mounted at ``folder``, where
    recipe, data, output and caches are. TrainJob is Kubeflow Trainer 2 (with a TrainingRuntime of its own, for the
    volumes), PyTorchJob the older Training Operator. A PyTorchJob's RANK and WORLD_SIZE count pods, not processes, so
    they only number the nodes for torchrun.

    Raises:
        RunError: the processes do not divide over the nodes, or a name Kubernetes does not take.
    """
    local = _per_node(processes, nodes)
    for what in (name, claim):
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?", what):
            raise RunError(f"{what!r} is no name for Kubernetes: up to 42 small letters, digits and '-'")
    limits = {"nvidia.com/gpu": local * gpus_per_process} if gpus_per_process else {}
    train = ["-m", "lorakit.cli", "train", recipe, *overrides]
    if kind == "TrainJob":  # torchrun reads PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK and PET_MASTER_*
        pod = _pod("node", image, ["torchrun", *train], claim, folder, limits)
        return "---\n".join(_lines(part) for part in _train_job(name, nodes, local, pod))
    meet = ["--node-rank=$(RANK)", "--master-addr=$(MASTER_ADDR)", "--master-port=$(MASTER_PORT)"]
    command = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={local}", *meet, *train]
    return _lines(_pytorch_job(name, nodes, local, _pod("pytorch", image, command, claim, folder, limits)))


def _per_node(processes: int, nodes: int) -> int:
    if processes % nodes:
        raise RunError(f"parallel.processes: {processes} processes do not divide over {nodes} nodes")
    return processes // nodes


def _pod(
    container: str, image: str, command: Sequence[str], claim: str, folder: str, limits: Mapping[str, int]
) -> dict[str, Any]:
    """What runs on one node."""
    environment = {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVE_SECONDS),  # how long torchrun lets its processes save
        "XDG_CACHE_HOME": f"{folder.rstrip('/')}/.cache",
    }
    return {
        "terminationGracePeriodSeconds": SAVE_SECONDS + 30,
        "containers": [
            {
                "name": container, "image": image, "command": list(command), "workingDir": folder,
                "env": [{"name": key, "value": value} for key, value in environment.items()],
                **({"resources": {"limits": dict(limits)}} if limits else {}),
                "volumeMounts": [
                    {"name": "work", "mountPath": folder},
                    {"name": "memory", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},  # NCCL's shared memory; the default is 64 MB
        ],
    }  # fmt: skip


def _train_job(name: str, nodes: int, local: int, pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A runtime that knows the pod, and a job that uses it. One pod's end ends all, and they start again together."""
    version = f"{TRAINER}/v1alpha1"
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {f"{TRAINER}/trainjob-ancestor-step": "trainer"}},
            "spec": {"backoffLimit": 0, "template": {"spec": {"restartPolicy": "Never", **pod}}},
        },
    }
    runtime = {
        "apiVersion": version,
        "kind": "TrainingRuntime",
        "metadata": {"name": name, "labels": {f"{TRAINER}/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": nodes, "torch": {}},
            "template": {"spec": {"failurePolicy": {"maxRestarts": 3}, "replicatedJobs": [node]}},
        },
    }
    job = {
        "apiVersion": version,
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"apiGroup": TRAINER, "kind": "TrainingRuntime", "name": name},
            "trainer": {"numNodes": nodes, "numProcPerNode": local},
        },
    }
    return [runtime, job]


def _pytorch_job(name: str, nodes: int, local: int, pod: Mapping[str, Any]) -> dict[str, Any]:
    replica = {"restartPolicy": "OnFailure", "template": {"spec": dict(pod)}}
    workers = {"Worker": {"replicas": nodes - 1, **replica}} if nodes > 1 else {}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "nprocPerNode": str(local),
            "runPolicy": {"backoffLimit": 3},
            "pytorchReplicaSpecs": {"Master": {"replicas": 1, **replica}, **workers},
        },
    }


def _lines(value: Any, indent: str = "") -> str:
    """Block YAML of mappings, lists and plain values; every text is quoted, so that none can be taken for another."""
    if isinstance(value, dict) and value:
        return "".join(f"{indent}{key}:{_after(item, indent)}" for key, item in value.items())
    if isinstance(value, list) and value:
        parts = (_lines(item, indent + "  ") for item in value)
        return "".join(f"{indent}- {part[len(indent) + 2 :]}" for part in parts)
    return f"{indent}{json.dumps(value)}\n"


def _after(item: Any, indent: str) -> str:
    """What follows a key: a plain value on its line, anything with entries below it."""
    return f"\n{_lines(item, indent + '  ')}" if isinstance(item, dict | list) and item else f" {json.dumps(item)}\n"
