"""Three forked ranks with a real store, gloo and a watchdog: ``python -m tests.helpers.watchdog_scene SCENE FOLDER``.

The ranks act like the train command: they call `explain` after a failed collective, and `fail` after an error of their
own. Each writes standard error to FOLDER/RANK; the exit codes are printed.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lorakit.launch.watchdog import HeartbeatStore, Watchdog
from lorakit.parallel.setup import is_collective_error

SIZE = 3
PHASE = "step 3: reading rows"


class UserError(Exception):
    """An error of one rank alone."""


def host_is_killed(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(torch.ones(1))


def one_has_an_error(rank: int) -> None:
    if rank == 1:
        raise UserError("rows.jsonl:7: no text")
    if rank == 2:
        signal.pause()  # a main thread that reacts to nothing
    while True:
        dist.all_reduce(torch.ones(1))


SCENES = {"host is killed": host_is_killed, "one has an error": one_has_an_error}


def act(scene: str, rank: int, port: int, listener: int) -> int:
    """Play a scene as one rank, and return its exit code."""
    store = dist.TCPStore("127.0.0.1", port, SIZE, rank == 0, master_listen_fd=listener if rank == 0 else None)
    watchdog = Watchdog(HeartbeatStore(store, f"127.0.0.1:{port}"), rank, SIZE, silent_seconds=5)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    watchdog.start()
    watchdog.set_phase(PHASE)
    watchdog.exchange()
    # each rank has read the others' heartbeats of this phase, so it can name one that ends
    for other in range(SIZE):
        while PHASE not in store.get(f"lorakit/watchdog/rank {other}").decode():
            time.sleep(0.05)
    watchdog.exchange()
    dist.barrier()
    try:
        SCENES[scene](rank)
    except UserError as error:
        reason = watchdog.fail(str(error), 2)
    except RuntimeError as error:
        if not is_collective_error(error):
            raise
        reason = watchdog.explain(error)
    print(f"lorakit: {reason}", file=sys.stderr, flush=True)
    return reason.exit_code


def main(scene: str, folder: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    pids = []
    for rank in range(SIZE):
        pid = os.fork()
        if pid == 0:
            errors = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT)
            os.dup2(errors, 2)
            code = 1
            try:
                code = act(scene, rank, port, listener.fileno())
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(codes)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
