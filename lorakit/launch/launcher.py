"""lorakit's own launcher: torch's elastic agent, with workers that are heard, ended and explained our way.

The agent (``SimpleElasticAgent``, which torch documents for extension) meets the other machines, gives out ranks and
starts the group again. A run dies as one: when a worker fails the others are ended, and the exit code is that of the
worker that failed first by itself.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, Final, TextIO

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerSpec,
    WorkerState,
)

from lorakit.errors import RunError
from lorakit.launch.exits import (
    COMMAND,
    TRY_AGAIN,
    exit_code,
    failure_message,
    for_other_machines,
    may_start_again,
    only_consequences,
    root_cause,
    severity,
    stopped,
)
from lorakit.launch.node_monitor import Failure, Machines, Over
from lorakit.launch.rendezvous import Place, find_place, meeting
from lorakit.launch.workers import LOOK_SECONDS, Workers, say

SETTLE_SECONDS: Final = 0.5  # the first to end may have fallen over one that is only just ending
CAUSE_SECONDS: Final = 6.0  # longer than a rank that failed waits for the others to know (watch.py)
GRACE_SECONDS: Final = 5.0  # for the others, when one has failed
YIELD_SECONDS: Final = 20.0  # for the others, when one stopped to be tried again: it may have been asked to, like them
SAVE_SECONDS: Final = 60.0  # after a signal to the launcher
NOTHING: Final = 9  # less telling than any end of a worker


def launch(
    command: Sequence[str], *, processes: int, nodes: int, node_rank: int | None, rendezvous: str | None,
    max_restarts: int, threads: int | None, wait_seconds: float = 30.0, silent_seconds: float = 20.0,
) -> int:  # fmt: skip
    """Run ``command`` as the workers of this machine, ``processes / nodes`` of them; returns the exit code.

    Rank 0 writes to the terminal itself; what other ranks write is passed on to standard error with ``[rank 3] ``
    before it. SIGINT, SIGTERM and SIGHUP reach the workers once, as SIGTERM, and they have a minute to save; a second
    signal kills them. After a failure that is no user error the group starts again up to ``max_restarts`` times.
    ``threads`` per worker: None shares the cores unless OMP_NUM_THREADS is set. ``wait_seconds``: how long the machines
    wait for each other at the start; ``silent_seconds``: how long one may not be heard of later.

    Raises:
        RunError: the machines did not find each other; nothing was started.
        TemporaryFailure: another machine has gone.
    """
    if processes % nodes:
        raise RunError(f"parallel.processes: {processes} processes do not divide over {nodes} machines")
    local_size = processes // nodes
    with _hearing_signals() as asked, _quiet_torch() as to:
        try:
            place = find_place(
                rendezvous, node_rank=node_rank, nodes=nodes, local_size=local_size, wait_seconds=wait_seconds,
                silent_seconds=silent_seconds,
            )  # fmt: skip
            with meeting(place) as handler:
                spec = WorkerSpec(
                    role="lorakit", local_world_size=local_size, rdzv_handler=handler, entrypoint=command[0],
                    max_restarts=max_restarts, monitor_interval=LOOK_SECONDS,
                )  # fmt: skip
                _Agent(spec, command, threads or _threads_per_worker(local_size), place, asked, to).run()
        except Over as over:
            say(over.words, to)
            return over.code
    return 0


class _StopSignals:
    """Signals that the launcher got. ``waiting``: there are no workers, so a signal ends what is waited for."""

    def __init__(self) -> None:
        self.by, self.times, self.waiting = "", 0, True

    def receive(self, number: int, frame: FrameType | None) -> None:
        if not self.by or number == signal.SIGINT:  # SIGTERM again is the same request: schedulers repeat it
            self.by, self.times = signal.Signals(number).name, self.times + 1
        if self.waiting:
            raise Over(TRY_AGAIN, f"{COMMAND} stopped by {self.by}; the same command begins again or goes on")


@contextlib.contextmanager
def _hearing_signals() -> Iterator[_StopSignals]:
    asked = _StopSignals()
    if threading.current_thread() is not threading.main_thread():
        raise RunError("several processes are started from the main thread only")
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if before[number] != signal.SIG_IGN:  # nohup stays nohup
            signal.signal(number, asked.receive)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet_torch() -> Iterator[TextIO]:
    """Standard error, for the workers and for our words alone.

    The agent's log speaks of its inside, and its C++ prints a stack for every connection that another machine drops;
    both are left out. What matters of it is said in our words.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    sys.stderr.flush()
    with open(os.dup(2), "w", errors="replace") as to, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield to
        finally:
            os.dup2(to.fileno(), 2)
            logging.disable(before)


def _threads_per_worker(local_size: int) -> int | None:
    """Cores per worker, or None when OMP_NUM_THREADS is set already."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_size)


class _Agent(SimpleElasticAgent):
    """Starts, watches and ends the workers of this machine; the rest is torch's."""

    def __init__(
        self,
        spec: WorkerSpec,
        command: Sequence[str],
        threads: int | None,
        place: Place,
        asked: _StopSignals,
        to: TextIO,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout=10)
        self._command, self._threads, self._place, self._asked, self._to = command, threads, place, asked, to
        self._workers: Workers | None = None
        self._machines: Machines | None = None
        self._server: TCPStore | None = None
        self._restarts, self._max_restarts = 0, spec.max_restarts

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        self._machines = Machines(worker_group.store, worker_group.group_rank, self._place)
        common = self._common_environment(worker_group)
        self._asked.waiting = False
        self._workers = Workers(
            self._command,
            [
                {**common, "RANK": str(worker.global_rank), "LOCAL_RANK": str(worker.local_rank),
                 "WORLD_SIZE": str(worker.world_size)}
                for worker in worker_group.workers
            ],
            self._to,
        )  # fmt: skip
        return {number: worker.process.pid for number, worker in enumerate(self._workers.all)}

    def _common_environment(self, group: Any) -> dict[str, str]:
        """As torchrun sets it. The workers' store is new for every start: no key of the last one is left in it."""
        if group.group_rank == 0:
            seconds = timedelta(seconds=max(1.0, self._place.wait_seconds))
            self._server = TCPStore(self._place.host, 0, is_master=True, wait_for_workers=False, timeout=seconds)
            group.store.set("port", str(self._server.port))
        added = {
            "LOCAL_WORLD_SIZE": str(group.spec.local_world_size), "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size), "MASTER_ADDR": self._place.host,
            "MASTER_PORT": group.store.get("port").decode(), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_RESTART_COUNT": str(self._restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(group.spec.max_restarts),
        }  # fmt: skip
        if self._threads is not None:
            added["OMP_NUM_THREADS"] = str(self._threads)
        defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        return {**defaults, **os.environ, **added}

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        workers, machines = self._workers, self._machines
        assert workers is not None
        assert machines is not None
        workers.poll()
        if self._asked.by:
            self._end(SAVE_SECONDS)
        if workers.failed:
            return self._failed(workers, machines)
        try:
            machines.listen("running" if workers.living else "done")
        except Over as over:
            self._end(YIELD_SECONDS if over.code == TRY_AGAIN else GRACE_SECONDS)
            machines.leave(Failure(NOTHING, over.code, over.words, again=False))
            raise
        if workers.living or not machines.all_done():
            return RunResult(WorkerState.HEALTHY)
        workers.lines.flush(now=True)
        return RunResult(WorkerState.SUCCEEDED, return_values={worker.rank: None for worker in workers.all})

    def _failed(self, workers: Workers, machines: Machines) -> RunResult:
        """End the others; then start all again, or say why not."""
        workers.wait(0 if self._asked.by else SETTLE_SECONDS)
        if not self._asked.by and only_consequences(
            workers.failed
        ):  # the cause is telling the others, and ends after them
            workers.wait(CAUSE_SECONDS, until=lambda: not only_consequences(workers.failed))
        failed = list(workers.failed)
        first = root_cause(failed)
        workers.lines.flush(first.rank)
        self._end(YIELD_SECONDS if first.code == TRY_AGAIN else GRACE_SECONDS)
        if self._asked.by:
            failure = Failure(severity(first), TRY_AGAIN, stopped(self._asked.by, workers.failed), again=False)
        else:
            why = failure_message(first, failed)
            failure = machines.compare(Failure(severity(first), exit_code(first), why, may_start_again(first)))
        if failure.again and self._restarts < self._max_restarts:
            self._restarts += 1
            say(
                f"{COMMAND} {for_other_machines(failure.why)}; all start again from the last checkpoint"
                f" ({self._restarts} of {self._max_restarts})",
                self._to,
            )
            return RunResult(WorkerState.FAILED)
        machines.leave(failure)
        raise Over(failure.code, failure.why)

    def _stop_workers(self, worker_group: Any) -> None:
        if self._workers is not None and self._workers.living:
            say(f"{COMMAND} another machine starts again, and so do the processes here", self._to)
        self._end(GRACE_SECONDS)
        self._asked.waiting = True

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end(GRACE_SECONDS)

    def _end(self, seconds: float) -> None:
        """SIGTERM, time to save, SIGKILL; at once after a second signal to the launcher."""
        if self._workers is not None:
            self._workers.end(seconds, self._hurried)
            self._workers.lines.flush(now=True)

    def _hurried(self) -> bool:
        if self._machines is not None:
            self._machines.beat()
        return self._asked.times > 1
