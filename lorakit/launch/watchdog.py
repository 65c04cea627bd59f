"""The ranks of a run notice each other's failures, whatever launched them: each says about once a second that it lives.

Invariant: no other machine's clock is read. A rank is silent when its count has not grown for so many seconds that
this process was awake itself, so a job that is stopped and continued as a whole raises no alarm.

Two threads, because a store whose host is gone may never answer: one talks with the store, the other only looks at the
time, and ends the process also when the main thread is blocked inside a collective.
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

from torch.distributed.distributed_c10d import Store

from lorakit.errors import TemporaryFailure
from lorakit.launch import heartbeat
from lorakit.launch.heartbeat import FailureReason, Heartbeat, Peers
from lorakit.launch.heartbeat_store import HeartbeatStore

_NEIGHBOURS: Final = 8  # a rank listens to rank 0 and the next 8: whatever group dies, a survivor is before it
_SETTLE_SECONDS: Final = 5.0  # for the others to read the reason before a process, and maybe the store with it, goes
_LAST_SECONDS: Final = 10.0  # for the main thread to end by itself once it was told
_STEP: Final = re.compile(r"step (\d+)")


@final
class Watchdog:
    """Every rank says that it lives and where it is; when one fails, is gone or stands still, all end and say why.

    store: a TCPStore, or PrefixStore over one, that no other Watch used; only connections made from it are used.
    silent_seconds: a rank not heard of for so long is gone. Longer than any C call that keeps the interpreter's lock.
    stuck_seconds: no rank has come to another phase for so long: a deadlock.
    start_seconds: how much later than this rank another one may start.
    grace_seconds: for the main thread to raise, once a reason is known, before the process is ended under it.
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
        self._every_seconds = min(1.0, silent_seconds / 10)
        others = {0, *((rank + i) % size for i in range(1, _NEIGHBOURS + 1))} - {rank}
        self._neighbours = sorted(other for other in others if other < size)
        self._others = Peers(self._neighbours)
        self._board = HeartbeatStore(store)
        self._who = (
            socket.gethostname(),
            os.getpid(),
            heartbeat.machine_id(),
            heartbeat.process_start_time(os.getpid()),
        )
        self._place = self._seen_place = (-1, 0, "starting")  # step, calls of at() since it began, phase
        self._news = threading.Condition()
        self._now = self._moved = self._answered = 0.0  # in seconds this process was awake since start()
        self._tried, self._failed = -1.0, False  # when the last round that is over began, and how it went
        self._count = self._num_ended = self._num_knowing = 0
        self._offered: tuple[FailureReason, float] | None = None  # to be said in the store, which keeps the first
        self._reason: tuple[FailureReason, float] | None = None
        self._main_notified: float | None = None  # when the main thread asked: it prints the words itself
        self._reached = self._ended = self._said_ended = self._said_knowing = self._stopped = False
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._exchange_loop, self._watch_loop)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def set_phase(self, phase: str) -> None:
        """Where the main thread is: "step 12: backward", "loading the base". Every call counts as progress."""
        step, calls, _ = self._place
        named = _STEP.match(phase)
        now_at = int(named[1]) if named else step
        self._place = (now_at, calls + 1 if now_at == step else 0, phase[:200])

    def close(self) -> None:
        """This rank ends well; rank 0, with whom the store may go, waits until the others do or have read so."""

        def is_said() -> bool:
            return self._said_ended and (self.rank > 0 or self._num_ended >= self.size)

        with self._news:
            if self._reason or self._ended:
                return
            self._ended = True
            self._news.notify_all()
            self._news.wait_for(lambda: is_said() or self._is_over(), min(3.0, 4 * self._every_seconds))
            self._stopped = True
            self._news.notify_all()
        for thread in self._threads:
            thread.join(2 * self._every_seconds)

    def fail(self, message: str, exit_code: int) -> FailureReason:
        """The reason all ranks end with, once they know it: this one, or what another rank said before."""
        verb = "stopped" if exit_code == TemporaryFailure.exit_code else "failed"
        me = self._beat()
        return self._agree_on_reason(
            FailureReason(self.rank, f"{me.name()} {verb} at: {me.phase}\n{message[:8000]}", exit_code)
        )

    def explain(self, error: BaseException) -> FailureReason:
        """Why a collective failed here: another rank's failure, waited for; else the error, and where the ranks are."""
        with self._news:
            self._main_notified = self._now
            limit = self._silent_seconds + 3 * self._every_seconds
            self._news.wait_for(lambda: self._offered or self._reason or self._is_over(), limit)
            where = heartbeat.places(self._all())
        words = f"{self._beat().name()} cannot go on, although every rank is heard of: {str(error)[:8000]}"
        return self._agree_on_reason(FailureReason(None, f"{words}\n{where}\n{heartbeat.RETRY_HINT}"))

    def _agree_on_reason(self, own: FailureReason) -> FailureReason:
        """Offers a reason and waits until the others know which one holds."""
        with self._news:
            self._main_notified = self._now
            offered, since = self._offered = self._offered or (own, self._now)
            self._news.notify_all()
            self._news.wait_for(lambda: self._is_known() or self._is_alone(since), _SETTLE_SECONDS)
            if self.rank == 0:
                self._news.wait_for(lambda: False, self._every_seconds / 2)  # for the others to see that all know
            return self._adopt(offered)

    def _adopt(self, reason: FailureReason) -> FailureReason:
        if self._reason is None:
            self._reason = (reason, self._now)
            self._news.notify_all()
            if reason.stacks:  # from a thread: nobody may be reading what is printed
                threading.Thread(target=faulthandler.dump_traceback, args=(2,), daemon=True).start()
        return self._reason[0]

    def _exchange_loop(self) -> None:
        while not self._stopped:
            began, failed = self._now, True
            with contextlib.suppress(RuntimeError, OSError):  # the store's; how long it lasts is for the other thread
                if self._has_to_talk():
                    self._exchange()
                failed = False
            with self._news:
                self._tried, self._failed = began, failed
                self._news.notify_all()
                if not self._stopped:
                    self._news.wait(self._every_seconds / (4 if self._offered or self._reason else 1))

    def _exchange(self) -> None:
        self._count += 1
        mine, all_others = self._beat(), [rank for rank in range(self.size) if rank != self.rank]
        ranks = all_others if mine.still_seconds >= self._stuck_seconds else self._neighbours
        offered = self._offered[0] if self._offered and not self._reason else None
        knowing = self._reason is not None
        news = self._board.exchange(mine, ranks, offered, knowing)
        with self._news:
            self._said_ended, self._said_knowing = mine.ended, knowing
            self._reached, self._answered = True, self._now
            self._num_ended, self._num_knowing = news.num_ended, news.num_knowing
            self._others.hear(news.beats, self._now)
            if news.reason:
                self._adopt(news.reason)

    def _watch_loop(self) -> None:
        before = time.monotonic()
        while not self._stopped:
            time.sleep(self._every_seconds / 4)
            before, passed = time.monotonic(), time.monotonic() - before
            with self._news:
                self._now += min(passed, 1.0)  # more is time in which this process was stopped
                if self._seen_place is not self._place:
                    self._seen_place, self._moved = self._place, self._now
                verdict = None if self._reason or self._offered or self._ended else self._verdict()
                if verdict:
                    self._offered = (verdict, self._now)
                    self._news.notify_all()
                if self._offered and self._is_alone(self._offered[1]):
                    self._adopt(self._offered[0])
            if self._reason:
                self._end_when_due(*self._reason)

    def _end_when_due(self, reason: FailureReason, known: float) -> None:
        if self._main_notified is None and self._now > known + self._grace_seconds:
            _end(f"\nlorakit: {reason}\n", reason.exit_code)
        if self._main_notified is not None and self._now > max(known, self._main_notified) + _LAST_SECONDS:
            _end("", reason.exit_code)

    def _verdict(self) -> FailureReason | None:
        if self._is_over():
            return self._stuck()
        if gone := self._others.process_died(self._who[2], self._now, self._has_looked):
            return heartbeat.gone(gone)
        if self._cut_off():
            first = self._others.beats.get(0)
            return heartbeat.store_unreachable(self._board.address, self._silent_seconds, first, self.size)
        almost = self._silent_seconds - 2 * self._every_seconds
        if silent := self._others.heartbeat_lost(self._answered, self._silent_seconds, almost):
            return heartbeat.silent(silent, self._silent_seconds)
        if self._answered > self._start_seconds and (absent := self._others.never_started()):
            return heartbeat.absent(absent, self._board.address, self._start_seconds)
        return self._stuck()

    def _stuck(self) -> FailureReason | None:
        everyone = [self._beat()] if self._is_over() else self._all()
        still = min(beat.still_seconds for beat in everyone if not beat.ended)
        nobody = still >= self._stuck_seconds and (self._is_over() or len(everyone) == self.size)
        return heartbeat.deadlocked(everyone, still) if nobody else None

    def _is_over(self) -> bool:
        """Whether rank 0 ended well: nothing can be told any more, and the store may go with it."""
        return 0 in self._others.beats and self._others.beats[0].ended

    def _has_to_talk(self) -> bool:
        """Whether anything is left to say or to learn; torch prints pages when it finds the store gone."""
        waiting = self._main_notified is not None and not self._is_known()
        return not self._is_over() and (self._reason is None or not self._said_knowing or waiting)

    def _cut_off(self) -> bool:
        """Whether the store is out of reach."""
        limit = self._silent_seconds if self._reached else self._start_seconds  # connecting: as slow as DNS
        return self._now > self._answered + limit

    def _has_looked(self, since: float) -> bool:
        """Whether what others wrote before then would be known here, or nothing can be learned any more."""
        return self._tried > since or self._now > since + _SETTLE_SECONDS or self._cut_off()

    def _is_alone(self, since: float) -> bool:
        """Whether what was offered then cannot be told."""
        refused = self._failed and self._tried > since
        return refused or self._now > since + _SETTLE_SECONDS or self._cut_off() or self._is_over()

    def _is_known(self) -> bool:
        """Whether every rank that can read knows the reason."""
        lost = self._reason[0].num_lost if self._reason else -self.size
        return self._num_knowing + self._num_ended + lost >= self.size

    def _beat(self) -> Heartbeat:
        return Heartbeat(self.rank, self._count, *self._who, *self._place, self._now - self._moved, self._ended)

    def _all(self) -> list[Heartbeat]:
        return [beat for _, beat in sorted({**self._others.beats, self.rank: self._beat()}.items())]


def _end(words: str, exit_code: int) -> None:
    """Ends this process at once; what it says must not keep it, should nobody read it."""

    def say() -> None:
        os.write(2, words.encode(errors="replace"))
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()

    try:
        speaker = threading.Thread(target=say, daemon=True)
        speaker.start()
        speaker.join(2.0)
    finally:
        os._exit(exit_code)
