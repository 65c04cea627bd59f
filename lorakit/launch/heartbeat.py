"""Heartbeats of the ranks, and the messages for each way in which a rank can fail. No store, thread or clock.

Invariant: every time is a number of seconds that the caller passes in, so no other machine's clock is compared.
Imports no torch.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from lorakit.errors import TemporaryFailure

RETRY_HINT: Final = "What was saved is kept; the same command goes on."


@dataclass(frozen=True)
class FailureReason:
    """Why all ranks end, the same for every rank.

    rank: the rank that failed; None if no single rank did.
    exit_code: the exit code of every rank.
    num_lost: ranks that cannot acknowledge the reason, because they ended or stopped.
    dump_stacks: every rank prints the Python stacks of its threads.
    """

    rank: int | None
    message: str
    exit_code: int = TemporaryFailure.exit_code
    num_lost: int = 0
    dump_stacks: bool = False

    def __str__(self) -> str:
        return f"stopped, because {self.message}".replace("\n", "\n  ")


@dataclass(frozen=True)
class Heartbeat:
    """One rank's sign of life. ``(step, calls)`` orders the ranks by progress.

    count: number of this heartbeat, from 1.
    machine: `machine_id` of its machine. process_start: `process_start_time` of its process.
    calls: number of `Watchdog.set_phase` calls since the step began.
    idle_seconds: time since the phase last changed, on the rank's own clock.
    closed: the rank ended without a failure.
    """

    rank: int
    count: int
    host: str
    pid: int
    machine: str
    process_start: str | None
    step: int
    calls: int
    phase: str
    idle_seconds: float
    closed: bool

    def name(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"

    def progress(self) -> str:
        return f"{self.phase}, for {self.idle_seconds:.0f} s"

    def process_has_ended(self, machine: str) -> bool:
        """True if its process ran on ``machine``, this machine, and has ended; False also if that cannot be read."""
        # the start time is compared too, because the system may give the number to a new process
        return (
            bool(machine) and machine == self.machine and process_start_time(self.pid) not in (self.process_start, None)
        )


@final
class Peers:
    """Latest heartbeat of each peer, with this rank's clock at receipt. ``ranks``: the peers that are watched."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.heartbeats: dict[int, Heartbeat] = {}
        """rank -> latest heartbeat; also of ranks that are not watched but were read once"""
        self._ranks = ranks
        self._received_at: dict[int, float] = {}
        self._ended_at: dict[int, float] = {}

    def receive(self, heartbeats: Mapping[int, Heartbeat], now: float) -> None:
        """Store the heartbeats with a new count; an unchanged count is no sign of life."""
        for rank, beat in heartbeats.items():
            if rank not in self.heartbeats or self.heartbeats[rank].count != beat.count:
                self.heartbeats[rank], self._received_at[rank] = beat, now

    def process_died(self, machine: str, now: float, is_settled: Callable[[float], bool]) -> list[Heartbeat]:
        """Return the peers whose process on this machine ended without closing, so long ago that ``is_settled``.

        A rank that failed in the ordinary way writes its reason before it exits; the delay gives time to read it.
        """
        for beat in self._open():
            if beat.rank not in self._ended_at and beat.process_has_ended(machine):
                self._ended_at[beat.rank] = now
        return [beat for beat in self._open() if beat.rank in self._ended_at and is_settled(self._ended_at[beat.rank])]

    def heartbeat_lost(self, now: float, seconds: float, almost: float) -> list[Heartbeat]:
        """Return the peers without a heartbeat for ``almost`` seconds, if one has been without for ``seconds``.

        Peers of one machine stop together, but their last heartbeats differ by up to an interval.
        """
        silences = [(beat, now - self._received_at[beat.rank]) for beat in self._open()]
        is_any_lost = any(silence > seconds for _, silence in silences)
        return [beat for beat, silence in silences if is_any_lost and silence > almost]

    def never_started(self) -> list[int]:
        """Return the watched ranks that never sent a heartbeat."""
        return [rank for rank in self._ranks if rank not in self.heartbeats]

    def _open(self) -> list[Heartbeat]:
        latest = (self.heartbeats[rank] for rank in self._ranks if rank in self.heartbeats)
        return [beat for beat in latest if not beat.closed]


def pid_namespace_id() -> str:
    """Return an identifier of this boot and process-id namespace; empty if the system offers none.

    The host name does not serve: containers on one machine share process numbers only within a namespace.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_start_time(pid: int) -> str | None:
    """Return the start time of a process of this machine; empty if it has ended; None if it cannot be read."""
    try:
        # the name, in parentheses, may itself contain spaces and parentheses
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:
        return None
    return "" if state in "ZX" else fields[18]


def status_lines(beats: Sequence[Heartbeat]) -> str:
    """Return each rank's phase, one rank per line."""
    return "\n".join(f"{beat.name()}: {'ended well' if beat.closed else beat.progress()}" for beat in beats)


def process_died(beats: Sequence[Heartbeat]) -> FailureReason:
    """Return the reason for processes that ended without `Watchdog.fail` or `close`."""
    message = f"{_names(beats)} ended without a word, as a killed process does (out of memory?)."
    return FailureReason(beats[0].rank, f"{message}\n{_last_phase(beats)}\n{RETRY_HINT}", num_lost=len(beats))


def heartbeat_lost(beats: Sequence[Heartbeat], seconds: float) -> FailureReason:
    """Return the reason for ranks without a new heartbeat for ``seconds``."""
    have = "has" if len(beats) == 1 else "have"
    message = f"{_names(beats)} {have} not been heard of for {seconds:.0f} s: machine gone, stopped, or cut off."
    return FailureReason(beats[0].rank, f"{message}\n{_last_phase(beats)}\n{RETRY_HINT}", num_lost=len(beats))


def never_started(ranks: Sequence[int], address: str, seconds: float) -> FailureReason:
    """Return the reason for ranks that never sent a heartbeat."""
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    message = f"{names} gave no sign of life for {seconds:.0f} s: not started, or unable to reach {address}."
    return FailureReason(ranks[0], f"{message}\n{RETRY_HINT}", num_lost=len(ranks))


def store_unreachable(address: str, seconds: float, first: Heartbeat | None, size: int) -> FailureReason:
    """Return the reason for a store that does not answer. ``first``: last heartbeat of rank 0, the usual host."""
    message = f"{address}, where the ranks meet, did not answer for {seconds:.0f} s: machine gone, stopped, or cut off."
    last = f"\n{first.name()} was last at: {first.progress()}." if first else ""
    return FailureReason(None, f"{message}{last}\n{RETRY_HINT}", num_lost=size)


def deadlocked(beats: Sequence[Heartbeat], seconds: float) -> FailureReason:
    """Return the reason for ranks that all run and make no progress; names the ranks that are behind the others."""
    open_beats = [beat for beat in beats if not beat.closed]
    least = min((beat.step, beat.calls) for beat in open_beats)
    behind = [beat for beat in open_beats if (beat.step, beat.calls) == least]
    rank = behind[0].rank if len(behind) == 1 else None
    names = f"\nBehind the others: {_names(behind)}." if len(behind) < len(open_beats) else ""
    message = f"no rank moved for {seconds:.0f} s:\n{status_lines(beats)}{names}\n{RETRY_HINT}"
    return FailureReason(rank, message, dump_stacks=True)


def _names(beats: Sequence[Heartbeat]) -> str:
    return ", ".join(beat.name() for beat in beats)


def _last_phase(beats: Sequence[Heartbeat]) -> str:
    return f"Last heard of at: {beats[0].progress()}."
