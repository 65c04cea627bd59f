"""plan: what a recipe takes, before it is run."""

import argparse
import json
from pathlib import Path

from lorakit.cli.arguments import Add, positive, recipe_arguments
from lorakit.errors import LorakitError, RunError


def add_to(command: Add) -> None:
    """The command and its options."""
    plan = command("plan", _plan, "say what memory a recipe takes with every backend, what fits, and what to change")
    recipe_arguments(plan)
    plan.add_argument("--gpu", metavar="NAME", help="plan for machines with this GPU, such as H200 (default: this one)")
    plan.add_argument("--gpus", type=positive, metavar="N", help="GPUs in each machine (with --gpu; default 1)")
    plan.add_argument("--nodes", type=positive, metavar="N", help="machines (with --gpu; default 1)")
    plan.add_argument(
        "--host-memory-gb", type=positive, metavar="X", help="of each machine (with --gpu; default 256 for each GPU)"
    )
    plan.add_argument("--json", metavar="FILE", help="write every figure")


def _plan(options: argparse.Namespace) -> int:
    from lorakit.recipe import load_recipe

    described = {"--gpus": options.gpus, "--nodes": options.nodes, "--host-memory-gb": options.host_memory_gb}
    alone = [flag for flag, value in described.items() if value is not None]
    if options.gpu is None and alone:
        raise LorakitError(f"{', '.join(alone)}: describes a machine; name its GPU with --gpu")
    recipe = load_recipe(options.recipe, tuple(options.overrides))
    from lorakit.files.atomic import write_file
    from lorakit.planning import machine_with_gpu as machine_of
    from lorakit.planning import run

    machine = None
    if options.gpu is not None:
        memory = None if options.host_memory_gb is None else options.host_memory_gb * 1_000_000_000
        machine = machine_of(options.gpu, options.gpus or 1, options.nodes or 1, memory)
    plan = run(recipe, machine)
    print(plan.text)
    if options.json is not None:
        write_file(Path(options.json), json.dumps(plan.facts(), indent=1) + "\n")
    if plan.refusal is not None:
        raise RunError(plan.refusal)
    return 0
