"""Write docs/support.md, the table of what goes with what, by trying it: ``python -m scripts.support_page``."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from transformers import AutoTokenizer

from lorakit.base.find import find_base
from tests.helpers.compatibility import ABSENT, FEATURES, KINDS, make_bases, refusals

PAGE: Final = Path(__file__).parents[1] / "docs" / "support.md"


def page(refusals: Mapping[tuple[str, str], str | None]) -> str:
    """Return the text of docs/support.md. ``refusals``: (kind, feature) -> why it is refused, or None."""
    lines = [
        "# What goes with what",
        "",
        "Written by `python -m scripts.support_page` from what it tried; `tests/test_compatibility_matrix.py` fails"
        " when this page is not what is found. Every `yes` is trained on one process there. With two processes on"
        " `ddp`, `zero2`, `zero3` and `fsdp2` it is compared with one process: all cells by `make attack`, a choice of"
        " them on `zero3` and `fsdp2` by `make matrix`. A refusal comes from `lorakit check`, before anything is"
        " loaded.",
        "",
        "| | " + " | ".join(KINDS) + " |",
        "|---|" + "---|" * len(KINDS),
    ]
    notes: dict[str, int] = {}
    for feature in FEATURES:
        cells = []
        for kind in KINDS:
            why = refusals[kind, feature]
            if (kind, feature) in ABSENT:
                cells.append("-")
            elif why is None:
                cells.append("yes")
            else:
                cells.append(f"no [{notes.setdefault(why, len(notes) + 1)}]")
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    lines += ["", "`-`: there is no such thing in this kind of base.", ""]
    lines += [f"{number}. {why}" for why, number in notes.items()]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        make_bases(Path(name), AutoTokenizer.from_pretrained(find_base("builtin:tiny")))
        PAGE.write_text(page(refusals(Path(name))))
    print(f"wrote {PAGE}")
