"""Report a run in metrics.jsonl, to trackers, and on standard error: a live bar in a terminal, else plain lines."""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from lorakit.files.text import duration, flatten
from lorakit.parallel import LossReport, StepReport
from lorakit.recipe import Recipe
from lorakit.run.metrics import Metrics
from lorakit.run.trackers import Trackers

LINE_SECONDS = 10.0
BAR_COLUMNS: Final = 110  # width of a terminal that has space for the bar beside the numbers
LABEL_COLUMNS: Final = 32  # width that has space for the word behind the time left
TIME_COLUMNS: Final = len(" -:--:-- left ")
STATUS: Final = Path("/proc/self/status")


class Display:
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
        memory = f"{peak_memory_bytes() / 1e9:.2f} GB memory"
        facts = [f"loss {report.loss:.4f}", f"lr {report.learning_rate:.2e}", f"{rate:,.0f} tok/s", memory]
        if self._bar is not None and self._task is not None:
            # as many of the numbers as there is space for, beside the counter and the time left
            space = self._console.width - len(f"step {self._total}/{self._total} ") - TIME_COLUMNS
            while len("  ".join(facts)) > max(0, space):
                facts.pop()
            self._bar.update(self._task, completed=number, facts="  ".join(facts))
        elif now - self._shown >= LINE_SECONDS or number == self._total or self._steps == 1:
            left = self._seconds / self._steps * (self._total - number)
            facts += [f"{duration(left)} left"] if number < self._total else []
            self.say("  ".join([f"step {number}/{self._total}", *facts]))
            self._shown = now

    def say(self, text: str) -> None:
        """Print a line above the bar; a file of these lines has it in one."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=self._bar is None)


@contextmanager
def display(total_steps: int, first_step: int, console: Console | None = None) -> Iterator[Display]:
    """Display the steps from ``first_step`` to ``total_steps``; on standard error if ``console`` is None."""
    console = console or _standard_error()
    if not console.is_terminal:
        yield Display(console, None, total_steps, first_step)
        return
    bar_columns = (BarColumn(bar_width=24), TaskProgressColumn()) if console.width >= BAR_COLUMNS else ()
    columns = (
        TextColumn("step {task.completed}/{task.total}"), *bar_columns, TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(), *((TextColumn("left"),) if console.width >= LABEL_COLUMNS else ()),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        yield Display(console, bar, total_steps, first_step)


@dataclass(frozen=True)
class Report:
    shown: Display
    metrics: Metrics
    trackers: Trackers

    def step(self, number: int, report: StepReport, seconds: float) -> None:
        """Report step ``number`` (counted from 1), which took ``seconds``."""
        self.shown.step(number, report, seconds)
        values = {
            "loss": report.loss, "learning_rate": report.learning_rate, "grad_norm": report.grad_norm,
            "tokens": report.num_tokens, "label_tokens": report.num_label_tokens,
            "tokens_per_second": round(report.num_tokens / seconds, 1), **report.metrics,
        }  # fmt: skip
        self.metrics.write({"step": number, **values})
        self.trackers.log(values, number)

    def evaluation(self, number: int, report: LossReport, *, has_perplexity: bool) -> None:
        """Report loss and metrics of the held-out rows after step ``number``. has_perplexity: of a mean of tokens."""
        values = {"eval_loss": report.loss}
        values |= {"eval_perplexity": perplexity(report.loss)} if has_perplexity else {}
        values |= {f"eval_{name}": value for name, value in report.metrics.items()}
        for source, part in report.by_source.items():
            values |= {f"eval_loss/{source}": part.loss}
            values |= {f"eval_{name}/{source}": value for name, value in part.metrics.items()}
        shown = [f"perplexity {values['eval_perplexity']:.3f}"] if has_perplexity else []
        shown += [f"{name} {value:.3f}" for name, value in report.metrics.items()]
        shown += [f"loss of {source} {part.loss:.4f}" for source, part in report.by_source.items()]
        self.shown.say(f"step {number}: held-out loss {report.loss:.4f}, {', '.join(shown)}")
        self.metrics.write({"step": number, **values})
        self.trackers.log(values, number)


@contextmanager
def reporting(recipe: Recipe, *, last_step: int, total_steps: int) -> Iterator[Report]:
    """Open a Report for a run that continues after ``last_step``; it is closed at the end of the block."""
    output = Path(recipe.output)
    with (
        closing(Trackers(recipe.train.log_to, output, flatten(recipe.model_dump(mode="json")))) as trackers,
        closing(Metrics(output / "metrics.jsonl", last_step)) as metrics,
        display(total_steps, last_step) as screen,
    ):
        yield Report(screen, metrics, trackers)


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity where that does not fit a float."""
    return math.exp(loss) if loss < 700 else math.inf


@contextmanager
def row_progress(doing: str = "tokenising") -> Iterator[Callable[[int | None, int | None], None]]:
    """Yield a function that shows rows so far, of all or None; until it is called nothing is shown, as from a cache."""
    console = _standard_error()
    columns = (TextColumn(doing), BarColumn(bar_width=24), TextColumn("{task.fields[rows]}"), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("", total=None, rows="")
    shown = time.monotonic()

    def show(done: int | None, total: int | None) -> None:
        nonlocal shown
        if done is None:
            console.print(f"{doing}: waiting for another process with the same rows", highlight=False)
            return
        rows = f"{done:,} of {total:,} rows" if total else f"{done:,} rows"
        if console.is_terminal:
            bar.update(task, completed=done, total=total, rows=rows)
            bar.start()
        elif time.monotonic() - shown >= LINE_SECONDS:
            console.print(f"{doing}: {rows}", highlight=False)
            shown = time.monotonic()

    try:
        yield show
    finally:
        if bar.live.is_started:  # else an empty line is printed
            bar.stop()


def _standard_error() -> Console:
    # notebooks set FORCE_COLOR for the processes that they start, which rich takes for a terminal
    return Console(file=sys.stderr, force_terminal=sys.stderr.isatty())


def peak_memory_bytes() -> int:
    """Return the peak bytes of this process: on the GPU if there is one, else resident."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the peak resident bytes. On Linux not ``ru_maxrss``, because that starts at the parent process's peak."""
    if STATUS.exists():
        lines = STATUS.read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
