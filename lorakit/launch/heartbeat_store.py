"""Exchange heartbeats and failure reasons among the ranks through the TCPStore of their rendezvous.

Invariant: the first failure reason that any rank writes is the one that all ranks read. A call may never return if the
store's host is unreachable; launch/watchdog.py therefore calls `exchange` in a thread of its own.
"""

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, final

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from lorakit.launch.heartbeat import FailureReason, Heartbeat

_PREFIX: Final = "lorakit/watchdog"
_REASON: Final = f"{_PREFIX}/reason"
_NUM_CLOSED: Final = f"{_PREFIX}/num_closed"
_NUM_ACKNOWLEDGED: Final = f"{_PREFIX}/num_acknowledged"
_UNSET: Final = "-"


@dataclass(frozen=True)
class StoreSnapshot:
    """Content of the store: the first failure reason, two counts of ranks, and the latest heartbeats by rank."""

    reason: FailureReason | None
    num_closed: int
    num_acknowledged: int
    heartbeats: Mapping[int, Heartbeat]


@final
class HeartbeatStore:
    """One rank's connection to the store.

    ``store``: a TCPStore, or a PrefixStore over one, that no other HeartbeatStore uses. Only clones of it are used.
    """

    def __init__(self, store: Store) -> None:
        self._store: Any = store  # Any: torch's stubs lack Store.clone
        self._connection: Any = None
        self._created_keys: set[str] = set()
        self._counted_closed = self._counted_acknowledged = False
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        assert isinstance(store, TCPStore), f"the ranks meet in a TCPStore, not in a {type(store).__name__}"
        self._host, self._port = store.host, store.port
        self.address = f"{self._host}:{self._port}"

    def exchange(
        self, beat: Heartbeat, ranks: Sequence[int], proposed: FailureReason | None, acknowledged: bool
    ) -> StoreSnapshot:
        """Write this rank's heartbeat and the reason it proposes, and read the heartbeats of ``ranks``.

        ``acknowledged``: this rank has read the reason that holds.

        Raises:
            RuntimeError, OSError: the store is unreachable. The next call opens a new connection.
        """
        try:
            if self._connection is None:
                self._connection = self._connect()
            return self._exchange(self._connection, beat, ranks, proposed, acknowledged)
        except (RuntimeError, OSError):
            self._connection = None
            raise

    def _connect(self) -> Any:
        # a clone has its own socket: on the shared one, a blocked call of the main thread would block this one too
        if self._created_keys:  # a reconnection: probe the port first, because torch logs pages if it is refused
            socket.create_connection((self._host, self._port)).close()
        return self._store.clone()

    def _exchange(
        self, store: Any, beat: Heartbeat, ranks: Sequence[int], proposed: FailureReason | None, acknowledged: bool
    ) -> StoreSnapshot:
        for key in (_REASON, *map(_key, ranks)):  # multi_get below would wait for a key that does not exist
            if key not in self._created_keys:
                store.compare_set(key, "", _UNSET)
                self._created_keys.add(key)
        if beat.closed and not self._counted_closed:
            self._counted_closed = store.add(_NUM_CLOSED, 1) > 0
        store.set(_key(beat.rank), json.dumps(asdict(beat)))
        if proposed:
            store.compare_set(_REASON, _UNSET, json.dumps(asdict(proposed)))  # sets nothing if another rank was first
        if acknowledged and not self._counted_acknowledged:
            self._counted_acknowledged = store.add(_NUM_ACKNOWLEDGED, 1) > 0
        num_closed, num_acknowledged = store.add(_NUM_CLOSED, 0), store.add(_NUM_ACKNOWLEDGED, 0)
        reason, *texts = (value.decode() for value in store.multi_get([_REASON, *map(_key, ranks)]))
        heartbeats = {
            rank: Heartbeat(**json.loads(text)) for rank, text in zip(ranks, texts, strict=True) if text != _UNSET
        }
        return StoreSnapshot(
            None if reason == _UNSET else FailureReason(**json.loads(reason)), num_closed, num_acknowledged, heartbeats
        )


def _key(rank: int) -> str:
    return f"{_PREFIX}/{rank}"
