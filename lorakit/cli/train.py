"""init, train, check, schema, plan, launch: from rows to a recipe, and from a recipe to a patch."""

import argparse
import json
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lorakit.cli.arguments import (
    AddCommand,
    add_columns_option,
    add_metric_option,
    add_recipe_arguments,
    add_repeated,
    given,
    parse_columns,
    picked,
    positive_int,
    print_line,
    refuse,
    write_or_print,
)
from lorakit.errors import LorakitError, RecipeError, RunError, check_absent, did_you_mean

if TYPE_CHECKING:
    from lorakit.recipe import Recipe

OF_SLURM = ("cpus_per_process", "time")
OF_K8S = ("image", "claim", "folder")


def add_train_commands(add_command: AddCommand) -> None:
    init = add_command("init", _init, "write a recipe for a base and a file of rows")
    init.add_argument("--base", help="model folder, hub id or builtin:tiny (in a terminal, you are asked)")
    init.add_argument("--data", nargs="+", metavar="FILE", help="training rows (in a terminal, you are asked)")
    add_columns_option(init)
    init.add_argument("--eval", metavar="FILE", help="held-out rows (default: a share of many rows, none of few)")
    init.add_argument("--out", default="recipe.yaml", help="file to write, which must not exist (default: recipe.yaml)")
    init.add_argument("--output", metavar="DIR", help="folder of the run (default: adapters/, named after the rows)")
    init.add_argument("--yes", action="store_true", help="ask nothing")
    shipped = "copy a shipped recipe instead, such as quickstart"
    init.add_argument("--from", dest="shipped", metavar="NAME", help=shipped)

    train = add_command("train", _train, "train an adapter from a recipe; goes on by itself after an interruption")
    add_recipe_arguments(train)
    train.add_argument("--fresh", action="store_true", help="discard the run in the output folder and start over")
    add_metric_option(train)
    push = "push the patch of the finished run into this repository of the hub; the repository is made at the start"
    train.add_argument("--push", metavar="ORGANISATION/NAME", help=push)
    train.add_argument("--push-base", metavar="NAME", help="name of the base in the pushed patch, as --base of push")
    train.add_argument("--push-private", action="store_true", help="make the repository private, as --private of push")
    # set by the launching process only: its workers record why `auto` became the values in their overrides
    train.add_argument("--why", default="", help=argparse.SUPPRESS)
    check = add_command("check", _check, "validate everything about a recipe that needs no weights")
    add_recipe_arguments(check)
    check.add_argument("--rows", type=positive_int, help="first rows to show with their labels (default: 1)")
    add_repeated(check, "--row", "FILE:LINE", "show this row with its labels, in full, instead of the first ones")
    schema = add_command("schema", _schema, "write the JSON schema of recipes, for editors")
    schema.add_argument("--out", help="file to write (default: standard output)")
    _add_cluster_commands(add_command)


def _add_cluster_commands(add_command: AddCommand) -> None:
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
    launch.add_argument("--cpus-per-process", type=int, help="slurm: cores per process (default: 8)")
    launch.add_argument("--time", help="slurm: time limit (default: 24:00:00)")
    launch.add_argument("--image", help="k8s: container image with lorakit in it")
    launch.add_argument("--claim", help="k8s: PersistentVolumeClaim with recipe, data and output")
    launch.add_argument("--folder", help="k8s: where the claim is mounted (default: /work)")


def _init(options: argparse.Namespace) -> None:
    if options.shipped is not None:
        refuse(options, ("base", "data", "columns", "eval", "output"), "--from copies a recipe as it is; edit the copy")
    out = Path(options.out)
    check_absent(out)
    if not out.parent.is_dir():
        raise LorakitError(f"--out: no folder {out.parent.absolute()}; make it first")
    text, needs_mending = (_shipped(options.shipped), False) if options.shipped is not None else _written(options)
    from lorakit.files.atomic import write_file
    from lorakit.recipe import load_recipe

    write_file(out, text)
    load_recipe(out)
    first = "mend the rows of the notes, then " if needs_mending else ""
    print_line(f"wrote {out}; next: {first}lorakit check {out}, then lorakit train {out}")


def _written(options: argparse.Namespace) -> tuple[str, bool]:
    """Return a recipe's text for the base and rows that the options, or the user, name; True if rows need mending."""
    missing = [name for name in ("base", "data") if getattr(options, name) is None]
    if missing and (options.yes or not sys.stdin.isatty()):
        flags = " and ".join(f"--{name}" for name in missing)
        raise LorakitError(f"{flags} missing: lorakit init --base DIR_OR_ID --data FILE --out {options.out}")
    base = options.base or _ask("base (a model folder, a hub id, or builtin:tiny)", "builtin:tiny")
    data = tuple(options.data or [_ask("training rows (a file such as .jsonl, .csv or .parquet, or a folder)", "")])
    print_line("looking at base and rows")
    from lorakit.data.find_rows import check_training_files
    from lorakit.training import new_recipe

    columns = tuple(parse_columns(options.columns).items())
    check_training_files(data, "train", [Path(options.eval).resolve()] if options.eval else ())
    facts, tokenizer = new_recipe.read_base(base)
    columns = columns or new_recipe.find_columns(data, tokenizer)
    template = new_recipe.add_named_template(tokenizer)
    rows = new_recipe.read_sample(data, tokenizer, columns)
    eval_rows = new_recipe.read_sample((options.eval,), tokenizer, columns, rows.objective) if options.eval else None
    output = options.output or new_recipe.free_output(data[0])
    text = new_recipe.recipe_text(facts, rows, eval_rows, output, template)
    print_line(f"\n{text}")
    notes = [note for facts in (rows, eval_rows) if facts for note in facts.notes]
    for note in notes:
        print_line(f"note: {note}")
    return text, bool(notes)


def _ask(question: str, default: str) -> str:
    try:
        return input(f"{question}{f' [{default}]' if default else ''}: ").strip() or default
    except EOFError:
        raise LorakitError("the input ended; nothing was written") from None


def _shipped(name: str) -> str:
    """Return the text of a recipe that comes with lorakit: a file of the wheel, or of the checkout."""
    package = Path(__file__).parent.parent
    folder = next(path for path in (package / "assets" / "recipes", package.parent / "recipes") if path.is_dir())
    names = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))
    if name not in names:
        raise LorakitError(f"--from: {name!r} is none of {', '.join(names)}.{did_you_mean(name, names)}")
    print_line("its rows are paths of lorakit's repository: name your own in data.train")
    lines = (folder / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    # the schema is beside the recipes of a checkout alone
    return "\n".join(line for line in lines if not line.startswith("# yaml-language-server")) + "\n"


def _train(options: argparse.Namespace) -> int:
    from lorakit.launch.environment import launched_size
    from lorakit.recipe import load_recipe

    # hides torch's warnings about settings that lorakit chose; torch raises its errors besides logging them
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # before the next imports, which import torch
    recipe = load_recipe(options.recipe, tuple(options.overrides), launched=partial(launched_size, os.environ))
    from lorakit.inference.measures import load_metrics
    from lorakit.launch.workers import die_with_parent
    from lorakit.training.callbacks import Hooks
    from lorakit.training.start import run_or_launch

    die_with_parent()
    pushes = _prepares_push(options, recipe)
    hooks = Hooks(metrics=load_metrics(options.metric), metric_files=tuple(options.metric))
    code = run_or_launch(recipe, options.recipe, options.overrides, fresh=options.fresh, why=options.why, hooks=hooks)
    if code == 0 and pushes:
        _push(options, recipe.output)
    return code


def _prepares_push(options: argparse.Namespace, recipe: "Recipe") -> bool:
    """Make the repository for the finished run's patch; False without `--push`, or where another process does it."""
    if options.push is None:
        refuse(options, ("push_base", "push_private"), "goes with --push ORGANISATION/NAME")
        return False
    from lorakit.files.hub import check_push, open_repository
    from lorakit.training.start import current_process

    world = current_process(recipe.parallel)
    if world is not None and world.rank != 0:
        return False
    check_push(options.push, options.recipe, recipe.base.model, options.push_base, "--push-base")
    open_repository(options.push, private=options.push_private)
    return True


def _push(options: argparse.Namespace, output: str) -> None:
    from lorakit.export.hub import push_patch

    base = [] if options.push_base is None else ["--base", options.push_base]
    private = ["--private"] if options.push_private else []
    command = shlex.join(["lorakit", "push", output, options.push, *base, *private])
    try:
        address = push_patch(output, options.push, base=options.push_base, private=options.push_private)
    except LorakitError as problem:
        text = f"{problem}\nThe run is finished, and its patch is in {output}. To push it: {command}"
        raise type(problem)(text) from None
    print_line(f"pushed     {address}")


def _check(options: argparse.Namespace) -> None:
    if options.row:
        refuse(options, ("rows",), "of the first rows, in whose place --row shows others; leave one of them out")
    from lorakit.recipe import load_recipe

    recipe = load_recipe(options.recipe, tuple(options.overrides))  # before the next import, which imports torch
    from lorakit.training.check import check

    check(recipe, print_line, num_rows=0 if options.row else options.rows or 1, named_rows=options.row)


def _schema(options: argparse.Namespace) -> None:
    from lorakit.recipe.schema import schema_text

    write_or_print(schema_text(), options.out)


def _plan(options: argparse.Namespace) -> None:
    from lorakit.recipe import load_recipe

    described = options.gpu is not None or options.gpu_memory_gb is not None
    if not described:
        reason = "describes a machine; name its GPU with --gpu, or give --gpu-memory-gb"
        refuse(options, ("gpus", "nodes", "host_memory_gb"), reason)
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
    refuse(options, OF_SLURM if options.k8s else OF_K8S, f"is for --{'slurm' if options.k8s else 'k8s'}")
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
        text = kubernetes_job(job, **given(options, *OF_K8S))
    else:
        text = slurm_job(job, **given(options, *OF_SLURM))
    write_or_print(text, options.out)
