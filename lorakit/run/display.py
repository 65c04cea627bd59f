"""Display a run while it trains, on standard error: a live bar in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from lorakit.parallel import StepReport
from lorakit.run.process_memory import peak_resident_bytes

LINE_SECONDS = 10.0


class Display:
    """Display of the steps of a run."""

    def __init__(self, console: Console, bar: Progress | None, total_steps: int, first_step: int) -> None:
        self._console, self._bar, self._total = console, bar, total_steps
        self._task = bar.add_task("", total=total_steps, completed=first_step, facts="") if bar else None
        self._shown = time.monotonic()
        self._tokens = self._steps = 0
        self._seconds = 0.0

    def step(self, number: int, report: StepReport, seconds: float) -> None:
        """Show step ``number`` (counted from 1), which took ``seconds``. Tokens per second count no padding."""
        now = time.monotonic()
        self._tokens += report.num_tokens
        self._steps += 1
        self._seconds += seconds
        rate = self._tokens / self._seconds
        memory = f"{peak_memory_bytes() / 1e9:.2f} GB"
        facts = f"loss {report.loss:.4f}  lr {report.learning_rate:.2e}  {rate:,.0f} tok/s  {memory}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=number, facts=facts)
        elif now - self._shown >= LINE_SECONDS or number == self._total or self._steps == 1:
            left = self._seconds / self._steps * (self._total - number)
            self._console.print(f"step {number}/{self._total}  {facts}  {left:.0f} s left", highlight=False)
            self._shown = now

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, highlight=False, markup=False)


@contextmanager
def display(total_steps: int, first_step: int) -> Iterator[Display]:
    """Open a live display for the steps from ``first_step`` to ``total_steps``."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield Display(console, None, total_steps, first_step)
        return
    columns = (
        TextColumn("step {task.completed}/{task.total}"), BarColumn(bar_width=24), TaskProgressColumn(),
        TextColumn("{task.fields[facts]}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        yield Display(console, bar, total_steps, first_step)


@contextmanager
def row_progress() -> Iterator[Callable[[int, int | None], None]]:
    """Open a display for tokenising; yield what shows the rows so far, of all rows or an unknown number.

    Nothing is shown until it is called, because most data sets are read at once from the cache.
    """
    console = Console(file=sys.stderr)
    columns = (
        TextColumn("tokenising"), BarColumn(bar_width=24), TextColumn("{task.fields[rows]}"), TimeRemainingColumn()
    )  # fmt: skip
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("", total=None, rows="")
    shown = time.monotonic()

    def show(done: int, total: int | None) -> None:
        nonlocal shown
        rows = f"{done:,} of {total:,} rows" if total else f"{done:,} rows"
        if console.is_terminal:
            bar.start()
            bar.update(task, completed=done, total=total, rows=rows)
        elif time.monotonic() - shown >= LINE_SECONDS:
            console.print(f"tokenising: {rows}", highlight=False)
            shown = time.monotonic()

    try:
        yield show
    finally:
        bar.stop()


def peak_memory_bytes() -> int:
    """Return the peak bytes of this process: on the GPU if there is one, else resident."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return peak_resident_bytes()
