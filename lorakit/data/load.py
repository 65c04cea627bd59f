"""Tokenise the rows of a recipe's `data` section: those for training, and those held out."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lorakit.data.dataset import Part, TokenDataset, count_shared, without_shared
from lorakit.data.find_rows import SPLITS_FILE, check_training_files, files_without_rows, find_sources
from lorakit.data.row_settings import RowSettings, map_columns
from lorakit.data.rows import RowSource, read_rows
from lorakit.data.token_cache import Progress, tokenize_sources, trim_cache
from lorakit.errors import DataError, collect_problems
from lorakit.recipe import Recipe
from lorakit.recipe.data import SourceSection

LocatedRow = tuple[str, Any]  # (file:line, row or BadRow)
OpenProgress = Callable[[], AbstractContextManager[Progress]]


@dataclass(frozen=True)
class RowSet:
    """Rows of one source that are tokenised with the same settings. split: of a hub data set."""

    source: SourceSection
    side: str  # `train`, or `eval` for held-out rows
    split: str
    settings: RowSettings
    name: str | None  # as of `Part`
    eval_files: Collection[Path] = ()  # of rows for training: files of `data.eval`, resolved

    def sources(self) -> list[RowSource]:
        """Return the files and hub data sets of the rows; raises as `find_sources` and `check_training_files`."""
        source = self.source
        hub = {"subset": source.subset, "revision": source.revision}
        sources = find_sources(source.path, self.split, streaming=source.streaming, **hub)
        if self.side == "train" and any(each.path for each in sources):
            check_training_files(source.path, self.split, self.eval_files)
        return sources

    def rows(self) -> Iterator[LocatedRow]:
        """Yield the rows as `load_datasets` reads them, before they are tokenised."""
        return located_rows(self.sources(), self.settings)


def row_sets(recipe: Recipe) -> list[RowSet]:
    """Return the rows of each source of `data.train`, of `data.eval`, and those that are held out of the former."""
    data = recipe.data
    sources = data.train_sources()
    eval_sources = data.eval_sources()
    several = len(eval_sources) + sum(data.share_of(source) > 0 for source in sources) > 1
    evaluation = [_row_set(recipe, "eval", source, several) for source in eval_sources]
    eval_files = set[Path]()
    for one in evaluation:
        with suppress(DataError):  # a file is missing, which is a problem of its own
            eval_files |= {source.path.resolve() for source in one.sources() if source.path}
    training = [_row_set(recipe, "train", source, len(sources) > 1) for source in sources]
    for one in training:
        if one.settings.eval_share:
            settings = replace(one.settings, eval_side=True)
            name = one.source.label if several else one.name
            evaluation.append(replace(one, side="eval", settings=settings, name=name))
    return [*(replace(one, eval_files=eval_files) for one in training), *evaluation]


def load_datasets(
    recipe: Recipe, tokenizer: Any, progress: OpenProgress, today: str | None = None
) -> dict[str, TokenDataset]:
    """Return the tokenised rows of a recipe: `train`, and `eval` if some are held out.

    progress: opens a display. today: the date that a chat template writes.
    Raises DataError: with all problems of both, or because of rows that are in both.
    """

    def load(one: RowSet) -> Part:
        with progress() as show:
            settings = replace(one.settings, today=today)
            (part,) = tokenize_sources(one.sources(), tokenizer, settings, show).parts
        return replace(part, name=one.name, passes=one.source.weight if one.side == "train" else 1.0)

    parts: dict[str, list[Part]] = {}
    sets = row_sets(recipe)
    for one, part in zip(sets, collect_problems(load, sets), strict=True):
        parts.setdefault(one.side, []).append(part)
    trim_cache(recipe.data.cache_gb * 1e9)
    datasets = {side: TokenDataset(own) for side, own in parts.items()}
    rows, eval_rows = datasets["train"], datasets.get("eval")
    if eval_rows is None or recipe.data.on_shared_rows == "count":
        return datasets
    if recipe.data.on_shared_rows == "drop":
        return {"train": without_shared(rows, eval_rows), "eval": eval_rows}
    if number := count_shared(rows, eval_rows):
        raise DataError(
            f"data.on_shared_rows: {number:,} of {len(eval_rows):,} held-out rows are training rows too (the same"
            " tokens); `drop` leaves them out of training"
        )
    return datasets


def tokenize_file(path: str, tokenizer: Any, settings: RowSettings, progress: OpenProgress, also: str) -> TokenDataset:
    """Return the rows of a file that is scored. Raises DataError, which names the options, after ``also``."""
    try:
        with progress() as show:
            return tokenize_sources(find_sources(path, "test"), tokenizer, settings, show)
    except DataError as problem:
        options = "data.on_bad_rows, data.columns and data.ignore_keys are --on-bad-rows, --columns and --ignore-keys"
        raise DataError(f"{problem}\nHere {also}{options}; pairs need an --adapter of pairs") from None


def located_rows(sources: Iterable[RowSource], settings: RowSettings) -> Iterator[LocatedRow]:
    """Yield the rows of files with their locations: those that the settings take, with the columns that they name."""
    rows = ((f"{source.name}:{line}", row) for source in sources for line, row in read_rows(source))
    for location, row in itertools.islice(rows, settings.limit):
        if settings.is_on_side(row):
            yield location, map_columns(row, settings.columns)


def check_sources(recipe: Recipe) -> None:
    """Raise DataError, which names all missing ones, unless the files of all rows exist and are meant for training."""
    collect_problems(RowSet.sources, row_sets(recipe))


def files_left_out(recipe: Recipe) -> list[str]:
    """Return the files in folders of rows that hold no rows."""
    files = (file for one in row_sets(recipe) for file in files_without_rows(one.source.path, one.split))
    return list(dict.fromkeys(files))


def splits_read(datasets: Mapping[str, TokenDataset]) -> list[str]:
    """Return the folders of splits that are read of each `DatasetDict`."""
    folders = [Path(source).parent for rows in datasets.values() for source in rows.sources]
    return list(dict.fromkeys(str(folder) for folder in folders if (folder.parent / SPLITS_FILE).is_file()))


def _row_set(recipe: Recipe, side: str, source: SourceSection, several: bool) -> RowSet:
    """Return the rows of a source. ``several``: it is not the only one, so its rows have a name."""
    data = recipe.data
    columns = data.columns if source.columns is None else source.columns
    same = data.model_dump(include={"max_tokens", "on_long_rows", "on_bad_rows", "loss_on", "ignore_keys", "turns"})
    settings = RowSettings(
        **same,
        columns=tuple(sorted(columns.items())),
        limit=source.limit,
        eval_share=data.share_of(source) if side == "train" else 0.0,
        template_kwargs=data.chat_template_kwargs,
        **recipe.objective.row_settings,
    )
    split = data.hub_split if side == "train" else data.hub_eval_split
    return RowSet(source, side, split, settings, source.label if several else source.name)
