"""Find the files of rows that a recipe names: files, folders, patterns, or hub data sets.

Of a folder that `datasets` saved, the files are those of one split. Invariant: the files of a name have a fixed order.
A folder's files that hold no rows are left out and can be listed.
"""

import glob
import os
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from itertools import chain, takewhile
from pathlib import Path
from typing import Final

from lorakit.data.row_files import READ_FORMS, form_of
from lorakit.data.rows import RowSource
from lorakit.errors import DataError, collect_problems, did_you_mean
from lorakit.files.text import first_of, read_object

SPLITS_FILE: Final = "dataset_dict.json"  # in a folder that `DatasetDict.save_to_disk` wrote, beside one of each split
STATE_FILE: Final = "state.json"
"""in a folder that `Dataset.save_to_disk` wrote, with the names of its files; the library's cache may be beside them"""
DATASET_FILES: Final = ("dataset_info.json", "dataset_infos.json", SPLITS_FILE, STATE_FILE)
"""files that ``datasets`` and the hub put beside rows"""
EVAL_WORDS: Final = frozenset(
    {"test", "testing", "eval", "evaluation", "validation", "valid", "val", "dev", "held", "heldout", "holdout"}
)
"""words in names of files and folders: those by which ``datasets`` finds splits, and the usual ones beside them"""
TRAINING_WORDS: Final = frozenset({"train", "training"})
LISTED_FILES: Final = 4
MIXED: Final = {".jsonl", ".parquet"}  # forms that may be together in one folder
Names = str | tuple[str, ...]  # of files, folders, patterns or hub data sets, as in a recipe


def find_sources(
    names: Names, split: str, *, streaming: bool = False, subset: str | None = None, revision: str | None = None
) -> list[RowSource]:
    """Return the named files in a fixed order. Raises DataError: no such file, with the path, or an unknown form."""

    def find(name: str) -> list[RowSource]:
        sources = _find(name, split, streaming=streaming)
        if (subset or revision) and any(source.path for source in sources):
            raise DataError(f"data: {name}: `subset` and `revision` are for data sets of the hub; leave them out")
        return [replace(source, subset=subset, revision=revision) for source in sources]

    sources = list(chain.from_iterable(collect_problems(find, [names] if isinstance(names, str) else names)))
    paths = Counter(str(source.path.resolve()) if source.path else source.name for source in sources)
    if repeated := sorted(path for path, number in paths.items() if number > 1):
        raise DataError(f"data: named twice: {', '.join(repeated)}")
    return sources


def files_without_rows(names: Names, split: str = "train") -> list[str]:
    """Return the files without rows in the folders among ``names``, which are left out."""
    folders = [Path(name) for name in ([names] if isinstance(names, str) else names) if Path(name).is_dir()]
    return [str(path) for folder in folders for path in _files(folder, split) if not _has_rows(path)]


def check_training_files(names: Names, split: str, eval_files: Collection[Path] = ()) -> None:
    """Raise DataError if a folder or pattern of training rows has files whose names say that they are held out.

    A folder in which every file is, and a file that is named itself, are what the user asked for. ``eval_files``:
    files of the held-out rows, resolved, which `data.on_shared_rows` is about.
    """
    for name in [names] if isinstance(names, str) else names:
        root = _root(name)
        paths = [source.path for source in _find(name, split) if source.path] if root else []
        of_eval = {path for path in paths if any(map(_is_for_eval, path.relative_to(root or "").parts))}
        others = [str(path) for path in paths if path not in of_eval]
        for_eval = [str(path) for path in paths if path in of_eval and path.resolve() not in eval_files]
        if for_eval and others:
            raise DataError(
                f"data: {name}: names say that these are held-out rows: {first_of(for_eval, LISTED_FILES)}; they would"
                f" be trained on beside {first_of(others, LISTED_FILES)}. Name the files to train on, or all of them if"
                " they are meant"
            )


def _root(name: str) -> Path | None:
    """Return the folder that a name means, or the fixed folders of a pattern; None for a file and a hub data set."""
    if os.path.isdir(name):
        return Path(name)
    if not glob.has_magic(name) or os.path.isfile(name):
        return None
    return Path(*takewhile(lambda part: not glob.has_magic(part), Path(name).parts))


def _is_for_eval(part: str) -> bool:
    """True if the name of a file or folder says that its rows are held out: test.jsonl, val-00000.parquet, eval/."""
    words = set(re.split(r"[-._ 0-9]+", part.lower()))
    return bool(words & EVAL_WORDS) and not words & TRAINING_WORDS


def _find(name: str, split: str, *, streaming: bool = False) -> list[RowSource]:
    """Return the files of a name, or the hub data set that it is. streaming: a folder in the form of one is read so."""
    path = Path(name)
    _refuse_root(name)
    if os.path.isdir(name):
        return [RowSource(name, None, split, streaming=True)] if streaming else _find_in_folder(path, split)
    if streaming and (os.path.isfile(name) or glob.has_magic(name)):
        raise DataError(
            f"data: {name}: `streaming` is for data sets of the hub; files are read row by row anyway: leave it out"
        )
    if os.path.isfile(name):
        return [_source(name)]
    if glob.has_magic(name):
        matches = sorted(match for match in glob.glob(name, recursive=True) if Path(match).is_file())
        if not matches:
            raise DataError(f"data: {name}: no file matches; looked in {Path().absolute()}")
        return [_source(match) for match in matches]
    if os.path.islink(name) and not os.path.exists(name):
        raise DataError(f"data: {name}: a link to {path.readlink()}, which leads to no file")
    if os.path.exists(name):
        raise DataError(f"data: {name}: neither a file nor a folder; rows are read more than once, so store them first")
    has_folder = os.path.isdir(path.parent)
    nearest = did_you_mean(name, map(str, path.parent.iterdir() if has_folder else ()))
    missing = f"data: {name}: no such file or folder; looked for {path.absolute()}.{nearest}"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or form_of(name) is not None or name.endswith(".txt"):
        raise DataError(missing)
    if has_folder:  # a mistyped path, for which the hub would be searched for half a minute
        raise DataError(
            f"{missing} {path.parent} is a folder here, so the hub was not searched; for a hub data set of this name"
            " run from another folder"
        )
    return [RowSource(name, None, split, streaming)]


def _refuse_root(name: str) -> None:
    root = _root(name)
    if root and os.path.abspath(root) == os.path.abspath(os.sep) and (root == Path(name) or "**" in Path(name).parts):
        raise DataError(f"data: {name}: means all files of this machine; name the folder of the rows")


def _source(name: str) -> RowSource:
    if form_of(name) is None:
        raise DataError(
            f"data: {name}: lorakit reads files ending in {READ_FORMS}; convert it; a text is a row"
            ' {"text": "..."}, or several (on_long_rows: split)'
        )
    if Path(name).name == "dataset_info.json":
        raise DataError(f"data: {name}: a register of data sets, without rows; name the files that it lists")
    return RowSource(name, Path(name))


def _find_in_folder(folder: Path, split: str) -> list[RowSource]:
    files = [path for path in _files(folder, split) if _has_rows(path)]
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


def _files(folder: Path, split: str) -> list[Path]:
    """Return the files of a folder and of those in it, without those that are hidden or begin with an underscore.

    ``split``: of a folder that `datasets` saved.
    """
    files = list[Path]()
    seen = set[Path]()  # because a link may lead back to a folder above it
    for parent, folders, names in os.walk(folder, followlinks=True):
        seen.add(Path(parent).resolve())
        if SPLITS_FILE in names:
            folders[:] = [_saved_split(Path(parent), split)]
        if STATE_FILE in names:
            names = _saved_files(Path(parent), names)
        folders[:] = [name for name in folders if _is_shown(name) and Path(parent, name).resolve() not in seen]
        files += [path for name in names if _is_shown(name) and (path := Path(parent, name)).is_file()]
    return sorted(files)


def _saved_split(folder: Path, split: str) -> str:
    """Return the split to read of a `DatasetDict`, which is the name of its folder. Raises DataError: no such split."""
    splits = read_object(folder / SPLITS_FILE).get("splits")
    if not isinstance(splits, list) or split not in splits:
        known = ", ".join(map(str, splits or ())) or "none"
        raise DataError(
            f"data: {folder}: a DatasetDict without the split {split!r}; its splits are {known}; name one in"
            f" data.hub_split (of held-out rows data.hub_eval_split), or its folder as in {folder / 'SPLIT'}"
        )
    return split


def _saved_files(folder: Path, names: list[str]) -> list[str]:
    """Return the files of a saved `Dataset` without the library's cache. Raises DataError: one is missing."""
    listed = read_object(folder / STATE_FILE).get("_data_files")
    if not isinstance(listed, list):  # a file of this name that another program wrote
        return names
    saved = [str(file.get("filename")) for file in listed if isinstance(file, dict)]
    if missing := [name for name in saved if name not in names]:
        raise DataError(f"data: {folder}: {STATE_FILE} names the file {missing[0]}, which is not there; copy all files")
    return [name for name in names if name in saved or not name.endswith(".arrow")]


def _is_shown(name: str) -> bool:
    return not name.startswith((".", "_"))


def _has_rows(path: Path) -> bool:
    return form_of(path.name) is not None and path.name not in DATASET_FILES
