"""Open a session: the engine and the base, which stay in memory while adapters come and go."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorakit.base.device import DtypeChoice, choose_dtype
from lorakit.base.loading import LoadedBase, load_for_training
from lorakit.parallel import Engine
from lorakit.recipe import Recipe


@dataclass(frozen=True)
class Session:
    """An engine with a base. The base has no weights yet if the engine shards it, until the engine is prepared.

    folder: of the base's files.
    """

    engine: Engine
    folder: Path
    dtype: DtypeChoice
    base: LoadedBase


def open_session(recipe: Recipe, engine: Engine, folder: Path, recorded: Mapping[str, Any]) -> Session:
    """Load the base of a recipe from its folder. Collective.

    recorded: the record of an interrupted run, whose dtype is used once more; else empty.
    Raises BaseModelError: the base cannot be loaded, or not quantised as the recipe requests.
    """
    group = engine.group
    # `auto` measures the machine, so one rank chooses for all
    dtype = group.run_on_rank_0(lambda: choose_dtype(recorded.get("dtype", recipe.base.dtype), engine.device))
    if "dtype" in recorded:
        dtype = DtypeChoice(dtype.dtype, recorded["dtype_why"])
    engine.set_phase("loading the base")
    return Session(engine, folder, dtype, group.run_on_all(lambda: load_base_of(recipe, engine, folder, dtype)))


def load_base_of(recipe: Recipe, engine: Engine, folder: Path, dtype: DtypeChoice) -> LoadedBase:
    return load_for_training(recipe.base, folder, dtype.dtype, engine.device, sharded=engine.shards_base)
