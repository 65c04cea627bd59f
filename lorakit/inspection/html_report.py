"""Write one HTML page about a run: curves, samples of answers, settings, rows, memory, engine, environment.

The page is one file without scripts. Its policy forbids the browser to load anything, and the template escapes every
text of the run, because recipes and rows may hold any text.
"""

from io import BytesIO
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, StrictUndefined, UndefinedError

from lorakit.errors import RunError, translate_error
from lorakit.files.atomic import write_file
from lorakit.files.text import duration, flatten, or_dash, plain_text, size
from lorakit.inference.measures import MEASURES
from lorakit.recipe.schema import default_values
from lorakit.run.charts import HELD_OUT, MAIN, Chart, ChartLine, draw, loss_chart
from lorakit.run.facts import RunFacts, read_run, refusing_foreign_values
from lorakit.run.record import read_samples

REPORT_FILE: Final = "report.html"
ASSETS: Final = Path(__file__).parent.parent / "assets" / "report"
SHARES: Final = frozenset({"accuracy", *MEASURES})  # metrics from 0 to 1
NOT_CURVES: Final = {"step", "loss", "eval_loss", "eval_perplexity", "tokens", "label_tokens"}
SAMPLE_LETTERS: Final = 600  # of a prompt or an answer
SETTINGS: Final = (
    "base.model", "adapter.method", "adapter.rank", "adapter.alpha", "adapter.targets", "train.learning_rate",
    "train.schedule", "train.steps", "train.epochs", "train.batch_size",
)  # fmt: skip
"""keys of a recipe that are shown also where they have their default values"""
BYTES: Final = ("base_bytes", "adapter_bytes", "gradients_bytes", "optimizer_bytes", "peak_memory_bytes")


@refusing_foreign_values()
def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page about a run, by default report.html in its folder; return its path. Raises RunError: no run."""
    run = read_run(folder)
    path = run.folder / REPORT_FILE if out is None else Path(out)
    if path.is_dir():
        raise RunError(f"--out {path}: is a folder; name a file in it, such as {path / REPORT_FILE}")
    pages = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=plain_text, undefined=StrictUndefined
    )
    pages.filters |= {"dash": or_dash, "prompt": _prompt, "shortened": _shortened}
    pages.globals |= {"duration": duration, "size": size}
    template = pages.from_string((ASSETS / REPORT_FILE).read_text())
    with translate_error(UndefinedError, LookupError):  # which is refused as a foreign value
        page = template.render(run=run, style=(ASSETS / "report.css").read_text(), **_facts(run))
    write_file(path, f"{page.strip()}\n")
    return path


def _facts(run: RunFacts) -> dict[str, Any]:
    """Return the values that the template shows besides those of the record."""
    recipe, defaults = flatten(run.section("recipe")), flatten(default_values())
    usual = {key: recipe[key] for key in SETTINGS if recipe.get(key) is not None}
    changed = {key: value for key, value in recipe.items() if key not in defaults or defaults[key] != value}
    # of a run whose recipe says epochs
    steps = {} if run.total_steps is None or "train.steps" in usual else {"steps of the run": run.total_steps}
    data, base, engine = (run.section(name) for name in ("data", "base", "engine"))
    return {
        "name": run.folder.resolve().name,
        "figures": run.figures(),
        "measure": recipe.get("evaluation.best", "loss"),
        "charts": _charts(run),
        "samples": _samples(run),
        "settings": usual | steps | changed,
        "defaults": {key: value for key, value in recipe.items() if key not in {*changed, *SETTINGS}},
        "row_keys": dict.fromkeys(key for facts in data.values() for key, value in facts.items() if value),
        # without the digests of the layers, which are long and in run.json
        "base": {key: value for key, value in base.items() if not isinstance(value, dict | list)},
        "engine": {key: value for key, value in engine.items() if key not in BYTES and value not in ({}, [])},
        "memory": [key for key in BYTES if any(rank.get(key) is not None for rank in run.ranks)],
    }


def _charts(run: RunFacts) -> list[tuple[str, str]]:
    """Return titles and drawings, which are ``<svg>`` elements after their first word."""
    charts = [loss_chart("loss", run.curve("loss"), run.curve("eval_loss"))]
    keys = (key for line in run.lines for key in line if key not in NOT_CURVES)
    for key in dict.fromkeys(key.removeprefix("eval_") for key in keys):
        of_steps = ChartLine("step", run.curve(key), MAIN)
        of_evals = ChartLine("held out", run.curve(f"eval_{key}"), HELD_OUT, marked=True)
        lines = [line for line in (of_steps, of_evals) if line.points]
        charts.append(Chart(key.replace("_", " "), lines, log="loss" in key, share=key.partition("/")[0] in SHARES))
    drawings = []
    for chart in [chart for chart in charts if chart.lines]:
        image = BytesIO()
        draw([chart], image, "svg", height=3.4)
        drawings.append((chart.title, image.getvalue().decode().partition("<svg ")[2]))
    return drawings


def _samples(run: RunFacts) -> dict[str, Any]:
    """Return held-out rows with their answers at the patch's step, and by name those before the first step."""
    by_step = read_samples(run.folder)
    step = str(run.patch_step) if str(run.patch_step) in by_step else next(reversed(by_step), "")
    before = {row["row"]: row for row in by_step.get("0", []) if step != "0"}
    return {"step": step, "before": before, "rows": by_step.get(step, [])}


def _prompt(prompt: str | list[dict[str, Any]]) -> str:
    """Return a prompt as text: a single message as it is, and several with their roles."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return plain_text(prompt[0].get("content"))
    lines = []
    for message in prompt:  # its content, then what it has besides, such as tool calls, as JSON
        others = {key: value for key, value in message.items() if key not in ("role", "content") and value}
        text = " ".join(plain_text(part) for part in (message.get("content"), others) if part)
        lines.append(f"{message.get('role')}: {text}")
    return "\n".join(lines)


def _shortened(text: str) -> str:
    return text if len(text) <= SAMPLE_LETTERS else f"{text[:SAMPLE_LETTERS]} ..."
