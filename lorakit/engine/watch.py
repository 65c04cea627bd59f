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

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from lorakit.engine import beats
from lorakit.engine.beats import Beat, Reason
from lorakit.engine.board import Board
from lorakit.errors import TryAgainLater

_NEIGHBOURS: Final = 8  # a rank listens to the next 8: whatever group dies, a survivor is before it; traffic is linear
_SETTLE_SECONDS: Final = 5.0  # for the others to read the reason before a process, and maybe the store with it, goes
_LAST_SECONDS: Final = 10.0  # for the main thread to end by itself once it was told
_STEP: Final = re.compile(r"step (\d+)")


@final
class Watch:
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
        self._neighbours = [(rank + i) % size for i in range(1, min(size - 1, _NEIGHBOURS) + 1)]
        self._board = Board(store)
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._machine, self._born = beats.this_machine(), beats.born(self._pid)
        self._place = self._seen_place = (-1, 0, "starting")  # step, calls of at() since it began, phase
        self._news = threading.Condition()
        self._now = self._moved = self._answered = 0.0  # in seconds this process was awake since start()
        self._tried, self._failed = -1.0, False  # when the last round that is over began, and how it went
        self._count = self._num_ended = self._num_knowing = 0
        self._beats: dict[int, Beat] = {}
        self._heard: dict[int, float] = {}
        self._missed: dict[int, float] = {}  # rank -> since when its process is gone from this machine
        self._offered: tuple[Reason, float] | None = None  # to be said in the store, which keeps the first
        self._reason: tuple[Reason, float] | None = None
        self._told: float | None = None  # when the main thread asked: it prints the words itself
        self._reached = self._ended = self._stopped = False
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._talk, self._judge)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def at(self, phase: str) -> None:
        """Where the main thread is: "step 12: backward", "loading the base". Every call counts as progress."""
        step, calls, _ = self._place
        named = _STEP.match(phase)
        now_at = int(named[1]) if named else step
        self._place = (now_at, calls + 1 if now_at == step else 0, phase[:200])

    def close(self) -> None:
        """This rank ends well; waits seconds for the others to end or to read so. Does nothing after a failure."""
        with self._news:
            if self._reason or self._ended:
                return
            self._ended = True
            self._news.notify_all()
            self._news.wait_for(lambda: self._num_ended >= self.size, min(3.0, 4 * self._every_seconds))
            self._stopped = True
            self._news.notify_all()
        for thread in self._threads:
            thread.join(2 * self._every_seconds)

    def fail(self, message: str, exit_code: int) -> Reason:
        """The reason all ranks end with, once they know it: this one, or what another rank said before."""
        verb = "stopped" if exit_code == TryAgainLater.exit_code else "failed"
        me = self._beat()
        return self._settle(Reason(self.rank, f"{me.name()} {verb} at: {me.phase}\n{message[:8000]}", exit_code))

    def explain(self, error: BaseException) -> Reason:
        """Why a collective failed here: another rank's failure, waited for; else the error, and where the ranks are."""
        with self._news:
            self._told = self._now
            self._news.wait_for(lambda: self._offered or self._reason, self._silent_seconds + 3 * self._every_seconds)
            where = beats.places(self._all())
        words = f"{self._beat().name()} cannot go on, although every rank is heard of: {str(error)[:8000]}"
        return self._settle(Reason(None, f"{words}\n{where}\n{beats.AGAIN}"))

    def _settle(self, own: Reason) -> Reason:
        """Offers a reason and waits until the others know which one holds."""
        with self._news:
            self._told = self._now
            offered, since = self._offered = self._offered or (own, self._now)
            self._news.notify_all()
            self._news.wait_for(lambda: self._is_known() or self._is_alone(since), _SETTLE_SECONDS)
            return self._adopt(offered)

    def _adopt(self, reason: Reason) -> Reason:
        if self._reason is None:
            self._reason = (reason, self._now)
            self._news.notify_all()
            if reason.stacks:  # from a thread: nobody may be reading what is printed
                threading.Thread(target=faulthandler.dump_traceback, args=(2,), daemon=True).start()
        return self._reason[0]

    def _talk(self) -> None:
        while not self._stopped:
            began, failed = self._now, True
            with contextlib.suppress(RuntimeError, OSError):  # the store's; how long it lasts is for the other thread
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
        news = self._board.exchange(mine, ranks, offered, knowing=self._reason is not None)
        with self._news:
            self._reached, self._answered = True, self._now
            self._num_ended, self._num_knowing = news.num_ended, news.num_knowing
            for rank, beat in news.beats.items():
                if rank not in self._beats or self._beats[rank].count != beat.count:
                    self._beats[rank], self._heard[rank] = beat, self._now
            if news.reason:
                self._adopt(news.reason)

    def _judge(self) -> None:
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

    def _end_when_due(self, reason: Reason, known: float) -> None:
        if self._told is None and self._now > known + self._grace_seconds:
            _end(f"\nlorakit: {reason}\n", reason.exit_code)
        if self._told is not None and self._now > max(known, self._told) + _LAST_SECONDS:
            _end("", reason.exit_code)

    def _verdict(self) -> Reason | None:
        live = [self._beats[rank] for rank in self._neighbours if rank in self._beats and not self._beats[rank].ended]
        for beat in live:
            if beat.rank not in self._missed and beat.has_left(self._machine):
                self._missed[beat.rank] = self._now
        left = [beat for beat in live if beat.rank in self._missed]
        gone = [beat for beat in left if self._has_looked(self._missed[beat.rank]) or self._cut_off()]
        if gone:
            return beats.gone(gone)
        if self._cut_off():
            return beats.unreachable(self._board.address, self._silent_seconds, self._beats.get(0), self.size)
        silence = {beat.rank: self._answered - self._heard[beat.rank] for beat in live}
        if max(silence.values(), default=0.0) > self._silent_seconds:
            almost = self._silent_seconds - 2 * self._every_seconds  # what died together is named together
            return beats.silent([beat for beat in live if silence[beat.rank] > almost], self._silent_seconds)
        absent = [rank for rank in self._neighbours if rank not in self._beats]
        if absent and self._answered > self._start_seconds:
            return beats.absent(absent, self._board.address, self._start_seconds)
        return self._stuck()

    def _stuck(self) -> Reason | None:
        everyone = self._all()
        still = min(beat.still_seconds for beat in everyone if not beat.ended)
        nobody = len(everyone) == self.size and still >= self._stuck_seconds
        return beats.stuck(everyone, still) if nobody else None

    def _cut_off(self) -> bool:
        """Whether the store is out of reach; once a rank ended well, its host may have ended well too."""
        limit = self._silent_seconds if self._reached else self._start_seconds  # connecting: as slow as DNS
        return self._now > self._answered + limit and self._num_ended == 0

    def _has_looked(self, since: float) -> bool:
        """Whether what others wrote before then would be known here, or nothing can be learned any more."""
        return self._tried > since or self._now > since + _SETTLE_SECONDS

    def _is_alone(self, since: float) -> bool:
        """Whether what was offered then cannot be told."""
        return self._now > since + _SETTLE_SECONDS or self._cut_off() or (self._failed and self._tried > since)

    def _is_known(self) -> bool:
        """Whether every rank that can read knows the reason."""
        lost = self._reason[0].num_lost if self._reason else -self.size
        return self._num_knowing + self._num_ended + lost >= self.size

    def _beat(self) -> Beat:
        who = (self.rank, self._count, self._host, self._pid, self._machine, self._born)
        return Beat(*who, *self._place, self._now - self._moved, self._ended)

    def _all(self) -> list[Beat]:
        return [beat for _, beat in sorted({**self._beats, self.rank: self._beat()}.items())]


def is_collective_error(error: BaseException) -> bool:
    """Whether an error may be the echo of another rank's failure, so that ``Watch.explain`` should be asked.

    Source: what torch 2.13's gloo says when a peer is killed, stopped or gone; NCCL's errors are DistBackendErrors.
    """
    told = any(word in str(error) for word in ("gloo/", "monitoredBarrier", "NCCL"))
    return isinstance(error, DistError) or (type(error) is RuntimeError and told)


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
