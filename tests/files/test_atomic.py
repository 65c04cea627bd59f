"""Nothing half-done is visible, at whatever moment a process dies."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lorakit.errors import TemporaryFailure
from lorakit.files.atomic import (
    atomic_folder,
    manifest_matches,
    remove_folder,
    sweep_folder,
    write_file,
    write_files,
    write_manifest,
)

DIES_AFTER = """
import os, sys
from pathlib import Path
from lorakit.files.atomic import atomic_folder, write_files, write_manifest
target, left = Path(sys.argv[1]), int(sys.argv[2])
def count(event, arguments=None):
    global left
    if event == "open" or event.startswith(("os.", "shutil.")):
        left -= 1
        if left < 0:
            os._exit(9)
fsync = os.fsync
os.fsync = lambda handle: (count("os.fsync"), fsync(handle))
sys.addaudithook(count)
"""
COMMIT = """
with atomic_folder(target) as staging:
    (staging / "a").write_text("a" * 1000)
    (staging / "b").write_text("b")
    write_manifest(staging)
"""
REPLACE = """
write_files(target, {"last": "new", "one": "new", "two": "new"}, last="last")
"""


def die(code: str, target: Path, calls: int) -> int:
    """Run the code in a process that dies after so many calls to the file system."""
    return subprocess.run([sys.executable, "-c", DIES_AFTER + code, str(target), str(calls)], check=False).returncode


def test_files_replaced_together_are_all_old_all_new_or_not_there(tmp_path: Path) -> None:
    outcomes = []
    for calls in range(100):
        target = tmp_path / str(calls)
        target.mkdir()
        write_files(target, {"last": "old", "one": "old", "two": "old"}, last="last")
        code = die(REPLACE, target, calls)
        contents = {(target / name).read_text() for name in ("one", "two")} if (target / "last").exists() else set()
        outcomes.append("".join(contents | ({(target / "last").read_text()} if contents else set())) or "none")
        if code == 0:
            break

    assert set(outcomes) == {"old", "none", "new"}
    assert outcomes == sorted(outcomes, key=["old", "none", "new"].index)


@pytest.mark.matrix
def test_a_commit_that_dies_at_any_call_is_whole_or_absent_and_leaves_nothing_after_the_next(tmp_path: Path) -> None:
    target, outcomes = tmp_path / "target", []
    for calls in range(100):
        code = die(COMMIT, target, calls)
        outcomes.append(target.exists())
        if target.exists():
            assert manifest_matches(target)
        if code == 0:
            break

    assert outcomes[0] is False
    assert outcomes[-1] is True
    assert len(outcomes) > 20
    remove_folder(target)
    sweep_folder(tmp_path, target.name)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_what_was_there_and_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_file(path, "old")
    fsync = os.fsync

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TemporaryFailure, match="the disk is full"):
        write_file(path, "new")
    with pytest.raises(TemporaryFailure), atomic_folder(tmp_path / "folder") as staging:
        (staging / "x").write_text("x")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    monkeypatch.setattr(os, "fsync", fsync)
    write_file(path, "new")
    assert path.read_text() == "new"


def test_a_folder_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "x") as staging:
        (staging / "a").write_text("1")
    with pytest.raises(FileExistsError), atomic_folder(tmp_path / "x"):
        pass
    assert (tmp_path / "x" / "a").read_text() == "1"


def test_a_manifest_notices_changed_cut_and_missing_files(tmp_path: Path) -> None:
    def folder(name: str) -> Path:
        with atomic_folder(tmp_path / name) as staging:
            (staging / "a").write_text("aaaa")
            write_manifest(staging)
        return tmp_path / name

    assert manifest_matches(folder("good"))
    for name, damage in (("changed", "aaba"), ("cut", "aaa"), ("empty", "")):
        (folder(name) / "a").write_text(damage)
        assert not manifest_matches(tmp_path / name)
    (folder("missing") / "a").unlink()
    assert not manifest_matches(tmp_path / "missing")
    (folder("garbled") / "manifest.json").write_text("[")
    assert not manifest_matches(tmp_path / "garbled")


def test_what_living_processes_stage_is_not_swept(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "x") as staging:
        (staging / "a").write_text("1")
        sweep_folder(tmp_path, "x")
        assert staging.exists()
