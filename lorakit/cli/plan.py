"""plan, launch: the memory a recipe needs, and a cluster's job file for it."""

import argparse
import json

from lorakit.cli.arguments import AddCommand, add_recipe_arguments, picked, positive_int, write_or_print
from lorakit.errors import LorakitError, RecipeError, RunError, check_absent


def add_plan_commands(add_command: AddCommand) -> None:
    about = "show the memory a recipe needs with every backend, the simplest that fits, what to change"
    plan = add_command("plan", _plan, about)
    add_recipe_arguments(plan)
    plan.add_argument("--gpu", metavar="NAME", help="plan for machines with this GPU, such as H200 (default: this one)")
    memory = "plan for GPUs of this memory (with --gpu: instead of that GPU's)"
    plan.add_argument("--gpu-memory-gb", type=positive_int, metavar="N", help=memory)
    plan.add_argument("--gpus", type=positive_int, metavar="N", help="GPUs in each machine (with --gpu; default 1)")
    plan.add_argument("--nodes", type=positive_int, metavar="N", help="machines (with --gpu; default 1)")
    host_memory = "of each machine (with --gpu; default 256 for each GPU)"
    plan.add_argument("--host-memory-gb", type=positive_int, metavar="X", help=host_memory)
    plan.add_argument("--json", metavar="FILE", help="write every figure")

    launch = add_command("launch", _launch, "write a cluster's job file for a recipe: --slurm or --k8s")
    add_recipe_arguments(launch)
    kind = launch.add_mutually_exclusive_group(required=True)
    kind.add_argument("--slurm", action="store_true", help="an sbatch script")
    kind.add_argument("--k8s", action="store_true", help="a Kubeflow TrainJob")
    launch.add_argument("--out", help="file to write, which must not exist (default: standard output)")
    launch.add_argument("--name", default="lorakit", help="name of the job (default: lorakit)")
    launch.add_argument("--gpus-per-process", type=int, default=1, help="0 on machines without (default: 1)")
    launch.add_argument("--cpus-per-process", type=int, default=8, help="slurm: cores per process (default: 8)")
    launch.add_argument("--time", dest="time_limit", default="24:00:00", help="slurm: time limit (default: 24:00:00)")
    launch.add_argument("--image", help="k8s: container image with lorakit in it")
    launch.add_argument("--claim", help="k8s: PersistentVolumeClaim with recipe, data and output")
    launch.add_argument("--folder", default="/work", help="k8s: where the claim is mounted (default: /work)")


def _plan(options: argparse.Namespace) -> None:
    from lorakit.recipe import load_recipe

    machine_flags = {"--gpus": options.gpus, "--nodes": options.nodes, "--host-memory-gb": options.host_memory_gb}
    given = [flag for flag, value in machine_flags.items() if value is not None]
    described = options.gpu is not None or options.gpu_memory_gb is not None
    if given and not described:
        raise LorakitError(f"{', '.join(given)}: describes a machine; name its GPU with --gpu, or give --gpu-memory-gb")
    recipe = load_recipe(options.recipe, tuple(options.overrides))  # before the next imports, which import torch
    from lorakit.planning import machine_with_gpu, make_plan
    from lorakit.planning.machine import GB

    machine = None
    if described:
        host_memory = options.host_memory_gb and options.host_memory_gb * GB
        gpu_memory = options.gpu_memory_gb and options.gpu_memory_gb * GB
        machine = machine_with_gpu(options.gpu, options.gpus or 1, options.nodes or 1, host_memory, gpu_memory)
    plan = make_plan(recipe, machine)
    print(plan.text)
    if options.json is not None:
        write_or_print(json.dumps(plan.facts(), indent=1) + "\n", options.json)
    if plan.refusal is not None:
        raise RunError(plan.refusal)


def _launch(options: argparse.Namespace) -> None:
    check_absent(options.out)
    from lorakit.launch.job_files import Job, kubernetes_job, slurm_job
    from lorakit.recipe import load_recipe

    parallel = load_recipe(options.recipe, tuple(options.overrides)).parallel
    if parallel.backend == "auto":
        raise RecipeError("parallel.backend: auto is chosen on one machine; name one that `lorakit plan` advises")
    if options.k8s and (options.image is None or options.claim is None):
        raise RecipeError("--k8s needs --image (with lorakit in it) and --claim (a shared volume)")
    settings = picked(options, "recipe", "name", "gpus_per_process", "overrides")
    job = Job(processes=parallel.processes, nodes=parallel.nodes, **settings)
    if options.k8s:
        text = kubernetes_job(job, **picked(options, "image", "claim", "folder"))
    else:
        text = slurm_job(job, **picked(options, "cpus_per_process", "time_limit"))
    write_or_print(text, options.out)
