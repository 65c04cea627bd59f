"""Tokenise rows into a memory-mapped Arrow file, so that data larger than memory works.

The file is in the user's cache and is built once. Invariant: its folder is named by a digest of data, tokenizer,
template and settings, so that a file of other tokens is never opened.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import tokenizers

from lorakit.data.encode import Encoded, Encoder
from lorakit.data.rows import BadRow, RowSource, find_sources, read_rows
from lorakit.errors import DataError
from lorakit.files.atomic import MANIFEST, atomic_folder, manifest_matches, write_json, write_manifest
from lorakit.files.cache import cache_folder

if TYPE_CHECKING:  # because rows are tokenised without a recipe too, and then without importing pydantic
    from lorakit.recipe import DataSection

FORMAT: Final = 2
"""part of the cache's key; change it whenever the same row would give other tokens"""
LABEL_MASK: Final = "learnt"
"""name of the column; not renamed, because existing files have it, and their digests are in run.json"""
SHOWN_BAD_ROWS: Final = 10
ROWS_PER_BLOCK: Final = 1024


@dataclass(frozen=True)
class RowSettings:
    """Settings that decide the tokens and labels of a row."""

    max_tokens: int
    on_long_rows: str
    on_bad_rows: str
    loss_on: str
    ignore_keys: tuple[str, ...] = ()


@dataclass
class RowCounts:
    """Counts of rows, tokens and label tokens, and of rows not used."""

    rows: int = 0
    """rows of the data set, without bad and dropped ones"""
    bad: int = 0
    truncated: int = 0
    dropped_long: int = 0
    tokens: int = 0
    label_tokens: int = 0
    largest_id: int = 0
    long: int = 0
    """rows longer than ``max_tokens``, whether truncated or dropped"""
    longest: int = 0
    """tokens of the longest row, before truncation"""
    unread: dict[str, int] = field(default_factory=dict)
    """key that was not read -> rows that have it"""
    plain: int = 0
    """rows of plain text, rendered by no template"""
    system: str | None = None
    """system prompt that every row begins with; None if there is none, or another in some rows"""


class TokenDataset:
    """Tokenised rows, memory-mapped: ``ids(i)``, ``label_mask(i)`` and ``location(i)`` (file:line) of row i."""

    def __init__(self, folder: Path, sources: list[str]) -> None:
        import pyarrow as pa

        self.counts = RowCounts(**json.loads((folder / "rows.json").read_text()))
        self.sources = sources
        self.digest: str = json.loads((folder / MANIFEST).read_text())["rows.arrow"]["sha256"]
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


def tokenize_rows(names: str | tuple[str, ...], split: str, tokenizer: Any, settings: RowSettings) -> TokenDataset:
    """Tokenise the rows of a recipe's ``data.train`` or ``data.eval``, or open them from the cache.

    Raises:
        DataError: missing files; bad rows, with file and line of the first ten and the total; or no row left.
    """
    sources = find_sources(names, split)
    digests = [source.digest() for source in sources]
    key = _key(digests, tokenizer, settings)
    folder = cache_folder("tokens") / key
    if not manifest_matches(folder):
        if folder.exists():
            raise DataError(f"{folder}: the token cache is damaged; remove this folder and run again")
        try:
            with atomic_folder(folder) as staging:
                _build(staging, sources, Encoder(tokenizer, settings.loss_on, settings.ignore_keys), settings)
                if digests != [source.digest() for source in sources]:
                    raise DataError(f"data: {names} changed while it was read; run again when it is complete")
        except OSError:
            if not manifest_matches(folder):  # it does if another process built the same rows meanwhile
                raise
    return TokenDataset(folder, [source.name for source in sources])


def _build(staging: Path, sources: list[RowSource], encoder: Encoder, settings: RowSettings) -> None:
    import pyarrow as pa

    schema = pa.schema(
        {"input_ids": pa.list_(pa.int32()), LABEL_MASK: pa.list_(pa.bool_()), "source": pa.int32(), "line": pa.int64()}
    )
    counts = RowCounts()
    bad: list[str] = []
    lengths: list[int] = []
    with pa.OSFile(str(staging / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        block: list[dict[str, Any]] = []
        for index, line, encoded in _encode(sources, encoder):
            if isinstance(encoded, BadRow):
                counts.bad += 1
                bad += [f"{sources[index].name}:{line}: {encoded}"] if len(bad) < SHOWN_BAD_ROWS else []
                continue
            for unread in sorted(encoded.unread):
                counts.unread[unread] = counts.unread.get(unread, 0) + 1
            fitted = _fit(encoded, settings, counts)
            if fitted is None:
                continue
            block.append({"input_ids": fitted.ids, LABEL_MASK: fitted.label_mask, "source": index, "line": line})
            lengths.append(len(fitted.ids))
            if counts.rows == 0:
                counts.system = encoded.system
            counts.system = counts.system if counts.system == encoded.system else None
            counts.rows += 1
            counts.plain += encoded.plain
            counts.tokens += len(fitted.ids)
            counts.label_tokens += sum(fitted.label_mask[1:])  # no token predicts the first one
            counts.largest_id = max(counts.largest_id, *fitted.ids)
            if len(block) == ROWS_PER_BLOCK:
                writer.write_batch(pa.RecordBatch.from_pylist(block, schema=schema))
                block = []
        if block:
            writer.write_batch(pa.RecordBatch.from_pylist(block, schema=schema))
    _check(counts, bad, settings, sources)
    np.save(staging / "lengths.npy", np.array(lengths, dtype=np.int32))
    write_json(staging / "rows.json", asdict(counts))
    write_manifest(staging)


def _encode(sources: list[RowSource], encoder: Encoder) -> Iterator[tuple[int, int, Encoded | BadRow]]:
    for index, source in enumerate(sources):
        for line, row in read_rows(source):
            try:
                yield index, line, row if isinstance(row, BadRow) else encoder(row)
            except BadRow as problem:
                yield index, line, problem


def _fit(row: Encoded, settings: RowSettings, counts: RowCounts) -> Encoded | None:
    """Fit a row into ``max_tokens``; None if the row is dropped. Both are counted."""
    limit = settings.max_tokens
    counts.longest = max(counts.longest, len(row.ids))
    if len(row.ids) <= limit:
        return row
    counts.long += 1
    # a row whose labels are all cut off is dropped too, because its loss would have no tokens
    if settings.on_long_rows == "drop" or not any(row.label_mask[1:limit]):
        counts.dropped_long += 1
        return None
    counts.truncated += 1
    return Encoded(row.ids[:limit], row.label_mask[:limit])


def _check(counts: RowCounts, bad: list[str], settings: RowSettings, sources: list[RowSource]) -> None:
    listed = "\n  ".join(bad)
    if bad and settings.on_bad_rows == "stop":
        more = "" if counts.bad == len(bad) else f"\n  ... and {counts.bad - len(bad)} more"
        raise DataError(
            f"data: {counts.bad} of {counts.bad + counts.rows} rows cannot be used:\n  {listed}{more}\n"
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
        raise DataError(f"data: no row is left of {names}: {why}" + (f"\n  {listed}" if bad else ""))


def _key(digests: list[str], tokenizer: Any, settings: RowSettings) -> str:
    parts = [FORMAT, digests, asdict(settings), tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template]
    parts += [{name: str(token) for name, token in tokenizer.special_tokens_map.items()}, tokenizers.__version__]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def load_split(data: "DataSection", names: str | tuple[str, ...], split: str, tokenizer: Any) -> TokenDataset:
    """Return the tokenised rows of ``data.train`` or ``data.eval`` (``names``), by the settings of the data section."""
    settings = RowSettings(data.max_tokens, data.on_long_rows, data.on_bad_rows, data.loss_on, data.ignore_keys)
    return tokenize_rows(names, split, tokenizer, settings)
