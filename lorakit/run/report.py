"""Send the numbers of a run to the display, metrics.jsonl and trackers."""

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lorakit.files.text import flatten
from lorakit.parallel import LossReport, StepReport
from lorakit.recipe import Recipe
from lorakit.run.display import Display, display
from lorakit.run.metrics import Metrics
from lorakit.run.trackers import Trackers


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
    config = flatten(recipe.model_dump(mode="json"))
    with (
        closing(Trackers(recipe.train.log_to, output, config)) as trackers,
        closing(Metrics(output / "metrics.jsonl", last_step)) as metrics,
        display(total_steps, last_step) as screen,
    ):
        yield Report(screen, metrics, trackers)


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity where that does not fit a float."""
    return math.exp(loss) if loss < 700 else math.inf
