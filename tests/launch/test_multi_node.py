"""One run on two hosts under torchrun: two network, process and host-name spaces on this machine, joined by a cable.

The hosts share a file system, as the nodes of a cluster do.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from lorakit.files.safetensors import open_tensors
from lorakit.run.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.spread, pytest.mark.attack]

Recipe = Callable[..., Path]
PORT = 29400
PATIENCE_SECONDS = 240  # a hang guard, no expectation


class Run(NamedTuple):
    """A started command and the file of its output."""

    process: subprocess.Popen[str]
    file: Path


@dataclass
class Host:
    """A network and process space of its own; ``interface`` is its end of the cable."""

    name: str
    space: str
    interface: str
    address: str
    running: list[Run] = field(default_factory=list)

    def start(self, recipe: Path, *overrides: str, **variables: str) -> Run:
        """Run docs/clusters.md's torchrun line as process 1 of this host: killing it kills every process of the host.

        The names of these hosts do not resolve, so torchrun needs its address and whether it serves the rendezvous.
        """
        endpoint = next(item.partition("=")[2] for item in overrides if item.startswith("parallel.rendezvous="))
        train = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint}", f"--rdzv-conf=is_host={int(endpoint.startswith(f'{self.address}:'))}",
            f"--local-addr={self.address}", "--no-python", str(Path(sys.executable).with_name("lorakit")), "train",
            str(recipe), *overrides,
        ]  # fmt: skip
        file = recipe.with_name(f"{self.name}-{len(self.running)}.txt")
        with file.open("w") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.space, "unshare", "--uts", "--pid", "--fork", "--mount-proc",
                 "--kill-child", "sh", "-c", 'hostname "$0"; exec "$@"', self.name, *train],
                env=os.environ | {"OMP_NUM_THREADS": "1"} | variables, stdout=output, stderr=output, text=True,
            )  # fmt: skip
        self.running.append(Run(process, file))
        return self.running[-1]

    def cut(self) -> None:
        ip("-n", self.space, "link", "set", self.interface, "down")

    def connect(self) -> None:
        ip("-n", self.space, "link", "set", self.interface, "up")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts and a cable between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("network namespaces need root, `ip` and `unshare`")
    number = os.getpid()
    net = f"10.{77 + number % 100}.{number // 100 % 250}"
    pair = tuple(Host(f"host{x}", f"lk{number}{x}", f"lk{x}{number}", f"{net}.{n}") for n, x in enumerate("ab", 1))
    one, other = pair
    try:
        for host in pair:
            ip("netns", "add", host.space)
        ip("link", "add", one.interface, "netns", one.space, "type", "veth", "peer", "name", other.interface,
           "netns", other.space)  # fmt: skip
        for host in pair:
            ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", host.interface)
            ip("-n", host.space, "link", "set", "lo", "up")
            host.connect()
        probe = ["ip", "netns", "exec", one.space, "unshare", "--uts", "--pid", "--fork", "--mount-proc", "true"]
        subprocess.run(probe, check=True, capture_output=True, text=True, timeout=20)
    except (subprocess.SubprocessError, OSError) as problem:
        remove(pair)
        pytest.skip(f"no network namespaces here: {getattr(problem, 'stderr', None) or problem}")
    yield one, other
    remove(pair)


def remove(pair: tuple[Host, ...]) -> None:
    for host in pair:
        for run in host.running:
            kill(run)
        subprocess.run(["ip", "netns", "del", host.space], capture_output=True, timeout=20)


def kill(run: Run) -> None:
    """Kill a host as a power failure does: its process 1 is the only child of `unshare`."""
    process = run.process
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    for pid in [*map(int, children), process.pid]:
        if process.poll() is None:
            os.kill(pid, signal.SIGKILL)
    process.wait(20)


@pytest.fixture
def long_recipe(recipe: Recipe) -> Path:
    return recipe(
        train={"steps": 120, "save_every_steps": 4, "batch_size": 7, "micro_batch_size": 2, "eval_every_steps": 60},
        adapter={"dropout": 0.0, "rank": 3, "alpha": 6.0},
    )


def start_both(hosts: tuple[Host, Host], recipe: Path, backend: str, *overrides: str) -> tuple[Run, Run]:
    """Start the same command on both; only `output` differs, to tell which one writes."""
    spread = (f"parallel.backend={backend}", "parallel.processes=4", "parallel.nodes=2")
    rendezvous = f"parallel.rendezvous={hosts[0].address}:{PORT}"
    output = json.loads(recipe.read_text())["output"]
    first, second = hosts
    return (
        first.start(recipe, *spread, rendezvous, *overrides, f"output={output}"),
        second.start(recipe, *spread, rendezvous, *overrides, f"output={output}-elsewhere"),
    )


def ended(*runs: Run) -> list[tuple[int, str]]:
    """Return exit code and output of each."""
    return [(run.process.wait(PATIENCE_SECONDS), run.file.read_text()) for run in runs]


def wait_for_step(out: Path, step: int, *runs: Run) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while max((line["step"] for line in read_metrics(out / "metrics.jsonl")), default=0) < step:
        assert all(run.process.poll() is None for run in runs), ended(*runs)
        assert time.monotonic() < until
        time.sleep(0.02)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def out_of(recipe: Path) -> Path:
    return Path(json.loads(recipe.read_text())["output"])


def assert_equal_to_one_process(recipe: Path, tmp_path: Path) -> None:
    """Patch and losses equal those of one process, to float tolerance."""
    single = tmp_path / "alone"
    command = [sys.executable, "-m", "lorakit.cli", "train", str(recipe), f"output={single}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    one, other = (
        [line["loss"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line]
        for out in (out_of(recipe), single)
    )
    assert one == pytest.approx(other, rel=1e-4)
    one, other = (open_tensors(out / "adapter_model.safetensors") for out in (out_of(recipe), single))
    for name in other.entries:
        assert (one.read(name) - other.read(name)).norm() <= 1e-3 * other.read(name).norm(), name


def test_two_hosts_train_what_one_process_trains(hosts: tuple[Host, Host], long_recipe: Path, tmp_path: Path) -> None:
    """lorakit finds gloo's interface by itself, although the host names do not resolve."""
    (code, output), (other_code, other_output) = ended(*start_both(hosts, long_recipe, "ddp"))

    assert (code, other_code) == (0, 0), output + other_output
    assert "step " not in other_output  # only rank 0 prints
    assert not out_of(long_recipe).with_name("out-elsewhere").exists()  # ... and writes files
    assert_equal_to_one_process(long_recipe, tmp_path)


def test_a_host_that_dies_is_named_by_the_other_and_both_resume_later(
    hosts: tuple[Host, Host], long_recipe: Path, tmp_path: Path
) -> None:
    for dies, step in ((1, 9), (0, 40)):
        both = start_both(hosts, long_recipe, "zero2", "parallel.silent_seconds=5")
        wait_for_step(out_of(long_recipe), step, *both)

        kill(both[dies])

        ((code, output),) = ended(both[1 - dies])
        assert code == 1, output  # torchrun's own
        assert "stopped, because" in output, output
        assert hosts[dies].name in output or hosts[dies].address in output, output
        assert "goes on" in output

    (code, output), (other_code, other_output) = ended(*start_both(hosts, long_recipe, "zero2"))
    assert (code, other_code) == (0, 0), output + other_output
    assert "resuming" in output
    assert_equal_to_one_process(long_recipe, tmp_path)


def test_a_cut_cable_ends_both_hosts_with_a_reason(hosts: tuple[Host, Host], long_recipe: Path, tmp_path: Path) -> None:
    both = start_both(hosts, long_recipe, "fsdp2", "parallel.silent_seconds=5")
    wait_for_step(out_of(long_recipe), 9, *both)
    try:
        hosts[1].cut()
        ended(both[0])
        wait_for(lambda: "stopped, because" in both[1].file.read_text())
        # torchrun's own call to the store does not return as long as the cable is cut, so only its workers have ended
        kill(both[1])
    finally:
        hosts[1].connect()

    assert both[0].process.returncode == 1  # torchrun's own
    for run in both:
        output = run.file.read_text()
        assert "not been heard of for 5 s" in output or "did not answer" in output, output

    results = ended(*start_both(hosts, long_recipe, "fsdp2"))
    assert [code for code, _ in results] == [0, 0], results
    assert_equal_to_one_process(long_recipe, tmp_path)
