"""A recipe is run: in this process, or in as many as it asks for, which this one starts and waits for."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lorakit.base.load import find_base
from lorakit.errors import RunError, TemporaryFailure
from lorakit.launch.launcher import launch
from lorakit.parallel.setup import current_process
from lorakit.recipe import Recipe, load_recipe
from lorakit.training.loop import run


def train(recipe: str | Path, *, fresh: bool = False, **overrides: Any) -> Path:
    """Train from a recipe file; ``overrides`` are recipe keys, as in ``**{"train.learning_rate": 2e-3}``.

    Starts the recipe's processes, unless a launcher such as torchrun has. Returns the folder of the patch. Raises as
    ``lorakit.training.loop.run``, and RecipeError for what is wrong with the recipe.
    """
    texts = tuple(f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items())
    loaded = load_recipe(recipe, texts)
    code = run_or_launch(loaded, recipe, texts, fresh=fresh)
    if code:
        raise (TemporaryFailure if code == TemporaryFailure.exit_code else RunError)(
            "the run's processes ended with an error; it is printed above"
        )
    return Path(loaded.output)


def run_or_launch(recipe: Recipe, path: str | Path, overrides: Sequence[str], *, fresh: bool, why: str = "") -> int:
    """Run the recipe; returns the exit code of its workers, or 0. ``path`` and ``overrides`` are what it was made of.

    What it leaves open (`auto`) is chosen first; ``why`` tells a worker what it was chosen for.

    Raises:
        LorakitError: as ``lorakit.training.loop.run``, of a run in this process; or it cannot be started.
    """
    if current_process(recipe, os.environ) is not None:
        run(recipe, fresh=fresh, why=why)
        return 0
    values: Mapping[str, str] = {}
    if recipe.auto_keys:
        from lorakit.planning import resolve_auto

        choice = resolve_auto(recipe, fresh=fresh)
        recipe, values, why = choice.of(recipe), choice.values, choice.why
    parallel = recipe.parallel
    if not parallel.is_distributed:
        run(recipe, fresh=fresh, why=why)
        return 0
    find_base(recipe.base.model, recipe.base.revision)  # said once here rather than by every worker
    command = [
        sys.executable, "-m", "lorakit.cli", "train", str(path), *overrides,
        *(f"{key}={value}" for key, value in values.items()),
        *(["--fresh"] if fresh else []), *(["--why", why] if why else []),
    ]  # fmt: skip
    return launch(
        command, processes=parallel.processes, nodes=parallel.nodes, node_rank=None, rendezvous=parallel.rendezvous,
        max_restarts=parallel.max_restarts, threads=None, silent_seconds=parallel.silent_seconds,
    )  # fmt: skip
