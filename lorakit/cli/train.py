"""train, check, schema: from a recipe to a patch."""

import argparse
import os
from pathlib import Path

from lorakit.cli.arguments import Add, recipe_arguments


def add_to(command: Add) -> None:
    """The commands and their options."""
    train = command("train", _train, "train an adapter from a recipe; goes on by itself after an interruption")
    recipe_arguments(train)
    train.add_argument("--fresh", action="store_true", help="discard what the output folder holds and start over")
    train.add_argument("--why", default="", help=argparse.SUPPRESS)  # of a worker: why `auto` became what it is
    recipe_arguments(command("check", _check, "say everything about a recipe that needs no weights"))
    schema = command("schema", _schema, "write the JSON schema of recipes, for editors")
    schema.add_argument("--out", help="file to write (default: standard output)")


def _train(options: argparse.Namespace) -> int:
    from lorakit.recipe import load_recipe

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's notes on our settings; its errors are raised too
    recipe = load_recipe(options.recipe, tuple(options.overrides))
    from lorakit.launch.workers import die_with_parent
    from lorakit.training.start import run_or_launch

    die_with_parent()
    return run_or_launch(recipe, options.recipe, options.overrides, fresh=options.fresh, why=options.why)


def _check(options: argparse.Namespace) -> int:
    from lorakit.recipe import load_recipe

    recipe = load_recipe(options.recipe, tuple(options.overrides))
    from lorakit.training.check import check

    check(recipe)
    return 0


def _schema(options: argparse.Namespace) -> int:
    from lorakit.recipe.schema import schema_text

    if options.out is None:
        print(schema_text(), end="")
        return 0
    from lorakit.files.atomic import write_file

    write_file(Path(options.out), schema_text())
    return 0
