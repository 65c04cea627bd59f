"""The store in which the ranks of a run exchange heartbeats and reasons: torch's TCPStore of their rendezvous."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final, final

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

_PREFIX: Final = "lorakit/watchdog/"


def is_collective_error(error: BaseException) -> bool:
    """True if another rank's failure may be the cause, by messages of torch 2.13's gloo and by NCCL's error class."""
    is_from_backend = any(word in str(error) for word in ("gloo/", "monitoredBarrier", "NCCL"))
    return isinstance(error, DistError) or (type(error) is RuntimeError and is_from_backend)


@final
class HeartbeatStore:
    """Texts by key in the store at ``address``. Raises RuntimeError if it cannot be reached, or never returns."""

    def __init__(self, store: Store, address: str) -> None:
        self.address = address
        self._store: Any = store  # Any: torch's stubs lack Store.clone
        self._created_keys: set[str] = set()

    def set(self, key: str, text: str) -> None:
        """Store a text."""
        self._connection.set(_PREFIX + key, text)

    def set_if_absent(self, key: str, text: str) -> str:
        """Store a text, unless the key has one already. Returns the text that the key has then."""
        return str(self._connection.compare_set(_PREFIX + key, "", text).decode())

    def get(self, keys: Sequence[str]) -> list[str]:
        """Return the texts of several keys; "" for a key without one."""
        for key in keys:
            if key not in self._created_keys:  # because TCPStore waits for a key that does not exist
                self.set_if_absent(key, "")
                self._created_keys.add(key)
        return [value.decode() for value in self._connection.multi_get([_PREFIX + key for key in keys])]

    @cached_property
    def _connection(self) -> Any:
        """A clone, which has its own socket: a blocked call of the main thread must not block the watchdog."""
        return self._store.clone()
