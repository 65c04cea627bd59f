"""Write job files for clusters: a Slurm script, or a Kubeflow TrainJob. Imports no torch.

Invariant: each job starts the recipe's processes, signals them in time to save, and then continues from the checkpoint.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jinja2

from lorakit.errors import RunError

TEMPLATES: Final = Path(__file__).parents[1] / "assets" / "jobs"
SAVE_SECONDS: Final = 120  # From the stop signal to the kill: enough for the step under way and its checkpoint.
MAX_STARTS: Final = 100  # Largest number of times that one Slurm job requeues itself.


@dataclass(frozen=True)
class Job:
    """A cluster's job that trains a recipe. processes: of the recipe, which divide over its nodes."""

    recipe: str
    processes: int
    nodes: int
    name: str = "lorakit"
    gpus_per_process: int = 1
    overrides: Sequence[str] = ()

    def fill(self, file: str, **values: Any) -> str:
        """Return a template with the values of the job, and others. In YAML strings are quoted: `no` is false there."""
        text = (TEMPLATES / file).read_text(encoding="utf-8")
        environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
        local = self.processes // self.nodes
        command = ["lorakit", "train", self.recipe, *self.overrides]
        return environment.from_string(text).render(
            name=self.name,
            nodes=self.nodes,
            local=local,
            gpus=local * self.gpus_per_process,
            command=command,
            shell_command=shlex.join(command),
            save_seconds=SAVE_SECONDS,
            **values,
        )


def slurm_job(job: Job, *, cpus_per_process: int = 8, time: str = "24:00:00") -> str:
    """Return an sbatch script that runs one task per process, saves before the time limit and requeues itself.

    Every task can use all GPUs of its node and takes the one of its local rank. With ``--gpus-per-task`` each task
    would get one GPU only, and then NCCL cannot use NVLink between them. Ranks are numbered node by node, whatever the
    cluster's default, because processes that share tokens or weights are neighbours. Raises RunError: a bad name.
    """
    if not re.fullmatch(r"[\w.+-]+", job.name) or not re.fullmatch(r"[\d:-]+", time):
        raise RunError(f"job name {job.name!r}, time limit {time!r}: letters and digits, a time such as 24:00:00")
    return job.fill("slurm.sh", cpus=cpus_per_process, time_limit=time, max_starts=MAX_STARTS)


def kubernetes_job(job: Job, *, image: str, claim: str, folder: str = "/work") -> str:
    """Return a TrainJob of Kubeflow Trainer 2, and a TrainingRuntime for its volumes, as YAML.

    There is one pod per node, in which torchrun starts ``processes / nodes`` lorakit processes.
    claim: a PersistentVolumeClaim that every pod can write (ReadWriteMany), mounted at ``folder``, where recipe, data,
    output and caches are. Raises RunError: a bad name.
    """
    for name in (job.name, claim):
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?", name):
            raise RunError(f"{name!r} is no name for Kubernetes: up to 42 small letters, digits and '-'")
    cache = f"{folder.rstrip('/')}/.cache"
    return job.fill("trainjob.yaml", image=image, claim=claim, folder=folder, cache=cache)
