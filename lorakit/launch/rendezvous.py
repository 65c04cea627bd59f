"""How the machines of a run find each other: torch's c10d rendezvous at one host:port, with its errors in words.

Nothing waits longer than ``wait_seconds``, and what was waited for is named.
"""

import contextlib
import errno
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, final

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from lorakit.errors import RunError, TemporaryFailure
from lorakit.launch.environment import DEFAULT_PORT, split_endpoint
from lorakit.launch.rendezvous_timeout import answered

_LEAVE_SECONDS: Final = 3.0


@dataclass(frozen=True)
class Place:
    """Where the machines meet, and how long they wait for each other."""

    host: str
    port: int
    hosted_here: bool
    node_rank: int | None
    nodes: int
    local_size: int
    wait_seconds: float
    silent_seconds: float

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def find_place(
    rendezvous: str | None, *, node_rank: int | None, nodes: int, local_size: int, wait_seconds: float,
    silent_seconds: float = 20.0,
) -> Place:  # fmt: skip
    """Where to meet; waits until the host answers there. One machine meets itself.

    Raises:
        RunError: no address given, an address that is nobody's, or nobody answers in time.
    """
    if nodes == 1:
        return Place("127.0.0.1", 0, True, 0, 1, local_size, wait_seconds, silent_seconds)
    if rendezvous is None:
        raise RunError(
            f"parallel.nodes is {nodes} and nobody says where they meet: set parallel.rendezvous to host:port of the"
            f" first machine, as in node01:{DEFAULT_PORT}"
        )
    host, port = split_endpoint(rendezvous)
    port = port or DEFAULT_PORT
    if node_rank is not None and not 0 <= node_rank < nodes:
        raise RunError(f"node rank {node_rank} of {nodes} machines: node ranks go from 0 to {nodes - 1}")
    free = _can_listen(host, port)
    if node_rank == 0 and free is False:
        raise _busy(f"{host}:{port}")
    here = node_rank == 0 if node_rank is not None else bool(free)
    if not here:
        _reach(host, port, wait_seconds)
    return Place(host, port, here, node_rank, nodes, local_size, wait_seconds, silent_seconds)


def _can_listen(host: str, port: int) -> bool | None:
    """Whether this machine could listen there: None when the address is another machine's, False when it is in use."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as problem:
        return False if problem.errno == errno.EADDRINUSE else None
    return True


def _reach(host: str, port: int, seconds: float) -> None:
    until, why = time.monotonic() + seconds, "no answer"
    while time.monotonic() < until:
        try:
            with socket.create_connection((host, port), timeout=max(0.1, until - time.monotonic())):
                return
        except OSError as problem:
            why = problem.strerror or str(problem)
        time.sleep(0.2)
    raise RunError(
        f"parallel.rendezvous: nobody answered at {host}:{port} for {seconds:g} s ({why}). Start the same command on"
        " that machine, and see that its port can be reached from here"
    )


def _busy(place: str) -> RunError:
    return RunError(
        f"parallel.rendezvous: {place} is in use by another program; choose another port, the same on every machine"
    )


def _patience(place: Place) -> float:
    """For a store that is there: a busy machine may take seconds to answer."""
    return max(5.0, place.wait_seconds)


def _own_address(place: Place) -> str:
    """This machine's address on the way to the host; nothing is sent."""
    if place.hosted_here:
        return place.host
    family, kind, _, _, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def meeting(place: Place) -> Iterator[RendezvousHandler]:
    """torch's rendezvous among the launchers of a run; what goes wrong in it, in words.

    Raises:
        RunError: not all machines came in time, the port is in use, or two machines claim one node rank.
        TemporaryFailure: the machine that hosts the rendezvous has gone.
    """
    handler = None
    try:
        handler = _Numbered(_connect(place), place)
        try:
            yield handler
        finally:
            with contextlib.suppress(DistError):
                answered(handler.shutdown, _LEAVE_SECONDS)
    except RendezvousTimeoutError:
        raise RunError(
            f"not all of the {place.nodes} machines came to {place} within {place.wait_seconds:g} s. Start the same"
            f" command on each, with the same parallel.nodes and parallel.processes"
        ) from None
    except RendezvousClosedError:
        raise TemporaryFailure("the run has ended on another machine, which says why") from None
    except (RendezvousConnectionError, DistError):
        if handler is not None and handler.joined:
            raise host_is_gone(place) from None
        if place.hosted_here and _can_listen(place.host, place.port):
            raise RunError(
                f"{place} could not be opened for the other machines within {_patience(place):g} s"
            ) from None
        raise _busy(str(place)) from None


def host_is_gone(place: Place) -> TemporaryFailure:
    """Said when the store cannot be reached any more."""
    return TemporaryFailure(
        f"the machine that hosts the rendezvous, {place}, no longer answers; the last checkpoint is kept, the same"
        " command on every machine goes on"
    )


def _connect(place: Place) -> RendezvousHandler:
    if place.hosted_here and place.node_rank is None:
        with contextlib.suppress(RendezvousConnectionError):  # two launchers on one machine may both think they host it
            return _handler(place, is_host=True)
    return _handler(place, is_host=place.hosted_here and place.node_rank is not None)


def _handler(place: Place, *, is_host: bool) -> RendezvousHandler:
    """In a thread that may be left behind: torch waits for ever for a program that accepts and never answers."""
    parameters = RendezvousParameters(
        "c10d", f"{place.host}:{place.port}", f"lorakit-{place.nodes}x{place.local_size}", place.nodes, place.nodes,
        local_addr=_own_address(place), is_host=is_host, join_timeout=max(1, round(place.wait_seconds)),
        read_timeout=round(_patience(place)), close_timeout=5,
    )  # fmt: skip
    made: list[RendezvousHandler | RendezvousConnectionError] = []

    def make() -> None:
        try:
            made.append(get_rendezvous_handler(parameters))
        except RendezvousConnectionError as problem:
            made.append(problem)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(_patience(place) + 2)
    if not made or isinstance(made[0], RendezvousConnectionError):
        raise RendezvousConnectionError(f"no store at {place}")
    return made[0]


@final
class _Numbered(RendezvousHandler):
    """c10d's rendezvous, with the machines numbered as their users ask, else the host first."""

    def __init__(self, inner: RendezvousHandler, place: Place) -> None:
        self._inner, self._place = inner, place
        self.joined = False

    def next_rendezvous(self) -> RendezvousInfo:
        info = self._inner.next_rendezvous()
        self.joined = True
        claim = [self._place.node_rank, not self._place.hosted_here, info.rank, this_machine()]
        info.store.set(f"claim/{info.rank}", json.dumps(claim))
        claims = [json.loads(info.store.get(f"claim/{rank}")) for rank in range(info.world_size)]
        given = sorted((rank, name) for rank, *_, name in claims if rank is not None)
        for (rank, name), (other, beside) in itertools.pairwise(given):
            if rank == other:
                raise RunError(f"node rank {rank} was given to two machines: {name} and {beside}")
        if given and len(given) < len(claims):
            raise RunError("a node rank was given to some machines only: give it to all, or to none")
        numbers = {claim[2]: number for number, claim in enumerate(sorted(claims, key=lambda claim: claim[:3]))}
        return RendezvousInfo(
            info.store, numbers[info.rank], info.world_size, RendezvousStoreInfo(self._place.host, self._place.port)
        )

    def get_backend(self) -> str:
        return self._inner.get_backend()

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return answered(self._inner.num_nodes_waiting, self._place.silent_seconds)

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()


def this_machine() -> str:
    """Host and process, for others to name."""
    return f"{socket.gethostname()} (process {os.getpid()})"
