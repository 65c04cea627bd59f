"""What the launchers of a run on several machines tell each other while it runs.

Once a second each says through the rendezvous' store that it is there. A machine that fails or falls silent is named by
the others, and the run ends, or starts again, on all.
"""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TypeVar, final

from lorakit.errors import TemporaryFailure
from lorakit.launch.exits import COMMAND, for_other_machines
from lorakit.launch.rendezvous import Place, host_is_gone, this_machine
from lorakit.launch.rendezvous_timeout import answered

T = TypeVar("T")
BEAT_SECONDS: Final = 1.0
HEAR_OUT_SECONDS: Final = 2.0  # a failure here may follow from one that another machine is about to report
LEAVE_SECONDS: Final = 10.0


class Over(Exception):
    """The run is over on this machine: the exit code, and what to say."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code, self.words = code, words


@dataclass(frozen=True)
class Failure:
    """Why a machine ends: how telling (less is more), the exit code, words, and whether the group may start again."""

    telling: int
    code: int
    why: str
    again: bool


@dataclass(frozen=True)
class News:
    """What one machine says of itself: ``running``, ``done``, ``failing`` or ``over``."""

    name: str = "which has not said its name"
    beats: int = -1
    state: str = "running"
    failure: Failure | None = None


@final
class Machines:
    """The launchers of one round, heard through the rendezvous' store; this one is number ``rank``."""

    def __init__(self, store: Any, rank: int, place: Place) -> None:
        self._store, self._rank, self._place = store, rank, place
        self._heard = {other: (News(), time.monotonic()) for other in range(place.nodes) if other != rank}
        self._beats, self._beaten, self._state = 0, 0.0, "running"
        self._lost = False

    def listen(self, state: str = "running") -> None:
        """Tell the others that this machine is there, and hear whether they are; at most once a second.

        Raises:
            Over: one of them has failed.
            TemporaryFailure: one of them, or the host of the store, has fallen silent.
        """
        if state == self._state and time.monotonic() - self._beaten < BEAT_SECONDS:
            return
        self._tell(state)
        for other, (before, since) in self._heard.items():
            news = self._hear(other)
            if news.state == "over" and news.failure is not None:
                raise Over(news.failure.code, f"{COMMAND} {_named(other, news)}: {news.failure.why}")
            if news.beats != before.beats:
                self._heard[other] = (news, time.monotonic())
            elif time.monotonic() - since > self._place.silent_seconds:
                raise TemporaryFailure(
                    f"{_named(other, news)} has not been heard of for {self._place.silent_seconds:g} s;"
                    " the last checkpoint is kept, the same command on every machine goes on"
                )

    def beat(self) -> None:
        """Tell the others that this machine is there, whatever became of them."""
        with contextlib.suppress(TemporaryFailure):
            if time.monotonic() - self._beaten >= BEAT_SECONDS:
                self._tell(self._state)

    def all_done(self) -> bool:
        """Whether every machine's workers have finished."""
        return self._state == "done" and all(self._hear(other).state == "done" for other in self._heard)

    def compare(self, failure: Failure) -> Failure:
        """The most telling of this failure and those that other machines report within a moment."""
        if not self._heard:
            return failure
        found = failure
        with contextlib.suppress(TemporaryFailure):
            self._tell("failing", failure)
            until = time.monotonic() + HEAR_OUT_SECONDS
            while time.monotonic() < until:
                for other in self._heard:
                    news = self._hear(other)
                    if news.failure is not None and news.failure.telling < found.telling:
                        why = f"{COMMAND} {_named(other, news)}: {news.failure.why}"
                        found = Failure(news.failure.telling, news.failure.code, why, news.failure.again)
                time.sleep(0.2)
        return found

    def leave(self, failure: Failure) -> None:
        """Tell the others why the run is over here; the host of the store stays until they know, or ten seconds."""
        with contextlib.suppress(TemporaryFailure):
            self._tell("over", failure)
            until = time.monotonic() + LEAVE_SECONDS
            while self._place.hosted_here and time.monotonic() < until:
                if all(self._hear(other).state == "over" for other in self._heard):
                    return
                time.sleep(0.1)

    def _tell(self, state: str, failure: Failure | None = None) -> None:
        self._beats, self._beaten, self._state = self._beats + 1, time.monotonic(), state
        if failure is not None:
            failure = replace(failure, why=for_other_machines(failure.why))
        news = asdict(News(this_machine(), self._beats, state, failure))
        if self._heard:
            self._reached(lambda: self._store.set(f"machine/{self._rank}", json.dumps(news)))

    def _hear(self, other: int) -> News:
        key = f"machine/{other}"
        if not self._reached(lambda: self._store.check([key])):
            return News()
        said = json.loads(self._reached(lambda: self._store.get(key)))
        return News(**{**said, "failure": Failure(**said["failure"]) if said["failure"] else None})

    def _reached(self, call: Callable[[], T]) -> T:
        try:
            if self._lost:
                raise RuntimeError
            return answered(call, self._place.silent_seconds)
        except RuntimeError:  # torch's DistError: the connection is gone, or nobody answers
            self._lost = True
            raise host_is_gone(self._place) from None


def _named(number: int, news: News) -> str:
    return f"machine {number}, {news.name}"
