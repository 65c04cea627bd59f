"""Tokenise rows into a memory-mapped Arrow file, so that data larger than memory works.

The file is in the user's cache and is built once. Invariant: its folder is named by a digest of data, tokenizer,
template and settings, so that a file of other tokens is never opened.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers

from lorakit.data.cache_entries import JOURNAL, ROWS
from lorakit.data.columns import all_columns
from lorakit.data.dataset import Part, TokenDataset
from lorakit.data.encode_chunks import ChunkEncoder, RowSettings, encode_chunks
from lorakit.data.find_rows import find_sources
from lorakit.data.row_counts import BadRows, RowCounts
from lorakit.data.rows import RowSource, count_rows
from lorakit.data.token_journal import TokenJournal, open_journal
from lorakit.data.token_records import DIGEST, WEIGHT, read_record, row_schema
from lorakit.data.token_table import DIGESTS, ROWS_PER_BLOCK, WEIGHTS, TokenTable
from lorakit.errors import DataError
from lorakit.files.atomic import (
    atomic_folder,
    disk_full_as_retryable,
    manifest_matches,
    write_json,
    write_manifest,
)
from lorakit.files.cache import cache_folder

FORMAT: Final = 5
"""part of the cache's key; change it whenever the same row would give other tokens or counts"""
Progress = Callable[[int | None, int | None], None]


def no_progress(done: int | None, total: int | None) -> None:
    """Show nothing."""


def tokenize_rows(
    names: str | tuple[str, ...],
    split: str,
    tokenizer: Any,
    settings: RowSettings,
    progress: Progress = no_progress,
) -> TokenDataset:
    """Tokenise the rows of files, as `tokenize_sources`. ``split``: of hub data sets."""
    return tokenize_sources(find_sources(names, split), tokenizer, settings, progress)


def tokenize_sources(
    sources: list[RowSource], tokenizer: Any, settings: RowSettings, progress: Progress = no_progress
) -> TokenDataset:
    """Tokenise the rows of files, or open them from the cache.

    An interrupted call leaves a journal, and the next one goes on after it. ``progress``: called with the number of
    rows so far, and of all rows or None; with None, None before it waits for another process that makes the same.

    Raises:
        DataError: missing files; bad rows by reason, with the first ones' file and line; or no row left.
        TemporaryFailure: a process that tokenises was killed, or the cache's disk is full.
    """
    digests = [source.digest() for source in sources]
    folder = cache_folder("tokens") / _key(digests, tokenizer, settings)
    if not manifest_matches(folder):
        if folder.exists():
            raise DataError(f"{folder}: the token cache is damaged; remove this folder and run again")
        encoder = ChunkEncoder(tokenizer, settings, sources)
        path = folder.with_name(folder.name + JOURNAL)
        names = [source.name for source in sources]
        with disk_full_as_retryable(path), open_journal(path, names, lambda: progress(None, None)) as journal:
            if not manifest_matches(folder):  # it does if another process built the same rows meanwhile
                with _removed_at_end(journal.path):
                    total = cache(lambda: _count(sources, settings.limit))
                    for record in encode_chunks(
                        sources,
                        encoder,
                        skip=len(journal),
                        progress=lambda done: progress(done, total()),
                        limit=settings.limit,
                    ):
                        journal.append(record)
                    with atomic_folder(folder) as staging:
                        _build(staging, journal, settings, sources)
                        if digests != [source.digest() for source in sources]:
                            listed = ", ".join(names)
                            raise DataError(f"data: {listed} changed while it was read; run again when it is complete")
    return TokenDataset([Part(TokenTable(folder, [source.name for source in sources]))])


def _count(sources: list[RowSource], limit: int | None) -> int | None:
    number = count_rows(sources)
    return number if number is None or limit is None else min(number, limit)


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
    digests: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    rest: list[Any] = []  # batches that do not fill a block yet
    with pa.OSFile(str(staging / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, row_schema()) as writer:
        for record in journal.records():
            batch, counted, bad_rows = read_record(record)
            counts.add(counted)
            bad.add_all(bad_rows)
            weights.append(np.frombuffer(batch.column(WEIGHT).buffers()[1], np.float32)[: len(batch)])
            lengths.append(np.diff(np.frombuffer(batch.column(0).buffers()[1], np.int32)[: len(batch) + 1]))
            digests.append(np.frombuffer(batch.column(DIGEST).buffers()[1], np.uint64)[: len(batch)])
            rest = _write_blocks(writer, [*rest, batch.drop_columns([WEIGHT, DIGEST])])
        _write_blocks(writer, rest, last=True)
    _check(counts, bad, settings, sources)
    np.save(staging / "lengths.npy", np.concatenate(lengths))
    np.save(staging / DIGESTS, np.concatenate(digests))
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
    listed, names = bad.listed(counts.bad), ", ".join(source.name for source in sources)
    if counts.bad and settings.on_bad_rows == "stop":
        raise DataError(
            f"data: {counts.bad} of {counts.bad + counts.rows} rows cannot be used:\n  {listed}\n"
            "Mend them, or set data.on_bad_rows: skip to leave them out and count them"
        )
    if counts.long > counts.split and settings.on_long_rows in ("stop", "split", "fill"):
        which = "" if settings.on_long_rows == "stop" else " that are no text alone"
        other = "" if which else ", drop, or for text split"
        raise DataError(
            f"data: {counts.long - counts.split} of {counts.rows + counts.dropped_long} rows{which} are longer than"
            f" data.max_tokens {settings.max_tokens}; the longest has {counts.longest} tokens. Raise it, or choose"
            f" data.on_long_rows: truncate (which loses their ends and end tokens){other or ' or drop'}"
        )
    if not counts.rows:
        raise DataError(_no_row_left(counts, settings, names) + (f"\n  {listed}" if counts.bad else ""))
    absent = sorted(all_columns(settings.columns) - counts.mapped.keys())
    if absent and not settings.eval_side:  # of few held-out rows none may have a column that is rare
        others = ", ".join(map(repr, [*counts.mapped, *counts.unread]))
        raise DataError(f"data.columns: no row of {names} has {', '.join(map(repr, absent))}; its columns: {others}")


def _no_row_left(counts: RowCounts, settings: RowSettings, names: str) -> str:
    left_out = counts.bad + counts.dropped_long + counts.zero_weight
    if not left_out + counts.eval_rows + settings.eval_side:
        return f"data: {names}: no rows in it; write a row on each line (docs/recipes.md), or name another file"
    if settings.eval_side and not left_out:
        return (
            f"data.eval: {settings.eval_share:g} of the rows of {names} is none of them; give a larger share, name"
            " held-out rows, or among several sources give this one `eval: 0`"
        )
    why = f"{counts.bad} bad, {counts.dropped_long} longer than max_tokens {settings.max_tokens}"
    why += f", {counts.zero_weight} of weight 0" if counts.zero_weight else ""
    why += f", {counts.eval_rows} held out by data.eval: {settings.eval_share:g}" if counts.eval_rows else ""
    return f"data: no row is left of {names}: {why}"


def _key(digests: list[str], tokenizer: Any, settings: RowSettings) -> str:
    parts = [FORMAT, digests, asdict(settings), tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template]
    parts += [{name: str(token) for name, token in tokenizer.special_tokens_map.items()}, tokenizers.__version__]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
