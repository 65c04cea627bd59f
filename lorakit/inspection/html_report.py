"""Write one HTML page about a run: curves, samples of answers, settings, rows, memory, engine, environment.

The page is one file without scripts. Its policy forbids the browser to load anything, and every text of the run is
escaped, because recipes and rows may hold any text.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from lorakit.errors import RunError
from lorakit.files.atomic import write_file
from lorakit.files.text import duration, or_dash, size
from lorakit.inference.measures import MEASURES
from lorakit.inspection.run_facts import RunFacts, is_number, read_run
from lorakit.recipe.schema import default_values
from lorakit.run.charts import HELD_OUT, MAIN, Chart, ChartLine, draw, loss_chart
from lorakit.run.record import flatten, read_samples

REPORT_FILE: Final = "report.html"
STYLE: Final = Path(__file__).parent.parent / "assets" / "report" / "report.css"
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
SHARES: Final = frozenset({"accuracy", *MEASURES})
"""metrics from 0 to 1"""
NOT_CURVES: Final = {"step", "loss", "eval_loss", "eval_perplexity", "tokens", "label_tokens"}
SAMPLE_LETTERS: Final = 600  # of a prompt or an answer
SETTINGS: Final = (
    "base.model", "adapter.method", "adapter.rank", "adapter.alpha", "adapter.targets", "train.learning_rate",
    "train.schedule", "train.steps", "train.epochs", "train.batch_size",
)  # fmt: skip
"""keys of a recipe that are shown also where they have their default values"""
BYTES: Final = ("base_bytes", "adapter_bytes", "gradients_bytes", "optimizer_bytes", "peak_memory_bytes")


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page about a run and return its path. ``out``: None is report.html in the run's folder.

    Raises RunError: the folder is not that of a run, or ``out`` is a folder.
    """
    run = read_run(folder)
    path = run.folder / REPORT_FILE if out is None else Path(out)
    if path.is_dir():
        raise RunError(f"--out {path}: is a folder; name a file in it, such as {path / REPORT_FILE}")
    write_file(path, report_page(run))
    return path


def report_page(run: RunFacts) -> str:
    name = run.folder.resolve().name
    sections = [
        ("", _tiles(run)),
        ("Curves", _charts(run)),
        ("Samples", _samples(run)),
        ("Recipe", _recipe(run)),
        ("Rows", _rows(run)),
        # without the digests of the layers, which are long and in run.json
        (
            "Base",
            _table({key: value for key, value in run.section("base").items() if not isinstance(value, dict | list)}),
        ),
        ("What ran", _table(_observed(run))),
        ("Memory", _memory(run)),
        ("Starts", _starts(run)),
    ]
    body = "".join(
        f"<section>{f'<h2>{title}</h2>' if title else ''}{html}</section>" for title, html in sections if html
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}</title><style>{STYLE.read_text()}</style></head>"
        f'<body><h1>{escape(name)} <span class="state">{escape(_state(run))}</span></h1>{body}'
        f"<footer>lorakit {escape(str(run.record.get('lorakit')))}, {escape(str(run.folder))}</footer></body></html>\n"
    )


def _state(run: RunFacts) -> str:
    early = run.record.get("stopped_early")
    state = f"stopped early: {early}" if early else f"{run.state}, step {run.step} of {or_dash(run.total_steps, str)}"
    return f"{state}; {run.damage}" if run.damage else state


def _tiles(run: RunFacts) -> str:
    figures = run.figures()
    best = f"{figures['best_eval_loss']:.4f} at step {figures['best_step']}" if figures["best_step"] else "-"
    tiles = [
        ("patch in this folder", _patch(run)),
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
    cells = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in tiles if value != "-")
    return f'<dl class="tiles">{cells}</dl>'


def _patch(run: RunFacts) -> str:
    """Return which step the folder's patch is of."""
    if run.patch_step is None:
        return "-"
    measure = flatten(dict(run.section("recipe"))).get("evaluation.best", "loss")
    best = "best held-out loss" if measure == "loss" else f"best {measure}"
    return f"step {run.patch_step}, {best if run.selects_best else 'the last'}"


def _charts(run: RunFacts) -> str:
    charts = [loss_chart("loss per label token", run.curve("loss"), run.curve("eval_loss"))]
    keys = (key for line in run.lines for key in line if key not in NOT_CURVES)
    for key in dict.fromkeys(key.removeprefix("eval_") for key in keys):
        lines = [
            ChartLine("step", run.curve(key), MAIN),
            ChartLine("held out", run.curve(f"eval_{key}"), HELD_OUT, marked=True),
        ]
        lines = [line for line in lines if line.points]
        share = key.partition("/")[0] in SHARES
        charts.append(Chart(key.replace("_", " "), lines, log="loss" in key, share=share))
    drawn = [f"<figure>{_svg(chart)}</figure>" for chart in charts if chart.lines]
    return f'<div class="charts">{"".join(drawn)}</div>' if drawn else "<p>No step is done yet.</p>"


def _svg(chart: Chart) -> str:
    """Return a chart as an ``<svg>`` element, without the header of an XML file."""
    image = BytesIO()
    draw([chart], image, "svg", height=3.4)
    drawing = image.getvalue().decode().partition("<svg ")[2]
    return f'<svg role="img" aria-label="{escape(chart.title)}" {drawing}'


def _samples(run: RunFacts) -> str:
    """Return held-out rows with the answers before the first step and at the patch's step, side by side."""
    by_step = read_samples(run.folder)
    if not by_step:
        return ""
    last = [*by_step][-1]
    step = str(run.patch_step) if str(run.patch_step) in by_step else last
    before = {_cell(row.get("row")): row for row in by_step.get("0", []) if step != "0"}
    first = "at the start" if run.record.get("start") else "base"
    lines = [
        [
            _cell(row.get("row")).rpartition("/")[2],
            _shortened(_prompt(row.get("prompt"))),
            *([_answer(before.get(_cell(row.get("row"))))] if before else []),
            _answer(row),
            _shortened(row.get("expected")),
        ]
        for row in by_step[step]
    ]
    if not lines:
        return ""
    negation = "" if step == str(run.patch_step) else "not "
    whose = "" if run.patch_step is None else f", {negation}that of the patch in this folder"
    about = f"Greedy answers to held-out rows at step {step} (train.eval_generate){whose}."
    header = ["row", "prompt", *([first] if before else []), f"step {step}", "expected"]
    return f"<p>{escape(about)}</p>{_grid(header, lines, 'samples')}"


def _answer(row: Mapping[str, Any] | None) -> str:
    """Return an answer as a cell: as long as the others, and marked where it is exact or was cut."""
    if row is None:
        return "-"
    cut = " [cut]" if row.get("cut") is True else ""
    return f"{_shortened(row.get('predicted'))}{cut}{' [exact]' if row.get('correct') is True else ''}"


def _prompt(prompt: Any) -> str:
    """Return a prompt as text: a single message as it is, and several with their roles."""
    if not isinstance(prompt, list):
        return _cell(prompt)
    messages = [message for message in prompt if isinstance(message, Mapping)]
    if len(messages) == 1:
        return _cell(messages[0].get("content"))
    return "\n".join(f"{_cell(message.get('role'))}: {_cell(message.get('content'))}" for message in messages)


def _shortened(value: Any) -> str:
    text = _cell(value)
    return text if len(text) <= SAMPLE_LETTERS else f"{text[:SAMPLE_LETTERS]} ..."


def _recipe(run: RunFacts) -> str:
    """Return the usual settings, the keys of the recipe that differ from the defaults, and the others folded."""
    recipe, defaults = flatten(dict(run.section("recipe"))), flatten(default_values())
    changed = {key: value for key, value in recipe.items() if key not in defaults or defaults[key] != value}
    rest = {key: value for key, value in recipe.items() if key not in changed and key not in SETTINGS}
    shown = {key: recipe[key] for key in SETTINGS if recipe.get(key) is not None}
    # of a run whose recipe says epochs
    steps = {} if run.total_steps is None or "train.steps" in shown else {"steps of the run": run.total_steps}
    table = _table(shown | steps | {key: value for key, value in changed.items() if key not in shown})
    return f"{table}<details><summary>{len(rest)} keys with their default values</summary>{_table(rest)}</details>"


def _rows(run: RunFacts) -> str:
    data = {part: facts for part, facts in run.section("data").items() if isinstance(facts, Mapping)}
    keys = dict.fromkeys(key for facts in data.values() for key, value in facts.items() if value)
    lines = [[key.replace("_", " "), *(_cell(facts.get(key)) for facts in data.values())] for key in keys]
    return _grid(["", *data], lines)


def _observed(run: RunFacts) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if run.record.get("dtype"):
        facts["dtype"] = f"{run.record['dtype']} ({run.record.get('dtype_why')})"
    for part, counts in run.section("fused").items():
        if isinstance(counts, Mapping):
            unknown = f"; not recognised: {_cell(counts['unknown'])}" if counts.get("unknown") else ""
            facts[f"fused {part}"] = f"{counts.get('fused')} of {counts.get('total')}{unknown}"
    engine = {key: value for key, value in run.section("engine").items() if key not in BYTES and value not in ({}, [])}
    return facts | engine


def _memory(run: RunFacts) -> str:
    used = [key for key in BYTES if any(is_number(rank.get(key)) for rank in run.ranks)]
    names = [key.removesuffix("_bytes").replace("_", " ") for key in used]
    lines = [
        [str(number), *(size(rank[key]) if is_number(rank.get(key)) else "-" for key in used)]
        for number, rank in enumerate(run.ranks)
    ]
    return _grid(["process", *names], lines) if used else ""


def _starts(run: RunFacts) -> str:
    recorded = run.record.get("starts")
    starts = [start for start in recorded if isinstance(start, Mapping)] if isinstance(recorded, list) else []
    lines = []
    for start in starts:
        parallel = start.get("parallel")
        packages = start.get("versions")
        how = f"{parallel.get('processes')}, {parallel.get('backend')}" if isinstance(parallel, Mapping) else "-"
        named = [f"{name} {v}" for name, v in packages.items()] if isinstance(packages, Mapping) else []
        steps = or_dash(start.get("total_steps"), _cell)
        lines.append([_cell(start.get("time")), steps, _cell(start.get("host")), how, ", ".join(named)])
    return _grid(["time", "steps of the run", "host", "processes", "versions"], lines) if lines else ""


def _table(values: Mapping[str, Any]) -> str:
    return _grid((), [[key, _cell(value)] for key, value in values.items()]) if values else ""


def _grid(header: Sequence[str], lines: Sequence[Sequence[str]], kind: str = "") -> str:
    """Return a table whose first column is of names. All cells are plain text, which is escaped here.

    kind: a name for the page's style.
    """
    if not lines:
        return ""
    head = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in header)}</tr>" if header else ""
    rows = [
        f"<tr><th>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for first, *cells in lines
    ]
    return f"<div class='wide {kind}'><table>{head}{''.join(rows)}</table></div>"


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
