"""train, check, schema: from a recipe to a patch."""

import argparse
import os
from pathlib import Path

from lorakit.cli.arguments import AddCommand, add_metric_option, add_recipe_arguments


def add_train_commands(add_command: AddCommand) -> None:
    """Add `train`, `check` and `schema`."""
    train = add_command("train", _train, "train an adapter from a recipe; goes on by itself after an interruption")
    add_recipe_arguments(train)
    train.add_argument("--fresh", action="store_true", help="discard the run in the output folder and start over")
    add_metric_option(train)
    # set by the launching process only: its workers record why `auto` became the values in their overrides
    train.add_argument("--why", default="", help=argparse.SUPPRESS)
    add_recipe_arguments(add_command("check", _check, "validate everything about a recipe that needs no weights"))
    schema = add_command("schema", _schema, "write the JSON schema of recipes, for editors")
    schema.add_argument("--out", help="file to write (default: standard output)")


def _train(options: argparse.Namespace) -> int:
    from lorakit.recipe import load_recipe

    # hides torch's warnings about settings that lorakit chose; torch raises its errors besides logging them
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    recipe = load_recipe(options.recipe, tuple(options.overrides))  # before the next imports, which import torch
    from lorakit.inference.measures import load_metrics
    from lorakit.launch.workers import die_with_parent
    from lorakit.training.hooks import Hooks
    from lorakit.training.start import run_or_launch

    die_with_parent()
    hooks = Hooks(metrics=load_metrics(options.metric), metric_files=tuple(options.metric))
    return run_or_launch(recipe, options.recipe, options.overrides, fresh=options.fresh, why=options.why, hooks=hooks)


def _check(options: argparse.Namespace) -> int:
    from lorakit.recipe import load_recipe

    recipe = load_recipe(options.recipe, tuple(options.overrides))  # before the next import, which imports torch
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
