"""Values of tables are those of the same rows as JSON, whatever the types of their columns."""

import datetime
import decimal
import json
import uuid
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from lorakit.data.find_rows import find_sources
from lorakit.data.row_files import BadRow
from lorakit.data.rows import read_rows

TIME = datetime.datetime(2026, 1, 2, 3, 4, 5)
VALUES: dict[str, tuple[Any, Any]] = {
    "json": (pa.array(['{"a": null, "b": [7, "7"]}'], pa.json_()), {"a": None, "b": [7, "7"]}),
    "json text": (pa.array(['"Oslo"'], pa.json_()), "Oslo"),
    "json in a list": (pa.array([["1", '"1"']], pa.list_(pa.string())).cast(pa.list_(pa.json_())), [1, "1"]),
    "map": (pa.array([[("a", 1), ("b", None)]], pa.map_(pa.string(), pa.int64())), {"a": 1}),
    "map of structs": (
        pa.array([[("a", {"n": 1, "m": None})]], pa.map_(pa.string(), pa.struct({"n": pa.int8(), "m": pa.int8()}))),
        {"a": {"n": 1}},
    ),
    "dictionary": (pa.array(["x"]).dictionary_encode(), "x"),
    "run-end encoded": (pa.RunEndEncodedArray.from_arrays([1], ["x"]), "x"),
    "list view": (pa.array([[1, None]], pa.list_view(pa.int64())), [1, None]),
    "fixed list": (pa.array([[1, 2]], pa.list_(pa.int8(), 2)), [1, 2]),
    "decimal": (pa.array([decimal.Decimal("1.50")], pa.decimal128(6, 2)), 1.5),
    "exact integer": (pa.array([decimal.Decimal(7)], pa.decimal128(6, 0)), 7),
    "decimals in structs": (pa.array([[{"n": decimal.Decimal("0.25")}]]), [{"n": 0.25}]),
    "time stamp": (pa.array([TIME], pa.timestamp("us")), "2026-01-02T03:04:05"),
    "nanoseconds": (pa.array([TIME], pa.timestamp("ns")), "2026-01-02T03:04:05"),
    "zone": (pa.array([TIME], pa.timestamp("s", "UTC")), "2026-01-02T03:04:05+00:00"),
    "date": (pa.array([TIME.date()]), "2026-01-02"),
    "time": (pa.array([TIME.time()]), "03:04:05"),
    "duration": (pa.array([datetime.timedelta(seconds=5)]), "0:00:05"),
    "uuid": (pa.array([b"0" * 16], pa.uuid()), str(uuid.UUID(bytes=b"0" * 16))),
    "text view": (pa.array(["x"], pa.string_view()), "x"),
}
ONLY_ARROW = {"list view", "run-end encoded", "duration"}
"""types that parquet does not have, or not in every version"""
PARAMETERS = [{"name": "clock", "parameters": {"default": None, "size": 7, "place": "7"}}, {"name": "map"}]


def read(path: Path | str, **kind: Any) -> list[Any]:
    return [row for source in find_sources(str(path), "train", **kind) for _, row in read_rows(source)]


@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_any_type_is_the_value_of_json(tmp_path: Path, name: str) -> None:
    array, expected = VALUES[name]
    table = pa.table({"value": array})
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)
    assert read(tmp_path / "file.arrow") == [{"value": expected}]
    json.dumps(expected)
    if name not in ONLY_ARROW:
        pyarrow.parquet.write_table(table, tmp_path / "file.parquet")
        assert read(tmp_path / "file.parquet") == [{"value": expected}]


def test_json_columns_of_datasets_are_read_alike_from_files_folders_and_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    features = datasets.Features({"tools": datasets.List(datasets.Json()), "note": datasets.Value("string")})
    rows = datasets.Dataset.from_list([{"tools": PARAMETERS, "note": None}], features=features)
    (tmp_path / "parquet").mkdir()
    rows.to_parquet(str(tmp_path / "parquet" / "rows.parquet"))
    rows.save_to_disk(tmp_path / "saved")

    expected = [{"tools": PARAMETERS}]
    assert read(tmp_path / "parquet") == expected
    assert read(tmp_path / "saved") == expected
    assert read(tmp_path / "parquet", streaming=True) == expected


def test_a_value_that_is_no_json_is_a_bad_row(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(
        pa.table({"a": pa.array(["{", "NaN", '{"b": 1, "b": 2}', "1"], pa.json_())}), tmp_path / "rows.parquet"
    )
    cut, no_number, twice, good = read(tmp_path / "rows.parquet")
    assert isinstance(cut, BadRow)
    assert "arrow.json is not JSON" in str(cut)
    assert isinstance(no_number, BadRow)
    assert isinstance(twice, BadRow)
    assert "'b' appears twice" in str(twice)
    assert good == {"a": 1}
