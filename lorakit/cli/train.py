"""train, check, schema: from a recipe to a patch."""

import argparse
import os
import shlex
from functools import partial
from typing import TYPE_CHECKING

from lorakit.cli.arguments import (
    AddCommand,
    add_metric_option,
    add_recipe_arguments,
    add_repeated,
    positive_int,
    print_line,
    write_or_print,
)
from lorakit.errors import LorakitError

if TYPE_CHECKING:
    from lorakit.recipe import Recipe


def add_train_commands(add_command: AddCommand) -> None:
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
    check.add_argument("--rows", type=positive_int, default=1, help="first rows to show with their labels (default: 1)")
    add_repeated(check, "--row", "FILE:LINE", "show this row with its labels, in full, instead of the first ones")
    schema = add_command("schema", _schema, "write the JSON schema of recipes, for editors")
    schema.add_argument("--out", help="file to write (default: standard output)")


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
        if options.push_base is not None or options.push_private:
            raise LorakitError("--push-base and --push-private go with --push ORGANISATION/NAME")
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
        raise type(problem)(
            f"{problem}\nThe run is finished, and its patch is in {output}. To push it: {command}"
        ) from None
    print_line(f"pushed     {address}")


def _check(options: argparse.Namespace) -> None:
    from lorakit.recipe import load_recipe

    recipe = load_recipe(options.recipe, tuple(options.overrides))  # before the next import, which imports torch
    from lorakit.training.check import check

    check(recipe, print_line, num_rows=0 if options.row else options.rows, named_rows=options.row)


def _schema(options: argparse.Namespace) -> None:
    from lorakit.recipe.schema import schema_text

    write_or_print(schema_text(), options.out)
