"""Serve more adapters than fit in memory: the least recently used ones stay on disk until a request names them.

Invariant: a name means the bytes that were loaded under it. An adapter whose files changed while it was on disk is
refused until it is loaded again.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from lorakit.errors import LorakitError, PatchError, TemporaryFailure, did_you_mean
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.inference.bind import PatchSource
from lorakit.ops.openmp import end_openmp_threads
from lorakit.patch import Patch, read_patch
from lorakit.patch.same_base import ALLOW, Allow
from lorakit.serving.request_log import Log
from lorakit.slots.routing import Adapter

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

    def is_resident(self, name: str) -> bool:
        return name in self.model.adapters

    def check_pinned(self) -> None:
        if missing := [name for name in dict.fromkeys(self.pinned) if name not in self.names]:
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
        return has_room or self.is_resident(name) or name in self.pinned

    def add(
        self, name: str, patch: Patch, *, replace: bool = False, allow: Collection[Allow] = (), files: Files = ()
    ) -> None:
        """Load a patch that was opened; arguments and errors as of ``AdaptedModel.add_patch``.

        files: of one whose values were not read. It stays on disk until a request names it.
        """
        with self._changing:
            if name in self._sources and not replace:
                raise PatchError(f"adapter name {name!r} is taken; choose another, or replace it (HTTP: load_inplace)")
            event = "adapter replaced" if name in self._sources or self.is_resident(name) else "adapter loaded"
            if not files:
                if not self.is_resident(name):
                    self._evict(num_new=1)
                self.model.add_patch(name, patch, replace=replace, allow=allow)
                source = self.model.sources()[name]
                self._touch(name)
            else:
                source = self.model.check_patch(name, patch, allow=allow)
                if self.is_resident(name):  # a request had named it meanwhile
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
            if self.is_resident(name) or not was_loaded:
                self.model.unload_adapter(name)
            self.log({"event": "adapter unloaded", "adapter": name, "digest": source.identity if source else None})

    def adapter(self, name: str | None) -> Adapter | None:
        """Return the adapter that a name has now, or None for the base. May read a file: not in an event loop.

        Raises LorakitError: the adapter is gone. TemporaryFailure: its files are damaged, or changed, or gone.
        """
        if name is None:
            return None
        with self._changing:
            if name in self._sources and not self.is_resident(name):
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
            if self.is_resident(name):
                self.model.unload_adapter(name)
            del self._used[name]


def files_of(folder: Path) -> Files:
    """Return the files of a folder; none if it cannot be read."""
    files = []
    for path in sorted(folder.iterdir()) if os.access(folder, os.R_OK | os.X_OK) else ():  # reading it says why not
        status = path.stat() if path.exists() else path.lstat()  # a link to a file, or to nothing
        files.append((path.name, status.st_ino, status.st_size, status.st_ctime_ns))
    return tuple(files)
