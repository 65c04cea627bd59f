"""Rows are tokenised on all cores, in the order of their files; an interrupted call goes on; the cache has no copies."""

import errno
import gzip
import os
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lorakit.cli import main
from lorakit.data import RowSettings, TokenDataset, encode_chunks, tokenize_rows
from lorakit.data.cache_entries import cache_entries, trim_cache
from lorakit.data.encode import Encoder
from lorakit.data.find_rows import find_sources
from lorakit.data.rows import read_rows
from lorakit.data.token_records import row_schema
from lorakit.errors import DataError, TemporaryFailure
from lorakit.files.atomic import MANIFEST
from lorakit.files.cache import cache_folder
from tests.helpers.rows import chat, write_rows

SETTINGS = RowSettings(24, "drop", "skip", "answer")
NUMBER = 1_500


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Rows of uneven length, some too long, some bad, some with a key that is not read."""
    rows: list[Any] = [{"prompt": f"say {i} ", "completion": "so " * (1 + i * 7 % 11)} for i in range(NUMBER)]
    rows[7::100] = [{"messages": "none"} for _ in rows[7::100]]
    rows[8::100] = [row | {"id": 1} for row in rows[8::100]]
    return write_rows(tmp_path / "many.jsonl", rows)


def tokenized(rows: Path, tokenizer: Any, **arguments: Any) -> TokenDataset:
    return tokenize_rows(str(rows), "train", tokenizer, SETTINGS, **arguments)


def journals() -> list[str]:
    return [path.name for path in cache_folder("tokens").glob("*.journal")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_many_processes_write_the_file_that_one_writes_row_by_row(many: Path, tokenizer: Any, tmp_path: Path) -> None:
    shown: list[tuple[int, int | None]] = []
    dataset = tokenized(many, tokenizer, progress=lambda *numbers: shown.append(numbers))

    encoder, blocks = Encoder(tokenizer, "answer"), []
    for line, row in read_rows(find_sources(str(many), "train")[0]):
        if "messages" not in row and len((encoded := encoder(row)).ids) <= SETTINGS.max_tokens:
            values = (encoded.ids, encoded.label_mask, 0, line)
            blocks.append(dict(zip(row_schema().names, values, strict=True)))
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, row_schema()) as writer:
        for start in range(0, len(blocks), 1024):
            writer.write_batch(pa.RecordBatch.from_pylist(blocks[start : start + 1024], schema=row_schema()))
    (written,) = cache_folder("tokens").glob("*/rows.arrow")
    assert written.read_bytes() == (tmp_path / "rows.arrow").read_bytes()
    assert [dataset.ids(row).tolist() for row in (0, 1023, 1024, len(blocks) - 1)] == [
        blocks[row]["input_ids"] for row in (0, 1023, 1024, -1)
    ]
    counts = dataset.counts
    assert (counts.rows, counts.bad, counts.unread) == (len(blocks), NUMBER // 100, {"id": NUMBER // 100})
    assert counts.rows + counts.bad + counts.dropped_long == NUMBER
    assert counts.tokens == sum(len(row["input_ids"]) for row in blocks) == dataset.lengths.sum()
    assert shown[-1] == (NUMBER, NUMBER)
    assert journals() == []


def test_an_interrupted_call_goes_on_after_its_last_record(many: Path, tokenizer: Any, tmp_path: Path) -> None:
    def stop(done: int, total: int | None) -> None:
        if done >= 1_280:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenized(many, tokenizer, progress=stop)
    (name,) = journals()
    journal = cache_folder("tokens") / name
    with open(journal, "ab") as file:  # as a process that is killed while it writes leaves it
        file.write((1_000_000).to_bytes(8, "little") + bytes(1000))
    shown: list[int] = []

    went_on = tokenized(many, tokenizer, progress=lambda done, total: shown.append(done))

    assert journals() == []
    assert shown == []  # the rest is less than other processes are started for
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "other")  # set back by the fixture
    assert went_on.digest == tokenized(many, tokenizer).digest


def test_a_damaged_record_and_those_after_it_are_encoded_once_more(many: Path, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        tokenized(many, tokenizer, progress=lambda done, total: done > 1_270 and 1 // 0)
    journal = next(cache_folder("tokens").glob("*.journal"))
    content = bytearray(journal.read_bytes())
    content[len(content) // 2] ^= 1
    journal.write_bytes(content)

    dataset = tokenized(many, tokenizer)

    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "other")
    assert dataset.digest == tokenized(many, tokenizer).digest


def test_a_process_that_is_killed_loses_nothing(many: Path) -> None:
    def encoder(chunk: Any) -> bytes:
        if chunk[0][1] > 1_270:  # its first line
            os.kill(os.getpid(), signal.SIGKILL)
        return b"record"

    records = []

    def encode_all() -> None:
        sources = find_sources(str(many), "train")
        for record in encode_chunks.encode_chunks(sources, encoder, skip=0, progress=lambda done: None):  # type: ignore[arg-type]
            records.append(record)

    with pytest.raises(TemporaryFailure, match="a process that tokenises was killed"):
        encode_all()
    assert 4 <= len(records) <= 8


def test_a_full_disk_of_the_cache_is_named_and_the_rest_is_done_by_the_same_call(many: Path, tokenizer: Any) -> None:
    def fill(done: int, total: int | None) -> None:
        if done >= 1_280:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(TemporaryFailure, match=rf"{cache_folder('tokens')}.*\.journal: the disk is full"):
        tokenized(many, tokenizer, progress=fill)
    assert len(journals()) == 1
    assert len(tokenized(many, tokenizer)) > 0


def test_an_unfinished_data_set_is_listed_with_its_files(
    many: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ZeroDivisionError):
        tokenized(many, tokenizer, progress=lambda done, total: 1 // 0)
    (path,) = cache_folder("tokens").glob("*.journal")

    assert main(["cache"]) == 0
    line = capsys.readouterr().out.splitlines()[1].split()
    assert (line[2:4], line[-1]) == (["kB", "unfinished"], str(many))

    path.write_bytes(path.read_bytes()[:10])  # as a process that is killed while it writes leaves it
    assert cache_entries()[0].sources == ()
    assert len(tokenized(many, tokenizer)) > 0


def test_a_file_that_is_cut_leaves_no_journal(many: Path, tokenizer: Any, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(many.read_bytes())[:-9])
    with pytest.raises(DataError, match="cut or damaged"):
        tokenized(cut, tokenizer)
    assert journals() == []


def test_rows_that_cannot_be_used_leave_no_journal(many: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=f"{NUMBER // 100} of .* rows cannot be used"):
        tokenize_rows(str(many), "train", tokenizer, RowSettings(64, "stop", "stop", "answer"))
    assert journals() == []


def test_rows_of_weight_0_are_left_out_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [chat("a", "b") | {"weight": weight} for weight in (1, 0, 2.5)])
    weighted = tokenized(rows, tokenizer)
    plain = tokenized(write_rows(tmp_path / "plain.jsonl", [chat("a", "b"), chat("a", "b") | {"weight": 1}]), tokenizer)

    assert weighted.weights is not None
    assert weighted.weights.tolist() == [1, 2.5]
    assert weighted.counts.zero_weight == 1
    assert plain.weights is None
    with pytest.raises(DataError, match="no row is left of .*, 1 of weight 0"):
        tokenized(write_rows(tmp_path / "none.jsonl", [chat("a", "b") | {"weight": 0}]), tokenizer)


def test_the_least_recently_used_rows_are_removed_beyond_the_limit_but_none_in_use(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows_of(name: str) -> TokenDataset:
        return tokenized(
            write_rows(tmp_path / f"{name}.jsonl", [{"text": f"{name} {i}"} for i in range(50)]), tokenizer
        )

    used = rows_of("used")
    for name in ("old", "new"):
        rows_of(name)
    entries = cache_entries()
    for age, entry in zip((300, 200, 100), entries, strict=True):
        os.utime(entry.path / MANIFEST, (time.time() - age,) * 2)
    assert [entry.sources[0].rpartition("/")[2] for entry in entries] == ["used.jsonl", "old.jsonl", "new.jsonl"]

    (removed,) = trim_cache(sum(entry.num_bytes for entry in entries) - 1)

    assert removed.sources == (str(tmp_path / "old.jsonl"),)
    assert used.ids(49).size
    assert main(["cache"]) == 0
    shown = capsys.readouterr().out
    assert "used.jsonl" in shown
    assert "old.jsonl" not in shown
    assert main(["cache", "--clear", "nothing"]) == 2
    assert "nothing: not in the cache; its names are" in capsys.readouterr().err
    assert main(["cache", "--clear"]) == 0
    shown = capsys.readouterr().out
    assert "removed 1 of 2 data sets" in shown
    assert f"in use by a running process, so left: {entries[0].path.name[:12]}" in shown
    del used
    assert main(["cache", "--clear", entries[0].path.name[:12]]) == 0
    assert cache_entries() == []
