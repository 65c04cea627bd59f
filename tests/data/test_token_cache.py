"""Rows are tokenised on all cores, in the order of their files; the cache has complete sets alone, and no copies."""

import errno
import gzip
import os
import pickle
import signal
import time
from copy import copy
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorakit.cli import main
from lorakit.data import encode_chunks, token_cache
from lorakit.data.dataset import Part, TokenDataset, TokenTable
from lorakit.data.encode import Encoder
from lorakit.data.encode_chunks import EncodedChunk
from lorakit.data.find_rows import find_sources
from lorakit.data.row_counts import RowCounts
from lorakit.data.row_settings import RowSettings
from lorakit.data.rows import read_rows
from lorakit.data.token_cache import cache_entries, trim_cache
from lorakit.errors import DataError, TemporaryFailure
from lorakit.files import atomic
from lorakit.files.atomic import MANIFEST, cache_folder, digest
from tests.helpers.rows import chat, tokenize_rows, write_rows

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


def left() -> list[str]:
    """Return the names of all files and folders in the cache."""
    return [path.name for path in cache_folder("tokens").glob("*")] + [
        path.name for path in cache_folder("tokens").glob(".*")
    ]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_many_processes_write_the_rows_that_one_writes_row_by_row(many: Path, tokenizer: Any) -> None:
    shown: list[tuple[int, int | None]] = []
    dataset = tokenized(many, tokenizer, progress=lambda *numbers: shown.append(numbers))

    encoder, rows = Encoder(tokenizer, RowSettings()), []
    for line, row in read_rows(find_sources(str(many), "train")[0]):
        if "messages" not in row and len((encoded := encoder(row)[0]).ids) <= SETTINGS.max_tokens:
            rows.append((encoded.ids, encoded.label_mask, f"{many}:{line}"))
    assert rows == [
        (dataset.ids(row).tolist(), dataset.label_mask(row).tolist(), dataset.location(row)) for row in range(len(rows))
    ]
    counts = dataset.counts
    assert (counts.rows, counts.bad, counts.unread) == (len(rows), NUMBER // 100, {"id": NUMBER // 100})
    assert counts.rows + counts.bad + counts.dropped_long == NUMBER
    assert counts.tokens == sum(len(ids) for ids, _, _ in rows) == dataset.lengths.sum()
    assert shown[-1] == (NUMBER, NUMBER)


@pytest.mark.matrix
def test_the_digest_is_of_tokens_and_labels_and_not_of_files(many: Path, tokenizer: Any, tmp_path: Path) -> None:
    lines = many.read_text().splitlines(keepends=True)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(lines[8:]))  # without a bad row and 7 others
    both = RowSettings(24, "drop", "skip", "answer", ignore_keys=("id",))
    cut = RowSettings(24, "drop", "skip", "answer", limit=8)
    one, two = (tokenize_rows(str(many), "train", tokenizer, settings) for settings in (SETTINGS, both))
    assert one.digest == two.digest
    assert len({one.digest, tokenized(other, tokenizer).digest, tokenized_with(cut, many, tokenizer).digest}) == 3


def tokenized_with(settings: RowSettings, rows: Path, tokenizer: Any) -> TokenDataset:
    return tokenize_rows(str(rows), "train", tokenizer, settings)


def test_an_interrupted_call_leaves_nothing_and_the_next_one_starts_over(many: Path, tokenizer: Any) -> None:
    def stop(done: int, total: int | None) -> None:
        if done >= 1_280:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenized(many, tokenizer, progress=stop)
    assert left() == []
    assert len(tokenized(many, tokenizer)) > 1_000


@pytest.mark.parametrize("file", [pytest.param("input_ids.bin", marks=pytest.mark.matrix), "label_mask.bin"])
def test_a_cached_set_is_read_again_once_a_file_has_changed(many: Path, tokenizer: Any, file: str) -> None:
    tokenized(many, tokenizer)
    tokenized(many, tokenizer)
    (path,) = cache_folder("tokens").glob(f"*/{file}")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="the token cache is damaged; remove this folder"):
        tokenized(many, tokenizer)
    os.truncate(path, len(content) - 4)
    with pytest.raises(DataError, match="the token cache is damaged; remove this folder"):
        tokenized(many, tokenizer)


def test_a_cached_set_that_nobody_touched_is_opened_by_sizes_alone(
    many: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):  # the second call reads what the first one wrote
        tokenized(many, tokenizer)
    read = list[Path]()

    def noted(path: Path, *algorithm: Any) -> str:
        read.append(path)
        return digest(path, *algorithm)

    monkeypatch.setattr(atomic, "digest", noted)
    tokenized(many, tokenizer)
    assert read == [many]


@pytest.mark.matrix
def test_a_pickled_set_names_its_folder_and_is_the_same(many: Path, tokenizer: Any) -> None:
    dataset = tokenized(many, tokenizer)
    table = dataset.parts[0].table
    some = TokenDataset([Part(TokenTable(table.folder, table.sources, np.arange(3, 900, 7)))])
    for one in (dataset, some):
        content = pickle.dumps(one)
        opened = pickle.loads(content)
        assert len(content) < 10_000
        assert (opened.digest, opened.counts, len(opened)) == (one.digest, one.counts, len(one))
        assert [opened.ids(row).tolist() for row in (0, 100)] == [one.ids(row).tolist() for row in (0, 100)]


def test_a_template_that_writes_the_date_is_tokenised_for_each_day(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [chat("a", "b")])
    dated = copy(tokenizer)
    dated.chat_template = "{{ strftime_now('%Y-%m-%d') }}" + tokenizer.chat_template
    folders, texts = set(), list[str]()
    for day in (1, 1, 2):
        monkeypatch.setattr(token_cache, "date", type("Day", (), {"today": lambda day=day: date(2026, 1, day)}))
        for one in (tokenizer, dated):
            dataset = tokenized(rows, one)
            folders.add(dataset.parts[0].table.folder)
            texts.append(tokenizer.decode(dataset.ids(0)))
    assert len(folders) == 3  # one without a date, and two days
    assert ["2026-01-0" in text for text in texts] == [False, True] * 3
    of_day_1 = replace(SETTINGS, today="2026-01-01")
    assert tokenized_with(of_day_1, rows, dated).parts[0].table.folder in folders


def test_a_process_that_is_killed_is_named(many: Path) -> None:
    def encoder(chunk: Any) -> EncodedChunk:
        if chunk[0][1] > 1_270:  # its first line
            os.kill(os.getpid(), signal.SIGKILL)
        return EncodedChunk({}, RowCounts(), len(chunk), [])

    with pytest.raises(TemporaryFailure, match="a process that tokenises was killed"):
        list(encode_chunks.encode_chunks(find_sources(str(many), "train"), encoder))


def test_a_process_gets_so_many_bytes_of_long_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_chunks, "CHUNK_BYTES", 10_000)
    sizes = [20] * 300 + [4_000] * 6 + [90_000, 30_000, 20]
    write_rows(tmp_path / "rows.jsonl", [{"text": "a" * size} for size in sizes])
    seen: list[tuple[int, int]] = []

    def encoder(chunk: Any) -> EncodedChunk:
        seen.append((len(chunk), sum(len(raw) for _, _, raw in chunk if isinstance(raw, bytes))))
        return EncodedChunk({}, RowCounts(), len(chunk), [])

    monkeypatch.setattr(encode_chunks, "INLINE_CHUNKS", 99)
    sources = find_sources(str(tmp_path / "rows.jsonl"), "train")
    chunks = list(encode_chunks.encode_chunks(sources, encoder, max_bytes=80_000))

    assert sum(chunk.num_read for chunk in chunks) == len(sizes)
    assert max(num_bytes for _, num_bytes in seen[:-2]) < 10_000 + 5_000  # one row more at most
    assert [number for number, _ in seen] == [256, 47, 3, 2, 1]  # a row that is too long has no bytes


def test_a_full_disk_of_the_cache_is_named_and_leaves_nothing(many: Path, tokenizer: Any) -> None:
    def fill(done: int, total: int | None) -> None:
        if done >= 1_280:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(TemporaryFailure, match=rf"{cache_folder('tokens')}.*: the disk is full"):
        tokenized(many, tokenizer, progress=fill)
    assert left() == []


@pytest.mark.matrix
def test_rows_that_cannot_be_used_leave_nothing(many: Path, tokenizer: Any, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(many.read_bytes())[:-9])
    with pytest.raises(DataError, match="cut or damaged"):
        tokenized(cut, tokenizer)
    with pytest.raises(DataError, match=f"{NUMBER // 100} of .* rows cannot be used"):
        tokenize_rows(str(many), "train", tokenizer, RowSettings(64, "stop", "stop", "answer"))
    assert left() == []


def test_rows_of_weight_0_are_left_out_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [chat("a", "b") | {"weight": weight} for weight in (1, 0, 2.5)])
    weighted = tokenized(rows, tokenizer)
    plain = tokenized(write_rows(tmp_path / "plain.jsonl", [chat("a", "b"), chat("a", "b") | {"weight": 1}]), tokenizer)

    assert weighted.weights.tolist() == [1, 2.5]
    assert weighted.counts.zero_weight == 1
    assert plain.weights.tolist() == [1, 1]
    with pytest.raises(DataError, match="no row is left of .*: 1 .*of weight 0"):
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
    assert main(["cache", "--clear"]) == 0
    shown = capsys.readouterr().out
    assert "removed 1 of 2 data sets" in shown
    assert f"in use by a running process, so left: {entries[0].path.name[:12]}" in shown
    del used
    assert main(["cache", "--clear"]) == 0
    assert cache_entries() == []
