"""The launcher of elastic runs: who is replaced, when the run ends, and with which exit code. Workers import no torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("torchft.coordination")  # its lighthouse runs beside the workers
pytestmark = pytest.mark.spread

ROOT = Path(__file__).parents[2]
WORKER = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from lorakit.launch.workers import send_failure_message
signal.alarm(60)
folder, rank = Path(__file__).parent, int(os.environ["RANK"])
number = int(os.environ.get("LORAKIT_WORKER", rank))
(folder / f"up{{number}}").touch()
def wait_for(*numbers):
    while not all((folder / f"up{{n}}").exists() for n in numbers): time.sleep(0.01)
wait_for(0, 1, 2)
"""
LAUNCH = """
import json, sys
from lorakit.launch.elastic import launch_elastically
from lorakit.launch.launcher import Delays
command = [sys.executable, "-S", "-E", sys.argv[1]]
delays = Delays(settle_seconds=0.2, cause_seconds=3.0, grace_seconds=3.0, yield_seconds=3.0, save_seconds=5.0)
raise SystemExit(launch_elastically(
    [*command, "begins"], [*command, "joins"], processes=3, silent_seconds=1, stuck_seconds=9, delays=delays,
    **json.loads(sys.argv[2])
))
"""


class Ended(NamedTuple):
    code: int
    printed: str


def launch(folder: Path, worker: str, *, fewest: int, max_replaced: int) -> Ended:
    (folder / "worker.py").write_text(WORKER + worker)
    settings = json.dumps({"fewest": fewest, "max_replaced": max_replaced})
    command = [sys.executable, "-c", LAUNCH, str(folder / "worker.py"), settings]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert not ended.stdout
    return Ended(ended.returncode, ended.stderr)


def test_a_lost_worker_is_replaced_by_one_with_its_rank_and_a_new_number(tmp_path: Path) -> None:
    ended = launch(
        tmp_path,
        """
if sys.argv[1] == "joins": (folder / f"joined {rank} {number}").touch()
if number == 1: os.kill(os.getpid(), signal.SIGKILL)
wait_for(3)
""",
        fewest=1, max_replaced=1,
    )  # fmt: skip

    assert ended.code == 0, ended.printed
    assert (tmp_path / "joined 1 3").exists()
    assert "rank 1 was killed by SIGKILL" in ended.printed
    assert "2 of 3 go on, and another one starts (1 of 1)" in ended.printed


def test_below_the_minimum_the_others_are_stopped_and_say_what_they_saved(tmp_path: Path) -> None:
    ended = launch(
        tmp_path,
        """
def stop(*_):
    send_failure_message("lorakit train: saved after step 3"); os._exit(75)
signal.signal(signal.SIGTERM, stop)
(folder / f"up{number + 10}").touch()
if number:
    wait_for(10)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(50)
""",
        fewest=2, max_replaced=0,
    )  # fmt: skip

    assert ended.code == 75
    assert "left, fewer than parallel.elastic.min: 2" in ended.printed
    assert ended.printed.count("saved after step 3") == 1


def test_an_error_that_all_workers_end_with_is_said_once_and_no_worker_is_replaced(tmp_path: Path) -> None:
    ended = launch(
        tmp_path, 'time.sleep(rank); send_failure_message("lorakit train: no such row"); sys.exit(2)', fewest=1, max_replaced=5
    )  # fmt: skip

    assert ended == (2, "lorakit train: no such row\n")
    assert not (tmp_path / "up3").exists()


def test_an_error_that_ends_others_later_is_said_once(tmp_path: Path) -> None:
    ended = launch(
        tmp_path,
        """
def refuse(*_):
    send_failure_message("lorakit train: no such row"); os._exit(2)
signal.signal(signal.SIGTERM, refuse)
(folder / f"up{number + 10}").touch()
if number:
    time.sleep(50)
wait_for(10)
refuse()
""",
        fewest=3, max_replaced=0,
    )  # fmt: skip

    assert ended.code == 2
    assert ended.printed.count("no such row") == 1, ended.printed


def test_a_worker_that_comes_too_late_ends_with_the_run(tmp_path: Path) -> None:
    ended = launch(
        tmp_path,
        """
if number == 1: os.kill(os.getpid(), signal.SIGKILL)
wait_for(3)
if number == 3: time.sleep(50)
""",
        fewest=1, max_replaced=1,
    )  # fmt: skip

    assert ended.code == 0, ended.printed
