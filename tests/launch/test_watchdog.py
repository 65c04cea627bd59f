"""When a rank fails, is lost or makes no progress, every rank ends with the reason that was written first.

A store in memory and a clock that the tests move; at the end two scenes of real processes with real gloo.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from lorakit.errors import PeerFailure
from lorakit.files.progress import report_progress
from lorakit.launch.watchdog import EXIT_SECONDS, RAISE_SECONDS, FailureReason, Watchdog
from lorakit.parallel.setup import final_error

ROOT = Path(__file__).parents[2]
STEP = 0.25


class MemoryStore:
    """What the ranks share. ``is_down``: it answers nobody. ``after_reading``: called once, after the next read."""

    address = "node1:29500"

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.is_down = False
        self.after_reading: Callable[[], None] | None = None

    def set(self, key: str, text: str) -> None:
        self._answer()
        self.texts[key] = text

    def set_if_absent(self, key: str, text: str) -> str:
        self._answer()
        return self.texts.setdefault(key, text)

    def get(self, keys: Sequence[str]) -> list[str]:
        self._answer()
        texts = [self.texts.get(key, "") for key in keys]
        meanwhile = self.after_reading
        self.after_reading = None
        if meanwhile is not None:
            meanwhile()
        return texts

    def _answer(self) -> None:
        if self.is_down:
            raise RuntimeError("connection refused")


class Ranks:
    """Some ranks and their common clock. ``ends``: rank -> (time, message, exit code) of its end."""

    def __init__(self, size: int, **settings: float) -> None:
        self.now = 1000.0
        self.store = MemoryStore()
        self.ends: dict[int, tuple[float, str, int]] = {}
        self.all = [self._watchdog(rank, size, settings) for rank in range(size)]

    def _watchdog(self, rank: int, size: int, settings: dict[str, float]) -> Watchdog:
        def end(message: str, code: int) -> None:
            self.ends.setdefault(rank, (self.now, message, code))

        return Watchdog(self.store, rank, size, clock=lambda: self.now, end_process=end, **settings)

    def run(self, seconds: float, without: Iterable[int] = ()) -> None:
        """Let the ranks run for so long, ``without`` those that are stopped or gone. Each exchanges once a second."""
        for number in range(round(seconds / STEP)):
            self.now += STEP
            for watchdog in self.all:
                if watchdog.rank in without or watchdog.rank in self.ends:
                    continue
                watchdog.check_time()
                if number % 4 == 0 and watchdog.reason is None:
                    try:
                        watchdog.exchange()
                    except RuntimeError:
                        assert self.store.is_down

    def reasons(self) -> list[str]:
        return [str(watchdog.reason) for watchdog in self.all]


def test_ranks_that_run_have_no_reason_to_end() -> None:
    ranks = Ranks(3)
    ranks.run(100)
    assert [watchdog.reason for watchdog in ranks.all] == [None] * 3


def test_the_first_reason_written_is_that_of_all_ranks() -> None:
    ranks = Ranks(4)
    ranks.run(2)
    ranks.all[2].propose(FailureReason(2, "first", 2))
    ranks.all[1].propose(FailureReason(1, "second", 1))
    ranks.store.after_reading = ranks.all[2].exchange  # between rank 1's read and its write
    ranks.all[1].exchange()
    ranks.run(2)

    assert {watchdog.reason for watchdog in ranks.all} == {FailureReason(2, "first", 2)}


def test_a_rank_ends_some_seconds_after_the_reason_and_rank_0_later() -> None:
    ranks = Ranks(3)
    ranks.run(2)
    ranks.all[1].propose(FailureReason(1, "no text", 2))
    known = ranks.now
    ranks.run(20)

    assert {code for _, _, code in ranks.ends.values()} == {2}
    assert all(message == "\nlorakit: stopped, because no text\n" for _, message, _ in ranks.ends.values())
    assert RAISE_SECONDS < ranks.ends[1][0] - known <= RAISE_SECONDS + 2
    assert RAISE_SECONDS < ranks.ends[2][0] - known <= RAISE_SECONDS + 2
    assert ranks.ends[0][0] >= ranks.ends[2][0] + 2  # it may host the store


def test_a_main_thread_that_raises_the_reason_prints_it_itself_and_has_more_time() -> None:
    ranks = Ranks(2)
    ranks.run(2)
    ranks.all[1].start()  # writes the reason while the main thread waits for it
    ranks.all[1].set_phase("step 3: reading rows")

    reason = ranks.all[1].fail("rows.jsonl:7: no text", 2)
    raised = ranks.now
    ranks.run(20)

    assert ") failed at: step 3: reading rows\n  rows.jsonl:7: no text" in str(reason)
    assert ranks.all[0].reason == reason
    assert ranks.ends[1][0] - raised > EXIT_SECONDS
    assert ranks.ends[1][1:] == ("", 2)


def test_a_broken_collective_is_explained_by_the_rank_that_was_lost() -> None:
    ranks = Ranks(3)
    ranks.run(2)
    ranks.all[0].propose(FailureReason(0, "no memory", 2))
    ranks.all[0].exchange()
    ranks.all[1].start()

    assert ranks.all[1].explain(RuntimeError("gloo/transport: connection closed")) == FailureReason(0, "no memory", 2)


def test_a_silent_rank_is_named_once_it_was_silent_for_long_enough() -> None:
    ranks = Ranks(3, silent_seconds=20)
    ranks.run(3)
    ranks.run(19, without=[1])
    assert ranks.all[0].reason is None
    ranks.run(4, without=[1])

    for watchdog in (ranks.all[0], ranks.all[2]):
        assert watchdog.reason is not None
        assert (watchdog.reason.rank, watchdog.reason.exit_code) == (1, 75)
        assert "rank 1 (" in watchdog.reason.message
        assert "has not been heard of for 20 s" in watchdog.reason.message


def test_a_rank_that_wakes_up_reads_why_the_others_ended() -> None:
    ranks = Ranks(3)
    ranks.run(3)
    ranks.run(60, without=[1])
    ranks.all[1].exchange()

    assert ranks.all[1].reason == ranks.all[0].reason


def test_ranks_that_stopped_together_are_named_together() -> None:
    ranks = Ranks(4)
    ranks.run(3)
    ranks.run(1, without=[2])
    ranks.run(30, without=[1, 2])

    assert "rank 1 (" in ranks.reasons()[0]
    assert "rank 2 (" in ranks.reasons()[0]
    assert "have not been heard of" in ranks.reasons()[0]


def test_every_rank_of_many_reads_of_a_loss_that_only_some_of_them_watch() -> None:
    ranks = Ranks(24)
    ranks.run(3)
    ranks.run(30, without=[23])

    assert len({watchdog.reason for watchdog in ranks.all[:23]}) == 1
    assert "rank 23 (" in ranks.reasons()[0]


def test_a_rank_that_never_starts_is_named_after_the_time_to_start() -> None:
    ranks = Ranks(3, start_seconds=60)
    ranks.run(59, without=[2])
    assert ranks.all[0].reason is None
    ranks.run(3, without=[2])

    assert "rank 2 gave no sign of life for 60 s: not started, or unable to reach node1:29500" in ranks.reasons()[1]


def test_a_store_that_does_not_answer_ends_each_rank_and_is_named() -> None:
    ranks = Ranks(2)
    ranks.all[0].set_phase("step 3: saving")
    ranks.run(3)
    ranks.store.is_down = True
    ranks.run(19)
    assert ranks.all[1].reason is None
    ranks.run(10)

    assert "node1:29500, where the ranks meet, did not answer for 20 s" in ranks.reasons()[1]
    assert "rank 0 (" in ranks.reasons()[1]
    assert "was last at: step 3: saving" in ranks.reasons()[1]
    assert {code for _, _, code in ranks.ends.values()} == {75}


def test_a_store_that_answers_again_in_time_raises_no_alarm() -> None:
    ranks = Ranks(3)
    for _ in range(5):
        ranks.store.is_down = False
        ranks.run(3)
        ranks.store.is_down = True
        ranks.run(18)

    assert [watchdog.reason for watchdog in ranks.all] == [None] * 3


def test_a_store_that_is_slow_at_the_start_gets_the_time_to_start() -> None:
    ranks = Ranks(2, start_seconds=60)
    ranks.store.is_down = True
    ranks.run(50)
    ranks.store.is_down = False
    ranks.run(5)

    assert ranks.all[1].reason is None


def test_a_run_that_is_suspended_and_continued_goes_on() -> None:
    ranks = Ranks(3, stuck_seconds=100)
    ranks.run(3)
    ranks.now += 3600
    ranks.run(30)

    assert [watchdog.reason for watchdog in ranks.all] == [None] * 3


def test_a_deadlock_names_the_phase_of_each_rank_and_who_is_behind() -> None:
    ranks = Ranks(12, stuck_seconds=60)
    for watchdog in ranks.all:
        watchdog.set_phase("step 3: reading rows")
    for watchdog in ranks.all[:11]:
        watchdog.set_phase("step 3: saving")
    ranks.run(59)
    assert ranks.all[0].reason is None
    ranks.run(6)

    reasons = {watchdog.reason for watchdog in ranks.all}
    assert len(reasons) == 1
    (reason,) = reasons
    assert reason is not None
    assert (reason.exit_code, reason.dump_stacks) == (75, True)
    assert reason.message.count("): step 3: saving, for 6") == 11
    assert "Behind the others: rank 11 (" in reason.message


def test_a_rank_whose_collective_broke_in_a_deadlock_ends_with_75_and_the_common_message() -> None:
    ranks = Ranks(2, stuck_seconds=60)
    ranks.run(65)

    error = final_error(ranks.all[1], RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))

    assert isinstance(error, PeerFailure)
    assert error.exit_code == 75
    assert "no rank moved for 6" in str(error)


@pytest.mark.parametrize("work", ["a phase of one rank", "a unit of work"])
def test_a_run_is_not_deadlocked_while_one_rank_makes_progress(work: str) -> None:
    ranks = Ranks(3, stuck_seconds=10)
    for _ in range(20):
        if work == "a phase of one rank":
            ranks.all[1].set_phase("step 0: held-out rows")
        else:
            report_progress()
        ranks.run(9)

    assert [watchdog.reason for watchdog in ranks.all] == [None] * 3


# --- real processes --------------------------------------------------------------------------------------------------


def play(scene: str, folder: Path) -> tuple[list[int], list[str]]:
    """Return exit code and standard error of each of three ranks."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.watchdog_scene", scene, folder],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        stdout=subprocess.PIPE, text=True, check=True, timeout=200,
    )  # fmt: skip
    return json.loads(done.stdout), [(folder / str(rank)).read_text() for rank in range(3)]


@pytest.mark.matrix
@pytest.mark.spread
def test_a_killed_rank_that_took_the_store_along_ends_all_others(tmp_path: Path) -> None:
    codes, output = play("host is killed", tmp_path)

    assert codes == [-9, 75, 75], output
    for text in output[1:]:
        assert text.count("lorakit: stopped") == 1, output
        assert "127.0.0.1:" in text, output
        assert "where the ranks meet, did not answer for 5 s" in text, output
        assert "was last at: step 3: reading rows" in text, output


@pytest.mark.matrix
@pytest.mark.spread
def test_an_error_of_one_rank_ends_blocked_ones_too_and_decides_their_exit_code(tmp_path: Path) -> None:
    codes, output = play("one has an error", tmp_path)

    assert codes == [2, 2, 2], output
    for text in output:
        assert text.count("lorakit: stopped") == 1, output
        assert "rank 1 (" in text, output
        assert "failed at: step 3: reading rows\n  rows.jsonl:7: no text" in text, output
