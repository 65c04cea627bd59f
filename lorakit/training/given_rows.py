"""Rows that a Python caller gives in a recipe's `data`, as a list of mappings or a `datasets.Dataset`.

They are written once into a file of the user's cache, and the recipe names that file. So resuming, launched processes
and the token cache work as with any file. Invariant: the file's name is a digest of its content.

Imports no torch at its top, as start.py.
"""

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from lorakit.errors import RecipeError
from lorakit.files.atomic import digest, disk_full_as_retryable, sync_path
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


def rows_as_file(key: str, value: Any, *, is_path: bool = False) -> Any:
    """Return the value of `data.train` or `data.eval` with names of files instead of rows. ``key``: for errors.

    is_path: of a source's `path`, where a mapping is a row; elsewhere one with `path` is a source.
    """
    if isinstance(value, list | tuple):
        if value and all(isinstance(row, Mapping) and (is_path or "path" not in row) for row in value):
            return _write(key, value)
        return [rows_as_file(f"{key}.{index}", each) for index, each in enumerate(value)]
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
        return {**value, "path": rows_as_file(f"{key}.path", value["path"], is_path=True)}
    return value


def _write(key: str, rows: Iterable[Any]) -> str:
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
