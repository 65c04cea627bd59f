"""Tokenised rows: tables in folders of the user's cache, and the data set of a run, of one table or several.

A table is a file of plain numbers for each column, memory-mapped. `rows.json` has the counts. The tokens of row i begin
at ``starts[i]`` of the files of tokens and labels.

Invariants: rows that a living process reads are not removed, because a table locks its manifest. The rows of an epoch
are a pure function of seed and epoch. A source of weight w is passed w times in an epoch. Where that is no full pass,
the next epoch goes on with it, so that all rows come equally often (decision 0042).
"""

import fcntl
import hashlib
import json
import os
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from lorakit.data.row_counts import RowCounts
from lorakit.errors import DataError
from lorakit.files.atomic import MANIFEST, write_json, write_manifest

if TYPE_CHECKING:  # because the cache is listed without torch
    from torch import Tensor

ROWS: Final = "rows.json"
TOKEN_WEIGHTS: Final = "token_weights"
COLUMNS: Final[dict[str, type]] = {
    "input_ids": np.int32, "label_mask": np.bool_, TOKEN_WEIGHTS: np.float32,
    "starts": np.int64, "lengths": np.int32, "sources": np.int32, "lines": np.int64, "weights": np.float32,
    "digests": np.uint64,
}  # fmt: skip
"""column of a table -> type of its values"""
OF_TOKENS: Final[tuple[str, ...]] = ("input_ids", "label_mask", TOKEN_WEIGHTS)
"""columns with a value for each token, the others for each row; the last one, of a table in which some own weights of
tokens are not 1, has these weights, or 0 where one is 1"""
CONTENT: Final = ("input_ids", "label_mask", "lengths", "weights", TOKEN_WEIGHTS)
"""columns that the digest of a table covers: not the names, order or lines of files"""
TEACHER_FILES: Final[dict[str, type]] = {"teacher_tokens.bin": np.int32, "teacher_log_probs.bin": np.float32}
TableColumns = Mapping[str, np.ndarray]


def lock_table(folder: Path, reader: Any) -> None:
    """Protect a table in the cache from being removed, as long as its reader lives."""
    (folder / MANIFEST).touch()  # its time is that of the last use
    lock = os.open(folder / MANIFEST, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)  # until the file is closed
    weakref.finalize(reader, os.close, lock)


@final
class TokenTable:
    """Tokenised rows: ``columns`` of rows, as COLUMNS but for those of tokens, and ``tokens`` of a row.

    ``lengths``: tokens of each row, (rows,) int32. ``sources``: names of files. ``selected``: indices of the rows in
    use, (rows,) int64; None: all. ``counts``: rows, tokens and label tokens are those of the rows in use, all others
    are of what was read.
    """

    def __init__(self, folder: Path, sources: list[str], selected: np.ndarray | None = None) -> None:
        lock_table(folder, self)
        self.folder = folder
        self.sources = sources
        self._selected = selected
        self.counts = RowCounts(**json.loads((folder / ROWS).read_text())["counts"])
        # without numpy's subclass for mapped files, whose slices are slow to make
        files = {
            name: np.memmap(folder / _file(name), kind, "r").view(np.ndarray)
            for name, kind in COLUMNS.items()
            if name != TOKEN_WEIGHTS or self.counts.token_weighted
        }
        manifest = json.loads((folder / MANIFEST).read_text())
        self.digest = _joint_digest(manifest[_file(name)]["sha256"] for name in CONTENT if name in files)
        self._token_columns = {name: files.pop(name) for name in OF_TOKENS if name in files}
        self.columns = files if selected is None else {name: column[selected] for name, column in files.items()}
        self.lengths = self.columns["lengths"]
        if selected is not None:
            self.digest = _joint_digest([self.digest, hashlib.sha256(selected.astype(np.int64).tobytes()).hexdigest()])
            self.counts = replace(
                self.counts,
                rows=len(selected),
                tokens=int(self.lengths.sum()),
                # without a row's first token, which no token predicts
                label_tokens=sum(int(self.tokens("label_mask", row)[1:].sum()) for row in range(len(selected))),
                shared=len(files["lengths"]) - len(selected),
                pairs=len(selected) * self.counts.pairs // max(self.counts.rows, 1),
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the folder's name, so that the processes of a machine map the same files."""
        return TokenTable, (self.folder, self.sources, self._selected)

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, column: str, row: int) -> np.ndarray:
        """Return the values of a row's tokens in one of the columns OF_TOKENS, (tokens,), as a view of the file."""
        start = self.columns["starts"][row]
        return self._token_columns[column][start : start + self.lengths[row]]


def append_rows(folder: Path, columns: TableColumns, num_tokens: int) -> None:
    """Append a chunk of rows to a table, so that memory does not grow with the rows.

    columns: all columns but ``starts``, see COLUMNS; with TOKEN_WEIGHTS if some are not 1. num_tokens: of earlier rows.
    """
    starts = num_tokens + np.cumsum(columns["lengths"], dtype=np.int64) - columns["lengths"]
    for name, values in {**columns, "starts": starts}.items():
        with open(folder / _file(name), "ab") as file:
            if name == TOKEN_WEIGHTS:
                file.truncate(4 * num_tokens)  # 0 where tokens before brought none
            file.write(values.astype(COLUMNS[name], copy=False).tobytes())


def finish_table(folder: Path, counts: RowCounts, sources: list[str]) -> None:
    """Write the counts and the manifest. The table is complete then."""
    if counts.token_weighted:
        os.truncate(folder / _file(TOKEN_WEIGHTS), 4 * counts.tokens)  # 0 after the last weights
    write_json(folder / ROWS, {"counts": asdict(counts), "sources": sources})
    write_manifest(folder)


def _file(column: str) -> str:
    return f"{column}.bin"


def _joint_digest(digests: Iterable[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()


@dataclass(frozen=True)
class Part:
    """The rows of one source. ``name``: labels its held-out loss; None for the only source of a recipe."""

    table: TokenTable
    name: str | None = None
    passes: float = 1.0  # passes over its rows in an epoch

    @property
    def group_size(self) -> int:
        """Neighbouring rows that stay together, such as two of a pair."""
        counts = self.table.counts
        return counts.rows // counts.pairs if counts.pairs else 1

    @property
    def rows_per_epoch(self) -> int:
        return self.group_size * max(1, round(self.passes * len(self.table) / self.group_size))

    def rows_of_epoch(self, seed: int, index: int, epoch: int) -> np.ndarray:
        """Return the first row of each of an epoch's groups, of endless shuffled passes. ``index``: of this part."""
        size, count = len(self.table) // self.group_size, self.rows_per_epoch // self.group_size
        first, stop = epoch * count, (epoch + 1) * count
        passes = range(first // size, -(-stop // size))
        orders = [np.random.Generator(np.random.PCG64([seed, index, number])).permutation(size) for number in passes]
        return self.group_size * np.concatenate(orders)[first - passes.start * size :][:count]


def count_shared(rows: "TokenDataset", eval_rows: "TokenDataset") -> int:
    """Return the number of held-out rows whose tokens are those of a training row, by digests of both."""
    return int(np.isin(eval_rows.digests, rows.digests).sum())


def without_shared(rows: "TokenDataset", eval_rows: "TokenDataset") -> "TokenDataset":
    """Return the training rows that are not held out, as in `count_shared`. Raises DataError: a source has none."""
    wanted = eval_rows.digests
    parts = []
    for part in rows.parts:
        table = part.table
        shared = np.isin(table.columns["digests"], wanted).reshape(-1, part.group_size).all(1)
        others = np.flatnonzero(~shared.repeat(part.group_size))
        if not len(others):
            name = part.name or ", ".join(table.sources)
            raise DataError(f"data.on_shared_rows: drop: every row of {name} is a held-out row too; name other rows")
        is_full = len(others) == len(table)
        parts.append(part if is_full else replace(part, table=TokenTable(table.folder, table.sources, others)))
    return TokenDataset(parts)


class TokenDataset:
    """Tokenised rows. ``weights``: (rows,) float32. ``lengths``: tokens, (rows,) int32."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        tables = [part.table for part in parts]
        self._starts = [0, *accumulate(map(len, tables))]  # row that each part begins with, and the number of all rows
        self.counts = RowCounts()
        for table in tables:
            self.counts.add(table.counts)
        self.sources = [source for table in tables for source in table.sources]
        one = tables[0] if len(tables) == 1 else None
        self.digest = one.digest if one else _joint_digest(table.digest for table in tables)
        self.lengths = one.lengths if one else np.concatenate([table.lengths for table in tables])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the parts, which are names of folders."""
        return TokenDataset, (self.parts,)

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def group_size(self) -> int:
        """Neighbouring rows that stay together, as of a part."""
        return max(part.group_size for part in self.parts)

    @cached_property
    def weights(self) -> np.ndarray:
        return np.concatenate([part.table.columns["weights"] for part in self.parts])

    @property
    def digests(self) -> np.ndarray:
        """Digest of each row's tokens, (rows,) uint64."""
        return np.concatenate([part.table.columns["digests"] for part in self.parts])

    @property
    def rows_per_epoch(self) -> int:
        return sum(part.rows_per_epoch for part in self.parts)

    def rows_of_epoch(self, seed: int, epoch: int) -> np.ndarray:
        """Return the indices of an epoch's rows, sorted: every row once, but for weights of sources."""
        if all(part.passes == 1 for part in self.parts):
            return np.arange(len(self))
        rows = [part.rows_of_epoch(seed, index, epoch) for index, part in enumerate(self.parts)]
        firsts = np.sort(np.concatenate([start + own for start, own in zip(self._starts, rows, strict=False)]))
        return (firsts[:, None] + np.arange(self.group_size)).ravel()

    def rows_of_part(self, index: int) -> np.ndarray:
        return np.arange(self._starts[index], self._starts[index + 1])

    def ids(self, row: int) -> np.ndarray:
        """Return the token ids of a row, (tokens,) int32, as a view of the file."""
        return self._tokens("input_ids", row)

    def label_mask(self, row: int) -> np.ndarray:
        """Return which tokens of a row are labels, (tokens,) bool."""
        return self._tokens("label_mask", row)

    def token_weights(self, row: int) -> np.ndarray:
        """Return the weight of each token's loss, its own times its row's, (tokens,) float32."""
        weights = np.full(self.lengths[row], self.weights[row])
        if self.part_of(row).table.counts.token_weighted:
            own = self._tokens(TOKEN_WEIGHTS, row)
            weights *= np.where(own == 0, 1, own)
        return weights

    def location(self, row: int) -> str:
        """Return the file and line of a row: ``rows.jsonl:7``."""
        part, index = self._find(row)
        columns = part.table.columns
        return f"{part.table.sources[columns['sources'][index]]}:{columns['lines'][index]}"

    def part_of(self, row: int) -> Part:
        return self._find(row)[0]

    def _tokens(self, column: str, row: int) -> np.ndarray:
        part, index = self._find(row)
        return part.table.tokens(column, index)

    def _find(self, row: int) -> tuple[Part, int]:
        """Return the part of a row, and the row's index in it."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        number = bisect_right(self._starts, row) - 1
        return self.parts[number], row - self._starts[number]


@final
class MismatchedRows(TokenDataset):
    """Rows of one row's prompt and another row's answer, as many as there are; prompts end at the first label token.

    Rows are two or more, and cut to the longest of them. Which answer follows which prompt depends on the number of
    rows alone, so every evaluation of the same rows reads the same.
    """

    def __init__(self, rows: TokenDataset) -> None:
        super().__init__(rows.parts)
        order = np.random.Generator(np.random.Philox(0)).permutation(len(rows))
        self._others = np.empty_like(order)
        self._others[order] = np.roll(order, 1)  # one cycle through all rows, so none is its own
        self._prompts = np.array([rows.label_mask(row).argmax() for row in range(len(rows))])
        self.lengths = np.minimum(self._prompts + (rows.lengths - self._prompts)[self._others], rows.lengths.max())

    def __reduce__(self) -> tuple[Any, ...]:
        return MismatchedRows, (TokenDataset(self.parts),)

    def _tokens(self, column: str, row: int) -> np.ndarray:
        other = int(self._others[row])
        prompt = super()._tokens(column, row)[: self._prompts[row]]
        answer = super()._tokens(column, other)[self._prompts[other] :]
        return np.concatenate([prompt, answer])[: self.lengths[row]]


@final
class TeacherTable:
    """A teacher's K likeliest tokens at each label of the rows, and log p of each and of all other tokens together."""

    def __init__(self, folder: Path, rows: TokenDataset) -> None:
        lock_table(folder, self)
        # without a row's first token, which no token predicts
        counts = np.array([rows.label_mask(row)[1:].sum() for row in range(len(rows))])
        self._stops = counts.cumsum()
        self._starts = self._stops - counts
        files = [np.memmap(folder / name, kind, "r").view(np.ndarray) for name, kind in TEACHER_FILES.items()]
        self._tokens, self._log_probs = (values.reshape(self._stops[-1], -1) for values in files)

    def labels_of(self, rows: Sequence[int]) -> tuple["Tensor", "Tensor"]:
        """Return tokens (labels, K) int64 and log p (labels, K + 1) float32 of the labels of these rows."""
        import torch

        own = np.concatenate([np.arange(self._starts[row], self._stops[row]) for row in rows])
        return torch.from_numpy(self._tokens[own].astype(np.int64)), torch.from_numpy(self._log_probs[own])


def write_teacher(folder: Path, num_rows: int, name: str, parts: Iterable[tuple["Tensor", "Tensor"]]) -> None:
    """Write a table into an empty folder.

    name: that the cache shows. parts: tokens and log p of the labels of all rows in turn, as of `labels_of`.
    """
    with ExitStack() as stack:
        files = {stack.enter_context(open(folder / name, "wb")): kind for name, kind in TEACHER_FILES.items()}
        for part in parts:
            for values, (file, kind) in zip(part, files.items(), strict=True):
                file.write(values.numpy().astype(kind).tobytes())
    finish_table(folder, RowCounts(rows=num_rows), [name])
