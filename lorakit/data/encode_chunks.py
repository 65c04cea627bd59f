"""Encode rows in chunks, in the order of the files, on all cores. How many these are does not change the chunks."""

import itertools
import math
import multiprocessing
import os
import signal
import warnings
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, final

import numpy as np

from lorakit.data.dataset import TOKEN_WEIGHTS, TableColumns
from lorakit.data.encode import Encoder
from lorakit.data.row_counts import RowCounts
from lorakit.data.row_files import BadRow, LongRow, decode_line
from lorakit.data.row_formats import Encoded
from lorakit.data.row_settings import RowSettings, map_columns, read_columns
from lorakit.data.rows import RowSource, read_raw
from lorakit.errors import TemporaryFailure
from lorakit.files.progress import report_progress
from lorakit.launch.workers import die_with, usable_cores

CHUNK_ROWS: Final = 256
CHUNK_BYTES: Final = 1 << 22  # from which on a chunk is full too; its tokens take about ten times as much
INLINE_CHUNKS: Final = 2  # chunks that this process encodes by itself, because starting others would take longer

RawRow = tuple[int, int, Any]  # (index of the source, line, the line's bytes or a parsed row or a BadRow)
LocatedRow = tuple[Encoded, int, int]  # (row, index of its source, line)


@dataclass(frozen=True)
class EncodedChunk:
    """The rows of a chunk as columns of a table, with the counts of all rows that were read for them."""

    columns: TableColumns
    counts: RowCounts
    num_read: int  # rows of the files
    bad: list[tuple[str, int, int]]  # (reason, index of the source, line) of each row that cannot be used


EncodeChunk = Callable[[list[RawRow]], EncodedChunk]


@final
class ChunkEncoder:
    def __init__(self, tokenizer: Any, settings: RowSettings) -> None:
        self._encode = Encoder(tokenizer, settings)
        self._settings = settings

    def __call__(self, chunk: list[RawRow]) -> EncodedChunk:
        rows = list[LocatedRow]()
        texts = list[LocatedRow]()
        counts = RowCounts()
        bad = list[tuple[str, int, int]]()
        for source, line, raw in chunk:
            try:
                encoded = self._encode_raw(raw, counts)
            except BadRow as problem:
                if isinstance(problem, LongRow) and self._settings.on_long_rows == "drop":
                    counts.dropped_long += 1
                    continue
                counts.bad += 1
                bad.append((str(problem), source, line))
                continue
            if not encoded:
                continue
            first = encoded[0]
            counts.add_keys(counts.unread, first.unread)
            counts.add_keys(counts.notes, first.notes)
            counts.divided += int(len(encoded) > 1 and self._settings.group_size == 1)
            if self._settings.on_long_rows == "fill" and first.is_text and first.weight != 0:
                counts.joined += 1
                texts.append((first, source, line))
            else:
                rows += [(part, source, line) for part in self._fit(encoded, counts)]
        rows += join_texts(texts, self._settings.max_tokens)
        for row, _, _ in rows:
            counts.system = row.system if counts.rows == 0 or row.system == counts.system else None
            counts.rows += 1
            counts.plain += int(row.plain)
            counts.token_weighted += int(row.token_weights is not None)
            counts.tokens += len(row.ids)
            tokens = row.ids if self._settings.labels is None else row.ids[:-1]
            counts.numbered += int(self._settings.labels is not None)
            counts.largest_id = max(counts.largest_id, *tokens)
            counts.label_tokens += sum(row.label_mask[1:])  # no token predicts the first one
        return EncodedChunk(_columns(rows), counts, len(chunk), bad)

    def _fit(self, encoded: list[Encoded], counts: RowCounts) -> list[Encoded]:
        """Fit the rows of a file's row into ``max_tokens``; none of a group of which one is left out."""
        fitted = [part for one in encoded for part in fit(one, self._settings, counts)]
        if self._settings.group_size == 1:
            return fitted
        is_full = len(fitted) == self._settings.group_size
        counts.pairs += int(is_full)
        return fitted if is_full else []

    def _encode_raw(self, raw: Any, counts: RowCounts) -> list[Encoded]:
        """Return the rows that a row becomes; none if it is on the other side of the split. Raises BadRow."""
        settings = self._settings
        row = decode_line(raw)
        if not settings.is_on_side(row):
            counts.eval_rows += int(not settings.eval_side)
            return []
        counts.file_rows += 1
        encoded = self._encode(map_columns(row, settings.columns))
        if not settings.columns:
            return encoded
        read = read_columns(row, settings.columns)
        counts.add_keys(counts.mapped, read)
        others = {name for name, value in row.items() if value is not None and name not in read}
        return [replace(one, unread=one.unread | others) for one in encoded]


def _columns(rows: Sequence[LocatedRow]) -> TableColumns:
    import xxhash

    ids = [np.array(row.ids, np.int32) for row, _, _ in rows]
    masks = [np.array(row.label_mask, np.bool_) for row, _, _ in rows]
    columns = {
        "input_ids": np.concatenate([np.empty(0, np.int32), *ids]),
        "label_mask": np.concatenate([np.empty(0, np.bool_), *masks]),
        "lengths": np.array([len(tokens) for tokens in ids], np.int32),
        "sources": np.array([source for _, source, _ in rows], np.int32),
        "lines": np.array([line for _, _, line in rows], np.int64),
        "weights": np.array([row.weight for row, _, _ in rows], np.float32),
        "digests": np.array([xxhash.xxh3_64_intdigest(tokens.tobytes()) for tokens in ids], np.uint64),
    }
    if any(row.token_weights is not None for row, _, _ in rows):
        columns[TOKEN_WEIGHTS] = np.concatenate([row.token_weights or np.ones(len(row.ids)) for row, _, _ in rows])
    return columns


def fit(row: Encoded, settings: RowSettings, counts: RowCounts) -> list[Encoded]:
    """Fit a row into ``max_tokens``, and count it. Returns the rows that it becomes: none if it is left out."""
    if row.weight == 0:
        counts.zero_weight += 1
        return []
    limit = settings.max_tokens
    counts.longest = max(counts.longest, len(row.ids))
    if len(row.ids) <= limit:
        return [row]
    if settings.on_long_rows == "split" and row.is_text:
        counts.split += 1
        return list(split_text(row, limit))
    if settings.on_long_rows == "drop":
        counts.dropped_long += 1
        return []
    if row.tail:
        tail = min(row.tail, limit)
        ids, mask = ([*part[: limit - tail], *part[-tail:]] for part in (row.ids, row.label_mask))
        row = replace(row, ids=ids, label_mask=mask)
    if not any(row.label_mask[1:limit]):  # its loss would have no tokens
        counts.dropped_unlabelled += 1
        return []
    counts.truncated += 1
    weights = row.token_weights and row.token_weights[:limit]
    return [replace(row, ids=row.ids[:limit], label_mask=row.label_mask[:limit], token_weights=weights)]


def split_text(row: Encoded, limit: int) -> Iterator[Encoded]:
    """Yield a text's parts; each repeats the last token before, so that every token but the first is predicted once."""
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


def encode_chunks(
    sources: list[RowSource], encoder: EncodeChunk, limit: int | None = None, max_bytes: float = math.inf
) -> Generator[EncodedChunk, None, None]:
    """Yield every chunk, encoded, in order. Raises TemporaryFailure: a process that encodes was killed.

    max_bytes: of a row; a longer one is a LongRow.
    """
    chunks = _read_chunks(sources, limit, max_bytes)
    yield from map(encoder, itertools.islice(chunks, INLINE_CHUNKS))
    following = next(chunks, None)
    if following is None:
        return
    waiting = deque[Future[EncodedChunk]]()
    with _pool(encoder) as submit:
        for chunk in itertools.chain([following], chunks):
            waiting.append(submit(chunk))
            if len(waiting) > 2 * usable_cores():  # so that memory does not grow with the files
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _read_chunks(sources: list[RowSource], limit: int | None, max_bytes: float = math.inf) -> Iterator[list[RawRow]]:
    every = ((index, line, raw) for index, source in enumerate(sources) for line, raw in read_raw(source))
    chunk = list[RawRow]()
    size = 0
    for index, line, raw in itertools.islice(every, limit):
        num_bytes = _num_bytes(raw)
        if num_bytes > max_bytes:
            remedy = "cut it, leave out columns without use, or raise data.max_tokens"
            raw = LongRow(f"has {num_bytes:,} bytes, and {max_bytes:,} are read; {remedy}")
            num_bytes = 0
        chunk.append((index, line, raw))
        size += num_bytes
        if len(chunk) == CHUNK_ROWS or size >= CHUNK_BYTES:
            report_progress()
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _num_bytes(value: Any) -> int:
    """Return the bytes of a row's line, or the letters of all texts of a table's row."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return len(value) if isinstance(value, str | bytes) else sum(map(_num_bytes, parts))


_encoder: EncodeChunk  # of a process of the pool


@contextmanager
def _pool(encoder: EncodeChunk) -> Iterator[Callable[[list[RawRow]], Future[EncodedChunk]]]:
    """Yield how to submit a chunk to processes; forked, because spawned ones would run the user's script once more."""
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(usable_cores(), context, _start_process, (os.getpid(), encoder))
    try:
        with warnings.catch_warnings():
            # Python warns of threads at a fork. The processes use no lock of a thread: they run the tokenizer alone
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
            pool.submit(os.getpid).result()  # starts all processes, in this thread
        yield lambda chunk: pool.submit(_encode_in_process, chunk)
    except BrokenProcessPool:
        raise TemporaryFailure("data: a process that tokenises was killed (out of memory?); run it again") from None
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
    return _encoder(chunk)
