"""What ranks say of themselves, and the words for what may become of them. No store, no thread, no clock."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from torch.distributed import DistError

from lorakit.errors import TemporaryFailure

RETRY_HINT: Final = "What was saved is kept; the same command goes on."


@dataclass(frozen=True)
class FailureReason:
    """Why all ranks end: whose failure it is (None: no single rank's), in words, and the exit code of every rank."""

    rank: int | None
    words: str
    exit_code: int = TemporaryFailure.exit_code
    num_lost: int = 0
    """ranks that will not answer any more"""
    stacks: bool = False
    """every rank prints its Python stacks"""

    def __str__(self) -> str:
        return f"stopped, because {self.words}".replace("\n", "\n  ")


@dataclass(frozen=True)
class Heartbeat:
    """One sign of life. ``step`` and ``calls`` (of ``at`` since the step began) order ranks by how far they came."""

    rank: int
    count: int
    host: str
    pid: int
    machine: str
    born: str | None
    step: int
    calls: int
    phase: str
    still_seconds: float
    ended: bool

    def name(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"

    def place(self) -> str:
        return f"{self.phase}, for {self.still_seconds:.0f} s"

    def has_left(self, machine: str) -> bool:
        """Whether its process has left this machine; False where it runs on another one, or this one does not say."""
        return bool(machine) and machine == self.machine and process_start_time(self.pid) not in (self.born, None)


@final
class Peers:
    """What a rank heard of those it listens to, and when, in seconds of its own."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.beats: dict[int, Heartbeat] = {}
        """the last of each rank that was ever asked for"""
        self._ranks = ranks
        self._heard: dict[int, float] = {}
        self._missed: dict[int, float] = {}

    def hear(self, beats: Mapping[int, Heartbeat], now: float) -> None:
        for rank, beat in beats.items():
            if rank not in self.beats or self.beats[rank].count != beat.count:
                self.beats[rank], self._heard[rank] = beat, now

    def process_died(self, machine: str, now: float, is_settled: Callable[[float], bool]) -> list[Heartbeat]:
        """Those whose process left this machine so long ago that all it wrote is known."""
        for beat in self._live():
            if beat.rank not in self._missed and beat.has_left(machine):
                self._missed[beat.rank] = now
        return [beat for beat in self._live() if beat.rank in self._missed and is_settled(self._missed[beat.rank])]

    def heartbeat_lost(self, now: float, seconds: float, almost: float) -> list[Heartbeat]:
        """Those not heard of for ``seconds``, and with them those for ``almost`` so long: they died together."""
        silence = [(beat, now - self._heard[beat.rank]) for beat in self._live()]
        late = any(passed > seconds for _, passed in silence)
        return [beat for beat, passed in silence if late and passed > almost]

    def never_started(self) -> list[int]:
        return [rank for rank in self._ranks if rank not in self.beats]

    def _live(self) -> list[Heartbeat]:
        return [self.beats[rank] for rank in self._ranks if rank in self.beats and not self.beats[rank].ended]


def machine_id() -> str:
    """What tells this machine and its numbering of processes from any other; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_start_time(pid: int) -> str | None:
    """When a process of this machine began; empty: there is none, or a dead one not yet buried; None: not known."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:
        return None
    return "" if state in "ZX" else fields[18]


def is_collective_error(error: BaseException) -> bool:
    """Whether an error may be the echo of another rank's failure, so that ``Watch.explain`` should be asked.

    Source: what torch 2.13's gloo says when a peer is killed, stopped or gone; NCCL's errors are DistBackendErrors.
    """
    told = any(word in str(error) for word in ("gloo/", "monitoredBarrier", "NCCL"))
    return isinstance(error, DistError) or (type(error) is RuntimeError and told)


def places(beats: Sequence[Heartbeat]) -> str:
    """Where each rank is, one per line."""
    return "\n".join(f"{beat.name()}: {'ended well' if beat.ended else beat.place()}" for beat in beats)


def gone(beats: Sequence[Heartbeat]) -> FailureReason:
    """Processes that left without ``fail`` or ``close``."""
    words = f"{_names(beats)} ended without a word, as a killed process does (out of memory?).\n{_last(beats)}\n{RETRY_HINT}"
    return FailureReason(beats[0].rank, words, num_lost=len(beats))


def silent(beats: Sequence[Heartbeat], seconds: float) -> FailureReason:
    """Ranks whose count does not grow any more."""
    have = "has" if len(beats) == 1 else "have"
    words = f"{_names(beats)} {have} not been heard of for {seconds:.0f} s: machine gone, stopped, or cut off."
    return FailureReason(beats[0].rank, f"{words}\n{_last(beats)}\n{RETRY_HINT}", num_lost=len(beats))


def absent(ranks: Sequence[int], address: str, seconds: float) -> FailureReason:
    """Ranks that never gave a sign of life."""
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    words = (
        f"{names} gave no sign of life for {seconds:.0f} s: not started, or unable to reach {address}.\n{RETRY_HINT}"
    )
    return FailureReason(ranks[0], words, num_lost=len(ranks))


def store_unreachable(address: str, seconds: float, first: Heartbeat | None, size: int) -> FailureReason:
    """The store does not answer; ``first`` is what rank 0, which usually is on its host, said last."""
    words = f"{address}, where the ranks meet, did not answer for {seconds:.0f} s: machine gone, stopped, or cut off."
    last = f"\n{first.name()} was last at: {first.place()}." if first else ""
    return FailureReason(None, f"{words}{last}\n{RETRY_HINT}", num_lost=size)


def deadlocked(beats: Sequence[Heartbeat], seconds: float) -> FailureReason:
    """All live, none moves: ranks that wait for each other in different places."""
    live = [beat for beat in beats if not beat.ended]
    least = min((beat.step, beat.calls) for beat in live)
    behind = [beat for beat in live if (beat.step, beat.calls) == least]
    whose = behind[0].rank if len(behind) == 1 else None
    told = f"\nBehind the others: {_names(behind)}." if len(behind) < len(live) else ""
    return FailureReason(whose, f"no rank moved for {seconds:.0f} s:\n{places(beats)}{told}\n{RETRY_HINT}", stacks=True)


def _names(beats: Sequence[Heartbeat]) -> str:
    return ", ".join(beat.name() for beat in beats)


def _last(beats: Sequence[Heartbeat]) -> str:
    return f"Last heard of at: {beats[0].place()}."
