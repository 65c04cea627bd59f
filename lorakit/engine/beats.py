"""What a rank says of itself, and the words for what may become of it. No store, no thread, no clock."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lorakit.errors import TryAgainLater

AGAIN: Final = "What was saved is kept; the same command goes on."


@dataclass(frozen=True)
class Reason:
    """Why all ranks end: whose failure it is (None: no single rank's), in words, and the exit code of every rank."""

    rank: int | None
    words: str
    exit_code: int = TryAgainLater.exit_code
    num_lost: int = 0
    """ranks that will not answer any more"""
    stacks: bool = False
    """every rank prints its Python stacks"""

    def __str__(self) -> str:
        return f"stopped, because {self.words}".replace("\n", "\n  ")


@dataclass(frozen=True)
class Beat:
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
        return bool(machine) and machine == self.machine and born(self.pid) not in (self.born, None)


def this_machine() -> str:
    """What tells this machine and its numbering of processes from any other; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def born(pid: int) -> str | None:
    """When a process of this machine began; empty: there is none, or a dead one not yet buried; None: not known."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:
        return None
    return "" if state in "ZX" else fields[18]


def places(beats: Sequence[Beat]) -> str:
    """Where each rank is, one per line."""
    return "\n".join(f"{beat.name()}: {'ended well' if beat.ended else beat.place()}" for beat in beats)


def gone(beats: Sequence[Beat]) -> Reason:
    """Processes that left without ``fail`` or ``close``."""
    words = f"{_names(beats)} ended without a word, as a killed process does (out of memory?).\n{_last(beats)}\n{AGAIN}"
    return Reason(beats[0].rank, words, num_lost=len(beats))


def silent(beats: Sequence[Beat], seconds: float) -> Reason:
    """Ranks whose count does not grow any more."""
    have = "has" if len(beats) == 1 else "have"
    words = f"{_names(beats)} {have} not been heard of for {seconds:.0f} s: machine gone, stopped, or cut off."
    return Reason(beats[0].rank, f"{words}\n{_last(beats)}\n{AGAIN}", num_lost=len(beats))


def absent(ranks: Sequence[int], address: str, seconds: float) -> Reason:
    """Ranks that never gave a sign of life."""
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    words = f"{names} gave no sign of life for {seconds:.0f} s: not started, or unable to reach {address}.\n{AGAIN}"
    return Reason(ranks[0], words, num_lost=len(ranks))


def unreachable(address: str, seconds: float, first: Beat | None, size: int) -> Reason:
    """The store does not answer; ``first`` is what rank 0, which usually is on its host, said last."""
    words = f"{address}, where the ranks meet, did not answer for {seconds:.0f} s: machine gone, stopped, or cut off."
    last = f"\n{first.name()} was last at: {first.place()}." if first else ""
    return Reason(None, f"{words}{last}\n{AGAIN}", num_lost=size)


def stuck(beats: Sequence[Beat], seconds: float) -> Reason:
    """All live, none moves: ranks that wait for each other in different places."""
    live = [beat for beat in beats if not beat.ended]
    least = min((beat.step, beat.calls) for beat in live)
    behind = [beat for beat in live if (beat.step, beat.calls) == least]
    whose = behind[0].rank if len(behind) == 1 else None
    told = f"\nBehind the others: {_names(behind)}." if len(behind) < len(live) else ""
    return Reason(whose, f"no rank moved for {seconds:.0f} s:\n{places(beats)}{told}\n{AGAIN}", stacks=True)


def _names(beats: Sequence[Beat]) -> str:
    return ", ".join(beat.name() for beat in beats)


def _last(beats: Sequence[Beat]) -> str:
    return f"Last heard of at: {beats[0].place()}."
