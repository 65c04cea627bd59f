"""Find the files of rows that a recipe names: files, folders, patterns, or hub data sets.

Invariant: the files of a name have a fixed order. A folder's files that hold no rows are left out and can be listed.
"""

import glob
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from lorakit.data.row_files import READ_FORMS, form_of
from lorakit.data.rows import RowSource
from lorakit.errors import DataError, did_you_mean

DATASET_FILES: Final = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""files that ``datasets`` and the hub put beside rows"""
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

    Raises DataError: a file that does not exist (with the absolute path tried), or of an unknown form.
    """
    sources = list[RowSource]()
    problems = list[str]()
    for name in [names] if isinstance(names, str) else names:
        try:
            of_name = [_stream(name, split)] if streaming else _find(name, split)
            if (subset or revision) and any(source.path for source in of_name):
                raise DataError(f"data: {name}: `subset` and `revision` are for data sets of the hub; leave them out")
            sources += [replace(source, subset=subset, revision=revision) for source in of_name]
        except DataError as problem:
            problems.append(str(problem))
    if problems:
        raise DataError("\n".join(problems))
    paths = Counter(str(source.path.resolve()) if source.path else source.name for source in sources)
    if repeated := sorted(path for path, number in paths.items() if number > 1):
        raise DataError(f"data: named twice: {', '.join(repeated)}")
    return sources


def files_without_rows(names: str | tuple[str, ...]) -> list[str]:
    """Return the files without rows in the folders among ``names``, which are left out."""
    folders = [Path(name) for name in ([names] if isinstance(names, str) else names) if Path(name).is_dir()]
    return [str(path) for folder in folders for path in _files(folder) if not _has_rows(path)]


def _find(name: str, split: str) -> list[RowSource]:
    path = Path(name)
    if _is(path, Path.is_dir):
        return _find_in_folder(path)
    if _is(path, Path.is_file):
        return [_source(name)]
    if glob.has_magic(name):
        matches = sorted(match for match in glob.glob(name, recursive=True) if Path(match).is_file())
        if not matches:
            raise DataError(f"data: {name}: no file matches; looked in {Path().absolute()}")
        return [_source(match) for match in matches]
    if path.is_symlink() and not path.exists():
        raise DataError(f"data: {name}: a link to {path.readlink()}, which leads to no file")
    if path.exists():
        raise DataError(f"data: {name}: neither a file nor a folder; rows are read more than once, so store them first")
    has_folder = _is(path.parent, Path.is_dir)
    nearest = did_you_mean(name, map(str, path.parent.iterdir() if has_folder else ()))
    missing = f"data: {name}: no such file or folder; looked for {path.absolute()}.{nearest}"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or form_of(name) is not None or name.endswith(".txt"):
        raise DataError(missing)
    if has_folder:  # a mistyped path, for which the hub would be searched for half a minute
        raise DataError(
            f"{missing} {path.parent} is a folder here, so the hub was not searched; for a hub data set of this name"
            " run from another folder"
        )
    return [RowSource(name, None, split)]


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


def _find_in_folder(folder: Path) -> list[RowSource]:
    files = [path for path in _files(folder) if _has_rows(path)]
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


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder and of those in it, without those that are hidden or begin with an underscore."""
    files = list[Path]()
    seen = set[Path]()  # because a link may lead back to a folder above it
    for parent, folders, names in os.walk(folder, followlinks=True):
        seen.add(Path(parent).resolve())
        folders[:] = [name for name in folders if _is_shown(name) and Path(parent, name).resolve() not in seen]
        files += [path for name in names if _is_shown(name) and (path := Path(parent, name)).is_file()]
    return sorted(files)


def _is_shown(name: str) -> bool:
    return not name.startswith((".", "_"))


def _has_rows(path: Path) -> bool:
    """True if a file in a folder has rows, by its name."""
    return form_of(path.name) is not None and path.name not in DATASET_FILES


def _is(path: Path, test: Callable[[Path], bool]) -> bool:
    try:
        return test(path)
    except (OSError, ValueError) as problem:  # a name too long, or with a NUL
        raise DataError(f"data: {str(path)[:80]!r} is no file name: {problem}") from None
