"""Detect that a rank failed, under any launcher, and make all ranks end with the same reason and exit code.

The rule: about once a second each rank writes its heartbeat, writes a reason if it has one, and reads the reason and
its neighbours' heartbeats. **The first reason written is the reason of all ranks.** The main thread raises it as soon
as it can (`fail`, `explain`); the process is ended some seconds later in any case. Rank 0, which usually hosts the
store, stays a little longer, so that the others can read the reason there.

No other machine's clock is read: a rank is lost when its heartbeat's count has not grown in so many reads of the store.
So a job that is suspended and continued as a whole raises no alarm. Imports no torch.
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Final, final

from lorakit.errors import TemporaryFailure
from lorakit.files.progress import progress_count

NUM_NEIGHBOURS: Final = 8
"""A rank watches rank 0 and the next 8 ranks. If several ranks die together, the rank before them notices."""
SETTLE_SECONDS: Final = 5.0  # for the store to answer, before a rank ends with a reason that the others could not read
RAISE_SECONDS: Final = 5.0  # from the reason until the process is ended, unless its main thread has begun to raise it
EXIT_SECONDS: Final = 10.0  # for a main thread that raises the reason to end the process

STORE_PREFIX: Final = "lorakit/watchdog/"
RETRY_HINT: Final = "What was saved is kept; the same command goes on."


@dataclass(frozen=True)
class FailureReason:
    """Why all ranks end, the same for every rank. rank: the one that failed; None if no single rank did."""

    rank: int | None
    message: str
    exit_code: int = TemporaryFailure.exit_code
    dump_stacks: bool = False

    def __str__(self) -> str:
        return f"stopped, because {self.message}".replace("\n", "\n  ")


@dataclass(frozen=True)
class Heartbeat:
    """One rank's sign of life. count: from 1. num_phases: that its main thread began, by which ranks are ordered."""

    rank: int
    count: int
    host: str
    pid: int
    num_phases: int
    phase: str
    idle_seconds: float

    def name(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"

    def position(self) -> str:
        return f"{self.phase}, for {self.idle_seconds:.0f} s"


@final
@dataclass(eq=False)
class HeartbeatStore:
    """Texts by key in the store at ``address``. Raises RuntimeError if it cannot be reached, or never returns."""

    store: Any  # torch's Store of the ranks' rendezvous, whose type has no `clone`
    address: str
    _created_keys: set[str] = field(default_factory=set)

    def set(self, key: str, text: str) -> None:
        """Store a text."""
        self._connection.set(STORE_PREFIX + key, text)

    def set_if_absent(self, key: str, text: str) -> str:
        """Store a text, unless the key has one already. Returns the text that the key has then."""
        return str(self._connection.compare_set(STORE_PREFIX + key, "", text).decode())

    def get(self, keys: Sequence[str]) -> list[str]:
        """Return the texts of several keys; "" for a key without one."""
        for key in keys:
            if key not in self._created_keys:  # because TCPStore waits for a key that does not exist
                self.set_if_absent(key, "")
                self._created_keys.add(key)
        return [value.decode() for value in self._connection.multi_get([STORE_PREFIX + key for key in keys])]

    @cached_property
    def _connection(self) -> Any:
        """A clone, which has its own socket: a blocked call of the main thread must not block the watchdog."""
        return self.store.clone()


def end_process(message: str, exit_code: int) -> None:
    """Print the message and end this process, also if nobody reads standard error."""

    def write() -> None:
        os.write(2, message.encode(errors="replace"))
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()

    # in a thread, because a write to a full pipe would block for ever
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(2.0)
    os._exit(exit_code)


@final
@dataclass(eq=False)
class Watchdog:
    """Send this rank's heartbeat, watch its neighbours, and end this rank when any rank fails."""

    store: HeartbeatStore
    rank: int
    size: int
    silent_seconds: float = 20.0  # after which a silent rank is lost; must exceed any C call that holds the GIL
    stuck_seconds: float = 1800.0  # if no rank makes progress for so long, the run is deadlocked
    start_seconds: float = 600.0  # how much later than this rank another one may start
    clock: Callable[[], float] = time.monotonic  # seconds since any fixed moment
    end_process: Callable[[str, int], None] = end_process  # called with a message and an exit code

    def __post_init__(self) -> None:
        self.reason: FailureReason | None = None  # the reason of all ranks; None while no rank has failed
        self._interval_seconds = min(1.0, self.silent_seconds / 10)
        self._stay_seconds = 0.0 if self.rank else 3 * self._interval_seconds  # how much longer rank 0 stays
        following = {(self.rank + i) % self.size for i in range(1, NUM_NEIGHBOURS + 1)}
        self._neighbours = sorted({0, *following} - {self.rank})
        self._phases = (0, "starting")
        self._count = 0
        self._beats: dict[int, Heartbeat] = {}  # rank -> its newest heartbeat
        self._unchanged_reads: dict[int, int] = {}  # neighbour -> reads of the store since its last new heartbeat
        self._time = self.clock()
        self._awake_seconds = 0.0  # time since the start, without the time in which this process was suspended
        self._progress: object = None
        self._progress_at = 0.0
        self._read_at: float | None = None  # awake seconds at the last answer of the store; None before the first
        self._proposed: FailureReason | None = None  # the reason that this rank writes, unless there is one
        self._tried: FailureReason | None = None  # the reason that the last exchange could write
        self._raises = False  # True once the main thread raises the reason
        self._ends_at = 0.0
        self._changed = threading.Condition(threading.RLock())
        """guards the fields above; notified when there is a reason, or one to write"""
        self._closed = False

    def start(self) -> None:
        """Start two threads, because a call to a store whose host is gone may never return."""
        for target in (self._exchange_until_closed, self._check_time_until_closed):
            threading.Thread(target=target, daemon=True).start()

    def close(self) -> None:
        """End the watch without a failure. Every rank must have arrived here: call it after a barrier."""
        self._closed = True

    def set_phase(self, phase: str) -> None:
        """Set the main thread's activity, such as "step 12: saving", which counts as progress too."""
        self._phases = (self._phases[0] + 1, phase[:200])

    def fail(self, message: str, exit_code: int) -> FailureReason:
        """Write this rank's own failure. Returns the reason of all ranks, which may be one that was written before."""
        beat = self._own_heartbeat()
        verb = "stopped" if exit_code == TemporaryFailure.exit_code else "failed"
        text = f"{beat.name()} {verb} at: {beat.phase}\n{message[:8000]}"
        return self._agree(FailureReason(self.rank, text, exit_code))

    def explain(self, error: BaseException) -> FailureReason:
        """Return a broken collective's reason, after the time in which a lost rank would be noticed."""
        with self._changed:
            self._raises = True
            limit = self.silent_seconds + 3 * self._interval_seconds
            self._changed.wait_for(lambda: self.reason is not None, limit)
            lines = _status_lines(self._all_heartbeats())
        message = f"{self._own_heartbeat().name()} cannot go on, although every rank is heard of: {str(error)[:8000]}"
        return self._agree(FailureReason(None, f"{message}\n{lines}\n{RETRY_HINT}"))

    def _agree(self, own: FailureReason) -> FailureReason:
        """Write a reason, unless there is one, and return the reason of all ranks."""
        with self._changed:
            self._raises = True
            self.propose(own)
            self._changed.wait_for(lambda: self.reason is not None, SETTLE_SECONDS)
            reason = self._set_reason(own)
        time.sleep(self._stay_seconds)
        return reason

    def propose(self, reason: FailureReason) -> None:
        """Have the next `exchange` write a reason, unless there is one."""
        with self._changed:
            self._proposed = reason
            self._changed.notify_all()

    def exchange(self) -> None:
        """Carry out the rule once. Raises RuntimeError: the store is unreachable."""
        self._tried = self._proposed
        self._count += 1
        own = self._own_heartbeat()
        # all ranks only in a possible deadlock: their heartbeats show whether none moves, at a cost of size^2 reads
        others = [rank for rank in range(self.size) if rank != self.rank]
        ranks = self._neighbours if own.idle_seconds < self.stuck_seconds else others
        self.store.set(f"rank {self.rank}", json.dumps(asdict(own)))
        text, *beats = self.store.get(["reason", *(f"rank {rank}" for rank in ranks)])
        with self._changed:
            self._read_at = self._awake_seconds
            for beat in beats:
                self._receive(beat)
            proposed = self._proposed or self._find_failure()
        if not text and proposed is not None:
            text = self.store.set_if_absent("reason", json.dumps(asdict(proposed)))
        if text:
            self._set_reason(FailureReason(**json.loads(text)))

    def check_time(self) -> None:
        """Measure idleness and the store's silence, and end the process if it should have ended by itself."""
        with self._changed:
            now = self.clock()
            self._awake_seconds += min(now - self._time, 1.0)  # in the rest of a longer time it was suspended
            self._time = now
            progress = (self._phases, progress_count())
            if progress != self._progress:
                self._progress = progress
                self._progress_at = self._awake_seconds
            # the first connection gets more time, because torch resolves host names and DNS may be slow
            limit = self.start_seconds if self._read_at is None else self.silent_seconds
            if self.reason is None and self._awake_seconds > (self._read_at or 0.0) + limit:
                self._set_reason(self._store_unreachable())
            if self.reason is not None and self._awake_seconds > self._ends_at:
                self.end_process("" if self._raises else f"\nlorakit: {self.reason}\n", self.reason.exit_code)

    def _set_reason(self, reason: FailureReason) -> FailureReason:
        """Let a reason be that of all ranks, unless there is one. Returns the one there is."""
        with self._changed:
            if self.reason is None:
                self.reason = reason
                if reason.dump_stacks:  # in a thread, because the write blocks if standard error is a full pipe
                    threading.Thread(target=faulthandler.dump_traceback, args=(2,), daemon=True).start()
            limit = EXIT_SECONDS if self._raises else RAISE_SECONDS
            self._ends_at = self._awake_seconds + limit + self._stay_seconds
            self._changed.notify_all()
            return self.reason

    def _receive(self, text: str) -> None:
        if text:
            beat = Heartbeat(**json.loads(text))
            if beat.rank not in self._beats or beat.count > self._beats[beat.rank].count:  # not one read long ago
                self._beats[beat.rank] = beat
                self._unchanged_reads[beat.rank] = 0
            else:
                self._unchanged_reads[beat.rank] += 1

    def _find_failure(self) -> FailureReason | None:
        """Return the failure that the heartbeats show, or None."""
        silent_reads = self.silent_seconds / self._interval_seconds
        if max(self._unchanged_reads.values(), default=0) > silent_reads:
            # ranks of one machine stop together, but their last heartbeats differ by up to an interval
            lost = [self._beats[rank] for rank, reads in self._unchanged_reads.items() if reads > silent_reads - 2]
            names = ", ".join(beat.name() for beat in lost)
            return FailureReason(
                lost[0].rank,
                f"{names} {'has' if len(lost) == 1 else 'have'} not been heard of for {self.silent_seconds:.0f} s:"
                f" killed, stopped, or cut off.\nLast heard of at: {lost[0].position()}.\n{RETRY_HINT}",
            )
        missing = [rank for rank in self._neighbours if rank not in self._beats]
        if missing and self._awake_seconds > self.start_seconds:
            return FailureReason(
                missing[0],
                f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} gave no sign of life for"
                f" {self.start_seconds:.0f} s: not started, or unable to reach {self.store.address}.\n{RETRY_HINT}",
            )
        beats = self._all_heartbeats()
        idle_seconds = min(beat.idle_seconds for beat in beats)
        if len(beats) == self.size and idle_seconds >= self.stuck_seconds:
            return _deadlocked(beats, idle_seconds)
        return None

    def _store_unreachable(self) -> FailureReason:
        first = self._beats.get(0)  # of the usual host
        last = f"\n{first.name()} was last at: {first.position()}." if first else ""
        return FailureReason(
            None,
            f"{self.store.address}, where the ranks meet, did not answer for {self.silent_seconds:.0f} s: killed,"
            f" stopped, or cut off.{last}\n{RETRY_HINT}",
        )

    def _own_heartbeat(self) -> Heartbeat:
        idle_seconds = self._awake_seconds - self._progress_at
        return Heartbeat(self.rank, self._count, socket.gethostname(), os.getpid(), *self._phases, idle_seconds)

    def _all_heartbeats(self) -> list[Heartbeat]:
        return [beat for _, beat in sorted({**self._beats, self.rank: self._own_heartbeat()}.items())]

    def _exchange_until_closed(self) -> None:
        while not self._closed and self.reason is None:
            with contextlib.suppress(RuntimeError):  # the other thread measures for how long the store is unreachable
                self.exchange()
            with self._changed:
                self._changed.wait_for(lambda: self._proposed is not self._tried, self._interval_seconds)

    def _check_time_until_closed(self) -> None:
        while not self._closed:
            time.sleep(self._interval_seconds / 4)
            self.check_time()


def _status_lines(beats: Sequence[Heartbeat]) -> str:
    """Return each rank's phase, one rank per line."""
    return "\n".join(f"{beat.name()}: {beat.position()}" for beat in beats)


def _deadlocked(beats: Sequence[Heartbeat], seconds: float) -> FailureReason:
    """Return the reason for ranks that all run and make no progress; names the ranks that are behind the others."""
    least = min(beat.num_phases for beat in beats)
    behind = [beat for beat in beats if beat.num_phases == least]
    rank = behind[0].rank if len(behind) == 1 else None
    names = ", ".join(beat.name() for beat in behind)
    last = f"\nBehind the others: {names}." if len(behind) < len(beats) else ""
    message = f"no rank moved for {seconds:.0f} s:\n{_status_lines(beats)}{last}\n{RETRY_HINT}"
    return FailureReason(rank, message, dump_stacks=True)
