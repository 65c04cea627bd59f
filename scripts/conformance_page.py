"""Write docs/conformance.md from the cases of ``conformance/``: ``python -m scripts.conformance_page``."""

from collections import Counter
from pathlib import Path
from typing import Final

from conformance.case import FOLDERS, Case
from conformance.cases import SECTIONS

PAGE: Final = Path(__file__).parents[1] / "docs" / "conformance.md"


def page() -> str:
    """Return the text of docs/conformance.md."""
    cases = [case for cases in SECTIONS.values() for case in cases]
    outcomes = Counter((case.suite, case.outcome) for case in cases)
    lines = [
        "# What other servers test",
        "",
        "Written by `python -m scripts.conformance_page` from the cases in `conformance/`. Each case is a fact that a"
        " test of another server checks, derived anew, and `make conformance` executes it against a running `lorakit"
        " serve builtin:tiny` with two adapters, over HTTP. A refusal is executed too: its status, and that its message"
        " names the field. The same command runs schemathesis over `/openapi.json` (no 500, no undocumented reply) and"
        " lm-eval (its scores are Python's).",
        "",
        "| suite | files are in | passes | refuses on purpose |",
        "|---|---|---|---|",
        *(
            f"| {suite} | `{folder}` | {outcomes[suite, 'passes']} | {outcomes[suite, 'refuses on purpose']} |"
            for suite, folder in FOLDERS.items()
        ),
        "",
        "Not derived: images, sound and video, pooling, tool parsers and reasoning parsers of model families, Harmony,"
        " speculative decoding, saved slots, and options of the other servers' command lines.",
    ]
    for title, rows in SECTIONS.items():
        lines += ["", f"## {title}", "", "| case | test | outcome | why, or what differs |", "|---|---|---|---|"]
        lines += [_row(case) for case in rows]
    return "\n".join(lines) + "\n"


def _row(case: Case) -> str:
    why = case.note if case.why_refused is None else case.why_refused
    return f"| {case.claim} | {case.suite} `{case.test}` | {case.outcome} | {why} |"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
