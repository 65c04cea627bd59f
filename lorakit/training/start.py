"""Start training from a recipe: in this process, or in several that this one launches and waits for.

Imports no torch at its top, because a process that only launches others lives as long as they do.
"""

import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lorakit.base.find import find_base
from lorakit.errors import RecipeError, RunError, TemporaryFailure
from lorakit.files.atomic import GIVEN_ROWS, cache_folder, digest, disk_full_as_retryable, sync_path
from lorakit.launch.environment import DEFAULT_PORT, World, contradictions, detect_world, launched_size
from lorakit.launch.launcher import MakeCommand, launch
from lorakit.launch.libraries import limit_kernel_caches
from lorakit.recipe import ParallelSection, Recipe, load_recipe
from lorakit.recipe.load import as_json, plain_value
from lorakit.training.callbacks import NO_HOOKS, Callback, Hooks, check_hooks

if TYPE_CHECKING:
    from lorakit.objectives.objective import Objective
    from lorakit.run.facts import TrainResult

UNREAD_TYPES: Final = frozenset({"DatasetDict", "IterableDataset", "DataFrame", "Table", "generator"})
"""types of rows that lorakit does not read, of `datasets`, pandas and pyarrow"""


def train(
    recipe: str | Path | Mapping[str, Any],
    *,
    fresh: bool = False,
    callbacks: Sequence[Callback] | None = None,
    metrics: Mapping[str, Callable[[str, str], float]] | None = None,
    objective: "Objective | None" = None,
    **overrides: Any,
) -> "TrainResult":
    """Train the adapter of a recipe, and return what the run ended with: losses, evaluations, folders of patches.

    Launches the recipe's processes, unless a launcher such as torchrun has started this one.

    recipe: a file, or a file's content, in which `data.train` and `data.eval` may be rows too: a list of mappings, or a
    `datasets.Dataset`. fresh: discard what the output folder contains, instead of resuming.
    callbacks: objects of classes derived from `lorakit.Callback`. metrics: name -> function (predicted, expected)
    -> number, a measure of answers beside those of `evaluation.measures`. objective: what to minimise instead of the
    recipe's `objective`. overrides: recipe keys, as in `**{"train.learning_rate": 2e-3}`.
    Raises RecipeError: the recipe is invalid. LorakitError: as `lorakit.training.loop.run`. An error of a callback,
    once the state is saved.
    """
    hooks = check_hooks(callbacks, metrics, objective)
    if type(fresh) is not bool:
        raise RecipeError(f"fresh: True or False, got {fresh!r}")
    texts = tuple(f"{key}={as_json(without_rows(key, value))}" for key, value in overrides.items())
    with _recipe_file(recipe) as path:
        loaded = load_recipe(path, texts, launched=partial(launched_size, os.environ))
        code = run_or_launch(loaded, path, texts, fresh=fresh, hooks=hooks)
    if code:
        raise (TemporaryFailure if code == TemporaryFailure.exit_code else RunError)(
            "the run's processes ended with an error; it is printed above"
        )
    from lorakit.run.facts import read_result

    return read_result(Path(loaded.output))


@contextmanager
def _recipe_file(recipe: str | Path | Mapping[str, Any]) -> Iterator[str | Path]:
    """Yield a recipe's file; of a mapping a temporary one, which launched processes read too."""
    if not isinstance(recipe, str | Path | Mapping):
        raise RecipeError(f"recipe: a file or a mapping of sections, got a {type(recipe).__name__}")
    if not isinstance(recipe, Mapping):
        yield recipe
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.json"
        sections = {key: without_rows(key, value) for key, value in recipe.items()}
        path.write_text(as_json(sections), encoding="utf-8")  # JSON is YAML
        try:
            yield path
        except (RecipeError, RunError) as problem:  # lines of a temporary file help nobody
            raise type(problem)(re.sub(rf"{re.escape(str(path))}(:\d+)?", "recipe", str(problem))) from None


def without_rows(key: str, value: Any) -> Any:
    """Return the value of a recipe's key with names of files instead of the rows in `data.train` and `data.eval`.

    The rows are written into the user's cache, so that resuming, launched processes and the token cache work as with
    any file.
    Raises RecipeError: rows of an unknown type, or a value that JSON does not have.
    """
    if key == "data" and isinstance(value, Mapping):
        return {name: without_rows(f"data.{name}", each) for name, each in value.items()}
    return rows_as_file(key, value) if key in ("data.train", "data.eval") else value


def rows_as_file(key: str, value: Any, *, is_path: bool = False) -> Any:
    """Return the value of `data.train` or `data.eval` with names of files instead of rows. ``key``: for errors.

    is_path: of a source's `path`, where a mapping is a row; elsewhere one with `path` is a source.
    """
    if isinstance(value, list | tuple):
        if value and all(isinstance(row, Mapping) and (is_path or "path" not in row) for row in value):
            return _write_rows(key, value)
        return [rows_as_file(f"{key}.{index}", each) for index, each in enumerate(value)]
    datasets = sys.modules.get("datasets")  # imported wherever there is such an object
    if datasets is not None and isinstance(value, datasets.Dataset):
        from lorakit.data.row_files import dataset_reader

        read = dataset_reader(value.features)
        return _write_rows(key, (read(row) for row in value.with_format(None)))
    if kinds := UNREAD_TYPES & {each.__name__ for each in type(value).__mro__}:
        raise RecipeError(
            f"{key}: rows are a list of mappings or a Dataset, got a {', '.join(kinds)}; make such a list of it, as"
            " with list(rows), rows.to_pylist() or rows.to_dict('records'), or name a split: rows['train']"
        )
    if isinstance(value, Mapping) and "path" in value:
        return {**value, "path": rows_as_file(f"{key}.path", value["path"], is_path=True)}
    return value


def _write_rows(key: str, rows: Iterable[Any]) -> str:
    """Write rows into the cache, in a file that a digest of its content names; return its path."""
    folder = cache_folder(GIVEN_ROWS)
    with disk_full_as_retryable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as staging:
            file = Path(staging) / "rows.jsonl"
            with open(file, "wb") as lines:
                for number, row in enumerate(rows, 1):
                    try:
                        lines.write(json.dumps(dict(row), default=plain_value).encode() + b"\n")
                    except (TypeError, ValueError) as problem:
                        form = "a row has text, numbers, true/false, lists and mappings"
                        raise RecipeError(f"{key}: row {number}: {form}: {problem}") from None
            sync_path(file)
            return str(file.rename(folder / f"{digest(file)[:32]}.jsonl"))


def run_or_launch(
    recipe: Recipe, path: str | Path, overrides: Sequence[str], *, fresh: bool, why: str = "", hooks: Hooks = NO_HOOKS
) -> int:
    """Train in this process, or launch the recipe's processes and wait. Returns their exit code, 0 if all went well.

    A launched process calls this function too: it finds its rank in its environment, and trains.

    path, overrides: of `recipe`, which launched processes load once more. why: the reason for the values of `auto`
    keys, if they have been chosen; else they are chosen here, once for all processes.
    Raises LorakitError: as `lorakit.training.loop.run` in this process, or the processes cannot be launched.
    """
    hooks.check_answers(recipe)
    limit_kernel_caches(recipe.base.dtype)
    world = current_process(recipe.parallel)
    if world is None:
        require_one_machine(recipe.parallel, ["train", str(path), *overrides, *(["--fresh"] if fresh else [])])
        values: Mapping[str, Any] = {}
        if recipe.auto_keys:
            from lorakit.planning import apply_changes, resolve_auto

            values, why = resolve_auto(recipe, fresh=fresh)
            recipe = apply_changes(recipe, values)
        if recipe.parallel.is_distributed:
            hooks.check_launch(recipe.parallel.processes)
            find_base(recipe.base.model, recipe.base.revision)  # a missing base is one error here, not one from each
            command = [
                # -P: without the current folder in sys.path, whose numpy.py or torch.py the workers would run
                *(sys.executable, "-P", "-m", "lorakit.cli", "train", str(path)),
                *overrides,
                *(f"{key}={value}" for key, value in values.items()),
                *(["--fresh"] if fresh else []),
                *(["--why", why] if why else []),
                *(part for file in hooks.metric_files for part in ("--metric", file)),
            ]
            return launch(
                command,
                processes=recipe.parallel.processes,
                max_restarts=recipe.parallel.max_restarts,
                restart_command=_restart_command(command, Path(recipe.output)) if fresh else None,
            )
    elif fresh and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise RunError(
            "--fresh: torchrun may start this command again (--max-restarts), and each start would discard the run;"
            " choose another output, or start once with --max-restarts=0"
        )
    from lorakit.training.loop import run

    run(recipe, world, fresh=fresh, why=why, hooks=hooks)
    return 0


def _restart_command(command: Sequence[str], output: Path) -> MakeCommand:
    """Return a function that gives the command of a restart: without --fresh once the run before is discarded."""
    from lorakit.run.record import recorded_run  # imports torch, and is needed for --fresh alone

    starts = recorded_run(output).get("starts")

    def restart_command() -> Sequence[str]:
        has_begun = recorded_run(output).get("starts") != starts
        return [part for part in command if part != "--fresh" or not has_begun]

    return restart_command


def require_one_machine(parallel: ParallelSection, arguments: Sequence[str]) -> None:
    """Raise RunError, with the torchrun line for ``arguments``, if a recipe for several machines was not launched."""
    nodes = parallel.nodes
    if nodes == 1:
        return
    endpoint = parallel.rendezvous or f"HOST:{DEFAULT_PORT}"
    host = "" if parallel.rendezvous else ", where HOST is one of them"
    raise RunError(
        f"parallel.nodes is {nodes}, and `lorakit train` starts the processes of one machine only."
        f" Run this on every machine{host} (docs/clusters.md has Slurm, mpirun and Kubernetes):\n"
        f"  torchrun --nnodes {nodes} --nproc-per-node {parallel.processes // nodes} --rdzv-backend c10d"
        f" --rdzv-endpoint {endpoint} --no-python lorakit {shlex.join(arguments)}"
    )


def current_process(parallel: ParallelSection) -> World | None:
    """Return this process's rank and group as its launcher set them; None if no launcher started it.

    Raises RunError: the launcher, or environment variables of other tools, contradict the recipe.
    """
    world = detect_world(os.environ, parallel.rendezvous)
    requested = parallel.model_dump(include={"backend", "processes", "nodes"})
    if lines := contradictions(world, os.environ, **requested, neighbours=parallel.sequence * parallel.tensor):
        heading = "launcher and recipe contradict each other (parallel.processes: auto takes the launcher's):\n"
        raise RunError(heading + "\n".join(f"  {line}" for line in lines))
    return world
