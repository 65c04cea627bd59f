"""plan: the memory a recipe needs, computed before the recipe is run."""

import argparse
import json
from pathlib import Path

from lorakit.cli.arguments import AddCommand, add_recipe_arguments, positive_int
from lorakit.errors import LorakitError, RunError


def add_plan_command(add_command: AddCommand) -> None:
    """Add `plan`."""
    plan = add_command(
        "plan", _plan, "show the memory a recipe needs with every backend, the simplest that fits, what to change"
    )
    add_recipe_arguments(plan)
    plan.add_argument("--gpu", metavar="NAME", help="plan for machines with this GPU, such as H200 (default: this one)")
    plan.add_argument(
        "--gpu-memory-gb",
        type=positive_int,
        metavar="N",
        help="plan for GPUs of this memory (with --gpu: instead of that GPU's)",
    )
    plan.add_argument("--gpus", type=positive_int, metavar="N", help="GPUs in each machine (with --gpu; default 1)")
    plan.add_argument("--nodes", type=positive_int, metavar="N", help="machines (with --gpu; default 1)")
    plan.add_argument(
        "--host-memory-gb",
        type=positive_int,
        metavar="X",
        help="of each machine (with --gpu; default 256 for each GPU)",
    )
    plan.add_argument("--json", metavar="FILE", help="write every figure")


def _plan(options: argparse.Namespace) -> int:
    from lorakit.recipe import load_recipe

    machine_flags = {"--gpus": options.gpus, "--nodes": options.nodes, "--host-memory-gb": options.host_memory_gb}
    given = [flag for flag, value in machine_flags.items() if value is not None]
    described = options.gpu is not None or options.gpu_memory_gb is not None
    if given and not described:
        raise LorakitError(f"{', '.join(given)}: describes a machine; name its GPU with --gpu, or give --gpu-memory-gb")
    recipe = load_recipe(options.recipe, tuple(options.overrides))  # before the next imports, which import torch
    from lorakit.files.atomic import write_file
    from lorakit.planning import machine_with_gpu, make_plan

    machine = None
    if described:
        host_memory = _bytes(options.host_memory_gb)
        gpu_memory = _bytes(options.gpu_memory_gb)
        machine = machine_with_gpu(options.gpu, options.gpus or 1, options.nodes or 1, host_memory, gpu_memory)
    plan = make_plan(recipe, machine)
    print(plan.text)
    if options.json is not None:
        write_file(Path(options.json), json.dumps(plan.facts(), indent=1) + "\n")
    if plan.refusal is not None:
        raise RunError(plan.refusal)
    return 0


def _bytes(gigabytes: int | None) -> int | None:
    return None if gigabytes is None else gigabytes * 1_000_000_000
