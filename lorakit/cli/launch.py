"""launch: write a cluster's job file for a recipe, instead of running the recipe."""

import argparse
import os
from pathlib import Path

from lorakit.cli.arguments import AddCommand, add_recipe_arguments
from lorakit.errors import LorakitError, RecipeError


def add_launch_command(add_command: AddCommand) -> None:
    """Add `launch`."""
    launch = add_command("launch", _launch, "write a cluster's job file for a recipe: --slurm or --k8s")
    add_recipe_arguments(launch)
    kind = launch.add_mutually_exclusive_group(required=True)
    kind.add_argument("--slurm", action="store_true", help="an sbatch script")
    kind.add_argument("--k8s", action="store_true", help="a Kubeflow TrainJob")
    launch.add_argument("--out", help="file to write, which must not exist (default: standard output)")
    launch.add_argument("--name", default="lorakit", help="name of the job")
    launch.add_argument("--gpus-per-process", type=int, default=1, help="0 on machines without (default: 1)")
    launch.add_argument("--cpus-per-process", type=int, default=8, help="slurm: cores per process (default: 8)")
    launch.add_argument("--time", default="24:00:00", help="slurm: time limit (default: 24:00:00)")
    launch.add_argument("--image", help="k8s: container image with lorakit in it")
    launch.add_argument("--claim", help="k8s: PersistentVolumeClaim with recipe, data and output")
    launch.add_argument("--folder", default="/work", help="k8s: where the claim is mounted (default: /work)")


def _launch(options: argparse.Namespace) -> int:
    if options.out is not None and os.path.lexists(options.out):
        raise LorakitError(f"--out: {options.out} exists already; choose another name, or remove it")
    from lorakit.launch.job_files import kubernetes_job, slurm_job
    from lorakit.recipe import load_recipe

    parallel = load_recipe(options.recipe, tuple(options.overrides)).parallel
    if parallel.backend == "auto":
        raise RecipeError(
            "parallel.backend: auto is chosen by `lorakit train` on one machine, and not in a cluster's job; name the"
            " backend that `lorakit plan` advises"
        )
    if options.slurm:
        text = slurm_job(
            options.recipe,
            processes=parallel.processes,
            nodes=parallel.nodes,
            name=options.name,
            gpus_per_process=options.gpus_per_process,
            cpus_per_process=options.cpus_per_process,
            time_limit=options.time,
            overrides=options.overrides,
        )
    else:
        if options.image is None or options.claim is None:
            raise RecipeError("--k8s needs --image (with lorakit in it) and --claim (a shared volume)")
        text = kubernetes_job(
            options.recipe,
            processes=parallel.processes,
            nodes=parallel.nodes,
            image=options.image,
            claim=options.claim,
            folder=options.folder,
            name=options.name,
            gpus_per_process=options.gpus_per_process,
            overrides=options.overrides,
        )
    if options.out is None:
        print(text, end="")
        return 0
    from lorakit.files.atomic import write_file

    write_file(Path(options.out), text)
    return 0
