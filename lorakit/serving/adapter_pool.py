"""Serve more adapters than fit in memory: the least recently used ones stay on disk until a request names them.

Invariant: a name means the bytes that were loaded under it. An adapter whose files changed while it was on disk is
refused until it is loaded again.
"""

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import final

from lorakit.errors import LorakitError, PatchError, did_you_mean
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.inference.bind import PatchSource
from lorakit.patch import Patch, read_patch
from lorakit.patch.same_base import ALLOW, Allow
from lorakit.serving.request_log import Log
from lorakit.slots.routing import Adapter


@final
class AdapterPool:
    """The adapters of a server. max_resident: in memory at a time; None is all. One adapter is read at a time.

    An adapter that a request is about to use stays. A request under way needs none of this: it has its adapter.
    pinned: names whose adapters stay in memory until they are removed. failed: name -> why a folder that is watched
    could not be loaded under it. log: writes a line for each change of what a name means.
    """

    def __init__(
        self,
        model: AdaptedModel,
        max_resident: int | None = None,
        pinned: Sequence[str] = (),
        log: Log = lambda content: None,
    ) -> None:
        self._model = model
        self._log = log
        self._max_resident = max_resident
        self.pinned = tuple(dict.fromkeys(pinned))
        self.failed: dict[str, str] = {}
        self._sources: dict[str, PatchSource] = {}  # patches of the adapters that were loaded here, resident or on disk
        self._used: OrderedDict[str, None] = OrderedDict()  # resident adapters, the least recently used first
        self._leases: Counter[str] = Counter()  # name -> requests that are about to use it
        self._changing = threading.RLock()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self._sources, *self._model.adapters)))

    def sources(self) -> dict[str, PatchSource]:
        return {**self._sources, **self._model.sources()}

    def is_resident(self, name: str) -> bool:
        return name in self._model.adapters

    def check_pinned(self) -> None:
        if missing := [name for name in self.pinned if name not in self.names]:
            near = "".join(dict.fromkeys(did_you_mean(name, self.names) for name in missing))
            raise LorakitError(f"--pin {', '.join(missing)}: no adapter of that name is loaded.{near}")

    def load(self, name: str, folder: str | Path, *, replace: bool = False, allow: Collection[Allow] = ()) -> None:
        """Load a patch under a name; arguments and errors as of ``AdaptedModel.load_adapter``."""
        self.add(name, read_patch(folder), replace=replace, allow=allow)

    def add(self, name: str, patch: Patch, *, replace: bool = False, allow: Collection[Allow] = ()) -> None:
        """Load a patch that was read; arguments and errors as of ``AdaptedModel.add_patch``."""
        with self._changing:
            if name in self._sources and not replace:
                raise PatchError(
                    f"adapter name {name!r} is taken; choose another, or replace it (in HTTP load_inplace: true)"
                )
            event = "adapter replaced" if name in self.names else "adapter loaded"
            if not self.is_resident(name):
                self._evict(num_new=1)
            self._model.add_patch(name, patch, replace=replace, allow=allow)
            self._log({"event": event, "adapter": name, "digest": patch.identity})
            self._sources[name] = self._model.sources()[name]
            self._touch(name)
            self._evict()

    def remove(self, name: str) -> None:
        """Forget an adapter, also a pinned one; its name stays pinned for the next one that gets it.

        Raises LorakitError: there is none of that name.
        """
        with self._changing:
            self._used.pop(name, None)
            source = self.sources().get(name)
            was_loaded = self._sources.pop(name, None) is not None
            if self.is_resident(name) or not was_loaded:
                self._model.unload_adapter(name)
            self._log({"event": "adapter unloaded", "adapter": name, "digest": source.identity if source else None})

    @contextlib.contextmanager
    def lease(self, name: str | None) -> Iterator[Adapter | None]:
        """Yield the adapter of a name, which is in memory inside the block; None is the base.

        It is the one that the name has now: its tokenizer and its tensors go together, also if it is replaced
        meanwhile. May read a file: not in an event loop.
        Raises LorakitError: the adapter is gone, or its files are, or they changed.
        """
        if name is None:
            yield None
            return
        with self._changing:
            if name in self._sources and not self.is_resident(name):
                self._read(name)
            adapter = self._model.adapter(name)  # an error, if it was removed meanwhile
            self._touch(name)
            self._leases[name] += 1
            self._evict()
        try:
            yield adapter
        finally:
            with self._changing:
                self._leases[name] -= 1
                self._evict()

    def _read(self, name: str) -> None:
        source = self._sources[name]
        patch = read_patch(source.folder)
        if patch.identity != source.identity:
            raise LorakitError(f"adapter {name!r}: its files changed since it was loaded; load it again")
        self._evict(num_new=1)
        # everything is allowed, because tensors and settings are those that were accepted for this base before
        self._model.add_patch(name, patch, allow=ALLOW)

    def _touch(self, name: str) -> None:
        self._used[name] = None
        self._used.move_to_end(name)

    def _evict(self, num_new: int = 0) -> None:
        """Leave the least recently used adapters on disk, until so many are resident as may be with ``num_new`` more.

        Room is made before an adapter is loaded, so that it gets the memory of another one.
        """
        if self._max_resident is None:
            return
        for name in [name for name in self._used if not (self._leases[name] or name in self.pinned)]:
            if len(self._model.adapters) + num_new <= self._max_resident:
                return
            if self.is_resident(name):
                self._model.unload_adapter(name)
            del self._used[name]
