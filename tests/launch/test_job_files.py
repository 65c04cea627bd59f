"""Job files for Slurm and Kubernetes start the recipe's processes, and start them anew after exit code 75."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lorakit.errors import LorakitError
from lorakit.launch.job_files import Job, kubernetes_job, slurm_job


def test_a_slurm_script_starts_a_task_per_process_and_queues_again_after_75(tmp_path: Path) -> None:
    for name, text in {  # what the script calls
        "srun": 'echo srun "$@"; exit $CODE', "scontrol": 'echo scontrol "$@"', "lorakit": "exit 1",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    text = slurm_job(Job("my recipes/a.yaml", processes=8, nodes=2), cpus_per_process=6)
    (tmp_path / "job.sh").write_text(text)

    for line in ("nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "cpus-per-task=6", "signal=TERM@120", "requeue"):
        assert f"#SBATCH --{line}\n" in text
    for code in (0, 2, 75):
        environment = {
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SLURM_CPUS_PER_TASK": "6",
            "SLURM_JOB_ID": "9",
            "CODE": str(code),
        }
        done = subprocess.run(
            ["bash", tmp_path / "job.sh"], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == code
        assert done.stdout.splitlines() == [
            "srun --kill-on-bad-exit=1 --distribution=block --cpus-per-task=6 --gpu-bind=none lorakit train my recipes/a.yaml",
            *(["scontrol requeue 9"] if code == 75 else []),
        ]  # fmt: skip
    assert "gpu" not in slurm_job(Job("a.yaml", processes=2, nodes=1, gpus_per_process=0))


def test_a_train_job_lets_its_pods_run_torchrun() -> None:
    runtime, job = yaml.safe_load_all(
        kubernetes_job(Job("r e.yaml", processes=8, nodes=2, name="tune"), image="me/lorakit:1", claim="data")
    )

    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert {part["apiVersion"] for part in (runtime, job)} == {"trainer.kubeflow.org/v1alpha1"}
    assert job["spec"]["runtimeRef"] == {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "tune"}
    assert job["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": 4}
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 2, "torch": {}}
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node"
    assert container["command"] == ["torchrun", "--no-python", "lorakit", "train", "r e.yaml"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}


@pytest.mark.parametrize(
    "make",
    [
        lambda: slurm_job(Job("a", processes=2, nodes=1, name="a\n#SBATCH --uid=0")),
        lambda: kubernetes_job(Job("a", processes=2, nodes=2), image="i", claim="Data"),
    ],
)
def test_jobs_that_could_not_run_are_refused(make: Callable[[], str]) -> None:
    with pytest.raises(LorakitError):
        make()
