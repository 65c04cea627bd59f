"""The measurement of a process: kept for later calls, and made anew where what was kept is damaged."""

import json
from pathlib import Path

import pytest

from lorakit.base.find import find_base
from lorakit.files.cache import cache_folder
from lorakit.planning import process_overhead
from lorakit.planning.process_overhead import measure_process_bytes


def test_a_later_call_reads_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = find_base("builtin:tiny")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def later_call() -> int:
        process_overhead._measured_bytes.cache_clear()
        return measure_process_bytes(folder, "float32", None)

    file = cache_folder("process_bytes") / f"{process_overhead._key(folder, 'float32')}.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"plain": 123}')
    assert later_call() == 123
    file.write_text('{"plain": "a text"}')
    measured = later_call()
    assert measured > 100_000_000
    assert json.loads(file.read_text())["plain"] == measured
    process_overhead._measured_bytes.cache_clear()


def test_copies_of_a_base_share_a_measurement_and_another_tokenizer_has_its_own(tmp_path: Path) -> None:
    built_in = find_base("builtin:tiny")
    (copy := tmp_path / "tokenizer.json").write_bytes((built_in / "tokenizer.json").read_bytes())
    assert process_overhead._key(tmp_path, "float32") == process_overhead._key(built_in, "float32")
    copy.write_text("{}")
    changed = process_overhead._key(tmp_path, "float32")
    copy.unlink()
    assert len({process_overhead._key(built_in, "float32"), changed, process_overhead._key(tmp_path, "float32")}) == 3


def test_another_setting_is_another_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = find_base("builtin:tiny")
    keys = {process_overhead._key(folder, dtype) for dtype in ("float32", "bfloat16", "float32")}
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert len(keys | {process_overhead._key(folder, "float32")}) == 3
