"""Compare two patches: tables with the most different first, and one sentence at the end.

They are compared by their updates B A, not by A and B, because many pairs of factors give the same update.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from lorakit.files.safetensors import dtype_name
from lorakit.files.text import Say, columns, say_lines
from lorakit.lora.low_rank import frobenius_norm, inner_product, low_rank, subtract_low_rank
from lorakit.patch import Patch, open_patch
from lorakit.patch.patch import check_plain
from lorakit.patch.same_base import base_differences

SHOWN: Final = 20
SAME_UPDATE: Final = 1e-6  # relative difference up to which two updates are equal: rounding of the factors to float32
OF_NORMS: Final = "difference: the norm of second - first, divided by that of the first"
OF_COSINES: Final = "cosine: 1 the same direction, 0 unrelated"
OF_VALUES: Final = "largest: between two values"
Line = tuple[float, Sequence[str]]  # relative difference between the two sides of a table's row, cells of the row


def diff(one: str | Path, two: str | Path, say: Say = print) -> bool:
    """Print the differences between two patches; True if they are the same.

    They are the same if all updates and full tensors are equal and they do not name different bases. Updates are
    compared by ||d1 - d2|| / ||d1|| of delta = s B A, computed from the factors, and full tensors by value.
    Raises PatchError: one of them is no patch, or cannot be read.
    """
    first, second = open_patch(one), open_patch(two)
    for patch in (first, second):
        check_plain(patch, "comparing")
    base_one, base_two = (patch.metadata.get("base") or {} for patch in (first, second))
    bases = base_differences(base_one, base_two)
    for text in bases:
        say(f"made for different bases: {text}\n")
    updates = [_update(name, first, second) for name in dict.fromkeys([*first.layers, *second.layers])]
    other_updates = [line for line in updates if not line[0] <= SAME_UPDATE]
    _table(say, ("update of", "rank", "rank", "difference", "cosine"), other_updates, f"{OF_NORMS}; {OF_COSINES}")
    full_tensors = [_values(name, first, second) for name in dict.fromkeys([*first.full_shapes, *second.full_shapes])]
    other_tensors = [line for line in full_tensors if line[0]]
    _table(say, ("full tensor", "first", "second", "largest", "difference"), other_tensors, f"{OF_VALUES}; {OF_NORMS}")
    if not (bases or other_updates or other_tensors):
        most = max((difference for difference, _ in updates), default=0.0)
        compared = f"{len(updates)} updates and {len(full_tensors)} full tensors"
        bits = "exactly" if not most else f"updates within {most:.2g} of their size"
        say(f"the same: {compared}, {bits}")
        return True
    counts = f"{len(other_updates)} of {len(updates)} updates, {len(other_tensors)} of {len(full_tensors)} full tensors"
    say(f"different: {counts}" + (", and the bases they were made for" if bases else ""))
    return False


def _update(name: str, one: Patch, two: Patch) -> Line:
    """Compare the updates of one layer; a missing update is zero."""
    a, b = one.layers.get(name), two.layers.get(name)
    ranks = ["-" if layer is None else str(layer.rank) for layer in (a, b)]
    if a and b and (a.sizes, a.embedding) != (b.sizes, b.embedding):
        return math.inf, [name, *ranks, "other shape", "-"]
    d1, d2 = (None if x is None else low_rank(dict(x.tensors), x.scale) for x in (a, b))
    if d1 and d2 and torch.equal(d1.B, d2.B) and torch.equal(d1.A, d2.A):
        return 0.0, [name, *ranks, "0", "1"]
    sizes = [0.0 if d is None else frobenius_norm(d) for d in (d1, d2)]
    apart = frobenius_norm(subtract_low_rank(d1, d2)) if d1 and d2 else max(sizes)
    cosine = f"{inner_product(d1, d2) / (sizes[0] * sizes[1]):.4f}" if d1 and d2 and all(sizes) else "-"
    difference = _relative(apart, sizes[0])
    return difference, [name, *ranks, f"{difference:.3g}", cosine]


def _values(name: str, one: Patch, two: Patch) -> Line:
    a, b = (patch.full_tensors[name] if name in patch.full_shapes else None for patch in (one, two))
    kinds = ["-" if x is None else f"{dtype_name(x.dtype)} {'x'.join(map(str, x.shape)) or 'scalar'}" for x in (a, b)]
    if a is None or b is None or a.shape != b.shape:
        return math.inf, [name, *kinds, "-", "-"]
    change = b.double() - a.double()
    difference = _relative(float(change.norm()), float(a.double().norm()))
    return difference, [name, *kinds, f"{float(change.abs().max()):.3g}", f"{difference:.3g}"]


def _relative(apart: float, size: float) -> float:
    """Return apart / size; infinite if size is 0 or a value is not finite."""
    if not apart:
        return 0.0
    return apart / size if size and math.isfinite(apart) and math.isfinite(size) else math.inf


def _table(say: Say, header: Sequence[str], lines: Sequence[Line], legend: str) -> None:
    """Print what the numbers are, and aligned columns, most different first; nothing if there are no lines."""
    if not lines:
        return
    say(legend)
    shown = sorted(lines, key=lambda line: -line[0])[:SHOWN]
    say_lines(say, columns([header, *(cells for _, cells in shown)]))
    say(f"... and {len(lines) - len(shown)} more\n" if len(lines) > len(shown) else "")
