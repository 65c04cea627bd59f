"""torchrun's elastic agents start lorakit with as many processes as there are, and the run goes on from a checkpoint.

Two agents on this machine with one process each: one is killed, the other goes on, the killed one joins again.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lorakit.run.metrics import read_metrics
from lorakit.run.record import RECORD
from tests.helpers.fork_server import ROOT

pytestmark = [pytest.mark.matrix, pytest.mark.spread]

PATIENCE_SECONDS = 240  # a hang guard, no expectation


class Agents:
    """The agents of one rendezvous, which the first one serves."""

    def __init__(self, recipe: Path) -> None:
        self._recipe = recipe
        self._all: list[subprocess.Popen[bytes]] = []
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]

    def start(self) -> subprocess.Popen[bytes]:
        """Start docs/clusters.md's torchrun line, with shorter waits for agents that are gone."""
        conf = f"is_host={int(not self._all)},last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=3"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=8",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}", f"--rdzv-conf={conf}",
            "--monitor-interval=0.5", "--no-python", Path(sys.executable).with_name("lorakit"), "train", str(self._recipe),
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        file = self._recipe.with_name(f"agent{len(self._all)}.txt")
        with file.open("wb") as output:
            agent = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
        self._all.append(agent)
        return agent

    def kill(self, agent: subprocess.Popen[bytes]) -> None:
        """Kill an agent and its process, as the loss of a machine does."""
        with contextlib.suppress(psutil.NoSuchProcess):
            doomed = psutil.Process(agent.pid).children(recursive=True)
            agent.kill()
            for process in doomed:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        agent.wait()

    def kill_all(self) -> None:
        for agent in self._all:
            self.kill(agent)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < until, self.output()
            time.sleep(0.1)

    def output(self) -> str:
        return "\n".join(file.read_text()[-3000:] for file in sorted(self._recipe.parent.glob("agent*.txt")))


@pytest.fixture
def agents(recipe: Callable[..., Path], tmp_path: Path) -> Iterator[Agents]:
    path = recipe(
        train={
            "steps": 100_000, "batch_size": 6, "micro_batch_size": 2, "eval_every_steps": 100_000,
            "save_every_steps": 100_000, "save_every_seconds": 0.5,
        },
        data={"eval": None},
        parallel={"backend": "ddp", "processes": "auto", "silent_seconds": 10},
    )  # fmt: skip
    agents = Agents(path)
    yield agents
    agents.kill_all()


def record_of(out: Path) -> dict[str, Any]:
    """Return run.json; empty where there is none yet."""
    try:
        content: dict[str, Any] = json.loads((out / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return content


def sizes(out: Path) -> list[int]:
    """Return the number of processes of each start of a run."""
    return [start["parallel"]["processes"] for start in record_of(out).get("starts", ())]


def last_step(out: Path) -> int:
    return max((line["step"] for line in read_metrics(out / "metrics.jsonl")), default=0)


def test_a_run_goes_on_without_a_lost_agent_and_with_it_again(agents: Agents, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = agents.start()
    second = agents.start()
    # an agent that comes alone at first is joined by the other one in another round
    agents.wait_for(lambda: sizes(out)[-1:] == [2] and any(out.glob("checkpoints/step-*")))

    agents.kill(second)
    agents.wait_for(lambda: sizes(out)[-1] == 1)
    resumed_at = last_step(out)
    agents.wait_for(lambda: last_step(out) > resumed_at)

    agents.start()
    agents.wait_for(lambda: sizes(out)[-1] == 2)
    joined_at = last_step(out)
    agents.wait_for(lambda: last_step(out) > joined_at)

    assert first.poll() is None
    steps = [line["step"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))  # none is repeated or skipped
