"""One run over two hosts, for real: network, process and host-name spaces of their own on this machine, joined by a cable.

Each host runs the same `lorakit train`; they share a file system, as the nodes of a cluster do.
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

import pytest

from lorakit.files.safetensors import open_tensors
from lorakit.run.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.spread, pytest.mark.attack]

Recipe = Callable[..., Path]
PORT = 29400
PATIENCE_SECONDS = 240  # a hang guard, no expectation


@dataclass
class Host:
    """A network of its own, with processes that see no others; ``interface`` is its end of the cable."""

    name: str
    space: str
    interface: str
    address: str
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, recipe: Path, *overrides: str, **variables: str) -> subprocess.Popen[str]:
        """`lorakit train`, as process 1 of this host: killing it kills every process of the host."""
        train = [sys.executable, "-m", "lorakit.cli", "train", str(recipe), *overrides]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.space, "unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child",
             "sh", "-c", 'hostname "$0"; exec "$@"', self.name, *train],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        self.running.append(process)
        return process

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
        for process in host.running:
            kill(process)
        subprocess.run(["ip", "netns", "del", host.space], capture_output=True, timeout=20)


def kill(process: subprocess.Popen[str]) -> None:
    """As if its plug were pulled: the host's process 1 is the one child of `unshare`."""
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    for pid in [*map(int, found), process.pid]:
        if process.poll() is None:
            os.kill(pid, signal.SIGKILL)
    process.wait(20)


@pytest.fixture
def long_recipe(recipe: Recipe) -> Path:
    return recipe(
        train={"steps": 120, "save_every_steps": 4, "batch_size": 7, "micro_batch_size": 2, "eval_every_steps": 60},
        adapter={"dropout": 0.0, "rank": 3, "alpha": 6.0},
    )


@pytest.fixture(scope="module")
def alone() -> dict[str, Path]:
    """The output of the one-process run of `long_recipe`, made by the first test that asks."""
    return {}


def start_both(
    hosts: tuple[Host, Host], recipe: Path, backend: str, *overrides: str
) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """The same command on both; only `output` differs, to see who writes."""
    spread = (f"parallel.backend={backend}", "parallel.processes=4", "parallel.nodes=2")
    meet = f"parallel.rendezvous={hosts[0].address}:{PORT}"
    output = json.loads(recipe.read_text())["output"]
    return tuple(
        host.start(recipe, *spread, meet, *overrides, f"output={output}{'' if host is hosts[0] else '-elsewhere'}")
        for host in hosts
    )  # type: ignore[return-value]


def ended(*processes: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """Exit code and words of each."""
    return [
        (process.wait(), said) for process in processes for said in [process.communicate(timeout=PATIENCE_SECONDS)[0]]
    ]


def wait_for_step(out: Path, step: int, *processes: subprocess.Popen[str]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while max((line["step"] for line in read_metrics(out / "metrics.jsonl")), default=0) < step:
        assert all(process.poll() is None for process in processes), ended(*processes)
        assert time.monotonic() < until
        time.sleep(0.02)


def out_of(recipe: Path) -> Path:
    return Path(json.loads(recipe.read_text())["output"])


def assert_equal_to_one_process(recipe: Path, tmp_path: Path) -> None:
    """The patch and the losses are those of one process, to float tolerance."""
    whole = tmp_path / "alone"
    command = [sys.executable, "-m", "lorakit.cli", "train", str(recipe), f"output={whole}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    one, other = (
        [line["loss"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line]
        for out in (out_of(recipe), whole)
    )
    assert one == pytest.approx(other, rel=1e-4)
    one, other = (open_tensors(out / "adapter_model.safetensors") for out in (out_of(recipe), whole))
    for name in other.entries:
        assert (one.read(name) - other.read(name)).norm() <= 1e-3 * other.read(name).norm(), name


def assert_in_words(said: str) -> None:
    assert "Traceback" not in said, said
    assert "lorakit train:" in said or "lorakit: stopped, because" in said, said


def test_two_hosts_train_what_one_process_trains(hosts: tuple[Host, Host], long_recipe: Path, tmp_path: Path) -> None:
    """Nothing tells gloo its interface, and the host names lead nowhere, or home."""
    (code, said), (other_code, other_said) = ended(*start_both(hosts, long_recipe, "ddp"))

    assert (code, other_code) == (0, 0), said + other_said
    assert "step " not in other_said  # rank 0 alone speaks
    assert not out_of(long_recipe).with_name("out-elsewhere").exists()  # ... and writes
    start = json.loads((out_of(long_recipe) / "run.json").read_text())["starts"][-1]
    assert start["host"] == "hosta"
    assert_equal_to_one_process(long_recipe, tmp_path)


def test_a_host_that_dies_is_named_by_the_other_and_both_go_on_later(
    hosts: tuple[Host, Host], long_recipe: Path, tmp_path: Path
) -> None:
    for dies, step in ((1, 9), (0, 40)):
        both = start_both(hosts, long_recipe, "zero2", "parallel.silent_seconds=5")
        wait_for_step(out_of(long_recipe), step, *both)
        began = time.monotonic()

        kill(both[dies])

        ((code, said),) = ended(both[1 - dies])
        assert code == 75, said
        assert time.monotonic() - began < 60
        assert_in_words(said)
        assert hosts[dies].name in said or hosts[dies].address in said, said
        assert "goes on" in said

    (code, said), (other_code, other_said) = ended(*start_both(hosts, long_recipe, "zero2"))
    assert (code, other_code) == (0, 0), said + other_said
    assert "resuming" in said
    assert_equal_to_one_process(long_recipe, tmp_path)


def test_a_cut_cable_ends_both_hosts_in_words(hosts: tuple[Host, Host], long_recipe: Path, tmp_path: Path) -> None:
    both = start_both(hosts, long_recipe, "fsdp2", "parallel.silent_seconds=5")
    wait_for_step(out_of(long_recipe), 9, *both)
    try:
        hosts[1].cut()
        found = ended(*both)
    finally:
        hosts[1].connect()

    for code, said in found:
        assert code == 75, found
        assert_in_words(said)
        assert "has not been heard of for 5 s" in said or "no longer answers" in said or "did not answer" in said, said

    found = ended(*start_both(hosts, long_recipe, "fsdp2"))
    assert [code for code, _ in found] == [0, 0], found
    assert_equal_to_one_process(long_recipe, tmp_path)


def test_hosts_that_do_not_meet_say_where_and_what_to_do(hosts: tuple[Host, Host], recipe: Recipe) -> None:
    spread = ("parallel.backend=ddp", "parallel.processes=2", "parallel.nodes=2")
    one, other = hosts
    nowhere = f"{one.address.rpartition('.')[0]}.9"
    silent, absent, waiting = (
        other.start(recipe(), *spread, f"parallel.rendezvous={one.address}:{PORT}"),  # nobody listens
        other.start(recipe(), *spread, f"parallel.rendezvous={nowhere}:{PORT}"),  # no such host
        one.start(recipe(), *spread, f"parallel.rendezvous={one.address}:{PORT + 1}"),  # the second never comes
    )

    for process, words in (
        (silent, f"parallel.rendezvous: nobody answered at {one.address}:{PORT} for 30 s"),
        (absent, f"parallel.rendezvous: nobody answered at {nowhere}:{PORT} for 30 s"),
        (waiting, f"not all of the 2 machines came to {one.address}:{PORT + 1} within 30 s"),
    ):
        ((code, said),) = ended(process)
        assert code == 2, said
        assert words in said
        assert_in_words(said)
