"""Faults of the processes on one machine: each ends all of them with a message and an exit code for scripts.

2: the user can fix it. 75: the same command goes on from the last checkpoint. No process is left running, none prints a
traceback.
"""

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import TCPStore

from lorakit.cli import main
from lorakit.errors import TemporaryFailure
from lorakit.launch.environment import World
from lorakit.launch.launcher import launch
from lorakit.parallel.setup import rendezvous_errors_explained
from lorakit.run.metrics import read_metrics
from lorakit.training.checkpoint import Checkpoints
from tests.helpers.bases import make_base
from tests.helpers.rows import chat, write_rows
from tests.helpers.runs import workers_of

pytestmark = [pytest.mark.slow, pytest.mark.spread]

Recipe = Callable[..., Path]
PATIENCE_SECONDS = 180  # a hang guard, no expectation
TRAIN = [sys.executable, "-m", "lorakit.cli", "train"]
DDP = ("parallel.backend=ddp", "parallel.processes=2", "parallel.silent_seconds=5")
MARK = "LORAKIT_TEST_FAULTS"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a command whose descendants all carry a mark; none of them may run at the end of the test."""
    mark, commands = f"{MARK}={tmp_path}", []

    def begin(command: list[str], cwd: Path | None = None, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, env=os.environ | {"OMP_NUM_THREADS": "1", MARK: str(tmp_path)} | variables, cwd=cwd,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        commands.append(process)
        return process

    yield begin
    left = marked(mark)
    until = time.monotonic() + 10
    while left and time.monotonic() < until:
        time.sleep(0.1)
        left = marked(mark)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in commands:
        process.communicate(timeout=PATIENCE_SECONDS)
    assert not left, "processes were left running"


def marked(mark: str) -> list[int]:
    """Return the running processes with this mark in their environment."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            if not dead and mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
    return pids


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output = process.communicate(timeout=PATIENCE_SECONDS)[0]
    return process.returncode, output


def assert_in_words(output: str) -> None:
    assert "lorakit train:" in output or "lorakit: stopped, because" in output, output
    assert "Traceback" not in output, output
    assert len(output.splitlines()) < 60, output


def torchrun(recipe: Path, *overrides: str) -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port", str(free_port())]
    return [*run, "-m", "lorakit.cli", "train", str(recipe), *overrides]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def as_rank(rank: int, port: int) -> dict[str, str]:
    """Return the variables that a launcher sets. No launcher runs, so a rank ends by itself."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def at_start(folder: Path, code: str) -> dict[str, str]:
    """Return variables with which Python runs ``code`` at its start."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def wait_for(what: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not what():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.02)


def steps_of(out: Path) -> int:
    return max((line["step"] for line in read_metrics(out / "metrics.jsonl")), default=0)


def saved_step(out: Path) -> int:
    """Return the step of the newest checkpoint that verifies."""
    newest = Checkpoints(out / "checkpoints").newest()
    return newest[0].step if newest else 0


@pytest.fixture
def endless(recipe: Recipe) -> Path:
    """A run that is long enough for a fault."""
    return recipe(
        train={"steps": 5000, "save_every_steps": 3, "batch_size": 6, "micro_batch_size": 2, "eval_every_steps": 5000},
        adapter={"dropout": 0.0},
    )


# ------------------------------------------------------------------------------------------- refused at the start


def test_another_number_of_processes_than_torchruns_is_refused(recipe: Recipe, start: Any) -> None:
    code, output = ended(start(torchrun(recipe(), "parallel.backend=ddp", "parallel.processes=4")))

    assert code == 1  # torchrun's
    assert "torchrun started 2 processes, parallel.processes is 4" in output
    assert "lorakit/parallel/" not in output  # no traceback but torchrun's own


@pytest.mark.matrix
def test_without_deepspeed_the_engines_that_need_nothing_more_are_named(
    recipe: Recipe, start: Any, tmp_path: Path
) -> None:
    hidden = at_start(tmp_path / "hidden", "import sys; sys.modules['deepspeed'] = None")

    code, output = ended(start([*TRAIN, str(recipe()), "parallel.backend=zero2", "parallel.processes=2"], **hidden))

    assert code == 2
    assert output.count("needs DeepSpeed: pip install 'lorakit[deepspeed]', or choose ddp or fsdp2") == 1
    assert_in_words(output)


@pytest.mark.matrix
@pytest.mark.skipif(torch.cuda.is_available(), reason="there DeepSpeed may compute on a GPU")
def test_a_device_that_deepspeed_is_told_and_that_is_not_here_is_refused(recipe: Recipe, start: Any) -> None:
    command = [*TRAIN, str(recipe()), "parallel.backend=zero1", "parallel.processes=2"]
    code, output = ended(start(command, DS_ACCELERATOR="cuda"))
    assert code == 2
    assert output.count("DS_ACCELERATOR=cuda: DeepSpeed would compute there, the run on cpu; unset it") == 1
    assert_in_words(output)


@pytest.mark.matrix
def test_a_port_of_another_program_is_named_by_both_ranks(recipe: Recipe, start: Any) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        path = recipe()
        first = start([*TRAIN, str(path), *DDP, "parallel.stuck_seconds=10"], **as_rank(0, port))

        code, output = ended(first)

    assert code == 2, output
    assert f"127.0.0.1:{port}" in output
    assert "in use by another program" in output
    assert_in_words(output)


@pytest.mark.matrix
def test_an_interface_that_is_not_here_is_refused_for_good_with_those_that_are(recipe: Recipe, start: Any) -> None:
    command = [*TRAIN, str(recipe()), *DDP, "parallel.stuck_seconds=10"]
    port = free_port()
    ranks = [start(command, GLOO_SOCKET_IFNAME="lo,nowhere0", **as_rank(rank, port)) for rank in range(2)]
    code, output = ended(ranks[0])
    assert code == 2, output
    assert "GLOO_SOCKET_IFNAME: no interface 'nowhere0' is here; there are " in output
    assert_in_words(output)


def test_a_port_that_was_taken_after_lorakits_launcher_chose_it_is_temporary() -> None:
    with socket.socket() as stranger:
        stranger.bind(("", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        world = World(0, 2, 0, 2, "lorakit", "127.0.0.1", port)
        with pytest.raises(TemporaryFailure, match=f"port 127.0.0.1:{port} was taken"):  # noqa: SIM117
            with rendezvous_errors_explained(world):
                TCPStore("127.0.0.1", port, 2, is_master=True)


def test_a_recipe_for_several_machines_is_refused_with_the_torchrun_line(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["parallel.backend=ddp", "parallel.processes=4", "parallel.nodes=2"]

    assert main(["train", str(recipe()), *overrides]) == 2

    torchrun = "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --no-python lorakit train"
    assert f"{torchrun} {tmp_path}/recipe.yaml {' '.join(overrides)}\n" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.matrix
def test_torch_forms_its_group_and_forms_another_after_a_restart(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "worker.py").write_text("""
import os, signal
from pathlib import Path
import torch, torch.distributed as dist
rank, first = int(os.environ["RANK"]), Path(__file__).with_name("first")
dist.init_process_group("gloo")
total = torch.tensor(float(rank + 1)); dist.all_reduce(total)
if rank == 0 and not first.exists():  # rank 0 serves the store
    first.touch(); os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
if rank == 0: print("sum", int(total))
dist.destroy_process_group()
""")

    code = launch([sys.executable, str(tmp_path / "worker.py")], processes=2, max_restarts=1)

    out, err = capfd.readouterr()
    assert (code, out) == (0, "sum 3\n"), err
    assert "rank 0 was killed by SIGKILL (out of memory?); all start again" in err


@pytest.mark.attack
def test_a_rank_that_never_starts_is_reported(recipe: Recipe, start: Any) -> None:
    port = free_port()

    code, output = ended(start([*TRAIN, str(recipe()), *DDP, "parallel.stuck_seconds=5"], **as_rank(0, port)))

    assert code == 75, output
    assert f"127.0.0.1:{port}" in output
    assert_in_words(output)


# --------------------------------------------------------------------------------------- ranks that are not alike


WAITS = """
import os, signal, sys
import torch
from lorakit.launch import interrupts
from lorakit.launch.environment import World
from lorakit.parallel.setup import form_group, torch_environment
from lorakit.recipe import ParallelSection

interrupts.FIRST_LINE_SECONDS = 0.1
interrupts.GRACE_SECONDS = 0.1
signal.signal(signal.SIGTERM, lambda number, frame: print("handled"))
world = World(1, 3, 1, 3, "torchrun", "127.0.0.1", int(sys.argv[1]))
os.environ.update(torch_environment(world))
form_group(world, ParallelSection(), torch.device("cpu"))
"""


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_waits_says_for_whom_and_ends_by_a_signal(number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as another:  # which takes connections, as a store does, and is none
        port = another.getsockname()[1]
        command = [sys.executable, "-c", WAITS, str(port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            line = next(line for line in process.stderr if line.startswith("lorakit: "))
            assert line == f"lorakit: rank 1 waits for 2 other ranks at 127.0.0.1:{port}, where rank 0 listens\n"
            process.send_signal(number)
            assert process.wait(PATIENCE_SECONDS) == TemporaryFailure.exit_code
            assert f"lorakit: stopped by {number.name} while rank 1 waits for 2 other ranks" in process.stderr.read()


@pytest.mark.matrix
def test_ranks_with_other_recipes_and_versions_are_refused_with_the_differences(
    recipe: Recipe, start: Any, tmp_path: Path
) -> None:
    port = free_port()
    other = at_start(
        tmp_path / "patched",
        "import importlib.metadata as m\noriginal = m.version\n"
        "m.version = lambda name: '1.2.3' if name == 'transformers' else original(name)\n",
    )
    both = (
        start([*TRAIN, str(recipe()), *DDP], **as_rank(0, port)),
        start([*TRAIN, str(recipe()), *DDP, "train.learning_rate=0.5"], **as_rank(1, port), **other),
    )

    for code, output in map(ended, both):
        assert code == 2, output
        assert "train.learning_rate: rank 0 0.01, rank 1 0.5" in output
        assert "rank 1 '1.2.3'" in output
        assert_in_words(output)
    assert not (tmp_path / "out").exists()


@pytest.mark.matrix
def test_ranks_with_other_rows_under_the_same_name_are_refused(recipe: Recipe, start: Any, tmp_path: Path) -> None:
    port, path, both = free_port(), recipe(data={"train": "here.jsonl", "eval": None}), []
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # each on a machine of its own
    for rank in range(2):
        folder = tmp_path / f"machine{rank}"
        folder.mkdir()
        write_rows(folder / "here.jsonl", [chat(f"say {i}", f"it {i * (1 + rank)}") for i in range(20)])
        code = [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {os.getcwd()!r}); from lorakit.cli import main; sys.exit(main(sys.argv[1:]))",
        ]
        both.append(
            start(
                [*code, "train", str(path), *DDP, "parallel.nodes=2", f"parallel.rendezvous=127.0.0.1:{port}"],
                cwd=folder,
                **(as_rank(rank, port) | alone),
            )
        )

    for code, output in map(ended, both):
        assert code == 2, output
        assert "the processes disagree on base and rows" in output
        assert "train rows: rank 0 " in output
        assert_in_words(output)


# ------------------------------------------------------------------------------------------------- while training


def killed(rank: int, number: int) -> Callable[[subprocess.Popen[str]], None]:
    return lambda process: os.kill(workers_of(process.pid)[rank], number)


@pytest.mark.attack
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(killed(0, signal.SIGKILL), "rank 0 was killed by SIGKILL", id="rank 0 killed"),
        pytest.param(killed(1, signal.SIGSTOP), "have not been heard of|has not been heard of", id="rank 1 stopped"),
        pytest.param(killed(0, signal.SIGSTOP), "not answer|not been heard of", id="rank 0 stopped"),
    ],
)
def test_a_killed_or_stopped_rank_ends_the_run_and_is_named(
    endless: Path, start: Any, tmp_path: Path, fault: Any, words: str
) -> None:
    process = start([*TRAIN, str(endless), *DDP])
    wait_for(lambda: steps_of(tmp_path / "out") >= 4, process)

    fault(process)
    code, output = ended(process)

    assert code == 75, output
    assert any(word in output for word in words.split("|")), output
    assert "goes on" in output
    assert_in_words(output)
    assert saved_step(tmp_path / "out") >= 3


@pytest.mark.attack
def test_a_rank_that_is_stopped_or_killed_ends_the_other_without_any_launcher(
    endless: Path, start: Any, tmp_path: Path
) -> None:
    port = free_port()
    one, other = (start([*TRAIN, str(endless), *DDP], **as_rank(rank, port)) for rank in range(2))
    wait_for(lambda: steps_of(tmp_path / "out") >= 4, one)

    os.kill(other.pid, signal.SIGSTOP)
    code, output = ended(one)

    assert code == 75, output
    assert "rank 1 (" in output
    assert "has not been heard of for 5 s" in output
    assert_in_words(output)
    os.kill(other.pid, signal.SIGCONT)
    code, output = ended(other)
    assert code == 75, output
    assert_in_words(output)


@pytest.mark.attack
def test_a_rank_that_dies_while_loading_is_named(endless: Path, start: Any, tmp_path: Path) -> None:
    process = start([*TRAIN, str(endless), *DDP])
    wait_for(lambda: (tmp_path / "out" / ".lock").exists(), process)  # rank 0 begins to load

    os.kill(workers_of(process.pid)[1], signal.SIGKILL)
    code, output = ended(process)

    assert code == 75, output
    assert "rank 1 was killed by SIGKILL" in output
    assert_in_words(output)


@pytest.mark.matrix
def test_a_rank_without_memory_is_named_and_ends_all(endless: Path, start: Any, tmp_path: Path) -> None:
    process = start([*TRAIN, str(endless), *DDP], MALLOC_MMAP_THRESHOLD_="4096", MALLOC_TRIM_THRESHOLD_="0")
    wait_for(lambda: steps_of(tmp_path / "out") >= 4, process)

    resource.prlimit(workers_of(process.pid)[1], resource.RLIMIT_DATA, (2**20, 2**20))
    code, output = ended(process)

    assert code in (2, 75), output
    assert "memory" in output, output
    assert "rank 1" in output, output
    # without what torch's own hook prints where even that has no memory: it imports tabulate at the process's end
    hook = (
        r"\[rank 1\] Exception ignored in atexit callback: <function dump_compile_times.*?\[rank 1\] MemoryError: *\n"
    )
    assert_in_words(re.sub(hook, "", output, flags=re.DOTALL))


@pytest.mark.matrix  # test_a_step_that_is_not_finite_on_one_rank_ends_all_and_names_the_rows takes less
def test_a_nan_loss_on_one_rank_names_its_row(recipe: Recipe, start: Any, tmp_path: Path, tokenizer: Any) -> None:
    base = make_base(tmp_path / "base", tokenizer)
    weights = load_file(base / "model.safetensors")
    strange = tokenizer("Q", add_special_tokens=False)["input_ids"][-1]
    weights["model.embed_tokens.weight"][strange] = torch.nan
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    rows = write_rows(tmp_path / "rows.jsonl", [chat("say", "so Q" if i == 12 else f"it {i}") for i in range(24)])
    path = recipe(
        base={"model": str(base)}, data={"train": str(rows), "eval": None, "packing": False},
        train={"batch_size": 6, "micro_batch_size": 1},
    )  # fmt: skip

    code, output = ended(start([*TRAIN, str(path), *DDP]))

    assert code == 2, output
    assert output.count(f"Rows in it: {rows}:13.") == 1
    assert output.count("nothing was updated") == 1
    assert_in_words(output)


# ------------------------------------------------------------------------------------------------------ the output


@pytest.mark.attack
def test_a_full_disk_loses_nothing_and_the_run_goes_on_with_more_space(
    recipe: Recipe, start: Any, tmp_path: Path
) -> None:
    path = recipe(train={"steps": 150, "save_every_steps": 2, "batch_size": 6, "eval_every_steps": 150})
    disk, out = tmp_path / "disk", tmp_path / "disk" / "out"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        process = start([*TRAIN, str(path), *DDP, f"output={out}"])
        wait_for(lambda: steps_of(out) >= 7, process)
        with open(disk / "filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
            for size in (4096, 1):
                with contextlib.suppress(OSError):
                    while filler.write(b"x" * size):
                        pass
        code, output = ended(process)

        assert code == 75, output
        assert "the disk is full" in output, output
        assert "run the same command again" in output
        assert_in_words(output)
        before = saved_step(out)
        assert before >= 2

        (disk / "filler").unlink()
        code, output = ended(start([*TRAIN, str(path), *DDP, f"output={out}"]))
        assert code == 0, output
        assert f"after step {before}" in output
        steps = [line["step"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line]
        assert steps == list(range(1, 151))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.attack
def test_a_second_run_is_refused_and_a_repeated_sigterm_is_one_request(
    endless: Path, start: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start([*TRAIN, str(endless), *DDP])
    wait_for(lambda: steps_of(out) >= 4, process)

    code, output = ended(start([*TRAIN, str(endless), *DDP]))

    assert code == 2, output
    assert (
        output.count(f"output: {out} is in use by process {workers_of(process.pid)[0]} on {socket.gethostname()}") == 1
    )
    assert_in_words(output)

    process.send_signal(signal.SIGTERM)
    time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    code, output = ended(process)

    assert code == 75, output
    assert "SIGTERM: saved after step" in output
    assert f"saved after step {saved_step(out)};" in output
    assert_in_words(output)


@pytest.mark.attack
def test_a_signal_to_torchruns_full_process_group_saves_once(endless: Path, start: Any, tmp_path: Path) -> None:
    """As from Kubernetes, Slurm and Ctrl-C: each worker gets the signal twice, from outside and from torchrun."""
    process = start(torchrun(endless, *DDP))
    wait_for(lambda: steps_of(tmp_path / "out") >= 4, process)

    for pid in marked(f"{MARK}={tmp_path}"):
        os.kill(pid, signal.SIGTERM)
    _, output = ended(process)

    assert f"SIGTERM: saved after step {saved_step(tmp_path / 'out')};" in output
    assert "stopped at once" not in output


@pytest.mark.attack
def test_a_killed_launcher_leaves_no_worker(endless: Path, start: Any, tmp_path: Path) -> None:
    process = start([*TRAIN, str(endless), *DDP])
    wait_for(lambda: steps_of(tmp_path / "out") >= 4, process)
    assert len(marked(f"{MARK}={tmp_path}")) == 3

    process.kill()

    until = time.monotonic() + 10
    while marked(f"{MARK}={tmp_path}"):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert saved_step(tmp_path / "out") >= 3
