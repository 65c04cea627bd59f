"""Write files that are complete or absent, also after a crash or a full disk.

Every commit has the same steps: stage beside the target, fsync every file, rename, fsync the parent. Files of the
user's cache too: a later call may read them instead of computing them again, and they may be deleted.
"""

import contextlib
import errno
import hashlib
import json
import os
import platform
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

from lorakit.errors import LorakitError, TemporaryFailure
from lorakit.files.progress import report_progress

MANIFEST = "manifest.json"
MERGE_LEDGER = "merge.json"  # in a merged model: what was merged into it, and how it is prompted
GIVEN_ROWS: Final = "rows"  # cache of rows that Python callers gave


def write_file(path: Path, content: bytes | str) -> None:
    """Replace ``path`` durably: a reader gets the old content or the new. Raises TemporaryFailure for a full disk."""
    with _staged(path) as staged:
        _write_new(staged, content)
        os.replace(staged, path)
        sync_path(path.parent)


Content = bytes | str | Callable[[BinaryIO], None]  # content of a file, or a function that writes it into an open file


def write_files(folder: Path, files: Mapping[str, Content], last: str) -> None:
    """Replace several files durably. ``last`` marks the others as complete: it is removed first and written last."""
    names = [*(name for name in files if name != last), last]
    with contextlib.ExitStack() as stack:
        # all are on the disk under other names before an old one is removed, so a full disk loses nothing
        staged = {name: stack.enter_context(_staged(folder / name)) for name in names}
        for name, path in staged.items():
            _write_new(path, files[name])
        (folder / last).unlink(missing_ok=True)
        sync_path(folder)
        for name, path in staged.items():
            os.replace(path, folder / name)
            sync_path(folder)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` durably as indented JSON with sorted keys."""
    write_file(path, json_text(value))


def json_text(value: Any) -> str:
    """Return ``value`` as indented JSON with sorted keys."""
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a staging folder that is renamed to ``target`` after the block, or removed if the block raises.

    Raises FileExistsError if ``target`` exists, TemporaryFailure if the disk is full.
    """
    if target.exists():
        raise FileExistsError(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep_folder(target.parent, target.name)
    with _staged(target) as staging:
        staging.mkdir()
        yield staging
        for path in [*staging.rglob("*"), staging]:
            sync_path(path)
        if target.exists():  # made meanwhile by another process
            raise FileExistsError(errno.EEXIST, "exists already", str(target))
        os.rename(staging, target)
        sync_path(target.parent)


def write_manifest(folder: Path) -> None:
    """Write the sizes and digests of every file in the folder, as its last file."""
    files = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
    write_json(folder / MANIFEST, {path.name: {"bytes": path.stat().st_size, "sha256": digest(path)} for path in files})


def manifest_matches(folder: Path, *, content: bool = True) -> bool:
    """True if every file of the folder's manifest has the recorded size, and digest unless ``content`` is False."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return all(
            (folder / name).stat().st_size == record["bytes"]
            and (not content or digest(folder / name) == record["sha256"])
            for name, record in manifest.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def remove_folder(folder: Path) -> None:
    """Remove a folder so that no half of it ever exists under its name."""
    if folder.is_symlink():
        folder.unlink()
        return
    doomed = folder.with_name(_staged_name(folder))
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, doomed)
        shutil.rmtree(doomed)


def sweep_folder(folder: Path, name: str = "*") -> None:
    """Remove the files that dead processes of this machine staged for any file in ``folder``, or for that ``name``."""
    import psutil  # here, because a loop of the caller's own makes no folders

    marker = f".tmp-{socket.gethostname()}-"  # of this machine only, because pids of others cannot be checked
    for path in folder.glob(f".{name}.tmp-*"):
        _, separator, owner = path.name.rpartition(marker)
        pid = owner.partition("-")[0]
        if separator and not (pid.isdecimal() and psutil.pid_exists(int(pid))):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def digest(path: Path, algorithm: Any = "sha256") -> str:
    """Return the digest of a file's content, in hexadecimal. algorithm: as `hashlib.file_digest` takes it."""
    with open(path, "rb") as file:
        value: str = hashlib.file_digest(file, algorithm).hexdigest()
    report_progress()
    return value


def fast_digest(path: Path) -> str:
    """Return the XXH3-128 of a file's content, in hexadecimal."""
    import xxhash  # here, because a loop of the caller's own hashes no files

    return digest(path, xxhash.xxh3_128)


def file_signature(file: Path | int) -> list[int] | None:
    """Return numbers that change with a file or an open one: size, mtime, inode, ctime; None if there is no file."""
    try:
        stat = os.stat(file)
    except FileNotFoundError:
        return None
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns]


def sync_path(path: Path) -> None:
    """Make a file's content durable, or the names of a folder's files."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def disk_full_as_retryable(path: Path) -> Iterator[None]:
    """Raise TemporaryFailure for a full disk, so that scripts can free space and continue."""
    try:
        yield
    except OSError as problem:
        if not is_disk_full(problem):
            raise
        free = shutil.disk_usage(next(part for part in (path, *path.absolute().parents) if part.is_dir())).free
        remedy = "What was saved before is intact: free some space and run the same command again"
        raise TemporaryFailure(f"{path}: the disk is full ({free} bytes free). {remedy}") from None


def is_disk_full(problem: BaseException) -> bool:
    """True for the error of a full disk, or of a user's full share of it."""
    return isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT)


def _write_new(path: Path, content: Content) -> None:
    with open(path, "xb") as file:
        if callable(content):
            content(file)
        else:
            file.write(content.encode() if isinstance(content, str) else content)
    sync_path(path)
    report_progress()


@contextlib.contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """Yield a path beside ``target`` for its new content; the block renames it, or it is removed."""
    staged = target.with_name(_staged_name(target))
    try:
        with disk_full_as_retryable(target):
            yield staged
    finally:
        if staged.is_dir():
            shutil.rmtree(staged, ignore_errors=True)
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)


def _staged_name(path: Path) -> str:
    return f".{path.name}.tmp-{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"


def try_lock(file: IO[Any], kind: int) -> bool:
    """Lock an open file, ``fcntl.LOCK_EX`` or ``LOCK_SH``; False if another process prevents that."""
    import fcntl  # which Windows lacks

    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def user_cache() -> Path:
    """Return the folder of all programs' caches: ``$XDG_CACHE_HOME``, or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def cache_folder(name: str) -> Path:
    """Return lorakit's cache of this name; it need not exist."""
    return user_cache() / "lorakit" / name


def measured_once(question: str, measure: Callable[[], Any]) -> Any:
    """Return what this machine was measured to be, as JSON has it; the first call measures, so all runs choose alike.

    question: names all that the answer depends on, besides the machine.
    """
    key = hashlib.sha256(f"{platform.node()}: {question}".encode()).hexdigest()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RuntimeError):
        return json.loads((cache_folder("measured") / f"{key}.json").read_text())["answer"]
    answer = measure()
    # where nothing can be written, or nobody has a home, each run measures
    with contextlib.suppress(OSError, LorakitError, RuntimeError):
        path = cache_folder("measured") / f"{key}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"question": question, "answer": answer})
    return answer
