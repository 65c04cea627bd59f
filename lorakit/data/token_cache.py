"""Tokenise rows into a memory-mapped Arrow file, so that data larger than memory works.

The file is in the user's cache and is built once. Invariant: its folder is named by a digest of data, tokenizer,
template and settings, so that a file of other tokens is never opened.
"""

import hashlib
import json
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import tokenizers

from lorakit.data.cache_entries import JOURNAL, ROWS, mark_in_use, trim_cache
from lorakit.data.encode_chunks import ChunkEncoder, RowSettings, encode_chunks
from lorakit.data.row_counts import BadRows, RowCounts
from lorakit.data.rows import RowSource, count_rows, find_sources
from lorakit.data.token_journal import TokenJournal, open_journal
from lorakit.data.token_records import LABEL_MASK, WEIGHT, read_record, row_schema
from lorakit.errors import DataError
from lorakit.files.atomic import (
    MANIFEST,
    atomic_folder,
    disk_full_as_retryable,
    manifest_matches,
    write_json,
    write_manifest,
)
from lorakit.files.cache import cache_folder

if TYPE_CHECKING:  # because rows are tokenised without a recipe too, and then without importing pydantic
    from lorakit.recipe import DataSection

FORMAT: Final = 4
"""part of the cache's key; change it whenever the same row would give other tokens or counts"""
WEIGHTS: Final = "weights.npy"
ROWS_PER_BLOCK: Final = 1024
"""rows of a block of rows.arrow; not changed, because the digest of the same tokens would change with it"""
Progress = Callable[[int, int | None], None]


def no_progress(done: int, total: int | None) -> None:
    """Show nothing."""


class TokenDataset:
    """Tokenised rows, memory-mapped: ``ids(i)``, ``label_mask(i)`` and ``location(i)`` (file:line) of row i.

    ``weights``: of each row, (rows,) float32; None if all are 1. ``lengths``: tokens of each row, (rows,) int32.
    """

    def __init__(self, folder: Path, sources: list[str]) -> None:
        import pyarrow as pa

        weakref.finalize(self, os.close, mark_in_use(folder))
        facts = json.loads((folder / ROWS).read_text())
        self.counts = RowCounts(**{name: fact for name, fact in facts.items() if name != "sources"})
        self.sources = sources
        manifest = json.loads((folder / MANIFEST).read_text())
        self.digest: str = manifest["rows.arrow"]["sha256"]
        self.weights: np.ndarray | None = None
        if WEIGHTS in manifest:
            self.weights = np.load(folder / WEIGHTS, mmap_mode="r")
            self.digest = hashlib.sha256((self.digest + manifest[WEIGHTS]["sha256"]).encode()).hexdigest()
        file = pa.ipc.open_file(pa.memory_map(str(folder / "rows.arrow")))
        self._blocks = [file.get_batch(index) for index in range(file.num_record_batches)]
        self.lengths: np.ndarray = np.load(folder / "lengths.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.lengths)

    def ids(self, row: int) -> np.ndarray:
        """Return the token ids of a row, (tokens,) int32, as a view of the file."""
        values, start, stop = self._column(row, "input_ids")
        return np.frombuffer(values, np.int32)[start:stop]

    def label_mask(self, row: int) -> np.ndarray:
        """Return which tokens of a row are labels, (tokens,) bool."""
        values, start, stop = self._column(row, LABEL_MASK)  # Arrow stores 8 of them in a byte
        bits = np.unpackbits(np.frombuffer(values, np.uint8)[start // 8 : -(-stop // 8)], bitorder="little")
        return bits[start % 8 : start % 8 + stop - start].view(bool)

    def _column(self, row: int, column: str) -> tuple[Any, int, int]:
        """Return the buffer of a block, and the row's start and stop in it. pyarrow's ``to_numpy`` imports pandas."""
        values = self._cell(row, column).values
        return values.buffers()[1], values.offset, values.offset + len(values)

    def location(self, row: int) -> str:
        """Return the file and line of a row: ``rows.jsonl:7``."""
        return f"{self.sources[self._cell(row, 'source').as_py()]}:{self._cell(row, 'line').as_py()}"

    def _cell(self, row: int, column: str) -> Any:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self._blocks[row // ROWS_PER_BLOCK].column(column)[row % ROWS_PER_BLOCK]


def tokenize_rows(
    names: str | tuple[str, ...],
    split: str,
    tokenizer: Any,
    settings: RowSettings,
    progress: Progress = no_progress,
) -> TokenDataset:
    """Tokenise the rows of a recipe's ``data.train`` or ``data.eval``, or open them from the cache.

    An interrupted call leaves a journal, and the next one goes on after it. ``progress``: called with the number of
    rows so far, and of all rows or None.

    Raises:
        DataError: missing files; bad rows by reason, with the first ones' file and line; or no row left.
        TemporaryFailure: a process that tokenises was killed, or the cache's disk is full.
    """
    sources = find_sources(names, split)
    digests = [source.digest() for source in sources]
    folder = cache_folder("tokens") / _key(digests, tokenizer, settings)
    if not manifest_matches(folder):
        if folder.exists():
            raise DataError(f"{folder}: the token cache is damaged; remove this folder and run again")
        encoder = ChunkEncoder(tokenizer, settings, sources)
        path = folder.with_name(folder.name + JOURNAL)
        with disk_full_as_retryable(path), open_journal(path, [source.name for source in sources]) as journal:
            if not manifest_matches(folder):  # it does if another process built the same rows meanwhile
                with _removed_at_end(journal.path):
                    total = cache(lambda: count_rows(sources))
                    for record in encode_chunks(
                        sources, encoder, skip=len(journal), progress=lambda done: progress(done, total())
                    ):
                        journal.append(record)
                    with atomic_folder(folder) as staging:
                        _build(staging, journal, settings, sources)
                        if digests != [source.digest() for source in sources]:
                            raise DataError(f"data: {names} changed while it was read; run again when it is complete")
    return TokenDataset(folder, [source.name for source in sources])


@contextmanager
def _removed_at_end(path: Path) -> Iterator[None]:
    """Remove a journal when its rows are in the cache, or cannot be used."""
    try:
        yield
    except DataError:
        path.unlink()
        raise
    path.unlink()


def _build(staging: Path, journal: TokenJournal, settings: RowSettings, sources: list[RowSource]) -> None:
    """Write the rows of a complete journal into the folder of the cache."""
    import pyarrow as pa

    counts = RowCounts()
    bad = BadRows()
    weights: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    rest: list[Any] = []  # batches that do not fill a block yet
    with pa.OSFile(str(staging / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, row_schema()) as writer:
        for record in journal.records():
            batch, counted, bad_rows = read_record(record)
            counts.add(counted)
            bad.add_all(bad_rows)
            weights.append(np.frombuffer(batch.column(WEIGHT).buffers()[1], np.float32)[: len(batch)])
            lengths.append(np.diff(np.frombuffer(batch.column(0).buffers()[1], np.int32)[: len(batch) + 1]))
            rest = _write_blocks(writer, [*rest, batch.drop_columns(WEIGHT)])
        _write_blocks(writer, rest, last=True)
    _check(counts, bad, settings, sources)
    np.save(staging / "lengths.npy", np.concatenate(lengths))
    if np.any((all_weights := np.concatenate(weights)) != 1):
        np.save(staging / WEIGHTS, all_weights)
    write_json(staging / ROWS, counts.facts() | {"sources": [source.name for source in sources]})
    write_manifest(staging)


def _write_blocks(writer: Any, batches: list[Any], *, last: bool = False) -> list[Any]:
    """Write all full blocks of ``ROWS_PER_BLOCK`` rows, or all rows if these are the last; return the others."""
    import pyarrow as pa

    table = pa.Table.from_batches(batches, row_schema()) if batches else None
    while table is not None and table.num_rows >= (1 if last else ROWS_PER_BLOCK):
        writer.write_table(table.slice(0, ROWS_PER_BLOCK).combine_chunks())
        table = table.slice(ROWS_PER_BLOCK)
    return [] if table is None else table.to_batches()


def _check(counts: RowCounts, bad: BadRows, settings: RowSettings, sources: list[RowSource]) -> None:
    listed = bad.listed(counts.bad)
    if counts.bad and settings.on_bad_rows == "stop":
        raise DataError(
            f"data: {counts.bad} of {counts.bad + counts.rows} rows cannot be used:\n  {listed}\n"
            "Mend them, or set data.on_bad_rows: skip to leave them out and count them"
        )
    if counts.long and settings.on_long_rows == "stop":
        raise DataError(
            f"data: {counts.long} of {counts.rows + counts.dropped_long} rows are longer than data.max_tokens"
            f" {settings.max_tokens}; the longest has {counts.longest} tokens. Raise it, or choose data.on_long_rows:"
            " truncate (which loses their ends and end tokens) or drop"
        )
    if not counts.rows:
        names = ", ".join(source.name for source in sources)
        why = f"{counts.bad} bad, {counts.dropped_long} longer than max_tokens {settings.max_tokens}"
        why += f", {counts.zero_weight} of weight 0" if counts.zero_weight else ""
        raise DataError(f"data: no row is left of {names}: {why}" + (f"\n  {listed}" if counts.bad else ""))


def _key(digests: list[str], tokenizer: Any, settings: RowSettings) -> str:
    parts = [FORMAT, digests, asdict(settings), tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template]
    parts += [{name: str(token) for name, token in tokenizer.special_tokens_map.items()}, tokenizers.__version__]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def load_split(
    data: "DataSection", names: str | tuple[str, ...], split: str, tokenizer: Any, progress: Progress = no_progress
) -> TokenDataset:
    """Return the tokenised rows of ``data.train`` or ``data.eval`` (``names``), by the settings of the data section."""
    settings = RowSettings(data.max_tokens, data.on_long_rows, data.on_bad_rows, data.loss_on, data.ignore_keys)
    dataset = tokenize_rows(names, split, tokenizer, settings, progress)
    trim_cache(data.cache_gb * 1e9)
    return dataset
