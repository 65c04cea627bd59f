"""Tokenise the rows of a recipe's `data` section: those for training, and those held out."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lorakit.data.columns import map_columns
from lorakit.data.dataset import Part, TokenDataset, count_shared, without_shared
from lorakit.data.find_rows import SPLITS_FILE, check_training_files, files_without_rows, find_sources
from lorakit.data.row_settings import RowSettings
from lorakit.data.rows import RowSource, read_rows
from lorakit.data.token_cache import Progress, tokenize_sources, trim_cache
from lorakit.errors import DataError, collect_problems

if TYPE_CHECKING:  # because rows are tokenised without a recipe too, and then without importing pydantic
    from lorakit.recipe import Recipe
    from lorakit.recipe.data import DataSection, SourceSection

LocatedRow = tuple[str, Any]  # (file:line, row or BadRow)
OpenProgress = Callable[[], AbstractContextManager[Progress]]


@dataclass(frozen=True)
class RowSet:
    """Rows of one source that are tokenised with the same settings. split: of a hub data set."""

    source: "SourceSection"
    split: str
    settings: RowSettings
    name: str | None  # as of `Part`, and so is ``passes``
    passes: float
    eval_files: frozenset[Path] | None = None
    """of rows for training: files of `data.eval`, resolved; None of held-out rows"""

    def sources(self) -> list[RowSource]:
        """Return the files and hub data sets of the rows; raises as `find_sources` and `check_training_files`."""
        source = self.source
        hub = {"subset": source.subset, "revision": source.revision}
        sources = find_sources(source.path, self.split, streaming=source.streaming, **hub)
        if self.eval_files is not None and any(each.path for each in sources):
            check_training_files(source.path, self.split, self.eval_files)
        return sources

    def rows(self) -> Iterator[LocatedRow]:
        """Yield the rows as `load_datasets` reads them, before they are tokenised."""
        return located_rows(self.sources(), self.settings)


def training_sets(data: "DataSection", *, pairs: bool = False) -> list[RowSet]:
    """Return the rows for training, a set for each source. pairs: each has a chosen and a rejected answer."""
    sources = data.train_sources()
    named = [_row_set(data, source, data.hub_eval_split, 0.0, True, pairs) for source in data.eval_sources()]
    eval_files = frozenset(path.resolve() for one in named for path in _paths(one))
    several = len(sources) > 1
    sets = [_row_set(data, each, data.hub_split, data.share_of(each), several, pairs) for each in sources]
    return [replace(one, eval_files=eval_files) for one in sets]


def eval_sets(data: "DataSection", *, pairs: bool = False) -> list[RowSet]:
    """Return the held-out rows: those of `data.eval`, and the shares of the sources of `data.train`."""
    shares = [one for one in training_sets(data, pairs=pairs) if one.settings.eval_share]
    sources = data.eval_sources()
    several = len(sources) + len(shares) > 1
    sets = [_row_set(data, source, data.hub_eval_split, 0.0, several, pairs) for source in sources]
    for one in shares:
        name = one.source.label if several else one.name
        sets.append(replace(one, settings=replace(one.settings, eval_side=True), name=name, passes=1.0))
    return sets


def load_datasets(
    recipe: "Recipe", tokenizer: Any, progress: OpenProgress, today: str | None = None
) -> dict[str, TokenDataset]:
    """Return the tokenised rows of a recipe: `train`, and `eval` if some are held out.

    progress: opens a display. today: the date that a chat template writes.
    Raises DataError: with all problems of both, or because of rows that are in both.
    """

    def load(one: RowSet) -> Part:
        with progress() as show:
            settings = replace(one.settings, today=today)
            (part,) = tokenize_sources(one.sources(), tokenizer, settings, show).parts
        return replace(part, name=one.name, passes=one.passes)

    data = recipe.data
    pairs = recipe.objective.reads_pairs
    sets = {"train": training_sets(data, pairs=pairs)}
    sets |= {"eval": eval_sets(data, pairs=pairs)} if data.has_eval else {}
    loaded = collect_problems(lambda each: TokenDataset(collect_problems(load, each)), sets.values())
    trim_cache(data.cache_gb * 1e9)
    datasets = dict(zip(sets, loaded, strict=True))
    if "eval" not in datasets or data.on_shared_rows == "count":
        return datasets
    rows, eval_rows = loaded
    if data.on_shared_rows == "drop":
        return {"train": without_shared(rows, eval_rows), "eval": eval_rows}
    if number := count_shared(rows, eval_rows):
        raise DataError(
            f"data.on_shared_rows: {number:,} of {len(eval_rows):,} held-out rows are training rows too (the same"
            " tokens); `drop` leaves them out of training"
        )
    return datasets


def located_rows(sources: Iterable[RowSource], settings: RowSettings) -> Iterator[LocatedRow]:
    """Yield the rows of files with their locations: those that the settings take, with the columns that they name."""
    rows = ((f"{source.name}:{line}", row) for source in sources for line, row in read_rows(source))
    for location, row in itertools.islice(rows, settings.limit):
        if settings.is_on_side(row):
            yield location, map_columns(row, settings.columns)


def check_sources(data: "DataSection") -> None:
    """Raise DataError, which names all missing ones, unless the files of all rows exist and are meant for training."""
    collect_problems(RowSet.sources, training_sets(data) + eval_sets(data))


def _paths(one: RowSet) -> list[Path]:
    """Return the files of a set: none of a hub data set, and none where one is missing, which is its own problem."""
    try:
        return [source.path for source in one.sources() if source.path]
    except DataError:
        return []


def files_left_out(data: "DataSection") -> list[str]:
    """Return the files in folders of rows that hold no rows."""
    sets = training_sets(data) + eval_sets(data)
    return list(dict.fromkeys(file for each in sets for file in files_without_rows(each.source.path, each.split)))


def splits_read(data: "DataSection") -> list[str]:
    """Return the folders of splits that are read of each `DatasetDict`."""
    folders = [path.parent for each in training_sets(data) + eval_sets(data) for path in _paths(each)]
    return list(dict.fromkeys(str(folder) for folder in folders if (folder.parent / SPLITS_FILE).is_file()))


def _row_set(
    data: "DataSection", source: "SourceSection", split: str, share: float, several: bool, pairs: bool
) -> RowSet:
    """Return the rows of a source. ``several``: it is not the only one, so its rows have a name."""
    columns = data.columns if source.columns is None else source.columns
    settings = RowSettings(
        data.max_tokens,
        data.on_long_rows,
        data.on_bad_rows,
        data.loss_on,
        data.ignore_keys,
        tuple(sorted(columns.items())),
        source.limit,
        share,
        turns=data.turns,
        pairs=pairs,
        template_kwargs=data.chat_template_kwargs,
    )
    return RowSet(source, split, settings, source.label if several else source.name, source.weight)
