"""Write one HTML page about a run: curves, samples of answers, settings, rows, memory, engine, environment.

The page is one file without scripts. Its policy forbids the browser to load anything, and the template escapes every
text of the run, because recipes and rows may hold any text.
"""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment

from lorakit.errors import RunError
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

Table = list[list[Any]]  # lines of cells, of which the first is a name


@refusing_foreign_values()
def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page about a run and return its path. ``out``: None is report.html in the run's folder.

    Raises RunError: the folder is not that of a run, or ``out`` is a folder.
    """
    run = read_run(folder)
    path = run.folder / REPORT_FILE if out is None else Path(out)
    if path.is_dir():
        raise RunError(f"--out {path}: is a folder; name a file in it, such as {path / REPORT_FILE}")
    pages = Environment(autoescape=True, trim_blocks=True, finalize=plain_text)
    recipe, defaults = _recipe(run)
    base = run.section("base").items()
    early = run.record.get("stopped_early")
    state = f"stopped early: {early}" if early else f"{run.state}, step {run.step} of {or_dash(run.total_steps, str)}"
    page = pages.from_string((ASSETS / REPORT_FILE).read_text()).render(
        name=run.folder.resolve().name,
        folder=str(run.folder),
        version=str(run.record.get("lorakit")),
        style=(ASSETS / "report.css").read_text(),
        state=f"{state}; {run.damage}" if run.damage else state,
        tiles=_tiles(run),
        charts=_charts(run),
        samples=_samples(run),
        recipe=recipe,
        defaults=defaults,
        tables=[
            _rows(run),
            # without the digests of the layers, which are long and in run.json
            ("Base", (), [[key, value] for key, value in base if not isinstance(value, dict | list)]),
            ("What ran", (), _observed(run)),
            _memory(run),
            _starts(run),
        ],
    )
    write_file(path, page + "\n")
    return path


def _tiles(run: RunFacts) -> list[tuple[str, str]]:
    figures = run.figures()
    best = f"{figures['best_eval_loss']:.4f} at step {figures['best_step']}" if figures["best_step"] else "-"
    patch = "-"
    if run.patch_step is not None:
        measure = flatten(run.section("recipe")).get("evaluation.best", "loss")
        of_best = "best held-out loss" if measure == "loss" else f"best {measure}"
        patch = f"step {run.patch_step}, {of_best if run.selects_best else 'the last'}"
    return [
        ("patch in this folder", patch),
        ("held-out loss", or_dash(figures["eval_loss"], "{:.4f}".format)),
        ("best held-out loss", best),
        ("held-out loss at the start", or_dash(figures["eval_loss_at_start"], "{:.4f}".format)),
        ("training loss, last step", or_dash(figures["loss"], "{:.4f}".format)),
        ("trained tokens", or_dash(figures["tokens"], "{:,}".format)),
        ("trained label tokens", or_dash(figures["label_tokens"], "{:,}".format)),
        ("time of the steps", or_dash(figures["seconds"], duration)),
        ("tokens per second", or_dash(figures["tokens_per_second"], "{:,.0f}".format)),
        ("peak memory of a process", or_dash(figures["peak_memory_bytes"], size)),
    ]


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
    """Return held-out rows with the answers before the first step and at the patch's step, side by side."""
    by_step = read_samples(run.folder)
    if not by_step:
        return {}
    step = str(run.patch_step) if str(run.patch_step) in by_step else [*by_step][-1]
    before = {row["row"]: row for row in by_step.get("0", []) if step != "0"}
    first = "at the start" if run.record.get("start") else "base"
    negation = "" if step == str(run.patch_step) else "not "
    whose = "" if run.patch_step is None else f", {negation}that of the patch in this folder"
    return {
        "about": f"Greedy answers to held-out rows at step {step} (train.eval_generate){whose}.",
        "header": ["row", "prompt", *([first] if before else []), f"step {step}", "expected"],
        "lines": [
            [
                row["row"].rpartition("/")[2],
                _shortened(_prompt(row["prompt"])),
                *([_answer(before.get(row["row"]))] if before else []),
                _answer(row),
                _shortened(row["expected"]),
            ]
            for row in by_step[step]
        ],
    }


def _answer(row: Mapping[str, Any] | None) -> str:
    """Return an answer as a cell: as long as the others, and marked where it is exact or was cut."""
    if row is None:
        return "-"
    cut = " [cut]" if row.get("cut") else ""
    return f"{_shortened(row['predicted'])}{cut}{' [exact]' if row['correct'] else ''}"


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


def _recipe(run: RunFacts) -> tuple[Table, Table]:
    """Return the usual settings and the keys of the recipe that differ from the defaults, and the other keys."""
    recipe, defaults = flatten(run.section("recipe")), flatten(default_values())
    changed = {key: value for key, value in recipe.items() if key not in defaults or defaults[key] != value}
    rest = [[key, value] for key, value in recipe.items() if key not in changed and key not in SETTINGS]
    shown = {key: recipe[key] for key in SETTINGS if recipe.get(key) is not None}
    # of a run whose recipe says epochs
    steps = {} if run.total_steps is None or "train.steps" in shown else {"steps of the run": run.total_steps}
    return [list(item) for item in (shown | steps | changed).items()], rest


def _rows(run: RunFacts) -> tuple[str, list[str], Table]:
    data = run.section("data")
    keys = dict.fromkeys(key for facts in data.values() for key, value in facts.items() if value)
    lines = [[key.replace("_", " "), *(facts.get(key) for facts in data.values())] for key in keys]
    return "Rows", ["", *data], lines


def _observed(run: RunFacts) -> Table:
    facts: Table = []
    if run.record.get("dtype"):
        facts.append(["dtype", f"{run.record['dtype']} ({run.record.get('dtype_why')})"])
    for part, counts in run.section("fused").items():
        unknown = f"; not recognised: {plain_text(counts['unknown'])}" if counts.get("unknown") else ""
        facts.append([f"fused {part}", f"{counts.get('fused')} of {counts.get('total')}{unknown}"])
    engine = run.section("engine").items()
    return facts + [[key, value] for key, value in engine if key not in BYTES and value not in ({}, [])]


def _memory(run: RunFacts) -> tuple[str, list[str], Table]:
    used = [key for key in BYTES if any(rank.get(key) is not None for rank in run.ranks)]
    names = [key.removesuffix("_bytes").replace("_", " ") for key in used]
    lines = [[number, *(or_dash(rank.get(key), size) for key in used)] for number, rank in enumerate(run.ranks)]
    return "Memory", ["process", *names], lines if used else []


def _starts(run: RunFacts) -> tuple[str, list[str], Table]:
    lines = []
    for start in run.record.get("starts", []):
        parallel = start["parallel"]
        packages = ", ".join(f"{name} {number}" for name, number in start["versions"].items())
        how = f"{parallel['processes']}, {parallel['backend']}"
        lines.append([start["time"], start["total_steps"], start["host"], how, packages])
    return "Starts", ["time", "steps of the run", "host", "processes", "versions"], lines
