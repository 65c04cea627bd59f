"""Watch a folder whose sub-folders are patches: load the new ones, replace those that change, unload those that go.

Invariant: an adapter is loaded from files that were the same at the last look, before they were read and after. A patch
that is being written is not served; the adapter that has its name stays until the new one is complete.
"""

import contextlib
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final, final

from lorakit.errors import LorakitError
from lorakit.files.text import printable
from lorakit.ops.openmp import end_openmp_threads
from lorakit.patch import open_patch, read_patch
from lorakit.serving.adapter_pool import AdapterPool, Files, files_of

POLL_SECONDS: Final = 1.0  # between two looks


@final
class AdapterFolder:
    """The adapters of a folder. reserved: names that it may not give, such as the base's."""

    def __init__(self, pool: AdapterPool, root: Path, reserved: Collection[str]) -> None:
        self._pool = pool
        self._root = root.absolute()
        self._reserved = frozenset(reserved)
        self._seen: dict[str, Files] = {}  # files of each sub-folder at the last look
        self._tried: dict[str, Files] = {}  # files of each sub-folder when it was last read, for better or worse
        self._loaded: set[str] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lorakit adapters", daemon=True)

    def start(self) -> None:
        """Load what is there, then watch in a thread."""
        self.look()
        if self._pool.max_resident is None:
            self._pool.model.expected_adapters += len(self._seen)
        changed = [change for files in self._seen.values() for *_, change in files]
        if time.time_ns() - max(changed, default=0) < POLL_SECONDS * 1e9:  # somebody may be writing
            time.sleep(POLL_SECONDS)
        self.look()  # a sub-folder is read when two looks see the same files
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(5 * POLL_SECONDS)  # a daemon, which may be reading a large patch

    def look(self) -> None:
        """Compare the folder with the last look; load, replace and unload what is settled since."""
        try:
            before = self._seen
            self._seen = self._folders()
        except OSError as problem:  # such as a network disk that is away: what is loaded stays
            error = printable(str(problem))
            if self._pool.failed.get("") != error:
                self._pool.failed[""] = error
                self._pool.log({"event": "adapters-dir cannot be read", "error": error})
            return
        self._pool.failed.pop("", None)
        for name, files in self._seen.items():
            if before.get(name) == files != self._tried.get(name):
                self._load(name, files)
        for name in self._tried.keys() - self._seen.keys() - before.keys():
            del self._tried[name]
            self._pool.failed.pop(printable(name), None)
            if name in self._loaded:
                self._loaded.discard(name)
                if name in self._pool.names:  # else it was unloaded over HTTP
                    self._pool.remove(name)
        end_openmp_threads()  # which reading a patch started, also one that was refused

    def _watch(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            self.look()

    def _folders(self) -> dict[str, Files]:
        """Return the files of each sub-folder; hidden ones are skipped, because writers stage patches in them."""
        folders: dict[str, Files] = {}
        for path in sorted(self._root.iterdir()):
            if not path.name.startswith(".") and path.is_dir():
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    folders[path.name] = files_of(path)
        return folders

    def _load(self, name: str, files: Files) -> None:
        folder = self._root / name
        try:
            if name in self._reserved:
                raise LorakitError(f"{name!r} is taken by the base or an --adapter; rename the folder")
            resident = self._pool.is_read_at_once(name)
            patch = read_patch(folder) if resident else open_patch(folder, verify=False)
            if files_of(folder) != files:  # it is being written; the next look reads it
                return
            self._pool.add(name, patch, replace=name in self._loaded, files=() if resident else files)
            self._loaded.add(name)
        except Exception as problem:  # of this adapter alone: the others go on
            error = str(problem).replace(str(folder), name)
            # JSON cannot have the bytes of names that are no UTF-8
            self._pool.failed[printable(name)] = printable(error)
            is_served = name in self._loaded
            self._pool.log({"event": "adapter refused", "adapter": name, "error": error, "served": is_served})
        self._tried[name] = files
