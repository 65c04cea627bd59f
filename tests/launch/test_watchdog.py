"""When a rank fails, is killed or makes no progress, every rank ends and names that rank.

Real processes with real gloo. One "stage" process imports torch once and forks the ranks of each scene. The ranks act
like the train command: they call `explain` after a failed collective, and `fail` after an error of their own.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)] if __name__ == "__main__" else []

from lorakit.launch.watchdog import Watchdog, is_collective_error  # noqa: E402

pytestmark = pytest.mark.spread

SILENT = 4.0  # seconds, in scenes about silence; a rank sends ten heartbeats in that time
PATIENT = 10.0  # seconds, in all other scenes: a busy machine has held a rank up for more than 2
HANG_SECONDS = 60.0
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1",
    "RES_OPTIONS": "timeout:1 attempts:1",  # torch asks DNS for the name of every peer
}  # fmt: skip
APART = -1  # the process that holds the store when no rank does


class UserError(Exception):
    """An error of one rank alone."""


# -- the scenes: actions of each rank, and signals from outside -------------------------------------


def reduce_for_ever(watchdog: Watchdog) -> None:
    for step in range(10**9):
        watchdog.set_phase(f"step {step}: all-reduce")
        dist.all_reduce(torch.ones(1000))
        time.sleep(0.01)


def wait_elsewhere(watchdog: Watchdog, phase: str = "step 3: reading rows") -> None:
    watchdog.set_phase(phase)
    time.sleep(HANG_SECONDS)


def later(seconds: float, number: signal.Signals) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()


def one_is_killed(watchdog: Watchdog) -> None:
    if watchdog.rank == 1:
        later(3, signal.SIGKILL)
    reduce_for_ever(watchdog)


def one_is_killed_while_the_others_are_blocked(watchdog: Watchdog) -> None:
    if watchdog.rank == 1:
        later(3, signal.SIGKILL)
    if watchdog.rank == 0:
        watchdog.set_phase("step 3: receiving")
        dist.recv(torch.ones(1), src=2)  # blocked inside torch, waiting for a rank that runs
    wait_elsewhere(watchdog)


def the_store_is_killed(watchdog: Watchdog) -> None:
    if watchdog.rank == 0:
        later(3, signal.SIGKILL)
    wait_elsewhere(watchdog)


def the_store_is_killed_but_its_port_stays_open(watchdog: Watchdog) -> None:
    """As when a data-loading process outlives the rank that forked it."""
    if watchdog.rank == 0 and os.fork() == 0:
        time.sleep(4 * SILENT)
        os._exit(0)
    the_store_is_killed(watchdog)


def one_is_stopped(watchdog: Watchdog) -> None:
    if watchdog.rank == 1:
        later(3, signal.SIGSTOP)
    reduce_for_ever(watchdog)


def two_are_stopped(watchdog: Watchdog) -> None:
    if watchdog.rank > 0:
        later(2.7 + 0.3 * watchdog.rank, signal.SIGSTOP)
    reduce_for_ever(watchdog)


def the_store_is_stopped(watchdog: Watchdog) -> None:
    if watchdog.rank == 0:
        later(3, signal.SIGSTOP)
    reduce_for_ever(watchdog)


def one_finds_an_error(watchdog: Watchdog) -> None:
    if watchdog.rank == 1:
        for step in range(3):
            watchdog.set_phase(f"step {step}: all-reduce")
            dist.all_reduce(torch.ones(1000))
        watchdog.set_phase("step 3: reading rows")
        raise UserError("rows.jsonl:7: no text\nGive it one.")
    reduce_for_ever(watchdog)


def the_host_of_the_store_finds_an_error(watchdog: Watchdog) -> None:
    if watchdog.rank == 0:
        watchdog.set_phase("step 3: reading rows")
        raise UserError("rows.jsonl:7: no text")
    wait_elsewhere(watchdog)


def each_finds_an_error_at_once(watchdog: Watchdog) -> None:
    watchdog.set_phase("reading the recipe")
    time.sleep(2 - time.time() % 1 + watchdog.rank / 30)  # all before the first exchange of heartbeats
    raise UserError(f"error {watchdog.rank} of the user")


def they_wait_for_each_other(watchdog: Watchdog) -> None:
    for step in range(3):
        watchdog.set_phase(f"step {step}: all-reduce")
        dist.all_reduce(torch.ones(1000))
    watchdog.set_phase("step 3: reading rows")
    if watchdog.rank == 1:
        wait_for_a_row()
    watchdog.set_phase("step 3: all-reduce")
    dist.all_reduce(torch.ones(1000))


def wait_for_a_row() -> None:
    threading.Event().wait(HANG_SECONDS)


def a_collective_breaks_although_all_live(watchdog: Watchdog) -> None:
    if watchdog.rank == 1:
        wait_elsewhere(watchdog)
    reduce_for_ever(watchdog)


def the_first_ends_well_long_before(watchdog: Watchdog) -> None:
    if watchdog.rank > 0:
        time.sleep(2 * SILENT)


def another_ends_well_long_before(watchdog: Watchdog) -> None:
    if watchdog.rank != 1:
        time.sleep(2 * SILENT)


def all_work_hard(watchdog: Watchdog) -> None:
    """More busy ranks than cores; each holds the GIL in a C call from time to time."""
    until = time.monotonic() + 2 * SILENT
    while time.monotonic() < until:
        watchdog.set_phase("step 1: forward")
        sum(number * number for number in range(200_000))
        ctypes.PyDLL(None).usleep(int(SILENT / 4 * 1e6))


def host_stops(rank: int) -> None:
    time.sleep(1 if rank == 0 else 2)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)


class Scene(NamedTuple):
    act: Callable[[Watchdog], None]
    size: int = 3
    silent_seconds: float = PATIENT
    settings: dict[str, float] = {}  # noqa: RUF012
    group: bool = True
    group_seconds: float = HANG_SECONDS
    delays: dict[int, float] = {}  # noqa: RUF012
    """seconds by which a rank starts late"""
    store: int = 0
    """the rank that holds the store"""
    ending_seconds: float = 2
    """time that a rank takes to end after it received the reason: longer than the grace"""
    first: Callable[[int], None] = lambda rank: None
    """called between joining the store and starting the watchdog"""
    together: bool = True
    """the action starts after all ranks have exchanged heartbeats, however busy the machine is"""
    meanwhile: Callable[[dict[int, int]], None] = lambda pids: None
    """called with the process ids of the ranks, in another process"""


def continue_the_stopped(pids: dict[int, int]) -> None:
    """Once all others have ended."""

    def is_stopped(pid: int) -> bool:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    while not all(is_stopped(pid) for pid in pids.copy().values()):
        time.sleep(0.1)
    for pid in pids.copy().values():
        os.kill(pid, signal.SIGCONT)


def continue_the_host(pids: dict[int, int]) -> None:
    time.sleep(2 + 2 * SILENT)
    os.kill(pids[0], signal.SIGCONT)


def pause_all(pids: dict[int, int]) -> None:
    time.sleep(1)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids.values():
            os.kill(pid, number)
        time.sleep(2 * SILENT)


SCENES = {
    "killed": Scene(one_is_killed),
    "killed, others do not end": Scene(one_is_killed, ending_seconds=HANG_SECONDS),
    "killed, others blocked": Scene(one_is_killed_while_the_others_are_blocked),
    "killed among many": Scene(
        lambda watchdog: (later(3, signal.SIGKILL) if watchdog.rank == 11 else None, wait_elsewhere(watchdog))[1],
        size=12, group=False,
    ),
    "store killed": Scene(the_store_is_killed, group=False),
    "store killed, port open": Scene(the_store_is_killed_but_its_port_stays_open, group=False),
    "store apart killed": Scene(wait_elsewhere, size=2, group=False, store=APART, silent_seconds=SILENT),
    "stopped": Scene(one_is_stopped, meanwhile=continue_the_stopped, silent_seconds=SILENT),
    "two stopped": Scene(two_are_stopped, meanwhile=continue_the_stopped, silent_seconds=SILENT),
    "store stopped": Scene(the_store_is_stopped, meanwhile=continue_the_stopped, silent_seconds=SILENT),
    "error": Scene(one_finds_an_error),
    "host's error": Scene(the_host_of_the_store_finds_an_error, group=False),
    "errors at once": Scene(each_finds_an_error_at_once, size=4, group=False),
    "deadlock": Scene(they_wait_for_each_other, settings={"stuck_seconds": 3}),
    "deadlock of many": Scene(
        lambda watchdog: wait_elsewhere(watchdog, f"step {3 - (watchdog.rank == 11)}: reading rows"),
        size=12, group=False, settings={"stuck_seconds": 2},
    ),
    "broken": Scene(a_collective_breaks_although_all_live, group_seconds=4, silent_seconds=SILENT),
    "first ends": Scene(the_first_ends_well_long_before, silent_seconds=SILENT),
    "another ends": Scene(another_ends_well_long_before, silent_seconds=SILENT),
    "starts late": Scene(
        lambda watchdog: time.sleep(SILENT * (3 - watchdog.rank)), group=False, together=False, delays={2: 2 * SILENT},
        silent_seconds=SILENT,
    ),
    "store answers late": Scene(
        lambda watchdog: time.sleep(3 * SILENT), group=False, together=False, first=host_stops, meanwhile=continue_the_host,
        silent_seconds=SILENT,
    ),
    "never starts": Scene(
        wait_elsewhere, group=False, together=False, settings={"start_seconds": 3}, delays={2: HANG_SECONDS},
    ),
    "hard work": Scene(all_work_hard, size=4, group=False, silent_seconds=SILENT),
    "paused": Scene(lambda watchdog: time.sleep(3 * SILENT), group=False, meanwhile=pause_all, silent_seconds=SILENT),
}  # fmt: skip


# -- the stage --------------------------------------------------------------------------------------------------------


def act(scene: Scene, watchdog: Watchdog, join: Callable[[], None]) -> int:
    """Run a rank as the train command does, and return its exit code."""
    watchdog.start()
    try:
        join()
        scene.act(watchdog)
    except UserError as problem:
        reason = watchdog.fail(str(problem), 2)
        print(f"lorakit: {problem if reason.rank == watchdog.rank else reason}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not is_collective_error(error):
            raise
        reason = watchdog.explain(error)
        print(f"lorakit: {reason}", file=sys.stderr, flush=True)
        time.sleep(scene.ending_seconds)
        return reason.exit_code
    watchdog.close()
    return 0


def perform(scene: Scene, rank: int, port: int, listening: int) -> int:
    """One forked process of a scene."""
    time.sleep(scene.delays.get(rank, 0))
    here = rank == scene.store
    if not here:
        os.close(listening)
    store = TCPStore(
        "127.0.0.1", port, is_master=here, wait_for_workers=False, master_listen_fd=listening if here else None
    )
    if rank == APART:
        wait_until_together(store, scene.size)
        os.kill(os.getpid(), signal.SIGKILL)

    def join() -> None:
        if scene.group:
            seconds = timedelta(seconds=scene.group_seconds)
            inner = PrefixStore("group", store)
            dist.init_process_group("gloo", store=inner, rank=rank, world_size=scene.size, timeout=seconds)
        if scene.together:
            come_together(store, scene.size)
            if here:  # the store ends with this rank
                wait_until_together(store, scene.size)

    scene.first(rank)
    settings: Any = {"silent_seconds": scene.silent_seconds, "grace_seconds": 1.0, **scene.settings}
    return act(scene, Watchdog(PrefixStore("watch", store), rank, scene.size, **settings), join)


def come_together(store: TCPStore, size: int) -> None:
    """Wait until every rank is in its third exchange, so that it has received the answer to an earlier one."""
    watched = PrefixStore("watch", store)
    for key in [f"lorakit/watchdog/{rank}" for rank in range(size)]:
        while (beat := watched.get(key).decode()) == "-" or json.loads(beat)["count"] < 3:
            time.sleep(0.1)
    store.add("together", 1)


def wait_until_together(store: TCPStore, size: int) -> None:
    while store.add("together", 0) < size:
        time.sleep(0.1)


@contextlib.contextmanager
def listening_socket() -> Iterator[tuple[int, int]]:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield listener.getsockname()[1], listener.fileno()


def fork(folder: Path, name: str, work: Callable[[], int]) -> int:
    """Run ``work`` in a forked process that prints to a file; return its process id."""
    if (pid := os.fork()) > 0:
        return pid
    code = 1
    try:
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = work()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def play(name: str, folder: Path) -> int:
    """Fork the ranks of a scene and write their exit codes to a file; None for a rank that had to be killed."""
    scene, until = SCENES[name], time.monotonic() + HANG_SECONDS
    codes: dict[int, int | None] = {}
    with listening_socket() as (port, listening):
        ranks = [*range(scene.size), *([APART] if scene.store == APART else [])]
        pids = {rank: fork(folder, f"{rank}", lambda r=rank: perform(scene, r, port, listening)) for rank in ranks}
    threading.Thread(target=scene.meanwhile, args=(pids,), daemon=True).start()
    while pids:
        late = time.monotonic() > until
        for rank, pid in list(pids.items()):
            if late or (name == "never starts" and rank == 2 and len(pids) == 1):
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if ended:
                codes[rank] = None if late else os.waitstatus_to_exitcode(status)
                del pids[rank]
        time.sleep(0.05)
    (folder / "codes.part").write_text(json.dumps([codes[rank] for rank in range(scene.size)]))
    (folder / "codes.part").rename(folder / "codes.json")
    return 0


def stage(lines: IO[str]) -> None:
    for line in lines:
        name, folder = json.loads(line)
        fork(Path(folder), "stage", lambda name=name, folder=folder: play(name, Path(folder)))


def launched(name: str, folder: Path) -> int:
    """Run a rank that torchrun started, which ignores torchrun's SIGTERM; return its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    dist.init_process_group("gloo")
    descriptor = os.open(folder / str(dist.get_rank()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    store = dist.distributed_c10d._get_default_store()
    watchdog = Watchdog(store, dist.get_rank(), dist.get_world_size(), silent_seconds=PATIENT)
    return act(SCENES[name], watchdog, lambda: None)


def printed_by(file: Path) -> str:
    """Return the output of a rank without torch's warning that DNS is slow."""
    lines = file.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if "hostname of the client socket cannot be retrieved" not in line)


class Played(NamedTuple):
    codes: list[int | None]
    output: list[str]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Played]]:
    """Return the exit code and the output of each rank of a scene."""
    folders = {name: tmp_path_factory.mktemp("scene") for name in SCENES}
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, env=ENVIRONMENT, start_new_session=True
    )
    assert process.stdin
    for name, folder in folders.items():  # all at once: mostly they wait
        process.stdin.write(json.dumps([name, str(folder)]).encode() + b"\n")
    process.stdin.flush()
    until = time.monotonic() + HANG_SECONDS + 30

    def played(name: str) -> Played:
        done = folders[name] / "codes.json"
        while not done.exists():
            assert process.poll() is None, "the stage broke"
            assert time.monotonic() < until, "the stage hangs"
            time.sleep(0.05)
        codes = json.loads(done.read_text())
        return Played(codes, [printed_by(folders[name] / str(rank)) for rank in range(len(codes))])

    yield played
    os.killpg(process.pid, signal.SIGKILL)  # the stage still waits for scenes, so its process group exists
    process.stdin.close()
    process.wait(HANG_SECONDS)


# -- the claims -------------------------------------------------------------------------------------------------------


def names_once(output: str, *words: str) -> bool:
    """True if the output has one message of lorakit with these words, and none of gloo."""
    return output.count("lorakit: stopped") == 1 and all(word in output for word in words) and "gloo" not in output


@pytest.mark.slow
@pytest.mark.usefixtures("played")  # the first test, because the scenes run meanwhile
def test_under_torchrun_the_reasons_are_the_same(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    runs = {}
    for scene in ("killed", "error"):
        folder = tmp_path / scene
        folder.mkdir()
        runs[scene] = subprocess.Popen([*torchrun, scene, folder], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    reports = {scene: run.communicate(timeout=2 * HANG_SECONDS)[1] for scene, run in runs.items()}
    output = {scene: printed_by(tmp_path / scene / "0") for scene in runs}

    assert [run.returncode for run in runs.values()] == [1, 1]  # torchrun's own
    assert names_once(output["killed"], "rank 1 (", "ended without a word"), output
    assert names_once(output["error"], "rank 1 (", "failed at: step 3: reading rows\n  rows.jsonl:7: no text"), output
    assert re.search(r"rank +: 0 .*\n +exitcode +: 75 ", reports["killed"]), reports["killed"]
    assert re.search(r"rank +: 0 .*\n +exitcode +: 2 ", reports["error"]), reports["error"]


@pytest.mark.parametrize("scene", ["killed", "killed, others do not end"])
def test_a_killed_rank_is_named_by_all_others(played: Callable[[str], Played], scene: str) -> None:
    codes, output = played(scene)

    assert codes == [75, -9, 75], output
    for rank in (0, 2):
        assert names_once(output[rank], "rank 1 (", "ended without a word", "all-reduce"), output[rank]


def test_a_killed_rank_is_noticed_by_ranks_that_are_blocked_elsewhere(played: Callable[[str], Played]) -> None:
    codes, output = played("killed, others blocked")

    assert codes == [75, -9, 75], output
    for rank in (0, 2):
        assert names_once(output[rank], "rank 1 (", "ended without a word", "step 3: reading rows"), output[rank]


def test_every_rank_of_many_names_one_it_does_not_watch(played: Callable[[str], Played]) -> None:
    codes, output = played("killed among many")

    assert codes == [75] * 11 + [-9], output
    assert all(names_once(words, "rank 11 (", "ended without a word") for words in output[:11]), output


@pytest.mark.parametrize("scene", ["store killed", "store killed, port open"])
def test_a_killed_rank_that_took_the_store_along_is_named(played: Callable[[str], Played], scene: str) -> None:
    codes, output = played(scene)

    assert codes == [-9, 75, 75], output
    assert all(names_once(words, "rank 0 (", "ended without a word", "step 3") for words in output[1:]), output


def test_a_store_that_ends_with_another_process_ends_the_ranks(played: Callable[[str], Played]) -> None:
    codes, output = played("store apart killed")

    assert codes == [75, 75], output
    assert all(names_once(words, "127.0.0.1:", "where the ranks meet, did not answer for 4 s") for words in output), (
        output
    )


def test_a_stopped_rank_is_named_and_ends_too_when_it_wakes_up(played: Callable[[str], Played]) -> None:
    codes, output = played("stopped")

    assert codes == [75, 75, 75], output
    for rank in (0, 2):
        assert names_once(output[rank], "rank 1 (", "not been heard of for 4 s", "all-reduce"), output[rank]


def test_ranks_that_stopped_together_are_named_together(played: Callable[[str], Played]) -> None:
    codes, output = played("two stopped")

    assert codes == [75, 75, 75], output
    assert names_once(output[0], "rank 1 (", "rank 2 (", "have not been heard of for 4 s"), output[0]


def test_a_stopped_host_of_the_store_is_named_by_its_address_and_rank(played: Callable[[str], Played]) -> None:
    codes, output = played("store stopped")

    assert codes == [75, 75, 75], output
    assert all(names_once(words, "did not answer for 4 s", "rank 0 (", "all-reduce") for words in output[1:]), output


def test_an_error_of_one_rank_is_printed_by_all_and_decides_their_exit_code(played: Callable[[str], Played]) -> None:
    codes, output = played("error")

    assert codes == [2, 2, 2], output
    assert "lorakit: rows.jsonl:7: no text\nGive it one." in output[1], output[1]
    for rank in (0, 2):
        assert names_once(output[rank], "rank 1 (", "failed at: step 3: reading rows\n  rows.jsonl:7: no text\n  Give")


def test_an_error_of_the_stores_host_is_sent_before_the_store_ends(played: Callable[[str], Played]) -> None:
    codes, output = played("host's error")

    assert codes == [2, 2, 2], output
    assert all(names_once(words, "rank 0 (", "rows.jsonl:7: no text") for words in output[1:]), output


def test_of_simultaneous_errors_all_ranks_print_the_same_one(played: Callable[[str], Played]) -> None:
    codes, output = played("errors at once")

    assert codes == [2] * 4, output
    first = [rank for rank, words in enumerate(output) if words == f"lorakit: error {rank} of the user\n"]
    assert len(first) == 1, output
    others = [words for rank, words in enumerate(output) if rank != first[0]]
    assert all(names_once(words, f"rank {first[0]} (", f"error {first[0]} of the user") for words in others), output


def test_a_deadlock_is_reported_with_the_phase_of_each_rank(played: Callable[[str], Played]) -> None:
    codes, output = played("deadlock")

    assert codes == [75, 75, 75], output
    for words in output:
        assert words.count("lorakit: stopped") == 1, words
        assert "no rank moved for" in words, words
        assert "): step 3: reading rows, for " in words, words
        assert words.count("): step 3: all-reduce, for ") == 2, words
        assert "Behind the others: rank 1 (" in words, words
    assert "in wait_for_a_row" in output[1], output[1]
    assert "in they_wait_for_each_other" in output[0], output[0]


def test_the_rank_behind_is_named_among_many(played: Callable[[str], Played]) -> None:
    codes, output = played("deadlock of many")

    assert codes == [75] * 12, output
    assert all("Behind the others: rank 11 (" in words for words in output), output


def test_a_broken_collective_of_running_ranks_is_reported_with_their_phases(played: Callable[[str], Played]) -> None:
    codes, output = played("broken")

    assert codes == [75, 75, 75], output
    for words in output:
        assert words.count("lorakit: stopped") == 1, words
        assert "although every rank is heard of" in words, words
        assert "): step 3: reading rows, for " in words, words


@pytest.mark.parametrize("scene", ["first ends", "another ends"])
def test_a_rank_that_closed_is_not_reported(played: Callable[[str], Played], scene: str) -> None:
    codes, output = played(scene)

    assert codes == [0, 0, 0], output
    assert "".join(output) == ""


def test_a_rank_that_starts_late_is_waited_for(played: Callable[[str], Played]) -> None:
    assert played("starts late") == ([0, 0, 0], ["", "", ""])


def test_a_store_that_is_slow_at_the_start_is_waited_for(played: Callable[[str], Played]) -> None:
    assert played("store answers late") == ([0, 0, 0], ["", "", ""])


def test_a_rank_that_never_starts_is_named(played: Callable[[str], Played]) -> None:
    codes, output = played("never starts")

    assert codes == [75, 75, -9], output
    assert all(names_once(words, "rank 2 gave no sign of life for 3 s", "127.0.0.1:") for words in output[:2]), output


def test_busy_ranks_are_not_reported(played: Callable[[str], Played]) -> None:
    codes, output = played("hard work")
    assert codes == [0] * 4, output
    # not that all print nothing, because torch warns where the rank with the store ends first
    assert "lorakit" not in "".join(output), output


def test_a_run_that_is_suspended_and_continued_goes_on(played: Callable[[str], Played]) -> None:
    assert played("paused") == ([0] * 3, [""] * 3)


if __name__ == "__main__" and len(sys.argv) > 1:
    os._exit(launched(sys.argv[1], Path(sys.argv[2])))
elif __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stage(sys.stdin)
