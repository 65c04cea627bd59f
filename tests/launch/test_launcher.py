"""How the processes of a run come to be, are heard, and end together; and how each launcher's processes are recognised."""

import importlib.util
import json
import os
import pty
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import lorakit.launch.launcher as launcher_module
from lorakit.errors import LorakitError, RunError, TemporaryFailure
from lorakit.launch.environment import World, contradictions, detect_world, split_endpoint
from lorakit.launch.job_files import kubernetes_job, slurm_job
from lorakit.launch.launcher import launch
from lorakit.launch.rendezvous import find_place, meeting
from lorakit.launch.slurm import node_names

pytestmark = pytest.mark.spread

ENGINE = Path(__file__).parents[2] / "lorakit" / "launch"
WORKER = """
import os, signal, sys, time
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(__file__).parent
"""
TOGETHER = """
(folder / f"up{rank}").touch()
while not all((folder / f"up{other}").exists() for other in range(int(os.environ["WORLD_SIZE"]))): time.sleep(0.01)
"""
LIGHT = f"""
import sys, types
sys.path.insert(0, {str(ENGINE.parent.parent)!r})
sys.modules["lorakit.parallel"] = package = types.ModuleType("lorakit.parallel")  # without the engines, which import torch
package.__path__ = [{str(ENGINE)!r}]
"""
LAUNCH = """
import json, sys
from lorakit.launch.launcher import launch
from lorakit.errors import LorakitError
try:
    code = launch([sys.executable, *sys.argv[2:]], **json.loads(sys.argv[1]))
except LorakitError as problem:
    print("lorakit train:", problem, file=sys.stderr)
    code = problem.exit_code
raise SystemExit(code)
"""
ALONE: dict[str, Any] = {"nodes": 1, "node_rank": None, "rendezvous": None, "max_restarts": 0, "threads": None}


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Launch workers that run ``code``; exit code, standard output, standard error."""

    def start(code: str, processes: int = 3, python: tuple[str, ...] = ("-S", "-E"), **options: Any) -> Any:
        (tmp_path / "worker.py").write_text(WORKER + code)
        for old in tmp_path.glob("up*"):
            old.unlink()
        command = [sys.executable, *python, str(tmp_path / "worker.py")]
        exit_code = launch(command, processes=processes, **{**ALONE, **options})
        return exit_code, *capfd.readouterr()

    return start


# ---------------------------------------------------------------------------------------------- what is heard


def test_rank_0_writes_itself_and_the_others_are_passed_on_with_their_rank(run: Any) -> None:
    code, out, err = run('print("out", rank); print("err", rank, file=sys.stderr)')

    assert code == 0
    assert out == "out 0\n"
    assert sorted(err.splitlines()) == [
        "[rank 1] err 1", "[rank 1] out 1", "[rank 2] err 2", "[rank 2] out 2", "err 0",
    ]  # fmt: skip


def test_in_a_terminal_rank_0_has_it_and_others_write_above_its_progress_bar(run: Any) -> None:
    terminal, end = pty.openpty()
    before = os.dup(2)
    os.dup2(end, 2)
    try:
        code = run(
            "while rank and not (folder / 'said').exists(): time.sleep(0.01)\n"
            "print(sys.stderr.isatty(), file=sys.stderr); (folder / 'said').touch()", processes=2,
        )[0]  # fmt: skip
    finally:
        os.dup2(before, 2)
        os.close(before)

    assert code == 0
    assert os.read(terminal, 1000) == b"True\r\n\r\x1b[2K[rank 1] False\r\n"
    os.close(terminal)
    os.close(end)


def test_lines_that_several_ranks_say_at_once_are_said_once(run: Any) -> None:
    code, _, err = run(TOGETHER + 'sys.stderr.write("a warning\\nin two lines" + "\\n" * (rank < 3))', processes=5)

    assert code == 0
    lines = [line for line in err.splitlines() if line.startswith("[")]
    assert lines == ["[ranks 1-4] a warning", "[ranks 1-4] in two lines"]


def test_a_worker_knows_its_place_and_its_share_of_the_cores(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    show = 'print(*(os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")))'
    cores = len(os.sched_getaffinity(0))

    assert run(show, processes=2)[1] == f"2 0 {max(1, cores // 2)}\n"
    assert run(show, processes=2, threads=7)[1] == "2 0 7\n"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert run(show, processes=1)[1] == "1 0 5\n"


# ---------------------------------------------------------------------------------------------- how it ends


def test_a_failing_worker_ends_the_others_and_gives_the_exit_code(run: Any, tmp_path: Path) -> None:
    began = time.monotonic()
    code, out, err = run(
        """
(folder / f"pid{rank}").write_text(str(os.getpid()))
"""
        + TOGETHER
        + """
if rank == 2:
    import subprocess
    (folder / "child").write_text(str(subprocess.Popen(["sleep", "60"]).pid))
    sys.exit("row 7 is bad")
time.sleep(60)
"""
    )

    assert code == 1
    assert time.monotonic() - began < 10
    assert err.splitlines() == [
        "[rank 2] row 7 is bad", "lorakit train: rank 2 failed (exit code 1); what it said is above",
    ]  # fmt: skip
    assert not any(alive(int((tmp_path / name).read_text())) for name in ("pid0", "pid1", "pid2", "child"))


def test_what_only_follows_from_a_failure_is_not_taken_for_it(run: Any) -> None:
    code, _, err = run(
        TOGETHER
        + """
if rank == 0: os.abort()                            # a library that lost its peer
if rank == 1: sys.exit(75)                          # our watch, which noticed
if rank == 2: time.sleep(0.2); print("I was it"); sys.exit(2)
"""
    )

    assert code == 2
    assert err.splitlines()[-1].startswith("lorakit train: rank 2 failed (exit code 2)")
    assert "[rank 2] I was it" in err


def test_a_killed_worker_is_named_with_what_to_do(run: Any) -> None:
    code, _, err = run("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(60)")

    assert code == 75
    assert err == (
        "lorakit train: rank 1 was killed by SIGKILL (out of memory?);"
        " the last checkpoint is kept, the same command goes on\n"
    )


def test_a_worker_that_does_not_end_is_killed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_module, "GRACE_SECONDS", 0.5)
    began = time.monotonic()
    code, _, err = run(
        """
signal.signal(signal.SIGTERM, lambda *_: print("still here", flush=True))
"""
        + TOGETHER
        + """
if rank == 1: sys.exit(1)
while True: time.sleep(1)
"""
    )

    assert code == 1
    assert "[rank 2] still here" in err
    assert time.monotonic() - began < 10


def test_last_words_are_said_once_and_at_the_end(run: Any) -> None:
    same = LIGHT + "from lorakit.launch.workers import last_words\n" + TOGETHER
    code, _, err = run(same + 'last_words("lorakit train: no such file"); print("noise"); sys.exit(2)')
    assert code == 2
    assert err.splitlines() == ["[ranks 1-2] noise", "lorakit train: no such file"]

    code, _, err = run(same + 'rank and last_words(f"lorakit train: bad row {rank}"); sys.exit(2 if rank else 75)')
    assert code == 2
    assert sorted(err.splitlines()) == ["[rank 1] lorakit train: bad row 1", "[rank 2] lorakit train: bad row 2"]


def test_outside_the_launcher_last_words_are_not_taken() -> None:
    code = (
        LIGHT
        + "from lorakit.launch.workers import *\ndie_with_parent()\nprint(last_words('x'), 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False False\n"


STOPPABLE = (
    """
got = []
signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
signal.signal(signal.SIGINT, lambda number, _: got.append(number))
"""
    + TOGETHER
    + """
if rank == 1: os.kill(os.getppid(), signal.SIGINT)
"""
)


def test_a_signal_reaches_each_worker_once_as_sigterm_and_they_may_save(run: Any) -> None:
    code, out, err = run(STOPPABLE + "while not got: time.sleep(0.01)\ntime.sleep(1)\n"
                         "print(got, os.getsid(0) == os.getpid()); sys.exit(75)")  # fmt: skip

    assert code == 75
    assert out == "[15] True\n"  # a session of its own: Ctrl-C in the terminal does not reach it besides
    assert "".join(err.splitlines()[:-1]).count("[15] True") == len(err.splitlines()) - 1  # once, or once for each
    assert err.splitlines()[-1:] == [
        "lorakit train: stopped by SIGINT; the last checkpoint is kept, the same command goes on",
    ]  # fmt: skip


def test_a_second_signal_ends_at_once(run: Any) -> None:
    began = time.monotonic()
    code, _, err = run(
        STOPPABLE
        + """
while not got: time.sleep(0.01)
if rank == 2: os.kill(os.getppid(), signal.SIGINT)
time.sleep(60)
"""
    )

    assert code == 75
    assert time.monotonic() - began < 10


def test_a_run_that_ends_although_it_was_asked_to_stop_has_ended(run: Any) -> None:
    assert run(STOPPABLE + "while not got: time.sleep(0.01)")[0] == 0


# ---------------------------------------------------------------------------------------------- starting again


def test_after_a_failure_all_start_again_and_it_is_said(run: Any) -> None:
    code, out, err = run("""
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("start", count, os.environ["MASTER_PORT"], flush=True)
if rank == 1 and count == "0": os.kill(os.getpid(), signal.SIGSEGV)
time.sleep(60 if count == "0" else 0)
""", max_restarts=2)  # fmt: skip

    assert code == 0
    starts = [line.split() for line in out.splitlines()]
    assert [count for _, count, _ in starts] == ["0", "1"]
    assert starts[0][2] != starts[1][2]  # a new store: nothing of the first start is left in it
    assert "lorakit train: rank 1 was killed by SIGSEGV; all start again from the last checkpoint (1 of 2)\n" in err


def test_restarts_are_used_up_and_a_user_error_takes_none(run: Any) -> None:
    code, out, err = run('print("start", flush=True); sys.exit(9)', max_restarts=1)
    assert (code, out.count("start")) == (9, 2)
    assert "(1 of 1)" in err

    for last in (2, 75):
        code, out, err = run(f'print("start", flush=True); sys.exit({last})', max_restarts=3)
        assert (code, out.count("start")) == (last, 1)
        assert "again" not in err


def test_torch_forms_its_group_and_forms_it_again_after_a_restart(run: Any) -> None:
    code, out, err = run("""
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(float(rank + 1)); dist.all_reduce(total)
if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0": os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
if rank == 0: print("sum", int(total))
dist.destroy_process_group()
""", processes=2, python=(), max_restarts=1)  # fmt: skip

    assert code == 0, err
    assert out == "sum 3\n"
    assert "rank 1 was killed by SIGKILL (out of memory?); all start again" in err


# ---------------------------------------------------------------------------------------------- launchers that die


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def wait_for(what: Callable[[], bool], seconds: float = 20) -> bool:
    until = time.monotonic() + seconds
    while not what() and time.monotonic() < until:
        time.sleep(0.05)
    return what()


def parent(tmp_path: Path, worker: str, **options: Any) -> subprocess.Popen[str]:
    """A launcher in a process of its own; its standard error goes to a file."""
    (tmp_path / "launch.py").write_text(LAUNCH)
    (tmp_path / "worker.py").write_text(WORKER + worker)
    arguments = [json.dumps({**ALONE, **options}), str(tmp_path / "worker.py")]
    with open(tmp_path / "err", "w") as err:
        return subprocess.Popen([sys.executable, tmp_path / "launch.py", *arguments], stdout=err, stderr=err, text=True)


REGISTERED = (
    LIGHT
    + """
from lorakit.launch.workers import die_with_parent
die_with_parent()
(folder / f"pid{rank}").write_text(str(os.getpid()))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(90)
"""
)


def pids(tmp_path: Path, count: int) -> list[int]:
    assert wait_for(lambda: all((tmp_path / f"pid{rank}").exists() for rank in range(count)), seconds=60)
    time.sleep(0.2)
    return [int((tmp_path / f"pid{rank}").read_text()) for rank in range(count)]


def test_a_killed_launcher_leaves_no_worker_behind(tmp_path: Path) -> None:
    process = parent(tmp_path, REGISTERED, processes=3)
    workers = pids(tmp_path, 3)
    assert all(map(alive, workers))

    process.kill()
    process.wait()

    assert wait_for(lambda: not any(map(alive, workers)), seconds=20)


def test_a_worker_whose_launcher_has_gone_already_ends(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT + "from lorakit.launch.workers import *\ndie_with_parent()\nprint('alive')"],
        env={**os.environ, "LORAKIT_PARENT": "1 9"}, capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (75, b"")


# ---------------------------------------------------------------------------------------------- several machines


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def two_machines(tmp_path: Path, worker: str, processes: int, once_up: Callable[[subprocess.Popen[str]], None]) -> Any:
    """The first machine is this process, the second one of its own; exit code of the first, and the second."""
    there = {"processes": processes, "nodes": 2, "rendezvous": f"127.0.0.1:{free_port()}"}
    second = parent(tmp_path, worker, **there, node_rank=1, wait_seconds=60)
    then = threading.Thread(target=once_up, args=(second,))
    then.start()
    command = [sys.executable, str(tmp_path / "worker.py")]
    code = launch(command, **{**ALONE, **there, "node_rank": 0, "wait_seconds": 60, "silent_seconds": 3})
    then.join()
    return code, second


def test_two_machines_form_one_run_and_name_the_one_that_dies(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    environments: list[list[str]] = []
    killed: list[int] = []

    def kill_once_up(second: subprocess.Popen[str]) -> None:
        environments.extend(Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in pids(tmp_path, 4))
        killed.append(second.pid)
        second.kill()
        second.wait()

    with pytest.raises(TemporaryFailure) as caught:
        two_machines(tmp_path, REGISTERED, 4, kill_once_up)

    said = str(caught.value)
    assert f"machine 1, {socket.gethostname()} (process {killed[0]}) has not been heard of for 3 s" in said
    for rank, told in enumerate(environments):
        world = detect_world(dict(item.split("=", 1) for item in told if "=" in item))
        assert world is not None
        assert (world.rank, world.size, world.local_rank, world.local_size) == (rank, 4, rank % 2, 2)
        assert world.launcher == "lorakit"
        assert f"GROUP_RANK={rank // 2}" in told
    assert len({item for told in environments for item in told if item.startswith("MASTER_PORT=")}) == 1
    assert wait_for(lambda: not any(map(alive, pids(tmp_path, 4))))
    assert capfd.readouterr().err == ""  # and no stack of torch's


@pytest.mark.parametrize("others", ["sys.exit(75)  # our watch, which noticed", "time.sleep(60)  # nobody noticed"])
def test_a_failure_on_one_machine_ends_the_other_with_its_words_and_code(
    others: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = f"""
if rank == 1: print("oh"); (folder / "dead").touch(); sys.exit(2)
while not (folder / "dead").exists(): time.sleep(0.01)
{others}
"""
    code, second = two_machines(tmp_path, worker, 2, lambda second: None)

    assert (code, second.wait(20)) == (2, 2)
    assert capfd.readouterr().err == (
        f"lorakit train: machine 1, {socket.gethostname()} (process {second.pid}): rank 1 failed (exit code 2)\n"
    )
    assert (tmp_path / "err").read_text() == (
        "[rank 1] oh\nlorakit train: rank 1 failed (exit code 2); what it said is above\n"
    )


@pytest.mark.parametrize(
    ("options", "listening", "message"),
    [
        ({"rendezvous": None}, False, "set parallel.rendezvous to host:port"),
        ({"rendezvous": "here:there"}, False, "'here:there' is no host:port"),
        ({"node_rank": 2}, False, "node rank 2 of 2 machines: node ranks go from 0 to 1"),
        ({"node_rank": 1}, False, "nobody answered at 127.0.0.1:PORT for 0.5 s (Connection refused)"),
        ({"rendezvous": "no.such.host.invalid:1"}, False, "nobody answered at no.such.host.invalid:1 for 0.5 s"),
        ({"node_rank": 0}, True, "127.0.0.1:PORT is in use by another program"),
        ({"node_rank": 0}, False, "not all of the 2 machines came to 127.0.0.1:PORT within 0.5 s"),
    ],
)
def test_machines_that_do_not_meet_say_where_and_how_long(options: Any, listening: bool, message: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        if listening:
            other.listen()
        else:
            other.close()
        settings = {
            "rendezvous": f"127.0.0.1:{port}",
            "node_rank": None,
            "nodes": 2,
            "local_size": 1,
            "wait_seconds": 0.5,
        }
        with pytest.raises(RunError) as caught, meeting(find_place(**{**settings, **options})) as handler:
            handler.next_rendezvous()

    assert message.replace("PORT", str(port)) in str(caught.value)


def test_a_program_that_accepts_and_never_answers_is_no_rendezvous() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        began = time.monotonic()
        place = find_place(
            f"127.0.0.1:{other.getsockname()[1]}", node_rank=None, nodes=2, local_size=1, wait_seconds=0.5
        )
        with pytest.raises(RunError, match="is in use by another program"), meeting(place):
            pass
        assert time.monotonic() - began < 15
        other.close()
        time.sleep(0.3)  # torch's thread notices, and says so


# ---------------------------------------------------------------------------------------------- who launched this?

# As recorded under OpenMPI 4.1, MPICH 4.0, Slurm 22.05, torch 2.13, accelerate 1.15 and DeepSpeed 0.19, less what is
# beside the point. MVAPICH and Intel MPI after their manuals.
TORCHRUN = {
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node7",
    "MASTER_PORT": "29400", "RANK": "3", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "4",
}  # fmt: skip
ACCELERATE = {"ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_MIXED_PRECISION": "no"}
DEEPSPEED = {
    "CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "4",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_num_nodes": "1", "PMIX_RANK": "1",
}  # fmt: skip
MPICH = {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_FD": "8", "PMI_RANK": "1", "PMI_SIZE": "2"}
MVAPICH = {
    "MV2_COMM_WORLD_LOCAL_RANK": "0", "MV2_COMM_WORLD_LOCAL_SIZE": "2", "MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "4",
}  # fmt: skip
SBATCH = {
    "SLURM_GTIDS": "0", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_NODELIST": "node[1-2]", "SLURM_NPROCS": "4", "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
SALLOC = {
    name: value for name, value in SBATCH.items() if name not in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
}
SRUN = {
    **SBATCH, "SLURM_GTIDS": "2,3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_PROCID": "3", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
ONE_TASK = {
    "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node2",
    "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
}  # fmt: skip
SUBSTEP = {
    **SRUN, "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "1", "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "node1",
    "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
}  # fmt: skip
FOUR_BY_MPI = {**OPENMPI, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
PYTORCHJOB = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "PET_NNODES": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"MASTER_ADDR": "node7", "OMP_NUM_THREADS": "4", "RANK": ""}, None),
        (TORCHRUN, World(3, 4, 1, 2, "torchrun", "node7", 29400)),
        ({**TORCHRUN, **ONE_TASK, **OPENMPI}, World(3, 4, 1, 2, "torchrun", "node7", 29400)),  # inside a step or mpirun
        ({**TORCHRUN, "LORAKIT_PARENT": "7 9"}, World(3, 4, 1, 2, "lorakit", "node7", 29400)),
        ({**TORCHRUN, **ACCELERATE}, World(3, 4, 1, 2, "accelerate", "node7", 29400)),
        ({**ACCELERATE, "MASTER_ADDR": "127.0.0.1"}, World(0, 1, 0, 1, "accelerate", "127.0.0.1", 29500)),
        (DEEPSPEED, World(3, 4, 1, 2, "deepspeed", "10.0.0.1", 29500)),
        (OPENMPI, World(1, 2, 1, 2, "openmpi", "127.0.0.1", 29500)),
        ({**FOUR_BY_MPI, "MASTER_ADDR": "n1", "MASTER_PORT": "99"}, World(3, 4, 1, 2, "openmpi", "n1", 99)),
        ({**FOUR_BY_MPI, **SALLOC, **ONE_TASK}, World(3, 4, 1, 2, "openmpi", "node1", 20031)),  # the job's first host
        ({**FOUR_BY_MPI, **SBATCH}, World(3, 4, 1, 2, "openmpi", "node1", 20031)),  # the same without mpirun's own step
        (MPICH, World(1, 2, 1, 2, "mpich", "127.0.0.1", 29500)),
        ({**MPICH, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}, World(1, 2, 1, 2, "mpich", "127.0.0.1", 29500)),
        ({**MVAPICH, "MASTER_ADDR": "n1"}, World(2, 4, 0, 2, "mvapich", "n1", 29500)),
        (SBATCH, None),
        (SALLOC, None),
        ({**SALLOC, **ONE_TASK}, None),  # srun --pty bash
        (SRUN, World(3, 4, 1, 2, "slurm", "node1", 20031)),
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "13"}, World(3, 4, 1, 2, "slurm", "node1", 20031)),
        ({**SRUN, "WORLD_SIZE": "4", "MASTER_ADDR": "n9", "MASTER_PORT": "1234"}, World(3, 4, 1, 2, "slurm", "n9", 1234)),
        (SUBSTEP, World(1, 2, 1, 2, "slurm", "127.0.0.1", 20032)),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1,3", "SLURM_LOCALID": "2"}, World(3, 4, 2, 3, "slurm", "node1", 20031)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, World(0, 1, 0, 1, "environment", "127.0.0.1", 29500)),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": ""}, World(3, 4, 1, 2, "environment", "node7", 29400)),
    ],
)  # fmt: skip
def test_each_launchers_processes_find_their_place(environment: dict[str, str], expected: World | None) -> None:
    assert detect_world(environment) == expected


def test_the_recipes_rendezvous_serves_where_the_launcher_names_no_address() -> None:
    for environment in (FOUR_BY_MPI, {**MVAPICH}, SRUN):
        world = detect_world(environment, "head:4321")
        assert world is not None
        assert (world.address, world.port) == ("head", 4321)
    world = detect_world(TORCHRUN, "head:4321")
    assert world is not None
    assert (world.address, world.port) == ("node7", 29400)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "3"}, "WORLD_SIZE and LOCAL_RANK and LOCAL_WORLD_SIZE are not set beside RANK=3"),
        ({"WORLD_SIZE": "8"}, "RANK and LOCAL_RANK and LOCAL_WORLD_SIZE are not set beside WORLD_SIZE=8"),
        (PYTORCHJOB, "let each pod run torchrun"),
        ({"PET_NNODES": "2"}, "PET_NNODES=2 is meant for torchrun"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 with WORLD_SIZE=4: ranks go from 0 to 3"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1' is no whole number"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "WORLD_SIZE='four' is no whole number"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 and WORLD_SIZE=4"),
        ({**TORCHRUN, "MASTER_PORT": "x"}, "MASTER_PORT='x' is no port"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE and"),
        ({**OPENMPI, "RANK": "0"}, "RANK=0 contradicts OMPI_COMM_WORLD_RANK=1: unset RANK"),
        ({**SRUN, "WORLD_SIZE": "8"}, "WORLD_SIZE=8 contradicts SLURM_STEP_NUM_TASKS=4"),
        ({**SRUN, "SLURM_NODEID": "2"}, "SLURM_NODEID=2 with SLURM_STEP_TASKS_PER_NODE='2(x2)'"),
        ({**SRUN, "SLURM_STEP_NODELIST": "node[1-"}, "'node[1-' is no Slurm node list"),
        (FOUR_BY_MPI, "set parallel.rendezvous to host:port of the machine of rank 0, or MASTER_ADDR"),
        (MVAPICH, "set parallel.rendezvous"),
    ],
)  # fmt: skip
def test_what_does_not_add_up_is_refused_by_name_and_value(environment: dict[str, str], message: str) -> None:
    with pytest.raises(RunError) as caught:
        detect_world(environment)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("node[01-03,7],login", ["node01", "node02", "node03", "node7", "login"]),
        ("a[9-11]", ["a9", "a10", "a11"]),
        ("rack[0-1]n[1-2]-ib,b", ["rack0n1-ib", "rack0n2-ib", "rack1n1-ib", "rack1n2-ib", "b"]),
    ],
)
def test_node_lists_are_spelt_out(text: str, names: list[str]) -> None:
    assert node_names(text) == names


@pytest.mark.parametrize("text", ["", "node[1-2", "node]1[", "node[a-b]", "node[]"])
def test_what_is_no_node_list_is_refused(text: str) -> None:
    with pytest.raises(RunError, match="is no Slurm node list"):
        node_names(text)


def test_endpoints() -> None:
    assert split_endpoint("node1:29500") == ("node1", 29500)
    assert split_endpoint("[fe80::1]:7") == ("fe80::1", 7)
    assert split_endpoint("node1") == ("node1", None)
    for wrong in ("node1:", ":1", "a b:1", "node1:99999", "fe80::1:7"):
        with pytest.raises(RunError, match="is no host:port"):
            split_endpoint(wrong)


DDP: dict[str, Any] = {"backend": "ddp", "processes": 4, "nodes": 2, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("environment", "recipe", "expected"),
    [
        (TORCHRUN, {}, []),
        (DEEPSPEED, {}, []),
        (SRUN, {}, []),
        ({**TORCHRUN, **ACCELERATE, "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_FSDP": "false"}, {}, []),
        (TORCHRUN, {"processes": 8}, ["torchrun started 4 processes, parallel.processes is 8"]),
        (ACCELERATE, {}, ["accelerate started 1 process, parallel.processes is 4"]),
        (TORCHRUN, {"nodes": 1}, ["torchrun uses 2 machines, parallel.nodes is 1"]),
        ({**FOUR_BY_MPI, "MASTER_ADDR": "n1"}, {"nodes": 4}, ["openmpi uses 2 machines, parallel.nodes is 4"]),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, {}, ["ACCELERATE_USE_DEEPSPEED=true, parallel.backend is ddp"]),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, {"backend": "zero2"}, []),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, {"backend": "zero3"}, []),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, {"backend": "zero2"},
            ["ACCELERATE_USE_DEEPSPEED=true, ACCELERATE_DEEPSPEED_ZERO_STAGE=3, parallel.backend is zero2"],
        ),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, {"backend": "fsdp2"}, []),
        ({"ACCELERATE_USE_FSDP": "true"}, {"backend": "fsdp2"}, ["ACCELERATE_USE_FSDP=true, parallel.backend is fsdp2"]),
        ({"ACCELERATE_USE_FSDP": "true"}, {"backend": "zero3"}, ["ACCELERATE_USE_FSDP=true, parallel.backend is zero3"]),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, {}, ["ACCELERATE_USE_MEGATRON_LM=true, parallel.backend is ddp"]),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"dtype": "float32"}, ["ACCELERATE_MIXED_PRECISION=bf16, base.dtype is float32"]),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {"dtype": "float16"}, []),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, {}, ["ACCELERATE_MIXED_PRECISION=fp8, base.dtype is bfloat16"]),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, {"dtype": "float32"}, []),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, {}, ["ACCELERATE_DYNAMO_BACKEND=inductor, and a recipe compiles nothing"]),
    ],
)  # fmt: skip
def test_what_the_launcher_says_against_the_recipe(environment: Any, recipe: Any, expected: list[str]) -> None:
    assert contradictions(detect_world(environment), environment, **{**DDP, **recipe}) == expected


# ---------------------------------------------------------------------------------------------- real launchers

SHOW = (
    LIGHT
    + """
import os
from lorakit.launch.environment import detect_world
os.write(1, f"{detect_world(os.environ)} {'torch' in sys.modules}\\n".encode())  # a line as one piece
"""
)
REAL = {
    "accelerate": ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"],
    "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--no_local_rank"],
}  # fmt: skip


def places(command: list[str], tmp_path: Path, launcher: str, **environment: str) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    done = subprocess.run(
        [*command, str(tmp_path / "show.py")], capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, **environment},
    )  # fmt: skip
    shown = sorted(line for line in done.stdout.splitlines() if line.startswith("World("))
    for rank, line in enumerate(shown):
        assert line.startswith(f"World(rank={rank}, size=2, local_rank={rank}, local_size=2, launcher={launcher!r}")
        assert line.endswith("False"), "world.py must import no torch"
    assert len(shown) == 2, done.stdout + done.stderr


@pytest.mark.parametrize("launcher", list(REAL))
def test_real_launchers(launcher: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(launcher) is None:
        pytest.skip(f"{launcher} is not installed")
    places([sys.executable, *REAL[launcher]], tmp_path, launcher, DS_ACCELERATOR="cpu")


def test_real_torchrun_told_by_the_variables_of_a_trainjobs_pod(tmp_path: Path) -> None:
    pod = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "localhost"}
    places(
        [sys.executable, "-m", "torch.distributed.run"], tmp_path, "torchrun", **pod, PET_MASTER_PORT=str(free_port())
    )


@pytest.mark.parametrize(
    ("program", "launcher", "options"),
    [("mpirun.openmpi", "openmpi", ["--allow-run-as-root", "--oversubscribe"]), ("mpirun.mpich", "mpich", [])],
)
def test_real_mpirun(program: str, launcher: str, options: list[str], tmp_path: Path) -> None:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed")
    places([found, *options, "-n", "2", sys.executable], tmp_path, launcher)


# ---------------------------------------------------------------------------------------------- job files


def test_a_slurm_script_starts_a_task_per_process_and_queues_again_after_75(tmp_path: Path) -> None:
    for name, text in {  # what the script calls
        "srun": 'echo srun "$@"; exit $CODE', "scontrol": 'echo scontrol "$@"', "lorakit": "exit 1",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    text = slurm_job("my recipes/a.yaml", processes=8, nodes=2, cpus_per_process=6)
    (tmp_path / "job.sh").write_text(text)

    for line in ("nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "cpus-per-task=6", "signal=TERM@120", "requeue"):
        assert f"#SBATCH --{line}\n" in text
    for code in (0, 2, 75):
        environment = {
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SLURM_CPUS_PER_TASK": "6",
            "SLURM_JOB_ID": "9",
            "CODE": str(code),
        }
        done = subprocess.run(
            ["bash", tmp_path / "job.sh"], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == code
        assert done.stdout.splitlines() == [
            "srun --kill-on-bad-exit=1 --cpus-per-task=6 --gpu-bind=none lorakit train my recipes/a.yaml",
            *(["scontrol requeue 9"] if code == 75 else []),
        ]  # fmt: skip
    assert "gpu" not in slurm_job("a.yaml", processes=2, nodes=1, gpus_per_process=0)


def test_a_train_job_lets_its_pods_run_torchrun() -> None:
    runtime, job = yaml.safe_load_all(
        kubernetes_job("r e.yaml", processes=8, nodes=2, image="me/lorakit:1", claim="data", name="tune")
    )

    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert {part["apiVersion"] for part in (runtime, job)} == {"trainer.kubeflow.org/v1alpha1"}
    assert job["spec"]["runtimeRef"] == {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "tune"}
    assert job["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": 4}
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 2, "torch": {}}
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node"
    assert container["command"] == ["torchrun", "-m", "lorakit.cli", "train", "r e.yaml"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}


def test_a_pytorch_jobs_pods_are_numbered_by_their_rank_and_its_processes_by_torchrun() -> None:
    job = yaml.safe_load(
        kubernetes_job("a.yaml", processes=6, nodes=3, image="i", claim="data", kind="PyTorchJob", gpus_per_process=0)
    )

    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: part["replicas"] for name, part in replicas.items()} == {"Master": 1, "Worker": 2}
    for part in replicas.values():
        (container,) = part["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert "resources" not in container
        assert container["command"] == [
            "torchrun", "--nnodes=3", "--nproc-per-node=2", "--node-rank=$(RANK)", "--master-addr=$(MASTER_ADDR)",
            "--master-port=$(MASTER_PORT)", "-m", "lorakit.cli", "train", "a.yaml",
        ]  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda: slurm_job("a", processes=3, nodes=2),
        lambda: slurm_job("a", processes=2, nodes=1, name="a\n#SBATCH --uid=0"),
        lambda: kubernetes_job("a", processes=3, nodes=2, image="i", claim="c"),
        lambda: kubernetes_job("a", processes=2, nodes=2, image="i", claim="Data"),
    ],
)
def test_jobs_that_could_not_run_are_refused(make: Callable[[], str]) -> None:
    with pytest.raises(LorakitError):
        make()
