"""Choose the root cause among failed workers, and write the message that explains the run's end. Imports no torch.

Invariant: an exit that may only follow from another worker's failure is the cause only if there is no other exit.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lorakit.errors import LorakitError, TemporaryFailure
from lorakit.launch.workers import Worker, format_ranks

USER_ERROR: Final = LorakitError.exit_code
TEMPORARY_FAILURE: Final = TemporaryFailure.exit_code
COMMAND: Final = "lorakit train:"
RESUME_HINT: Final = "; what was saved is kept, the same command goes on"
OUTPUT_HINT: Final = "; what it said is above"
# SIGABRT: a library aborted on a lost connection. SIGTERM: from outside. 75: its watchdog named another rank's failure.
CONSEQUENCE_CODES: Final = {-signal.SIGABRT, -signal.SIGTERM, TEMPORARY_FAILURE}


@dataclass(frozen=True)
class GroupFailure:
    """Why all workers ended: the launcher's exit code, the message, and whether a restart could end otherwise."""

    exit_code: int
    message: str
    may_restart: bool


def explain_failure(failed: Sequence[Worker]) -> GroupFailure:
    """Return the failure of the root cause among ``failed``; a user error or a temporary failure is not restarted."""
    first = root_cause(failed)
    may_restart = first.code not in (USER_ERROR, TEMPORARY_FAILURE)
    return GroupFailure(exit_code(first), failure_message(first, failed), may_restart)


def explain_stop(signal_name: str, failed: Sequence[Worker]) -> GroupFailure:
    """Return the end after a signal to the launcher: the messages of workers that saved, and other failures."""
    saved = [worker for worker in failed if worker.code == TEMPORARY_FAILURE and worker.message]
    message = failure_message(saved[0], saved) if saved else f"{COMMAND} stopped by {signal_name}{RESUME_HINT}"
    first = root_cause(failed)
    if severity(first) in (0, 2):
        message = f"{failure_message(first, failed)}\n{message}"
    return GroupFailure(TEMPORARY_FAILURE, message, may_restart=False)


def root_cause(failed: Sequence[Worker]) -> Worker:
    """Return the worker whose exit is the most severe; ties go to one with a message, then to the first to exit."""
    return min(failed, key=lambda worker: (severity(worker), not worker.message))


def severity(worker: Worker) -> int:
    """0 for a user error, 1 for a death by signal, 2 for another failure, 3 for a possible consequence of one."""
    code = worker.code or 0
    if code == USER_ERROR:
        return 0
    if code in CONSEQUENCE_CODES:
        return 3
    return 1 if code < 0 else 2


def is_consequence(worker: Worker) -> bool:
    """True if the worker may have exited because of another one.

    Exit code 2 without a message counts too: the rank with the user error sends the message, its peers exit alike.
    """
    return not worker.message and (severity(worker) == 3 or worker.code == USER_ERROR)


def exit_code(worker: Worker) -> int:
    """Return the launcher's exit code for this worker's exit; a death by signal is temporary."""
    return TEMPORARY_FAILURE if worker.code is None or worker.code < 0 else worker.code


def failure_message(first: Worker, failed: Sequence[Worker]) -> str:
    """Return the message of ``first``, then different user errors of other ranks; without one, how it exited."""
    if not first.message:
        return f"{COMMAND} {describe_exit(first)}"
    ranks_by_message: dict[str, list[int]] = {first.message: []}
    for worker in failed:
        is_user_error = bool(worker.message) and worker.code == first.code == USER_ERROR
        if worker.message == first.message or is_user_error:
            ranks_by_message.setdefault(worker.message, []).append(worker.rank)
    return "\n".join(
        message if 0 in ranks else f"[{format_ranks(ranks)}] {message}" for message, ranks in ranks_by_message.items()
    )


def describe_exit(worker: Worker) -> str:
    """Return ``rank 1 was killed by SIGKILL (out of memory?); ...``."""
    code = worker.code or 0
    if code < 0:
        # the kernel's out-of-memory killer sends SIGKILL and leaves no message
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"rank {worker.rank} was killed by {signal.Signals(-code).name}{hint}{RESUME_HINT}"
    if code == TEMPORARY_FAILURE:
        return f"rank {worker.rank} stopped{RESUME_HINT}"
    return f"rank {worker.rank} failed (exit code {code}){OUTPUT_HINT}"


def reason_only(message: str) -> str:
    """Return a message without the command's name and without the hint at its end, to be put into another sentence."""
    return message.removeprefix(COMMAND).removesuffix(OUTPUT_HINT).removesuffix(RESUME_HINT).strip()
