"""Encode rows in chunks, on all cores, in the order of the files.

Invariant: the chunks of the same sources are the same, however many processes encode them.
"""

import itertools
import multiprocessing
import os
import signal
import warnings
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from typing import Any, Final, final

import numpy as np

from lorakit.data.columns import Columns, map_columns
from lorakit.data.encode import Encoded, Encoder
from lorakit.data.eval_split import content_of, is_eval_row
from lorakit.data.json_row import BadRow, parse_raw
from lorakit.data.row_counts import BadRows, RowCounts
from lorakit.data.rows import RowSource, read_raw
from lorakit.data.token_table import Columns as TableColumns
from lorakit.errors import TemporaryFailure
from lorakit.files.progress import report_progress
from lorakit.launch.workers import die_with, usable_cores

CHUNK_ROWS: Final = 256
INLINE_CHUNKS: Final = 2
"""chunks that this process encodes by itself, because starting others would take longer"""

RawRow = tuple[int, int, Any]
"""(index of the source, line, the line's bytes or a parsed row or a BadRow)"""


@dataclass(frozen=True)
class RowSettings:
    """Settings that decide the tokens and labels of a row."""

    max_tokens: int
    on_long_rows: str
    on_bad_rows: str
    loss_on: str
    ignore_keys: tuple[str, ...] = ()
    columns: Columns = ()
    """empty: the keys of a row are those of the file"""
    limit: int | None = None
    """rows that are read, the first ones; None: all"""
    eval_share: float = 0.0
    """share of the rows that is held out (eval_split.py)"""
    eval_side: bool = False
    """take the rows that are held out, instead of the others"""
    today: str | None = None
    """date as YYYY-MM-DD that a chat template writes as today's; None: no template writes one, or the clock's"""

    def joins(self, row: Encoded) -> bool:
        """True if a row is joined with the texts beside it."""
        return self.on_long_rows == "fill" and row.is_text and row.weight != 0

    def takes(self, row: Any) -> bool:
        """True if a file's row is on this side of the split; a BadRow is on the side of training."""
        if not self.eval_share:
            return True
        content = content_of(row, self.columns, self.ignore_keys)
        return is_eval_row(content, self.eval_share) == self.eval_side


LocatedRow = tuple[Encoded, int, int]
"""(row, index of its source, line)"""


@dataclass(frozen=True)
class EncodedChunk:
    """The rows of a chunk as columns of a table, with the counts of all rows that were read for them."""

    columns: TableColumns
    counts: RowCounts
    bad: BadRows


EncodeChunk = Callable[[list[RawRow]], EncodedChunk]


@final
class ChunkEncoder:
    """Encodes chunks of rows of these sources with one tokenizer."""

    def __init__(self, tokenizer: Any, settings: RowSettings, sources: list[RowSource]) -> None:
        today = None if settings.today is None else date.fromisoformat(settings.today)
        self._encode = Encoder(tokenizer, settings.loss_on, settings.ignore_keys, today=today)
        self._settings = settings
        self._sources = sources

    def __call__(self, chunk: list[RawRow]) -> EncodedChunk:
        rows = list[LocatedRow]()
        texts = list[LocatedRow]()
        all_counts = RowCounts()
        bad = BadRows()
        for source, line, raw in chunk:
            counts = RowCounts()
            try:
                encoded = self._encode_raw(raw, counts)
            except BadRow as problem:
                counts.bad = 1
                bad.add(str(problem), 1, [f"{self._sources[source].name}:{line}"])
            else:
                if encoded is not None and self._settings.joins(encoded):
                    counts.unread = dict.fromkeys(sorted(encoded.unread), 1)
                    counts.joined = 1
                    texts.append((encoded, source, line))
                elif encoded is not None:
                    rows += [(fitted, source, line) for fitted in fit(encoded, self._settings, counts)]
            all_counts.add(counts)
        for row, source, line in join_texts(texts, self._settings.max_tokens):
            counts = RowCounts()
            rows.append((_counted(row, counts), source, line))
            all_counts.add(counts)
        return EncodedChunk(_columns(rows), all_counts, bad)

    def _encode_raw(self, raw: Any, counts: RowCounts) -> Encoded | None:
        """Encode a row; None if it is on the other side of the split.

        Raises:
            BadRow: as `Encoder` and `map_columns`.
        """
        settings, row = self._settings, parse_raw(raw)
        if not settings.takes(row):
            counts.eval_rows = int(not settings.eval_side)
            return None
        if isinstance(row, BadRow):
            raise row
        if not settings.columns:
            return self._encode(row)
        mapped = map_columns(row, settings.columns)
        counts.mapped = dict.fromkeys(mapped.read, 1)
        encoded = self._encode(mapped.row)
        return replace(encoded, unread=encoded.unread | mapped.unread)


def _columns(rows: Sequence[LocatedRow]) -> TableColumns:
    """Return rows as the columns of a table."""
    import xxhash

    ids = [np.array(row.ids, np.int32) for row, _, _ in rows]
    masks = [np.array(row.label_mask, np.bool_) for row, _, _ in rows]
    return {
        "input_ids": np.concatenate([np.empty(0, np.int32), *ids]),
        "label_mask": np.concatenate([np.empty(0, np.bool_), *masks]),
        "lengths": np.array([len(tokens) for tokens in ids], np.int32),
        "sources": np.array([source for _, source, _ in rows], np.int32),
        "lines": np.array([line for _, _, line in rows], np.int64),
        "weights": np.array([row.weight for row, _, _ in rows], np.float32),
        "digests": np.array([xxhash.xxh3_64_intdigest(tokens.tobytes()) for tokens in ids], np.uint64),
    }


def fit(row: Encoded, settings: RowSettings, counts: RowCounts) -> list[Encoded]:
    """Fit a row into ``max_tokens``, and count it. Returns the rows that it becomes: none if it is left out."""
    counts.unread = dict.fromkeys(sorted(row.unread), 1)
    if row.weight == 0:
        counts.zero_weight = 1
        return []
    limit = settings.max_tokens
    counts.longest = len(row.ids)
    if len(row.ids) > limit and settings.on_long_rows == "split" and row.is_text:
        counts.long = counts.split = 1
        return [_counted(part, counts) for part in split_text(row, limit)]
    ids, label_mask = row.ids[:limit], row.label_mask[:limit]
    if len(row.ids) > limit:
        counts.long = 1
        # a row whose labels are all cut off is dropped too, because its loss would have no tokens
        if settings.on_long_rows == "drop" or not any(label_mask[1:]):
            counts.dropped_long = 1
            return []
        counts.truncated = 1
    return [_counted(replace(row, ids=ids, label_mask=label_mask), counts)]


def split_text(row: Encoded, limit: int) -> Iterator[Encoded]:
    """Yield the parts of a text, each of at most ``limit`` tokens.

    Each part begins with the last token of the part before, so that every token but the text's first is predicted once.
    """
    for start in range(0, len(row.ids) - 1, limit - 1):
        ids, label_mask = row.ids[start : start + limit], row.label_mask[start : start + limit]
        if any(label_mask[1:]):
            yield replace(row, ids=ids, label_mask=label_mask)


def join_texts(texts: Sequence[LocatedRow], limit: int) -> Iterator[LocatedRow]:
    """Yield the texts joined end to end, in rows of ``limit`` tokens. The last row of each weight may be shorter.

    Each text ends with its end token, and its tokens are predicted from the text before it too. The location of a row
    is that of the text in which it begins. Rows overlap by a token, as in `split_text`.
    """
    for weight, group in itertools.groupby(texts, key=lambda text: text[0].weight):
        same = list(group)
        starts = [0, *itertools.accumulate(len(text.ids) for text, _, _ in same)]
        ids = list(itertools.chain.from_iterable(text.ids for text, _, _ in same))
        label_mask = list(itertools.chain.from_iterable(text.label_mask for text, _, _ in same))
        joined = replace(same[0][0], ids=ids, label_mask=label_mask, unread=frozenset(), weight=weight)
        for number, part in enumerate(split_text(joined, limit)):
            _, source, line = same[bisect_right(starts, number * (limit - 1)) - 1]
            yield part, source, line


def _counted(row: Encoded, counts: RowCounts) -> Encoded:
    """Count a row of the data set, and return it."""
    counts.rows += 1
    counts.plain += int(row.plain)
    counts.system = row.system
    counts.tokens += len(row.ids)
    counts.largest_id = max(counts.largest_id, *row.ids)
    counts.label_tokens += sum(row.label_mask[1:])  # no token predicts the first one
    return row


def encode_chunks(
    sources: list[RowSource],
    encoder: EncodeChunk,
    progress: Callable[[int], None],
    limit: int | None = None,
) -> Iterator[EncodedChunk]:
    """Yield every chunk, encoded, in order.

    ``limit``: number of rows to read; None: all. ``progress``: called with the number of rows so far, if there are more
    than this process encodes by itself.

    Raises:
        TemporaryFailure: a process that encodes was killed.
    """
    chunks = _read_chunks(sources, limit)
    yield from map(encoder, itertools.islice(chunks, INLINE_CHUNKS))
    following = next(chunks, None)
    if following is None:
        return
    num_rows = INLINE_CHUNKS * CHUNK_ROWS
    progress(num_rows)
    waiting: deque[tuple[int, Future[EncodedChunk]]] = deque()
    num_processes = usable_cores()
    with _pool(num_processes, encoder) as submit:
        for chunk in itertools.chain([following], chunks):
            num_rows += len(chunk)
            waiting.append((num_rows, submit(chunk)))
            if len(waiting) > 2 * num_processes:  # so that memory does not grow with the files
                yield from _next_chunk(waiting, progress)
        while waiting:
            yield from _next_chunk(waiting, progress)


def _next_chunk(
    waiting: deque[tuple[int, Future[EncodedChunk]]], progress: Callable[[int], None]
) -> Iterator[EncodedChunk]:
    num_rows, future = waiting.popleft()
    record = future.result()
    report_progress()
    yield record
    progress(num_rows)


def _read_chunks(sources: list[RowSource], limit: int | None) -> Iterator[list[RawRow]]:
    every = ((index, line, raw) for index, source in enumerate(sources) for line, raw in read_raw(source))
    rows = itertools.islice(every, limit)
    while chunk := list(itertools.islice(rows, CHUNK_ROWS)):
        report_progress()
        yield chunk


_encoder: EncodeChunk | None = None
"""of a process of the pool"""


@contextmanager
def _pool(num_processes: int, encoder: EncodeChunk) -> Iterator[Callable[[list[RawRow]], Future[EncodedChunk]]]:
    """Open processes that encode; yield what submits a chunk to them.

    They are forked, because spawned ones would run the user's script once more, and each import transformers.
    """
    context = multiprocessing.get_context("fork")
    parent = os.getpid()
    pool = ProcessPoolExecutor(num_processes, context, partial(_start_process, parent, encoder))
    try:
        with warnings.catch_warnings():
            # Python warns of threads at a fork. The processes use no lock of a thread: they run the tokenizer alone
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
            pool.submit(os.getpid).result()  # starts all processes, in this thread
        yield lambda chunk: pool.submit(_encode_in_process, chunk)
    except BrokenProcessPool:
        raise TemporaryFailure(
            "data: a process that tokenises was killed (out of memory?); the same command tokenises again"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_process(parent: int, encoder: EncodeChunk) -> None:
    global _encoder
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends its processes
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each
    _encoder = encoder


def _encode_in_process(chunk: list[RawRow]) -> EncodedChunk:
    assert _encoder is not None
    return _encoder(chunk)
