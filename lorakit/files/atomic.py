"""Files that are either complete or absent, also after a crash or a full disk.

The one way to commit: stage beside the target, fsync every file, rename, fsync the parent.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lorakit.errors import TemporaryFailure

MANIFEST = "manifest.json"


def write_file(path: Path, content: bytes | str) -> None:
    """Replace ``path`` durably; a reader sees the old content or the new, never a mixture.

    Raises:
        TemporaryFailure: the disk is full; the old content is kept.
    """
    staged = path.with_name(_staged_name(path))
    with disk_full_as_retryable(path), _removed_on_error(staged):
        _write_new(staged, content)
        os.replace(staged, path)
        sync_folder(path.parent)


Content = bytes | str | Callable[[BinaryIO], None]
"""What a file holds, or what writes it into an open file."""


def write_files(folder: Path, files: Mapping[str, Content], last: str) -> None:
    """Replace several files durably. ``last`` says that the others are whole: it is removed first and written last.

    They are written in the given order, ``last`` after all. Everything is on the disk under other names before
    anything old goes, so a full disk loses nothing.

    Raises:
        TemporaryFailure: the disk is full; the old files are kept.
    """
    staged = {name: folder / _staged_name(folder / name) for name in [*(name for name in files if name != last), last]}
    try:
        with disk_full_as_retryable(folder):
            for name, path in staged.items():
                _write_new(path, files[name])
        (folder / last).unlink(missing_ok=True)
        sync_folder(folder)
        for name, path in staged.items():
            os.replace(path, folder / name)
            sync_folder(folder)
    finally:
        for path in staged.values():
            path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """``value`` as indented JSON with sorted keys, durably."""
    write_file(path, json_text(value))


def json_text(value: Any) -> str:
    """``value`` as indented JSON with sorted keys."""
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A staging folder that becomes ``target`` at the end of the block, or vanishes if the block raises.

    Raises:
        FileExistsError: ``target`` is there already; it is never overwritten.
        TemporaryFailure: the disk is full; nothing is left behind.
    """
    if target.exists():
        raise FileExistsError(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_stale_staging(target)
    staging = target.with_name(_staged_name(target))
    with disk_full_as_retryable(target), _removed_on_error(staging):
        staging.mkdir()
        yield staging
        commit_folder(staging, target)


def commit_folder(staging: Path, target: Path) -> None:
    """Make a finished folder durable and give it its name.

    Raises:
        FileExistsError: something has that name.
    """
    for path in [*staging.rglob("*"), staging]:
        sync_folder(path) if path.is_dir() else sync_file(path)
    if target.exists():
        raise FileExistsError(errno.EEXIST, "exists already", str(target))
    os.rename(staging, target)
    sync_folder(target.parent)


def write_manifest(folder: Path) -> None:
    """Sizes and digests of every file in the folder, as its last file."""
    files = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
    write_json(folder / MANIFEST, {path.name: {"bytes": path.stat().st_size, "sha256": digest(path)} for path in files})


def manifest_matches(folder: Path) -> bool:
    """Whether the folder has a manifest and every file in it is as the manifest says."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return all(
            (folder / name).stat().st_size == facts["bytes"] and digest(folder / name) == facts["sha256"]
            for name, facts in manifest.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def remove_folder(folder: Path) -> None:
    """Remove a folder so that no half of it is ever seen under its name."""
    if folder.is_symlink():
        folder.unlink()
        return
    doomed = folder.with_name(_staged_name(folder))
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, doomed)
        shutil.rmtree(doomed)


def remove_stale_staging(target: Path) -> None:
    """Remove what dead processes of this machine left staged for ``target``."""
    _sweep(target.parent, f".{target.name}.tmp-*")


def sweep_folder(folder: Path) -> None:
    """Remove what dead processes of this machine left staged for anything in ``folder``."""
    _sweep(folder, ".*.tmp-*")


def _sweep(folder: Path, pattern: str) -> None:
    marker = f".tmp-{socket.gethostname()}-"
    for path in folder.glob(pattern):
        _, found, owner = path.name.rpartition(marker)
        if found and not _alive(owner):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def digest(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_signature(path: Path) -> list[int] | None:
    """What changes when a file does: size, time of its last change, inode, time of its last renaming. None: no file."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return [facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_ctime_ns]


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def disk_full_as_retryable(path: Path) -> Iterator[None]:
    """Turns a full disk into TemporaryFailure, so that scripts can free space and go on."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(path.parent if path.parent.exists() else Path.cwd()).free
        raise TemporaryFailure(
            f"{path}: the disk is full ({free} bytes free). What was saved before is intact:"
            " free some space and run the same command again"
        ) from None


def _write_new(path: Path, content: Content) -> None:
    with open(path, "xb") as file:
        if callable(content):
            content(file)
        else:
            file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Make a file's content durable."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise


def _staged_name(path: Path) -> str:
    return f".{path.name}.tmp-{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"


def _alive(marker: str) -> bool:
    pid = marker.partition("-")[0]
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True
