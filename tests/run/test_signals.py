"""A signal ends a run with what the next call goes on with."""

import signal

import pytest

from lorakit.errors import TemporaryFailure
from lorakit.run.signals import StopRequest


def test_a_signal_before_the_first_step_says_what_the_same_command_goes_on_with() -> None:
    with pytest.raises(TemporaryFailure, match="SIGTERM, before training began; .* after the last checkpoint if there"):
        StopRequest().receive(signal.SIGTERM, None)


def test_the_first_signal_is_answered_at_once_and_once(capfd: pytest.CaptureFixture[str]) -> None:
    stop = StopRequest()
    stop.defer()
    stop.answer = lambda: "stopping after this step"

    stop.receive(signal.SIGTERM, None)
    stop.receive(signal.SIGTERM, None)

    assert capfd.readouterr().err == "\nSIGTERM: stopping after this step\n"


def test_a_second_interrupt_while_the_loop_runs_promises_no_checkpoint_that_may_not_exist() -> None:
    stop = StopRequest()
    stop.defer()
    stop.receive(signal.SIGINT, None)
    with pytest.raises(TemporaryFailure, match="after the last checkpoint, or begins with the first step if there is"):
        stop.receive(signal.SIGINT, None)
