"""Which of several failed workers is the cause, and what a person is told about it. Imports no torch."""

import signal
from collections.abc import Sequence
from typing import Final

from lorakit.launch.workers import Worker, named

USER_ERROR: Final = 2
TRY_AGAIN: Final = 75
COMMAND: Final = "lorakit train:"
GOES_ON: Final = "; the last checkpoint is kept, the same command goes on"
ABOVE: Final = "; what it said is above"
CONSEQUENCES: Final = {-signal.SIGABRT, -signal.SIGTERM, TRY_AGAIN}  # how workers end when another one has gone


def root_cause(failed: Sequence[Worker]) -> Worker:
    """Of workers that failed within a moment, the one the others followed: the most telling, else the first."""
    return min(failed, key=lambda worker: (severity(worker), not worker.words))


def severity(worker: Worker) -> int:
    """0 for a user error, then a death by signal, a failure, and what may only follow from another's end."""
    code = worker.code or 0
    if code == USER_ERROR:
        return 0
    if code in CONSEQUENCES:
        return 3
    return 1 if code < 0 else 2


def only_consequences(failed: Sequence[Worker]) -> bool:
    """Whether all that failed ended as workers do when another one has gone or has a user error to tell of."""
    return all(not worker.words and (severity(worker) == 3 or worker.code == USER_ERROR) for worker in failed)


def exit_code(worker: Worker) -> int:
    """What the launcher's own exit code says of this end; a death by signal can be tried again."""
    return TRY_AGAIN if worker.code is None or worker.code < 0 else worker.code


def may_start_again(worker: Worker) -> bool:
    """Whether another try could end otherwise: not after a user error, nor where a worker asks to be tried later."""
    return worker.code not in (USER_ERROR, TRY_AGAIN)


def failure_message(first: Worker, failed: Sequence[Worker]) -> str:
    """The last words of the cause; other ranks' user errors besides, equal ones once; else how it ended."""
    if not first.words:
        return f"{COMMAND} {how_it_ended(first)}"
    said: dict[str, list[int]] = {first.words: []}
    for worker in failed:
        if worker.words == first.words or (worker.words and worker.code == first.code == USER_ERROR):
            said.setdefault(worker.words, []).append(worker.rank)
    return "\n".join(words if 0 in ranks else f"[{named(ranks)}] {words}" for words, ranks in said.items())


def how_it_ended(worker: Worker) -> str:
    """``rank 1 was killed by SIGKILL (out of memory?); ...``"""
    code = worker.code or 0
    if code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"rank {worker.rank} was killed by {signal.Signals(-code).name}{hint}{GOES_ON}"
    if code == TRY_AGAIN:
        return f"rank {worker.rank} stopped{GOES_ON}"
    return f"rank {worker.rank} failed (exit code {code}){ABOVE}"


def for_other_machines(words: str) -> str:
    """The same, to be read on another machine or before another start."""
    return words.removeprefix(COMMAND).removesuffix(ABOVE).removesuffix(GOES_ON).strip()


def stopped(by: str, failed: Sequence[Worker]) -> str:
    """After a signal to the launcher: what the workers say that saved, and what went wrong in others meanwhile."""
    saved = [worker for worker in failed if worker.code == TRY_AGAIN and worker.words]
    text = failure_message(saved[0], saved) if saved else f"{COMMAND} stopped by {by}{GOES_ON}"
    first = root_cause(failed)
    return f"{failure_message(first, failed)}\n{text}" if severity(first) in (0, 2) else text
