"""Find the files of rows that a recipe names: files, folders, patterns, or hub data sets.

Invariant: the files of a name have a fixed order. A folder's files that hold no rows are left out and can be listed.
"""

import glob
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from lorakit.data.row_files import READ_FORMS, form_of
from lorakit.data.rows import RowSource
from lorakit.errors import DataError, did_you_mean

FACTS: Final = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""files that ``datasets`` and the hub put beside rows"""
RUN_FILES: Final = ("run.json", "metrics.jsonl")
"""files of a run's output folder, which may be inside of a folder of rows"""
MIXED: Final = {".jsonl", ".parquet"}
"""forms that may be together in one folder"""


def find_sources(
    names: str | tuple[str, ...],
    split: str,
    *,
    streaming: bool = False,
    subset: str | None = None,
    revision: str | None = None,
) -> list[RowSource]:
    """Return the files that a recipe names, in a fixed order.

    ``split``, ``subset``, ``revision``: of a hub data set. ``streaming``: read hub data sets without storing them.

    Raises:
        DataError: a file that does not exist (with the absolute path tried), or of an unknown form.
    """
    sources, problems = list[RowSource](), list[str]()
    for name in _all(names):
        try:
            of_name = [_stream(name, split)] if streaming else _find(name, split)
            if (subset or revision) and any(source.path for source in of_name):
                raise DataError(f"data: {name}: `subset` and `revision` are for data sets of the hub; leave them out")
            sources += [replace(source, subset=subset, revision=revision) for source in of_name]
        except DataError as problem:
            problems.append(str(problem))
    if problems:
        raise DataError("\n".join(problems))
    paths = [str(source.path.resolve()) if source.path else source.name for source in sources]
    repeated = {path for path in paths if paths.count(path) > 1}
    if repeated:
        raise DataError(f"data: named twice: {', '.join(sorted(repeated))}")
    return sources


def files_without_rows(names: str | tuple[str, ...]) -> list[str]:
    """Return what is left out of the folders and patterns among ``names``: files without rows, and folders of runs."""
    left_out: list[str] = []
    for name in _all(names):
        if Path(name).is_dir():
            left_out += [str(path) for paths in _files(Path(name)) for path in paths if not _rows(path)]
        elif glob.has_magic(name) and not Path(name).is_file():
            left_out += sorted({str(run) for path in _matches(name) if (run := _run_around(path, name)) is not None})
    return left_out


def _all(names: str | tuple[str, ...]) -> Iterable[str]:
    return [names] if isinstance(names, str) else names


def _find(name: str, split: str) -> list[RowSource]:
    path = Path(name)
    if _is(path, Path.is_dir):
        return _find_in_folder(path)
    if _is(path, Path.is_file):
        return [_source(name)]
    if glob.has_magic(name):
        return _find_pattern(name)
    if path.is_symlink() and not path.exists():
        raise DataError(f"data: {name}: a link to {path.readlink()}, which leads to no file")
    if path.exists():
        raise DataError(f"data: {name}: neither a file nor a folder; rows are read more than once, so store them first")
    missing = f"data: {name}: no such file or folder; looked for {path.absolute()}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and form_of(name) is None and not name.endswith(".txt"):
        if _is(path.parent, Path.is_dir):  # a mistyped path, for which the hub would be searched for half a minute
            raise DataError(
                f"{missing}.{_nearest_files(path)} {path.parent} is a folder here, so"
                " the hub was not searched; for a hub data set of this name run from another folder"
            )
        return [RowSource(name, None, split)]
    raise DataError(f"{missing}.{_nearest_files(path)}")


def _stream(name: str, split: str) -> RowSource:
    """Return a hub data set, or a folder in the form of one, as a stream."""
    if _is(Path(name), Path.is_dir):
        return RowSource(name, None, split, streaming=True)
    if _is(Path(name), Path.is_file) or glob.has_magic(name):
        raise DataError(
            f"data: {name}: `streaming` is for data sets of the hub; files are read row by row anyway: leave it out"
        )
    return replace(_find(name, split)[0], streaming=True)


def _source(name: str) -> RowSource:
    if form_of(name) is None:
        raise DataError(
            f"data: {name}: lorakit reads files ending in {READ_FORMS}; convert it; a text is a row"
            ' {"text": "..."}, or several (on_long_rows: split)'
        )
    return RowSource(name, Path(name))


def _find_pattern(pattern: str) -> list[RowSource]:
    matches = _matches(pattern)
    files = [name for name in matches if _run_around(name, pattern) is None]
    if not files:
        runs = (
            f"; {len(matches)} in output folders of runs are left out: name them without a pattern" if matches else ""
        )
        raise DataError(f"data: {pattern}: no file matches; looked in {Path().absolute()}{runs}")
    return [_source(name) for name in files]


def _matches(pattern: str) -> list[str]:
    return sorted(name for name in glob.glob(pattern, recursive=True) if Path(name).is_file())


def _run_around(name: str, pattern: str) -> Path | None:
    """Return the output folder of a run that a match is in, unless the pattern names that folder itself."""
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts)
    start = Path(*fixed)
    between = itertools.takewhile(lambda folder: folder != start, Path(name).parents)
    return next(filter(_is_run, between), None)


def _is_run(folder: Path) -> bool:
    return all((folder / name).is_file() for name in RUN_FILES)


def _nearest_files(path: Path) -> str:
    """Return the files beside a missing one with the most similar names, as a sentence; empty if there are none."""
    beside = path.parent.iterdir() if _is(path.parent, Path.is_dir) else ()
    return did_you_mean(str(path), map(str, beside))


def _find_in_folder(folder: Path) -> list[RowSource]:
    files = [path for path in _files(folder)[0] if _rows(path)]
    if not files:
        raise DataError(f"data: {folder.absolute()} holds no file ending in {READ_FORMS}")
    forms = Counter(form_of(path.name) for path in files)
    if len(forms) > 1 and not forms.keys() <= MIXED:  # often the same rows twice, or facts about them
        listed = ", ".join(f"{number} {form}" for form, number in sorted(forms.items(), key=str))
        raise DataError(
            f"data: {folder} holds files of several forms ({listed}); name those with the rows, such as"
            f" '{folder}/**/*{forms.most_common(1)[0][0]}'"
        )
    return [RowSource(str(path), path) for path in files]


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files of a folder and of those in it, and the folders of runs in it, whose files are none of them.

    Nothing that is hidden, or begins with an underscore, is among them.
    """
    files, runs = list[Path](), list[Path]()
    for parent, folders, names in os.walk(folder, followlinks=True):
        inside = [Path(parent, name) for name in folders if _is_shown(name)]
        runs += filter(_is_run, inside)
        above = {path.resolve() for path in (Path(parent), *Path(parent).parents)}  # a link to one of them is a circle
        folders[:] = [path.name for path in inside if path not in runs and path.resolve() not in above]
        files += [path for name in names if _is_shown(name) and (path := Path(parent, name)).is_file()]
    return sorted(files), sorted(runs)


def _is_shown(name: str) -> bool:
    return not name.startswith((".", "_"))


def _rows(path: Path) -> bool:
    """True if a file in a folder has rows, by its name."""
    return form_of(path.name) is not None and path.name not in FACTS


def _is(path: Path, test: Callable[[Path], bool]) -> bool:
    try:
        return test(path)
    except (OSError, ValueError) as problem:  # a name too long, or with a NUL
        raise DataError(f"data: {str(path)[:80]!r} is no file name: {problem}") from None
