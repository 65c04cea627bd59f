"""A signal ends a run with what the next call goes on with."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from lorakit.errors import TemporaryFailure
from lorakit.launch.interrupts import StopRequest, interrupts_end_imports
from tests.helpers.fork_server import run_python


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


SWALLOWING = """import os, signal
try:
    os.kill(os.getpid(), signal.{})
    sum(range(10))  # by now the handler has run
except BaseException:
    pass
"""


@pytest.mark.parametrize(
    ("command", "name", "line"),
    [
        ("doctor", "SIGINT", "lorakit doctor: interrupted; the same command begins again or goes on\n"),
        ("train", "SIGINT", "lorakit train: stopped at once by SIGINT, before training began; the same command"),
        ("train", "SIGTERM", "lorakit train: stopped at once by SIGTERM, before training began; the same command"),
    ],
)
def test_a_signal_while_modules_are_imported_ends_the_command_whatever_an_import_swallows(
    recipe: Callable[..., Path], tmp_path: Path, command: str, name: str, line: str
) -> None:
    (tmp_path / "trackio.py").write_text(SWALLOWING.format(name))
    arguments = ["train", str(recipe(train={"log_to": ["trackio"]}))] if command == "train" else [command]
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from lorakit.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    run = run_python("-c", code, *arguments)

    assert run.returncode == 75, run.stderr
    assert run.stderr.startswith(line), run.stderr
    assert run.stderr.count("\n") == 1


def test_an_interrupt_outside_of_imports_is_an_exception_and_the_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupts_end_imports("line"):  # noqa: PT012
        assert signal.getsignal(signal.SIGINT) is not before
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
