"""Detect that a rank failed, under any launcher, and make all ranks exit with the same reason and exit code.

Invariant: no other machine's clock is read. A rank counts as lost when its heartbeat count has not grown for a number
of seconds that this process was itself awake. So a job that is suspended and continued as a whole raises no alarm.

Two threads, because a call to a store whose host is gone may never return. One exchanges heartbeats with the store. The
other compares times only, and ends the process even if the main thread is blocked inside a collective.
"""

import contextlib
import faulthandler
import os
import re
import socket
import sys
import threading
import time
from typing import Final, final

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from lorakit.errors import TemporaryFailure
from lorakit.launch import heartbeat
from lorakit.launch.heartbeat import FailureReason, Heartbeat, Peers
from lorakit.launch.heartbeat_store import HeartbeatStore

_NUM_NEIGHBOURS: Final = 8
"""A rank watches rank 0 and the next 8 ranks. If several ranks die together, the rank before them notices."""
_SETTLE_SECONDS: Final = 5.0
"""For the others to read a reason before this process ends, because the store may end with it."""
_EXIT_SECONDS: Final = 10.0
"""For the main thread to exit by itself after it has received the reason."""
_STEP: Final = re.compile(r"step (\d+)")


def is_collective_error(error: BaseException) -> bool:
    """True if an error may follow from another rank's failure, which `Watchdog.explain` then finds.

    Source: messages of torch 2.13's gloo when a peer is killed, stopped or gone. NCCL's errors are DistBackendErrors.
    """
    is_from_backend = any(word in str(error) for word in ("gloo/", "monitoredBarrier", "NCCL"))
    return isinstance(error, DistError) or (type(error) is RuntimeError and is_from_backend)


@final
class Watchdog:
    """Send this rank's heartbeat, watch its peers, and end this rank with the common reason when any rank fails.

    store: a TCPStore, or a PrefixStore over one, that no other Watchdog uses. Only clones of it are used.
    silent_seconds: after so long without a heartbeat a rank is lost. Must exceed any C call that holds the GIL.
    stuck_seconds: after so long without a new phase on any rank the run is deadlocked.
    start_seconds: how much later than this rank another one may start.
    grace_seconds: from a known reason until the process is ended, unless the main thread reacts before.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        silent_seconds: float = 20.0,
        stuck_seconds: float = 1800.0,
        start_seconds: float = 600.0,
        grace_seconds: float = 3.0,
    ) -> None:
        self.rank, self.size = rank, size
        self._silent_seconds, self._stuck_seconds = silent_seconds, stuck_seconds
        self._start_seconds, self._grace_seconds = start_seconds, grace_seconds
        self._interval_seconds = min(1.0, silent_seconds / 10)
        neighbours = {0, *((rank + i) % size for i in range(1, _NUM_NEIGHBOURS + 1))} - {rank}
        self._neighbours = sorted(other for other in neighbours if other < size)
        self._peers = Peers(self._neighbours)
        self._store = HeartbeatStore(store)
        pid = os.getpid()
        self._identity = (socket.gethostname(), pid, heartbeat.pid_namespace_id(), heartbeat.process_start_time(pid))
        self._position = self._last_position = (-1, 0, "starting")
        """step, number of set_phase calls since the step began, phase"""
        self._changed = threading.Condition()
        """guards the fields below, and is notified when one of them changes"""
        self._now = self._progress_at = self._store_read_at = 0.0
        """seconds that this process was awake since start()"""
        self._round_began_at, self._round_failed = -1.0, False
        """start and outcome of the last finished exchange with the store"""
        self._count = self._num_closed = self._num_acknowledged = 0
        self._proposed: tuple[FailureReason, float] | None = None
        """reason to be written to the store, which keeps the first one; and since when"""
        self._reason: tuple[FailureReason, float] | None = None
        """reason that holds for all ranks, and since when"""
        self._main_notified_at: float | None = None
        """when the main thread called fail() or explain(): it prints the reason itself; None before"""
        self._has_connected = self._closed = self._sent_closed = self._sent_acknowledgement = self._stopped = False
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._exchange_loop, self._watch_loop)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def set_phase(self, phase: str) -> None:
        """Set the main thread's phase, as "step 12: backward" or "loading the base". Every call counts as progress."""
        last_step, calls, _ = self._position
        match = _STEP.match(phase)
        step = int(match[1]) if match else last_step
        self._position = (step, calls + 1 if step == last_step else 0, phase[:200])

    def close(self) -> None:
        """End the watch without a failure. Rank 0 waits until all have closed, because it may host the store."""

        def is_sent() -> bool:
            return self._sent_closed and (self.rank > 0 or self._num_closed >= self.size)

        with self._changed:
            if self._reason or self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: is_sent() or self._rank_0_closed(), min(3.0, 4 * self._interval_seconds))
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(2 * self._interval_seconds)

    def fail(self, message: str, exit_code: int) -> FailureReason:
        """Return the reason that holds for all ranks: this failure, or the one that another rank wrote first."""
        verb = "stopped" if exit_code == TemporaryFailure.exit_code else "failed"
        own = self._own_heartbeat()
        return self._agree_on_reason(
            FailureReason(self.rank, f"{own.name()} {verb} at: {own.phase}\n{message[:8000]}", exit_code)
        )

    def explain(self, error: BaseException) -> FailureReason:
        """Return the reason for a failed collective, waiting until another rank's failure can have been noticed.

        If every rank still runs, the reason is the error itself, with the phase of each rank.
        """
        with self._changed:
            self._main_notified_at = self._now
            limit = self._silent_seconds + 3 * self._interval_seconds
            self._changed.wait_for(lambda: self._proposed or self._reason or self._rank_0_closed(), limit)
            lines = heartbeat.status_lines(self._all_heartbeats())
        message = f"{self._own_heartbeat().name()} cannot go on, although every rank is heard of: {str(error)[:8000]}"
        return self._agree_on_reason(FailureReason(None, f"{message}\n{lines}\n{heartbeat.RETRY_HINT}"))

    def _agree_on_reason(self, own: FailureReason) -> FailureReason:
        """Propose a reason, and wait until every rank has acknowledged the one that holds."""
        with self._changed:
            self._main_notified_at = self._now
            proposed, since = self._proposed = self._proposed or (own, self._now)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._all_acknowledged() or self._cannot_share(since), _SETTLE_SECONDS)
            if self.rank == 0:
                # the others read the number of acknowledgements once more, and the store may end with rank 0
                self._changed.wait_for(lambda: False, self._interval_seconds / 2)
            return self._set_reason(proposed)

    def _set_reason(self, reason: FailureReason) -> FailureReason:
        if self._reason is None:
            self._reason = (reason, self._now)
            self._changed.notify_all()
            if reason.dump_stacks:  # in a thread, because the write blocks if standard error is a full pipe
                threading.Thread(target=faulthandler.dump_traceback, args=(2,), daemon=True).start()
        return self._reason[0]

    def _exchange_loop(self) -> None:
        while not self._stopped:
            began_at, failed = self._now, True
            # an unreachable store raises; the other thread measures for how long
            with contextlib.suppress(RuntimeError, OSError):
                if self._needs_exchange():
                    self._exchange()
                failed = False
            with self._changed:
                self._round_began_at, self._round_failed = began_at, failed
                self._changed.notify_all()
                if not self._stopped:
                    self._changed.wait(self._interval_seconds / (4 if self._proposed or self._reason else 1))

    def _exchange(self) -> None:
        self._count += 1
        own, all_others = self._own_heartbeat(), [rank for rank in range(self.size) if rank != self.rank]
        # all ranks only in a possible deadlock: their heartbeats show whether nobody moves, at a cost of size^2 reads
        ranks = all_others if own.idle_seconds >= self._stuck_seconds else self._neighbours
        proposed = self._proposed[0] if self._proposed and not self._reason else None
        acknowledged = self._reason is not None
        snapshot = self._store.exchange(own, ranks, proposed, acknowledged)
        with self._changed:
            self._sent_closed, self._sent_acknowledgement = own.closed, acknowledged
            self._has_connected, self._store_read_at = True, self._now
            self._num_closed, self._num_acknowledged = snapshot.num_closed, snapshot.num_acknowledged
            self._peers.receive(snapshot.heartbeats, self._now)
            if snapshot.reason:
                self._set_reason(snapshot.reason)

    def _watch_loop(self) -> None:
        before = time.monotonic()
        while not self._stopped:
            time.sleep(self._interval_seconds / 4)
            before, passed = time.monotonic(), time.monotonic() - before
            with self._changed:
                self._now += min(passed, 1.0)  # in the rest of a longer time this process was suspended
                if self._last_position is not self._position:
                    self._last_position, self._progress_at = self._position, self._now
                reason = None if self._reason or self._proposed or self._closed else self._diagnose()
                if reason:
                    self._proposed = (reason, self._now)
                    self._changed.notify_all()
                if self._proposed and self._cannot_share(self._proposed[1]):
                    self._set_reason(self._proposed[0])
            if self._reason:
                self._exit_when_due(*self._reason)

    def _exit_when_due(self, reason: FailureReason, since: float) -> None:
        """End the process under a main thread that did not react to the reason in time."""
        if self._main_notified_at is None and self._now > since + self._grace_seconds:
            _exit_process(f"\nlorakit: {reason}\n", reason.exit_code)
        if self._main_notified_at is not None and self._now > max(since, self._main_notified_at) + _EXIT_SECONDS:
            _exit_process("", reason.exit_code)

    def _diagnose(self) -> FailureReason | None:
        """Return the reason to end, if a peer, the store or all progress is lost."""
        if self._rank_0_closed():
            return self._diagnose_deadlock()
        if died := self._peers.process_died(self._identity[2], self._now, self._has_exchanged_since):
            return heartbeat.process_died(died)
        if self._store_is_unreachable():
            first = self._peers.heartbeats.get(0)
            return heartbeat.store_unreachable(self._store.address, self._silent_seconds, first, self.size)
        almost = self._silent_seconds - 2 * self._interval_seconds
        # compared with the last successful read: while the store does not answer, no peer can be called silent
        if lost := self._peers.heartbeat_lost(self._store_read_at, self._silent_seconds, almost):
            return heartbeat.heartbeat_lost(lost, self._silent_seconds)
        if self._store_read_at > self._start_seconds and (missing := self._peers.never_started()):
            return heartbeat.never_started(missing, self._store.address, self._start_seconds)
        return self._diagnose_deadlock()

    def _diagnose_deadlock(self) -> FailureReason | None:
        beats = [self._own_heartbeat()] if self._rank_0_closed() else self._all_heartbeats()
        idle_seconds = min(beat.idle_seconds for beat in beats if not beat.closed)
        is_complete = self._rank_0_closed() or len(beats) == self.size
        if not is_complete or idle_seconds < self._stuck_seconds:
            return None
        return heartbeat.deadlocked(beats, idle_seconds)

    def _rank_0_closed(self) -> bool:
        """True if rank 0 ended without a failure; the store, which it may host, is then not used any more."""
        return 0 in self._peers.heartbeats and self._peers.heartbeats[0].closed

    def _needs_exchange(self) -> bool:
        """True if this rank still has to write or read: torch logs pages when a call fails, so none is made in vain."""
        waits = self._main_notified_at is not None and not self._all_acknowledged()
        return not self._rank_0_closed() and (self._reason is None or not self._sent_acknowledgement or waits)

    def _store_is_unreachable(self) -> bool:
        # the first connection gets more time, because torch resolves host names and DNS may be slow
        limit = self._silent_seconds if self._has_connected else self._start_seconds
        return self._now > self._store_read_at + limit

    def _has_exchanged_since(self, since: float) -> bool:
        """True if everything that was written to the store before ``since`` has been read, or never will be."""
        return self._round_began_at > since or self._now > since + _SETTLE_SECONDS or self._store_is_unreachable()

    def _cannot_share(self, since: float) -> bool:
        """True if a reason proposed at ``since`` cannot reach the other ranks."""
        failed = self._round_failed and self._round_began_at > since
        return failed or self._now > since + _SETTLE_SECONDS or self._store_is_unreachable() or self._rank_0_closed()

    def _all_acknowledged(self) -> bool:
        """True if every rank that can still read the store has read the reason."""
        num_lost = self._reason[0].num_lost if self._reason else -self.size
        return self._num_acknowledged + self._num_closed + num_lost >= self.size

    def _own_heartbeat(self) -> Heartbeat:
        idle_seconds = self._now - self._progress_at
        return Heartbeat(self.rank, self._count, *self._identity, *self._position, idle_seconds, self._closed)

    def _all_heartbeats(self) -> list[Heartbeat]:
        return [beat for _, beat in sorted({**self._peers.heartbeats, self.rank: self._own_heartbeat()}.items())]


def _exit_process(message: str, exit_code: int) -> None:
    """Print the message and end this process, also if nobody reads standard error."""

    def write() -> None:
        os.write(2, message.encode(errors="replace"))
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()

    try:
        # in a thread, because a write to a full pipe would block for ever
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(2.0)
    finally:
        os._exit(exit_code)
