"""What the ranks write for each other in the store they met at. Any call may never come back, when the host is gone."""

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, final

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from lorakit.launch.heartbeat import FailureReason, Heartbeat

_REASON, _ENDED, _KNOWING = "lorakit/watch/reason", "lorakit/watch/ended", "lorakit/watch/knowing"
_NOTHING: Final = "-"


@dataclass(frozen=True)
class StoreSnapshot:
    """What the board says: the first reason anyone gave, how many ranks ended well or know the reason, last beats."""

    reason: FailureReason | None
    num_ended: int
    num_knowing: int
    beats: Mapping[int, Heartbeat]


@final
class HeartbeatStore:
    """A rank's own connections to the store, which is a TCPStore or PrefixStore over one that no other Board used."""

    def __init__(self, store: Store) -> None:
        self._store: Any = store  # torch's stubs lack Store.clone
        self._connection: Any = None
        self._made: set[str] = set()
        self._said_ended = self._said_knowing = False
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        assert isinstance(store, TCPStore), f"the ranks meet in a TCPStore, not in a {type(store).__name__}"
        self._host, self._port = store.host, store.port
        self.address = f"{self._host}:{self._port}"

    def exchange(
        self, beat: Heartbeat, ranks: Sequence[int], offered: FailureReason | None, acknowledged: bool
    ) -> StoreSnapshot:
        """Write this rank's beat and what it offers as the reason, read the beats of ``ranks``.

        Raises:
            RuntimeError, OSError: the store is out of reach; the next call tries a new connection.
        """
        try:
            if self._connection is None:
                self._connection = self._connect()
            return self._exchange(self._connection, beat, ranks, offered, acknowledged)
        except (RuntimeError, OSError):
            self._connection = None
            raise

    def _connect(self) -> Any:
        if self._made:  # not for the first time: torch prints pages about a connection that is refused
            socket.create_connection((self._host, self._port)).close()
        return self._store.clone()

    def _exchange(
        self, store: Any, beat: Heartbeat, ranks: Sequence[int], offered: FailureReason | None, acknowledged: bool
    ) -> StoreSnapshot:
        for key in (_REASON, *map(_key, ranks)):  # asking for a key that is not there would wait for it
            if key not in self._made:
                store.compare_set(key, "", _NOTHING)
                self._made.add(key)
        if beat.ended and not self._said_ended:
            self._said_ended = store.add(_ENDED, 1) > 0
        store.set(_key(beat.rank), json.dumps(asdict(beat)))
        if offered:
            store.compare_set(_REASON, _NOTHING, json.dumps(asdict(offered)))  # the first one stays
        if acknowledged and not self._said_knowing:
            self._said_knowing = store.add(_KNOWING, 1) > 0
        num_ended, num_knowing = store.add(_ENDED, 0), store.add(_KNOWING, 0)
        reason, *texts = (value.decode() for value in store.multi_get([_REASON, *map(_key, ranks)]))
        said = {
            rank: Heartbeat(**json.loads(text)) for rank, text in zip(ranks, texts, strict=True) if text != _NOTHING
        }
        return StoreSnapshot(
            None if reason == _NOTHING else FailureReason(**json.loads(reason)), num_ended, num_knowing, said
        )


def _key(rank: int) -> str:
    return f"lorakit/watch/{rank}"
