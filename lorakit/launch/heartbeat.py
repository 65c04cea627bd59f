"""A rank's heartbeat, and the reason for which all ranks end, with one message for each kind of failure.

Invariant: every time is a number of seconds on the clock of the rank that writes it. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lorakit.errors import TemporaryFailure

RETRY_HINT: Final = "What was saved is kept; the same command goes on."


@dataclass(frozen=True)
class FailureReason:
    """Why all ranks end, the same for every rank.

    rank: the rank that failed; None if no single rank did.
    exit_code: the exit code of every rank.
    dump_stacks: every rank prints the Python stacks of its threads.
    """

    rank: int | None
    message: str
    exit_code: int = TemporaryFailure.exit_code
    dump_stacks: bool = False

    def __str__(self) -> str:
        return f"stopped, because {self.message}".replace("\n", "\n  ")


@dataclass(frozen=True)
class Heartbeat:
    """One rank's sign of life.

    count: number of this heartbeat, from 1.
    num_phases: phases that its main thread has begun, by which the ranks are ordered.
    idle_seconds: time since its last progress.
    """

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


def status_lines(beats: Sequence[Heartbeat]) -> str:
    """Return each rank's phase, one rank per line."""
    return "\n".join(f"{beat.name()}: {beat.position()}" for beat in beats)


def heartbeat_lost(beats: Sequence[Heartbeat], seconds: float) -> FailureReason:
    """Return the reason for ranks without a new heartbeat for ``seconds``."""
    names = ", ".join(beat.name() for beat in beats)
    have = "has" if len(beats) == 1 else "have"
    message = f"{names} {have} not been heard of for {seconds:.0f} s: killed, stopped, or cut off."
    return FailureReason(beats[0].rank, f"{message}\nLast heard of at: {beats[0].position()}.\n{RETRY_HINT}")


def never_started(ranks: Sequence[int], address: str, seconds: float) -> FailureReason:
    """Return the reason for ranks that never sent a heartbeat."""
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    message = f"{names} gave no sign of life for {seconds:.0f} s: not started, or unable to reach {address}."
    return FailureReason(ranks[0], f"{message}\n{RETRY_HINT}")


def store_unreachable(address: str, seconds: float, first: Heartbeat | None) -> FailureReason:
    """Return the reason for a store that does not answer. ``first``: last heartbeat of rank 0, the usual host."""
    message = f"{address}, where the ranks meet, did not answer for {seconds:.0f} s: killed, stopped, or cut off."
    last = f"\n{first.name()} was last at: {first.position()}." if first else ""
    return FailureReason(None, f"{message}{last}\n{RETRY_HINT}")


def deadlocked(beats: Sequence[Heartbeat], seconds: float) -> FailureReason:
    """Return the reason for ranks that all run and make no progress; names the ranks that are behind the others."""
    least = min(beat.num_phases for beat in beats)
    behind = [beat for beat in beats if beat.num_phases == least]
    rank = behind[0].rank if len(behind) == 1 else None
    names = ", ".join(beat.name() for beat in behind)
    last = f"\nBehind the others: {names}." if len(behind) < len(beats) else ""
    message = f"no rank moved for {seconds:.0f} s:\n{status_lines(beats)}{last}\n{RETRY_HINT}"
    return FailureReason(rank, message, dump_stacks=True)
