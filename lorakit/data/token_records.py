"""The tokens of some rows as bytes: one record of a journal (token_journal.py), as an Arrow stream of one batch."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from lorakit.data.encode import Encoded
from lorakit.data.row_counts import BadRows, RowCounts

LABEL_MASK: Final = "learnt"
"""name of the column; not renamed, because existing files have it, and their digests are in run.json"""
WEIGHT: Final = "weight"
DIGEST: Final = "digest"


@dataclass
class TokenRecord:
    """Encoded rows, with the counts of all rows that were read for them."""

    counts: RowCounts
    bad: BadRows = field(default_factory=BadRows)
    _ids: list[int] = field(default_factory=list)
    _label_mask: list[bool] = field(default_factory=list)
    _stops: list[int] = field(default_factory=lambda: [0])
    _rows: list[tuple[int, int, float, int]] = field(default_factory=list)

    def append(self, row: Encoded, source: int, line: int) -> None:
        """Append a row, of this line of the source with this index."""
        self._ids += row.ids
        self._label_mask += row.label_mask
        self._stops.append(len(self._ids))
        self._rows.append((source, line, row.weight, _digest(row.ids)))

    def to_bytes(self) -> bytes:
        """Return the record as bytes."""
        import pyarrow as pa

        stops = pa.array(np.array(self._stops, np.int32))
        sources, lines, weights, digests = zip(*self._rows, strict=True) if self._rows else ((), (), (), ())
        facts = {"counts": self.counts.facts(), "bad": asdict(self.bad)}
        columns = [
            pa.ListArray.from_arrays(stops, pa.array(np.array(self._ids, np.int32))),
            pa.ListArray.from_arrays(stops, pa.array(np.array(self._label_mask, bool))),
            pa.array(sources, pa.int32()), pa.array(lines, pa.int64()), pa.array(weights, pa.float32()),
            pa.array(digests, pa.uint64()),
        ]  # fmt: skip
        others = [pa.field(WEIGHT, pa.float32()), pa.field(DIGEST, pa.uint64())]
        schema = pa.schema([*row_schema(), *others]).with_metadata({"facts": json.dumps(facts)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
        return bytes(sink.getvalue())


def _digest(ids: list[int]) -> int:
    import xxhash

    return xxhash.xxh3_64_intdigest(np.array(ids, np.int32).tobytes())


def row_schema() -> Any:
    """Return the columns of ``rows.arrow``."""
    import pyarrow as pa

    return pa.schema(
        {"input_ids": pa.list_(pa.int32()), LABEL_MASK: pa.list_(pa.bool_()), "source": pa.int32(), "line": pa.int64()}
    )


def read_record(content: memoryview) -> tuple[Any, RowCounts, BadRows]:
    """Return the rows of a record as an Arrow batch, a view of ``content``; its counts; and its bad rows."""
    import pyarrow as pa

    reader = pa.ipc.open_stream(pa.py_buffer(content))
    facts = json.loads(reader.schema.metadata[b"facts"])
    return reader.read_next_batch(), RowCounts(**facts["counts"]), BadRows(**facts["bad"])
