"""Write docs/bases.md from what came of each architecture."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

PAGE: Final = Path(__file__).parents[2] / "docs" / "bases.md"
HEAD: Final = """\
# Bases

`make zoo` (about a quarter of an hour on two cores) shrinks every model that transformers {version} has for causal
language, of texts or of images and texts, to a few narrow layers, one of each kind that it has, with random weights.
Of a class that sees images the text side is trained, merged and asked, and its tower stays as it is. The default
recipe, in float32, trains it for three steps on rows of token ids. Then are compared: the held-out loss before
training with transformers' own, row by row; logits with PEFT's, which reads the patch; logits of the merged model in
transformers; and greedy answers, of base and patch in one batch, with the merged model's. "Trained" means that all of
it is equal to rounding, {tolerance:g} of the largest value.

{counts}

The last column is what a run says: of layers that `all-linear` leaves out, and of rows. "By a mask": transformers'
mask over the full line keeps packed rows apart. "Row by row": these parts, in which rows would see each other, are
called once for each row. "Padded": rows are not packed.
"""
WORDS: Final = {
    "trained": "trained",
    "unlike": "not equal",
    "refused": "refused, with the reason",
    "failed": "an error that lorakit does not explain",
    "absent": "no small model of it could be made here",
}


def page(outcomes: Iterable[Mapping[str, Any]], version: str, tolerance: float) -> str:
    """Return the page. outcomes: the fields of each `Outcome`."""
    ordered = sorted(outcomes, key=lambda one: str(one["name"]))
    numbers = Counter(str(one["state"]) for one in ordered)
    counts = f"Of {len(ordered)}: " + ", ".join(f"{numbers[state]} {word}" for state, word in WORDS.items()) + "."
    lines = [HEAD.format(version=version, tolerance=tolerance, counts=counts)]
    lines += ["| architecture | | in PEFT | layers and rows |", "|---|---|---|---|"]
    for one in ordered:
        is_trained = one["state"] == "trained"
        peft = ("no: " + one["peft"] if one["peft"] else "yes") if is_trained else ""
        notes = "; ".join(filter(None, map(_note, one["lines"]))) if is_trained else _short(one["why"])
        lines.append(f"| {one['name']} | {WORDS[one['state']]} | {peft} | {notes} |".replace("  ", " "))
    return "\n".join(lines) + "\n"


def _note(line: str) -> str:
    """Return what a line of a run says of the base, in short; empty if nothing."""
    name, _, text = line.partition(" ")
    text = text.strip()
    if name == "packing":
        text = "by a mask" if text.startswith("rows are kept apart by a mask") else text
        text = text.replace(", where rows would see each other", "").replace("rows are padded instead", "padded")
        return _short(text)
    return _short(text) if text.startswith("all-linear leaves out") else ""


def _short(text: str) -> str:
    """Return a text without paths of this machine, and without what is long."""
    words = ["BASE" if "/base" in word and word.startswith("/") else word for word in text.split()]
    joined = " ".join(words).replace("|", "\\|")
    return joined if len(joined) <= 200 else joined[:200].rsplit(" ", 1)[0] + " ..."
