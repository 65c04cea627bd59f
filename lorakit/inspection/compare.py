"""Compare runs: their figures in one table, the differences of their recipes, data and bases, and one picture.

Figures that are not of the same thing, such as losses of other held-out rows, are shown with a note that says so.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from lorakit.errors import RunError
from lorakit.files.text import Say, columns, duration, flatten, or_dash, plain_text, say_lines, size
from lorakit.patch.same_base import base_differences
from lorakit.run.charts import draw_runs
from lorakit.run.facts import RunFacts, read_run, refusing_foreign_values

DIGEST_LETTERS: Final = 12
FIGURES: Final[Mapping[str, tuple[str, Callable[[Any], str]]]] = {
    "tokens": ("tokens", "{:,}".format),
    "loss": ("loss", "{:.4f}".format),
    "lowest": ("lowest_loss", "{:.4f}".format),
    "held out": ("eval_loss", "{:.4f}".format),
    "best": ("best_eval_loss", "{:.4f}".format),
    "at step": ("best_step", str),
    "time": ("seconds", duration),
    "tok/s": ("tokens_per_second", "{:,.0f}".format),
    "memory": ("peak_memory_bytes", size),
}
"""head of a column -> its figure, and how that is written"""


@refusing_foreign_values()
def compare_runs(
    folders: Sequence[str | Path], say: Say = print, *, picture: str | Path | None = None
) -> dict[str, Any]:
    """Print a comparison of runs, also unfinished ones, and return its figures. ``picture``: a .png of their losses.

    Raises RunError: fewer than two runs, one of them twice, or a folder that is not a run's.
    """
    if len(folders) < 2:
        raise RunError(f"{len(folders)} run; name at least two (`lorakit show RUN` describes one)")
    if picture is not None and Path(picture).suffix != ".png":
        raise RunError(f"--out {picture}: the picture is a PNG; write it as NAME.png")
    runs = [read_run(folder) for folder in folders]
    names = _names(runs)
    figures = [{"name": name} | run.figures() for name, run in zip(names, runs, strict=True)]
    lines = [["run", "state", "step", *FIGURES]]
    for one in figures:
        cells = [or_dash(one[key], form) for key, form in FIGURES.values()]
        lines.append([one["name"], one["state"], f"{one['step']} of {or_dash(one['total_steps'], str)}", *cells])
    say_lines(say, columns(lines))
    data = _differing([_section(run, "data") for run in runs])
    differences = {
        "recipe": _differing([_section(run, "recipe") for run in runs]),
        "data": {key: row for key, row in data.items() if any(row)},  # a count of 0 is one that was not recorded
    }
    first = runs[0].section("base")
    bases = {
        name: parts
        for name, run in zip(names[1:], runs[1:], strict=True)
        if (parts := base_differences(first, run.section("base"), (f"in {names[0]}", f"in {name}")))
    }
    for title, table in {**differences, "base": bases}.items():
        say("")
        if not table:
            say(f"{title}: the same" if all(run.section(title) for run in runs) else f"{title}: not recorded")
        elif title == "base":
            say_lines(say, (f"base of {name} is not {names[0]}'s: {' and '.join(own)}" for name, own in bases.items()))
        else:
            rows = [[key, *(or_dash(value, plain_text) for value in values)] for key, values in table.items()]
            say_lines(say, columns([[f"{title} differs in", *names], *rows]))
    notes = _notes(runs, figures)
    for number, note in enumerate(notes):
        say(f"{'' if number else chr(10)}note: {note}")
    if picture is not None:
        curves = {name: (run.curve("loss"), run.curve("eval_loss")) for name, run in zip(names, runs, strict=True)}
        draw_runs(curves, Path(picture))
        say(f"\ndrawn in {picture}")
    return {"runs": figures, **differences, "base": bases, "notes": notes}


def _names(runs: Sequence[RunFacts]) -> list[str]:
    """Return the shortest ends of the folders' paths that tell them apart."""
    paths = [run.folder.resolve() for run in runs]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise RunError(f"{runs[number].folder}: this run is named twice")
    length = 1
    while len(set(names := ["/".join(path.parts[-length:]) for path in paths])) < len(paths):
        length += 1
    return names


def _section(run: RunFacts, name: str) -> dict[str, Any]:
    """Return a section by dotted keys, digests in short, without names of folders and files."""
    facts = flatten(run.section(name))
    named = {key: value for key, value in facts.items() if key != "output" and not key.endswith(".sources")}
    return {key: str(value)[:DIGEST_LETTERS] if key.endswith(".digest") else value for key, value in named.items()}


def _differing(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    keys = dict.fromkeys(key for table in tables for key in table)
    values = {key: [table.get(key) for table in tables] for key in keys}
    return {key: row for key, row in values.items() if len({plain_text(value) for value in row}) > 1}


def _notes(runs: Sequence[RunFacts], figures: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return which figures are not of the same thing, and the best run where they are."""
    notes = [f"{one['name']}: {run.damage}" for one, run in zip(figures, runs, strict=True) if run.damage]
    sections = [_section(run, "data") for run in runs]
    train_rows, eval_rows = ({section.get(f"{part}.digest") for section in sections} for part in ("train", "eval"))
    objectives = {plain_text(run.section("recipe").get("objective")) for run in runs}
    if len(objectives) > 1:
        notes.append("the objectives differ, so the losses are not of the same thing")
    if len(train_rows) > 1:
        notes.append("the training rows differ, so `loss` and `lowest` are of other rows")
    evaluated = [one for one in figures if one["best_step"]]
    if len(eval_rows) > 1 and evaluated:
        notes.append("the held-out rows differ, so `held out` and `best` do not compare")
    elif len(evaluated) == len(runs) and len(objectives) == 1:
        best = min(figures, key=itemgetter("best_eval_loss"))
        unfinished = [one["name"] for one, run in zip(figures, runs, strict=True) if not run.has_ended]
        more = f"; not finished: {', '.join(unfinished)}" if unfinished else ""
        lowest = f"{best['best_eval_loss']:.4f} at step {best['best_step']}"
        notes.append(f"the lowest held-out loss is {best['name']}'s, {lowest}{more}")
    return notes
