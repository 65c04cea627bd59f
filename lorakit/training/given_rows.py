"""Rows that a Python caller gives in a recipe's `data`, as a list of mappings or a `datasets.Dataset`.

They are written once into a file of the user's cache, and the recipe names that file. So resuming, launched processes
and the token cache work as with any file. Invariant: the file's name is a digest of its content.

Imports no torch at its top, as start.py.
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from lorakit.errors import RecipeError
from lorakit.files.atomic import disk_full_as_retryable
from lorakit.files.cache import GIVEN_ROWS, cache_folder
from lorakit.recipe.load import plain_value

UNREAD_TYPES: Final = frozenset({"DatasetDict", "IterableDataset", "DataFrame", "Table", "generator"})
"""types of rows that lorakit does not read, of `datasets`, pandas and pyarrow"""


def without_rows(key: str, value: Any) -> Any:
    """Return the value of a recipe's key with names of files instead of the rows in `data.train` and `data.eval`.

    Raises RecipeError: rows of an unknown type, or a value that JSON does not have.
    """
    if key == "data" and isinstance(value, Mapping):
        return {name: without_rows(f"data.{name}", each) for name, each in value.items()}
    return rows_as_file(key, value) if key in ("data.train", "data.eval") else value


def rows_as_file(key: str, value: Any) -> Any:
    """Return the value of `data.train` or `data.eval` with names of files instead of rows. ``key``: for errors."""
    if _is_list_of_rows(value) and not any("path" in row for row in value):  # with `path` each is a source
        return _write(key, iter(value))
    datasets = sys.modules.get("datasets")  # imported wherever there is such an object
    if datasets is not None and isinstance(value, datasets.Dataset):
        from lorakit.data.rows import dataset_reader

        read = dataset_reader(value.features)
        return _write(key, (read(row) for row in value.with_format(None)))
    if kinds := UNREAD_TYPES & {each.__name__ for each in type(value).__mro__}:
        raise RecipeError(
            f"{key}: rows are a list of mappings or a Dataset, got a {', '.join(kinds)}; make such a list of it, as"
            " with list(rows), rows.to_pylist() or rows.to_dict('records'), or name a split: rows['train']"
        )
    if isinstance(value, Mapping) and "path" in value:
        path = value["path"]
        inner = f"{key}.path"
        return {**value, "path": _write(inner, iter(path)) if _is_list_of_rows(path) else rows_as_file(inner, path)}
    if isinstance(value, list | tuple):
        return [rows_as_file(f"{key}.{index}", each) for index, each in enumerate(value)]
    return value


def _is_list_of_rows(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(row, Mapping) for row in value)


def _write(key: str, rows: Iterator[Any]) -> str:
    """Write rows into the cache; return the name of the file."""
    folder = cache_folder(GIVEN_ROWS)
    state = hashlib.sha256()
    with disk_full_as_retryable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".", delete=False) as file:
            try:
                for number, row in enumerate(rows, 1):
                    try:
                        line = json.dumps(dict(row), default=plain_value).encode() + b"\n"
                    except (TypeError, ValueError) as problem:
                        form = "a row has text, numbers, true/false, lists and mappings"
                        raise RecipeError(f"{key}: row {number}: {form}: {problem}") from None
                    state.update(line)
                    file.write(line)
                file.flush()
                os.fsync(file.fileno())
                path = folder / f"{state.hexdigest()[:32]}.jsonl"
                Path(file.name).replace(path)
            finally:  # the name is gone where all went well
                Path(file.name).unlink(missing_ok=True)
    return str(path)
