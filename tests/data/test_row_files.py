"""Rows are read from files of every form, from folders and patterns, or the file that cannot be read is named."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from lorakit.data import row_files
from lorakit.data.find_rows import files_without_rows, find_sources
from lorakit.data.row_files import BadRow
from lorakit.data.rows import read_rows
from lorakit.errors import DataError

ROWS = [{"prompt": f'say "{i}",\nplease ', "completion": f"só {i}"} for i in range(5)]


def read(path: Path | str) -> list[Any]:
    return [row for source in find_sources(str(path), "train") for _, row in read_rows(source)]


def write_every_form(folder: Path) -> list[str]:
    table = pa.Table.from_pylist(ROWS)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "\n\n")
    (folder / "rows.json").write_text(json.dumps(ROWS, indent=1))
    (folder / "lines.json").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS))
    (folder / "bom.json").write_text(json.dumps(ROWS), encoding="utf-8-sig")
    for suffix, delimiter in (("csv", ","), ("tsv", "\t")):
        with open(folder / f"rows.{suffix}", "w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "completion"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(ROWS)
            file.write("\r\n")
    (folder / "rows.csv.gz").write_bytes(gzip.compress((folder / "rows.csv").read_bytes()))
    (folder / "rows.json.gz").write_bytes(gzip.compress((folder / "rows.json").read_bytes()))
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    with pa.OSFile(str(folder / "stream.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    with pa.OSFile(str(folder / "file.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)
    return sorted(path.name for path in folder.iterdir())


def test_files_of_every_form_have_the_same_rows(tmp_path: Path) -> None:
    names = write_every_form(tmp_path)
    assert len(names) == 11
    for name in names:
        assert read(tmp_path / name) == ROWS, name


def test_the_elements_of_an_array_are_rows_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elements = [*ROWS, {"n": 1.5e3, "nested": [{"a": "]},"}]}, 1234567890123456, "text", []]
    (tmp_path / "rows.json").write_text(json.dumps(elements) + "\n")
    (tmp_path / "none.json").write_text(" [ ] ")

    assert read(tmp_path / "rows.json") == elements
    assert read(tmp_path / "none.json") == []
    monkeypatch.setattr(row_files, "MAX_ARRAY_BYTES", (tmp_path / "rows.json").stat().st_size - 1)
    with pytest.raises(DataError, match=r"rows.json: a JSON array above .* GB, .*: jq -c '.\[\]' FILE > NEW.jsonl"):
        read(tmp_path / "rows.json")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("cut.json", b'[{"text": "a"}, {"text"', "cut or damaged at row 2, not JSON"),
        ("open.json", b'[{"text": "a"}', "no JSON array after row 1: ',' or ']' expected, got ''"),
        ("two.json", b'[{"text": "a"}] [1]', "after the JSON array stands '['"),
        ("comma.json", b'[{"text": "a"},]', "cut or damaged at row 2"),
        ("deep.json", b"[" * 100_000, "nested too deeply"),
        ("latin.json", b'[{"text": "\xe9"}]', "not UTF-8 after row 0: byte 0xe9"),
        ("wide.json", json.dumps(ROWS).encode("utf-16"), "UTF-16, not UTF-8"),
        ("latin.csv", b"text\n\xe9\n", "not UTF-8 after row 0: byte 0xe9"),
        ("twice.csv", b"a,b,a\n1,2,3\n", "names a column twice: 'a'"),
        ("marks.csv", b"a;b\n1;2\n", "'a;b'; ';' seems to delimit the cells, where ',' is expected: pandas"),
        ("tabs.csv", b"a\tb\n1\t2\n", "'a\\tb'; '\\t' seems to delimit the cells"),
        ("commas.tsv", b"a,b\n1,2\n", "'a,b'; ',' seems to delimit the cells, where '\\t' is expected"),
        ("pretty.json", json.dumps({"data": ROWS}, indent=1).encode(), "begins with an object over several lines"),
        ("quote.csv", b'a,b\n1,"2\n', "cut or damaged at line 2"),
        ("cut.csv.gz", gzip.compress(b"text\n" + b"a\n" * 100, mtime=0)[:-9], "cut or damaged after line"),
        ("cut.arrow", b"ARROW1\0\0nothing", "cut or damaged after row 0"),
        ("no.arrow", b"nothing", "cut or damaged after row 0"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(tmp_path / name)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert expected in str(caught.value)


def test_a_table_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match=r"twice\.parquet: names a column twice: 'text'"):
        read(tmp_path / "twice.parquet")


def test_a_line_of_a_table_with_other_cells_than_columns_is_a_bad_row_of_that_line(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('prompt,completion\n"a\nb",c\nonly\nd,e\n')
    rows = list(read_rows(find_sources(str(tmp_path / "rows.csv"), "train")[0]))
    assert [line for line, _ in rows] == [2, 4, 5]
    assert isinstance(rows[1][1], BadRow)
    assert str(rows[1][1]) == "has 1 cells; the first line names 2 columns"
    assert rows[2][1] == {"prompt": "d", "completion": "e"}


def test_a_folder_has_the_rows_of_all_its_folders_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/2.jsonl", "a/deep/1.jsonl", ".hidden/x.jsonl", "_parts/x.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    for name in ("README.md", "a/picture.png", "dataset_infos.json"):
        (tmp_path / name).write_text("{}")

    assert [source.name for source in find_sources(str(tmp_path), "train")] == [
        str(tmp_path / name) for name in ("a/2.jsonl", "a/deep/1.jsonl", "b.jsonl")
    ]
    left_out = [str(tmp_path / name) for name in ("README.md", "a/picture.png", "dataset_infos.json")]
    assert files_without_rows((str(tmp_path), str(tmp_path / "b.jsonl"))) == left_out


def test_links_are_followed_once_and_one_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    for name in ("rows/1.jsonl", "other/2.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text('{"text": "a"}\n')
    (tmp_path / "rows/linked").symlink_to("../other")
    (tmp_path / "other/back").symlink_to("../rows")  # a circle
    (tmp_path / "gone.jsonl").symlink_to("nowhere.jsonl")

    names = [source.name for source in find_sources(str(tmp_path / "rows"), "train")]
    assert names == [str(tmp_path / name) for name in ("rows/1.jsonl", "rows/linked/2.jsonl")]
    for name, problem in (("gone.jsonl", "a link to nowhere.jsonl, which leads to no file"), ("/dev/null", "neither")):
        with pytest.raises(DataError, match=problem):
            find_sources(str(tmp_path / name), "train")


def test_a_folder_with_a_table_beside_other_rows_is_refused_because_they_may_be_the_same(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "rows.csv").write_text("text\na\n")
    with pytest.raises(DataError, match=r"files of several forms \(1 \.csv, 1 \.jsonl\); name those with the rows"):
        find_sources(str(tmp_path), "train")


@pytest.mark.parametrize("name", ["/", "/**", "/**/*.jsonl", "**/*.jsonl", "."])
def test_all_files_of_a_machine_are_refused_without_looking_at_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    with pytest.raises(DataError, match="means all files of this machine; name the folder of the rows"):
        find_sources(name, "train")


def test_a_pattern_names_the_files_that_match_it_in_their_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", "[x].jsonl", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n')

    def names(pattern: str) -> list[str]:
        return [Path(source.name).name for source in find_sources(str(tmp_path / pattern), "train")]

    assert names("*.jsonl") == ["[x].jsonl", "a.jsonl", "b.jsonl"]
    assert names("**/*.jsonl") == ["[x].jsonl", "a.jsonl", "b.jsonl", "c.jsonl"]
    assert names("[x].jsonl") == ["[x].jsonl"]  # a file of that name comes first
    with pytest.raises(DataError, match=r"x\*\.jsonl: no file matches"):
        names("x*.jsonl")
    with pytest.raises(DataError, match=r"notes\.txt: lorakit reads files ending in \.jsonl"):
        names("*")
