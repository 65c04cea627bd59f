"""The progress of a run: the counter in a terminal of any width, plain lines where there is none."""

import io

import pytest
from rich.console import Console

from lorakit.parallel import StepReport
from lorakit.run.display import display

REPORT = StepReport(
    loss=1.2345, learning_rate=1e-3, grad_norm=1.0, num_tokens=1000, num_label_tokens=500, metrics={"accuracy": 0.5}
)


def last_line(console: Console, file: io.StringIO) -> str:
    with display(4000, 2999, console) as shown:
        shown.step(3000, REPORT, 1.0)
    return file.getvalue().split("step ")[-1]


@pytest.mark.parametrize("width", [26, 40, 58, 80, 120])
def test_a_narrow_terminal_has_the_counter_and_as_many_numbers_as_fit(width: int) -> None:
    file = io.StringIO()
    line = last_line(Console(file=file, force_terminal=True, width=width, color_system=None), file)

    assert line.startswith("3000/4000")
    assert "…" not in line
    assert ("loss 1.2345" in line) == (width >= 40)
    assert ("GB memory" in line) == (width >= 120)
    assert ("left" in line) == (width >= 40)
    assert ("%" in line) == (width >= 110)


def test_a_process_of_a_notebook_writes_no_escape_codes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as ipykernel sets it
    with display(10, 0) as shown:
        shown.step(1, REPORT, 1.0)
    text = capfd.readouterr().err
    assert text.startswith("step 1/10  loss 1.2345")
    assert "\x1b" not in text


def test_a_line_of_a_log_names_memory_and_time_left_and_is_never_wrapped() -> None:
    file = io.StringIO()
    with display(500, 0, Console(file=file, width=40)) as shown:
        shown.step(1, REPORT, 2.0)
        shown.step(500, REPORT, 2.0)
    first, last = file.getvalue().splitlines()
    assert first.endswith(" GB memory  16 min 38 s left")
    assert last.endswith(" GB memory")
