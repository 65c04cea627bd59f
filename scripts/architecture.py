"""Write the parts of docs/ARCHITECTURE.md that follow from the code: the picture of the rooms and the annotated tree.

``python -m scripts.architecture`` draws docs/architecture.svg from the imports, and lists every file with the first
sentence of its docstring. A test compares both with what is committed.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = ROOT / "lorakit"
PICTURE: Final = ROOT / "docs" / "architecture.svg"
PAGE: Final = ROOT / "docs" / "ARCHITECTURE.md"
BEGIN, END = "<!-- tree -->\n```\n", "```\n<!-- end of tree -->"
BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, MARGIN = 150, 46, 34, 52, 24
LONGEST = 96  # characters of a purpose in the tree
WIDEST = 4  # the level above which there are few rooms
PURPOSE: Final = {
    "files": "atomic, safetensors",
    "recipe": "YAML to Recipe",
    "ops": "fused operations", "launch": "processes, failures", "data": "rows to batches", "lora": "the arithmetic",
    "quant": "4 and 8 bits", "patch": "adapters on disk", "objectives": "the loss", "base": "the frozen model",
    "decoding": "rows in a batch",
    "parallel": "the engine", "inference": "adapters per row", "derive": "patch from patches",
    "formats": "other programs",
    "run": "the output folder", "merging": "W + s B A, to files", "serving": "OpenAI over HTTP",
    "planning": "memory before a run", "export": "vLLM, llama.cpp",
    "training": "the loop", "inspection": "show, diff, doctor", "cli": "the commands",
}  # fmt: skip


def imported_rooms() -> dict[str, set[str]]:
    """Room -> the rooms that its files import; errors and version are left out, because every room imports them."""
    rooms: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if room in PURPOSE:
            rooms.setdefault(room, set()).update(
                other for other in _imports(path) if other in PURPOSE and other != room
            )
    return rooms


@functools.cache
def _imports(path: Path) -> list[str]:
    imported = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        imported += [name.split(".")[1] for name in names if name.startswith("lorakit.")]
    return imported


def levels(rooms: dict[str, set[str]]) -> list[list[str]]:
    """Rooms from bottom to top; each level imports from the levels below alone."""
    depth: dict[str, int] = {}

    def depth_of(room: str) -> int:
        if room not in depth:
            depth[room] = 1 + max((depth_of(other) for other in rooms[room]), default=-1)
        return depth[room]

    return [sorted(room for room in rooms if depth_of(room) == n) for n in range(max(map(depth_of, rooms)) + 1)]


def direct(rooms: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """The arrows that no longer path of arrows implies."""

    def reachable(room: str) -> set[str]:
        return rooms[room].union(*map(reachable, rooms[room]))

    for room, others in sorted(rooms.items()):
        implied = set().union(*map(reachable, others))
        yield from ((room, other) for other in sorted(others - implied))


def _corners(rows: list[list[str]], arrows: list[tuple[str, str]], width: int) -> dict[str, tuple[float, float]]:
    """Where each room's box is; a row is sorted by the middle of its arrows' other ends, so that few of them cross."""
    corner: dict[str, tuple[float, float]] = {room: (0.0, 0.0) for row in rows for room in row}
    for _ in range(12):
        for number, row in enumerate(rows):

            def middle(room: str) -> float:
                ends = [corner[b if a == room else a][0] for a, b in arrows if room in (a, b)]
                return sum(ends) / len(ends)

            free = width - 2 * MARGIN - len(row) * (BOX_WIDTH + GAP_X) + GAP_X
            left = MARGIN + free * (
                0.5 if number < WIDEST else 0.8
            )  # leaves room for long arrows beside the narrow top
            for column, room in enumerate(sorted(row, key=lambda room: (middle(room), room))):
                y = MARGIN + (len(rows) - 1 - number) * (BOX_HEIGHT + GAP_Y)
                corner[room] = left + column * (BOX_WIDTH + GAP_X), y
    return corner


def picture() -> str:
    """The drawing as SVG text; the same bytes for the same imports."""
    rooms = imported_rooms()
    rows = levels(rooms)
    width = max(map(len, rows)) * (BOX_WIDTH + GAP_X) - GAP_X + 2 * MARGIN
    height = len(rows) * (BOX_HEIGHT + GAP_Y) - GAP_Y + 2 * MARGIN
    corner = _corners(rows, list(direct(rooms)), width)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#7a8599"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for room, other in direct(rooms):
        (x, y), (to_x, to_y) = corner[room], corner[other]
        parts.append(
            f'<path d="M{x + BOX_WIDTH / 2:g} {y + BOX_HEIGHT:g} L{to_x + BOX_WIDTH / 2:g} {to_y - 2:g}" fill="none"'
            ' stroke="#7a8599" stroke-opacity="0.65" marker-end="url(#tip)"/>'
        )
    for room, (x, y) in corner.items():
        middle = x + BOX_WIDTH / 2
        parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="#eef3fb"'
            ' stroke="#3b5b92"/>'
            f'<g text-anchor="middle"><text x="{middle:g}" y="{y + 19:g}" font-size="14" font-weight="bold">'
            f"{room}</text>"
            f'<text x="{middle:g}" y="{y + 36:g}" font-size="11" fill="#444">{PURPOSE[room]}</text></g>'
        )
    return "\n".join([*parts, "</svg>", ""])


def tree() -> str:
    """Every room from top to bottom, every file in it, and what it is for."""
    lines: list[str] = []
    for room in [room for row in reversed(levels(imported_rooms())) for room in row]:
        lines.append(f"{room}/".ljust(28) + _purpose(PACKAGE / room / "__init__.py"))
        folder = PACKAGE / room
        paths = (path for path in folder.rglob("*.py") if not path.name.startswith("__"))
        ordered = sorted(paths, key=lambda path: (len(path.parts), path))  # packages in a room last
        lines += [f"  {path.relative_to(folder)}".ljust(28) + _purpose(path) for path in ordered]
    lines += [name.ljust(28) + _purpose(PACKAGE / name) for name in ("errors.py", "version.py")]
    return "\n".join(lines) + "\n"


def _purpose(path: Path) -> str:
    """The first sentence of a file's docstring; of a long one, the clauses that fit."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    text = re.split(r"\.(?= |$)", text)[0]
    ends = [match.start() for match in re.finditer(r"[:;,](?= )|$", text)]
    return text[: max((end for end in ends if end <= LONGEST), default=ends[0])]


def page(text: str) -> str:
    """The text of docs/ARCHITECTURE.md with the tree as it is now."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + tree() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PICTURE.write_text(picture())
    PAGE.write_text(page(PAGE.read_text()))
