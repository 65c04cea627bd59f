"""Serve more adapters than fit in memory: the least recently used ones stay on disk until a request names them.

Invariant: a name means the bytes that were loaded under it. An adapter whose files changed while it was on disk is
refused until it is loaded again. Of a watched folder, an adapter is loaded from files that were the same at the last
look, before they were read and after. A patch that is being written is not served; the adapter that has its name stays
until the new one is complete.
"""

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

from lorakit.errors import LorakitError, PatchError, TemporaryFailure, did_you_mean
from lorakit.files.text import printable
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.inference.bind import PatchSource
from lorakit.ops.openmp import end_openmp_threads
from lorakit.patch import Patch, open_patch, read_patch
from lorakit.patch.same_base import ALLOW, Allow
from lorakit.serving.request_log import Log
from lorakit.slots.routing import Adapter

POLL_SECONDS: Final = 1.0  # between two looks at a watched folder
Files = tuple[tuple[str, int, int, int], ...]
"""(name, inode, bytes, time of the last change) of each file; that time, ctime, is the kernel's, not the writer's"""


@final
@dataclass(eq=False)
class AdapterPool:
    """The adapters of a server. One is read at a time. A request needs none of this once it has its adapter."""

    model: AdaptedModel
    max_resident: int | None = None  # adapters in memory at a time; None is all
    pinned: Sequence[str] = ()  # names whose adapters stay in memory until they are removed
    log: Log = lambda content: None  # writes a line for each change of what a name means
    failed: dict[str, str] = field(default_factory=dict)  # name -> why a watched folder could not be loaded under it
    _sources: dict[str, PatchSource] = field(default_factory=dict)  # of the adapters loaded here, resident or on disk
    _unread: dict[str, Files] = field(default_factory=dict)  # of sources whose values were not read; else ()
    _used: OrderedDict[str, None] = field(default_factory=OrderedDict)  # resident ones, the least recently used first
    _changing: threading.RLock = field(default_factory=threading.RLock)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self._sources, *self.model.adapters)))

    def sources(self) -> dict[str, PatchSource]:
        return {**self._sources, **self.model.sources()}

    def __contains__(self, name: str) -> bool:
        return name in self._sources or self.model.is_loaded(name)

    def check_pinned(self) -> None:
        if missing := [name for name in dict.fromkeys(self.pinned) if name not in self]:
            near = "".join(dict.fromkeys(did_you_mean(name, self.names) for name in missing))
            raise LorakitError(f"--pin {', '.join(missing)}: no adapter of that name is loaded.{near}")

    def load(self, name: str, folder: str | Path, *, replace: bool = False, allow: Collection[Allow] = ()) -> None:
        """Load a patch under a name; arguments and errors as of ``AdaptedModel.load_adapter``."""
        try:
            self.add(name, read_patch(folder), replace=replace, allow=allow)
        finally:
            end_openmp_threads()

    def is_read_at_once(self, name: str) -> bool:
        """True if a patch of that name belongs in memory when it is added: without another one's going, or pinned."""
        has_room = self.max_resident is None or len(self.model.adapters) < self.max_resident
        return has_room or self.model.is_loaded(name) or name in self.pinned

    def add(
        self, name: str, patch: Patch, *, replace: bool = False, allow: Collection[Allow] = (), files: Files = ()
    ) -> None:
        """Load a patch that was opened; arguments and errors as of ``AdaptedModel.add_patch``.

        files: of one whose values were not read. It stays on disk until a request names it.
        """
        with self._changing:
            if name in self._sources and not replace:
                raise PatchError(f"adapter name {name!r} is taken; choose another, or replace it (HTTP: load_inplace)")
            event = "adapter replaced" if name in self._sources or self.model.is_loaded(name) else "adapter loaded"
            if not files:
                if not self.model.is_loaded(name):
                    self._evict(num_new=1)
                self.model.add_patch(name, patch, replace=replace, allow=allow)
                source = self.model.sources()[name]
                self._touch(name)
            else:
                source = self.model.check_patch(name, patch, allow=allow)
                if self.model.is_loaded(name):  # a request had named it meanwhile
                    self.model.unload_adapter(name)
            self._sources[name] = source
            self._unread[name] = files
            self.failed.pop(name, None)
            self.log({"event": event, "adapter": name, "digest": source.identity})
            self._evict()

    def remove(self, name: str) -> None:
        """Forget an adapter, or raise LorakitError: there is none. A pinned name stays so for its next adapter."""
        with self._changing:
            source = self.sources().get(name)
            was_loaded = name in self._sources
            for known in (self._used, self._sources, self._unread, self.failed):
                known.pop(name, None)
            if self.model.is_loaded(name) or not was_loaded:
                self.model.unload_adapter(name)
            self.log({"event": "adapter unloaded", "adapter": name, "digest": source.identity if source else None})

    def adapter(self, name: str | None) -> Adapter | None:
        """Return the adapter that a name has now, or None for the base. May read a file: not in an event loop.

        Raises LorakitError: the adapter is gone. TemporaryFailure: its files are damaged, or changed, or gone.
        """
        if name is None:
            return None
        with self._changing:
            if name in self._sources and not self.model.is_loaded(name):
                try:
                    self._read(name)
                except (LorakitError, OSError) as problem:
                    end_openmp_threads()
                    error = str(problem).replace(str(self._sources[name].folder), name)  # clients need not know where
                    self.failed.setdefault(name, error)  # a watched folder knows why it did not load newer files
                    self.log({"event": "adapter refused", "adapter": name, "error": error})
                    raise TemporaryFailure(f"adapter {name!r} cannot be read: {error}") from None
            adapter = self.model.adapter(name)  # an error, if it was removed meanwhile
            self._touch(name)
            self._evict()
        return adapter

    def _read(self, name: str) -> None:
        source = self._sources[name]
        patch = read_patch(source.folder)
        files = self._unread[name]
        if files_of(source.folder) != files if files else patch.identity != source.identity:
            raise PatchError("its files changed since it was loaded; load it again")
        self._evict(num_new=1)
        # everything is allowed where tensors and settings are those that were accepted for this base before
        self.model.add_patch(name, patch, allow=() if files else ALLOW)
        self._sources[name] = self.model.sources()[name]
        self._unread[name] = ()
        self.failed.pop(name, None)

    def _touch(self, name: str) -> None:
        self._used[name] = None
        self._used.move_to_end(name)

    def _evict(self, num_new: int = 0) -> None:
        """Leave the least recently used adapters on disk, until there is room for ``num_new`` in their memory."""
        if self.max_resident is None:
            return
        for name in [name for name in self._used if name not in self.pinned]:
            if len(self.model.adapters) + num_new <= self.max_resident:
                return
            if self.model.is_loaded(name):
                self.model.unload_adapter(name)
            del self._used[name]


@final
class AdapterFolder:
    """The adapters of a watched folder whose sub-folders are patches: new, changed and removed ones are followed.

    reserved: names that it may not give, such as the base's.
    """

    def __init__(self, pool: AdapterPool, root: Path, reserved: Collection[str]) -> None:
        self._pool = pool
        self._root = root.absolute()
        self._reserved = frozenset(reserved)
        self._seen: dict[str, Files] = {}  # files of each sub-folder at the last look
        self._tried: dict[str, Files] = {}  # files of each sub-folder when it was last read, for better or worse
        self._loaded: set[str] = set()
        self._wait = POLL_SECONDS  # until the next look
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
                if name in self._pool:  # else it was unloaded over HTTP
                    self._pool.remove(name)
        end_openmp_threads()  # which reading a patch started, also one that was refused

    def _watch(self) -> None:
        while not self._closed.wait(self._wait):
            self.look()

    def _folders(self) -> dict[str, Files]:
        """Return the files of each sub-folder; hidden ones are skipped, because writers stage patches in them."""
        folders: dict[str, Files] = {}
        began = time.monotonic()
        for entry in sorted(os.scandir(self._root), key=lambda entry: entry.name):
            if not entry.name.startswith(".") and entry.is_dir():
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    folders[entry.name] = files_of(Path(entry.path))
        self._wait = max(POLL_SECONDS, 20 * (time.monotonic() - began))  # 10,000 adapters are 40,000 files
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


def files_of(folder: Path) -> Files:
    """Return the files of a folder; none if it cannot be read."""
    entries = list(os.scandir(folder)) if os.access(folder, os.R_OK | os.X_OK) else []  # reading it says why not
    # a link leads to a file, or to nothing
    status = {one.name: one.stat(follow_symlinks=not one.is_symlink() or os.path.exists(one)) for one in entries}
    return tuple(sorted((name, one.st_ino, one.st_size, one.st_ctime_ns) for name, one in status.items()))
