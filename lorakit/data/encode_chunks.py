"""Encode rows in chunks, on all cores, in the order of the files.

Invariant: the chunks of the same sources are the same, however many processes encode them. So an interrupted call can
go on after the last chunk that was encoded (token_journal.py).
"""

import itertools
import multiprocessing
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from lorakit.data.encode import Encoded, Encoder
from lorakit.data.row_counts import RowCounts
from lorakit.data.rows import BadRow, RowSource, parse_raw, read_raw
from lorakit.data.token_records import TokenRecord
from lorakit.errors import TemporaryFailure
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


class ChunkEncoder:
    """Encodes chunks of rows of these sources with one tokenizer. The result is the bytes of a TokenRecord."""

    def __init__(self, tokenizer: Any, settings: RowSettings, sources: list[RowSource]) -> None:
        self._encode = Encoder(tokenizer, settings.loss_on, settings.ignore_keys)
        self._settings, self._sources = settings, sources

    def __call__(self, chunk: list[RawRow]) -> bytes:
        record = TokenRecord(RowCounts())
        for source, line, raw in chunk:
            counts = RowCounts()
            try:
                row = parse_raw(raw)
                if isinstance(row, BadRow):
                    raise row
                encoded = self._encode(row)
            except BadRow as problem:
                counts.bad = 1
                record.bad.add(str(problem), 1, [f"{self._sources[source].name}:{line}"])
            else:
                fitted = fit(encoded, self._settings, counts)
                if fitted is not None:
                    record.append(fitted, source, line)
            record.counts.add(counts)
        return record.to_bytes()


def fit(row: Encoded, settings: RowSettings, counts: RowCounts) -> Encoded | None:
    """Fit a row into ``max_tokens``, and count it; None if it is left out."""
    counts.unread = dict.fromkeys(sorted(row.unread), 1)
    if row.weight == 0:
        counts.zero_weight = 1
        return None
    limit = settings.max_tokens
    counts.longest = len(row.ids)
    ids, label_mask = row.ids[:limit], row.label_mask[:limit]
    if len(row.ids) > limit:
        counts.long = 1
        # a row whose labels are all cut off is dropped too, because its loss would have no tokens
        if settings.on_long_rows == "drop" or not any(label_mask[1:]):
            counts.dropped_long = 1
            return None
        counts.truncated = 1
    counts.rows, counts.plain, counts.system = 1, int(row.plain), row.system
    counts.tokens, counts.largest_id = len(ids), max(ids)
    counts.label_tokens = sum(label_mask[1:])  # no token predicts the first one
    return Encoded(ids, label_mask, weight=row.weight)


def encode_chunks(
    sources: list[RowSource], encoder: ChunkEncoder, *, skip: int, progress: Callable[[int], None]
) -> Iterator[bytes]:
    """Yield the record of every chunk after the first ``skip``, in order.

    ``progress``: called with the number of rows so far, if there are more than this process encodes by itself.

    Raises:
        TemporaryFailure: a process that encodes was killed.
    """
    chunks = itertools.islice(enumerate(_read_chunks(sources)), skip, None)
    yield from (encoder(chunk) for _, chunk in itertools.islice(chunks, INLINE_CHUNKS))
    following = next(chunks, None)
    if following is None:
        return
    progress(following[0] * CHUNK_ROWS)
    waiting: deque[tuple[int, Future[bytes]]] = deque()
    num_processes = usable_cores()
    with _pool(num_processes, encoder) as submit:
        for index, chunk in itertools.chain([following], chunks):
            waiting.append((index * CHUNK_ROWS + len(chunk), submit(chunk)))
            if len(waiting) > 2 * num_processes:  # so that memory does not grow with the files
                yield from _next_record(waiting, progress)
        while waiting:
            yield from _next_record(waiting, progress)


def _next_record(waiting: deque[tuple[int, Future[bytes]]], progress: Callable[[int], None]) -> Iterator[bytes]:
    num_rows, future = waiting.popleft()
    yield future.result()
    progress(num_rows)


def _read_chunks(sources: list[RowSource]) -> Iterator[list[RawRow]]:
    rows = ((index, line, raw) for index, source in enumerate(sources) for line, raw in read_raw(source))
    while chunk := list(itertools.islice(rows, CHUNK_ROWS)):
        yield chunk


_encoder: ChunkEncoder | None = None
"""of a process of the pool"""


@contextmanager
def _pool(num_processes: int, encoder: ChunkEncoder) -> Iterator[Callable[[list[RawRow]], Future[bytes]]]:
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
            "data: a process that tokenises was killed (out of memory?); the same command goes on where it stopped"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_process(parent: int, encoder: ChunkEncoder) -> None:
    global _encoder
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends its processes
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each
    _encoder = encoder


def _encode_in_process(chunk: list[RawRow]) -> bytes:
    assert _encoder is not None
    return _encoder(chunk)
