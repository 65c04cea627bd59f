"""lorakit's launcher: the workers of one machine start, write and end together. The workers import no torch."""

import contextlib
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from lorakit.errors import RunError
from lorakit.launch.environment import World
from lorakit.launch.launcher import launch
from lorakit.recipe import ParallelSection
from lorakit.training.start import require_one_machine

pytestmark = pytest.mark.spread

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 60  # a worker that still runs then is ended by its own alarm, so that no test hangs

WORKER = f"""
import os, signal, sys, time
from pathlib import Path
signal.alarm({LIMIT_SECONDS})
rank, folder = int(os.environ["RANK"]), Path(__file__).parent
def all_exist(name): return all((folder / f"{{name}}{{r}}").exists() for r in range(int(os.environ["WORLD_SIZE"])))
"""
MEET = """
(folder / f"up{rank}").touch()
while not all_exist("up"): time.sleep(0.01)
"""
IMPORTS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from lorakit.launch.environment import *
from lorakit.launch.workers import *
"""
LAUNCH = """
import signal, sys
from lorakit.launch.launcher import launch
if "ignore SIGHUP" in sys.argv: signal.signal(signal.SIGHUP, signal.SIG_IGN)
raise SystemExit(launch([sys.executable, "-S", "-E", sys.argv[1]], processes=2))
"""


class Ended(NamedTuple):
    code: int
    out: str
    err: str


class Run(Protocol):
    def __call__(self, code: str, processes: int = 3, max_restarts: int = 0) -> Ended: ...


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Launch workers that run ``code``."""

    def start(code: str, processes: int = 3, max_restarts: int = 0) -> Ended:
        (tmp_path / "worker.py").write_text(WORKER + code)
        for old in tmp_path.glob("up*"):
            old.unlink()
        command = [sys.executable, "-S", "-E", str(tmp_path / "worker.py")]
        exit_code = launch(command, processes=processes, max_restarts=max_restarts)
        return Ended(exit_code, *capfd.readouterr())

    return start


# -------------------------------------------------------------------------------------------- output and environment


def test_rank_0_writes_itself_and_the_others_are_passed_on_with_their_rank(run: Run) -> None:
    code, out, err = run('print("out", rank); print("err", rank, file=sys.stderr)')

    assert code == 0
    assert out == "out 0\n"
    assert sorted(err.splitlines()) == [
        "[rank 1] err 1", "[rank 1] out 1", "[rank 2] err 2", "[rank 2] out 2", "err 0",
    ]  # fmt: skip


def test_in_a_terminal_rank_0_has_it_and_others_write_above_its_progress_bar(run: Run) -> None:
    terminal, end = pty.openpty()
    before = os.dup(2)
    os.dup2(end, 2)
    try:
        code = run(
            "while rank and not (folder / 'printed').exists(): time.sleep(0.01)\n"
            "print(sys.stderr.isatty(), file=sys.stderr); (folder / 'printed').touch()", processes=2,
        ).code  # fmt: skip
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(end)
    written = b""
    with contextlib.suppress(OSError):  # the end of a terminal that nobody writes to any more
        while chunk := os.read(terminal, 1000):
            written += chunk
    os.close(terminal)

    assert code == 0
    assert written == b"True\r\n\r\x1b[2K[rank 1] False\r\n"


def test_lines_that_several_ranks_write_at_once_are_printed_once(run: Run) -> None:
    code, _, err = run(MEET + 'sys.stderr.write("a warning\\nin two lines" + "\\n" * (rank < 3))', processes=5)

    assert code == 0
    lines = [line for line in err.splitlines() if line.startswith("[")]
    assert lines == ["[ranks 1-4] a warning", "[ranks 1-4] in two lines"]


def test_workers_are_recognised_by_their_environment_and_import_no_torch(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "MASTER_ADDR", "GROUP_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):  # left from elsewhere
        monkeypatch.setenv(name, "7")
    show = "print(detect_world(os.environ), [n for n in os.environ if n.startswith('TORCHELASTIC')])\n"
    code, out, err = run(IMPORTS + show + "print('torch' in sys.modules)", processes=2)

    assert code == 0, err
    world, no_torch = out.splitlines()
    port = int(world.partition("port=")[2].partition(")")[0])
    assert world == f"{World(0, 2, 0, 2, 'lorakit', '127.0.0.1', port)} []"
    assert no_torch == "False"
    assert f"rank=1, size=2, local_rank=1, local_size=2, launcher='lorakit', address='127.0.0.1', port={port})" in err


def test_the_cores_are_shared_unless_the_environment_says_how(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    show = 'print(os.environ["OMP_NUM_THREADS"])'

    assert run(show, processes=2).out == f"{max(1, len(os.sched_getaffinity(0)) // 2)}\n"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert run(show, processes=1).out == "5\n"


def test_rank_0_can_listen_on_its_port_and_no_other_program_gets_it(run: Run) -> None:
    code, out, err = run("""
import errno, socket
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.socket() as stranger:
        try: stranger.bind(address)
        except OSError as problem: print(errno.errorcode[problem.errno], flush=True)
    server = socket.socket(socket.AF_INET6)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
    server.bind(("::", address[1])); server.listen()
    (folder / "listening").touch()
    print(server.accept()[0].recv(10).decode())
else:
    while not (folder / "listening").exists(): time.sleep(0.01)
    socket.create_connection(address, timeout=10).send(b"hello")
""", processes=2)  # fmt: skip

    assert (code, out) == (0, "EADDRINUSE\nhello\n"), err


# -------------------------------------------------------------------------------------------- how a group ends


def test_a_failing_worker_ends_the_others_and_gives_the_exit_code(run: Run, tmp_path: Path) -> None:
    began = time.monotonic()
    code, _, err = run(
        '(folder / f"pid{rank}").write_text(str(os.getpid()))\n'
        + MEET
        + """
if rank == 2:
    import subprocess
    (folder / "child").write_text(str(subprocess.Popen(["sleep", "60"]).pid))
    sys.exit("row 7 is bad")
time.sleep(60)
"""
    )

    assert code == 1
    assert time.monotonic() - began < 20
    assert err.splitlines() == [
        "[rank 2] row 7 is bad", "lorakit train: rank 2 failed (exit code 1); what it said is above",
    ]  # fmt: skip
    assert not any(is_running(int((tmp_path / name).read_text())) for name in ("pid0", "pid1", "pid2", "child"))


def test_a_consequence_of_a_failure_is_not_taken_for_the_cause(run: Run) -> None:
    code, _, err = run(
        MEET
        + """
if rank == 0: os.abort()    # as a library that lost its peer
if rank == 1: sys.exit(75)  # as the watchdog of another rank
if rank == 2: time.sleep(0.5); print("here it began"); sys.exit(2)
"""
    )

    assert code == 2
    assert err.splitlines()[-1].startswith("lorakit train: rank 2 failed (exit code 2)")
    assert "[rank 2] here it began" in err


def test_consequences_alone_are_reported_after_a_while(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorakit.launch.launcher.CAUSE_SECONDS", 0.2)
    code, _, err = run("sys.exit(75) if rank else time.sleep(60)", processes=2)

    assert code == 75
    assert err.splitlines() == ["lorakit train: rank 1 stopped; what was saved is kept, the same command goes on"]


def test_a_killed_worker_is_named_with_the_remedy(run: Run) -> None:
    code, _, err = run("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(60)")

    assert code == 75
    assert err == (
        "lorakit train: rank 1 was killed by SIGKILL (out of memory?);"
        " what was saved is kept, the same command goes on\n"
    )


def test_a_worker_that_ignores_sigterm_is_killed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorakit.launch.launcher.KILL_SECONDS", 0.3)
    code, _, err = run(
        'signal.signal(signal.SIGTERM, lambda *_: print("still here", flush=True))\n'
        + MEET
        + "if rank == 1: sys.exit(1)\nwhile True: time.sleep(1)"
    )

    assert code == 1
    assert "[rank 2] still here" in err


def test_the_message_of_the_cause_is_printed_once_and_last(run: Run) -> None:
    both = IMPORTS + MEET
    code, _, err = run(both + 'send_failure_message("lorakit train: no such file"); print("noise"); sys.exit(2)')
    assert code == 2
    assert err.splitlines() == ["[ranks 1-2] noise", "lorakit train: no such file"]

    code, _, err = run(
        both + 'rank and send_failure_message(f"lorakit train: bad row {rank}"); sys.exit(2 if rank else 75)'
    )
    assert code == 2
    assert sorted(err.splitlines()) == ["[rank 1] lorakit train: bad row 1", "[rank 2] lorakit train: bad row 2"]


# -------------------------------------------------------------------------------------------- signals

STOPPABLE = (
    """
received = []
signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
signal.signal(signal.SIGINT, lambda number, _: received.append(number))
"""
    + MEET
    + """
if rank == 1: os.kill(os.getppid(), signal.SIGINT)
while not received: time.sleep(0.01)
"""
)


def test_a_signal_reaches_each_worker_once_as_sigterm_and_they_may_save(run: Run) -> None:
    code, out, err = run(
        STOPPABLE + "time.sleep(0.3)\nprint(received, os.getsid(0) == os.getpid(), flush=True)\n" + "sys.exit(75)"
    )

    assert code == 75
    assert out == "[15] True\n"  # a session of its own: Ctrl-C in the terminal does not reach it as well
    *lines, last = err.splitlines()
    assert "".join(lines).count("[15] True") == len(lines)  # one line of both ranks, or one of each
    assert last == "lorakit train: stopped by SIGINT; what was saved is kept, the same command goes on"


def test_a_second_ctrl_c_kills_at_once(run: Run) -> None:
    began = time.monotonic()
    code = run(STOPPABLE + "if rank == 2: os.kill(os.getppid(), signal.SIGINT)\ntime.sleep(50)").code

    assert code == 75
    assert time.monotonic() - began < 20


def test_a_repeated_sigterm_is_one_request(run: Run) -> None:
    code, out, _ = run(
        STOPPABLE.replace("getppid(), signal.SIGINT", "getppid(), signal.SIGTERM")
        + "if rank == 2: os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(0.3)\nprint(received); sys.exit(75)"
    )

    assert (code, out) == (75, "[15]\n")


def test_a_run_that_ends_well_after_a_stop_request_has_succeeded(run: Run) -> None:
    assert run(STOPPABLE).code == 0


@pytest.mark.parametrize(("ignored", "code"), [("", 75), ("ignore SIGHUP", 0)])
def test_a_hangup_stops_the_run_unless_nohup_started_it(ignored: str, code: int, tmp_path: Path) -> None:
    process = start_launcher(
        tmp_path,
        """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
(folder / f"ready{rank}").write_text(str(os.getpid()))
while not (folder / "enough").exists(): time.sleep(0.01)
""",
        ignored,
    )
    wait_for_pids(tmp_path, "ready")

    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    (tmp_path / "enough").touch()

    assert process.wait(LIMIT_SECONDS) == code
    assert ("stopped by SIGHUP" in (tmp_path / "err").read_text()) == bool(code)


# -------------------------------------------------------------------------------------------- restarts


def test_after_a_failure_all_start_again_with_another_port_and_a_line_says_so(run: Run) -> None:
    code, out, err = run("""
first = not (folder / f"started{rank}").exists()
(folder / f"started{rank}").touch()
while not all_exist("started"): time.sleep(0.01)
print("start", os.environ["MASTER_PORT"], flush=True)
if rank == 1 and first: os.kill(os.getpid(), signal.SIGSEGV)
time.sleep(60 if first else 0)
""", max_restarts=2)  # fmt: skip

    assert code == 0
    ports = [line.split()[1] for line in out.splitlines()]
    assert len(set(ports)) == 2
    assert "lorakit train: rank 1 was killed by SIGSEGV; all start again from the last checkpoint (1 of 2)\n" in err


def test_a_restart_goes_on_instead_of_discarding_the_run_once_more(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "worker.py").write_text("import os, sys; print(sys.argv[1:], flush=True); os.abort()")
    command = [sys.executable, "-S", "-E", str(tmp_path / "worker.py")]

    launch([*command, "--fresh"], processes=1, max_restarts=2, restart_command=lambda: command)

    assert capfd.readouterr().out.splitlines() == ["['--fresh']", "[]", "[]"]


def test_restarts_are_used_up_and_a_user_error_takes_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorakit.launch.launcher.CAUSE_SECONDS", 0.2)
    code, out, err = run('print("start", flush=True); sys.exit(9)', max_restarts=1)
    assert (code, out.count("start")) == (9, 2)
    assert "(1 of 1)" in err

    for last in (2, 75):
        code, out, err = run(f'print("start", flush=True); sys.exit({last})', max_restarts=3)
        assert (code, out.count("start")) == (last, 1)
        assert "start again" not in err


# -------------------------------------------------------------------------------------------- launchers that die


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def start_launcher(tmp_path: Path, worker: str, *arguments: str) -> subprocess.Popen[str]:
    """A launcher in a process of its own; its standard error goes to a file."""
    (tmp_path / "launch.py").write_text(LAUNCH)
    (tmp_path / "worker.py").write_text(WORKER + worker)
    with open(tmp_path / "err", "w") as err:
        return subprocess.Popen(
            [sys.executable, tmp_path / "launch.py", str(tmp_path / "worker.py"), *arguments],
            stdout=err, stderr=err, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip


def wait_for_pids(tmp_path: Path, name: str) -> list[int]:
    files = [tmp_path / f"{name}{rank}" for rank in range(2)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def test_a_killed_launcher_leaves_no_worker_behind(tmp_path: Path) -> None:
    process = start_launcher(
        tmp_path,
        IMPORTS
        + """
die_with_parent()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / f"pid{rank}").write_text(str(os.getpid()))
time.sleep(90)
""",
    )
    workers = wait_for_pids(tmp_path, "pid")
    assert all(map(is_running, workers))

    process.kill()
    process.wait(LIMIT_SECONDS)

    wait_for(lambda: not any(map(is_running, workers)))


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", "-c", IMPORTS + code], capture_output=True, text=True, timeout=LIMIT_SECONDS,
        env={**os.environ, **environment}, check=False,
    )  # fmt: skip


def test_a_worker_whose_launcher_ended_before_it_started_ends() -> None:
    done = run_python("die_with_parent(); print('alive')", LORAKIT_PARENT="1 9")

    assert (done.returncode, done.stdout) == (75, "")


def test_outside_the_launcher_a_process_prints_its_own_message() -> None:
    done = run_python("die_with_parent(); print(send_failure_message('x'), 'torch' in sys.modules)")

    assert done.stdout == "False False\n"


# -------------------------------------------------------------------------------------------- several machines


@pytest.mark.parametrize("rendezvous", [None, "node01:1234"])
def test_several_machines_are_refused_with_the_line_that_starts_them(rendezvous: str | None) -> None:
    arguments = ["train", "my recipe.yaml", "train.steps=3", "--fresh"]
    with pytest.raises(RunError) as caught:
        require_one_machine(ParallelSection(backend="ddp", nodes=2, processes=8, rendezvous=rendezvous), arguments)

    assert "parallel.nodes is 2" in str(caught.value)
    assert "docs/clusters.md" in str(caught.value)
    assert shlex.split(str(caught.value).splitlines()[-1]) == [
        "torchrun", "--nnodes", "2", "--nproc-per-node", "4", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", rendezvous or "HOST:29500", "--no-python", "lorakit", *arguments,
    ]  # fmt: skip
    require_one_machine(ParallelSection(backend="ddp", processes=8), arguments)
