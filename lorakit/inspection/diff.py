"""Compare two patches, or two models: tables with the most different first, and one sentence at the end.

Patches are compared by their updates B A, not by A and B, because many pairs of factors give the same update.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lorakit.base.find import find_base
from lorakit.errors import LorakitError
from lorakit.files.base_files import BaseFiles, open_base_files
from lorakit.files.dtypes import dtype_name
from lorakit.files.text import columns, flatten, say_lines
from lorakit.lora.low_rank import frobenius_norm, inner_product, low_rank, subtract_low_rank
from lorakit.patch import Patch, open_patch
from lorakit.patch.adapter_config import CONFIG_FILE
from lorakit.patch.fingerprint import NOT_IDENTITY, BaseIdentity
from lorakit.patch.patch import check_plain
from lorakit.patch.same_base import base_differences

Say = Callable[[str], None]
Kind = tuple[torch.dtype, tuple[int, ...]]
SHOWN: Final = 20
CELL: Final = 48
SAME_UPDATE: Final = 1e-6  # relative difference up to which two updates are equal: rounding of the factors to float32
BLOCK_ELEMENTS: Final = 1 << 22
OF_NORMS: Final = "difference: the norm of second - first, divided by that of the first"
OF_COSINES: Final = "cosine: 1 the same direction, 0 unrelated"
OF_VALUES: Final = "largest: between two values"


@dataclass(frozen=True)
class Line:
    """One row of a table, and the relative difference between its two sides."""

    difference: float
    cells: Sequence[str]


def diff(one: str | Path, two: str | Path, say: Say = print) -> bool:
    """Print the differences between two patches, or two models; True if they are the same.

    Patches are the same if all updates and full tensors are equal and they do not name different bases. Updates are
    compared by ||d1 - d2|| / ||d1|| of delta = s B A, computed from the factors, and full tensors by value. Settings
    are printed and count only through the updates. Models (folders, hub ids, builtin:tiny) are the same if all tensors
    have equal values, and config and tokenizer are equal. Dtypes and files are printed and do not count. One tensor is
    in memory at a time.
    Raises LorakitError: one is a patch and the other is not. PatchError, BaseModelError: one of them cannot be read.
    """
    are_patches = [(Path(name) / CONFIG_FILE).is_file() for name in (one, two)]
    if all(are_patches):
        first, second = open_patch(one), open_patch(two)
        for each in (first, second):
            check_plain(each, "comparing")
        return _diff_patches(first, second, say)
    if any(are_patches):
        patch, other = (one, two) if are_patches[0] else (two, one)
        find_base(str(other))  # for its error, if there is nothing of that name
        raise LorakitError(
            f"{patch} is a patch, {other} is not. `lorakit show {patch} --for {other}` says whether they belong"
            f" together; to compare models merge the patch first (lorakit merge), to compare patches make a tuned model"
            " one (lorakit extract)"
        )
    return _diff_models(open_base_files(find_base(str(one))), open_base_files(find_base(str(two))), say)


def _diff_patches(one: Patch, two: Patch, say: Say) -> bool:
    _table(say, ("setting", "first", "second"), _unequal(_settings(one), _settings(two)))
    first, second = (patch.metadata.get("base") or {} for patch in (one, two))
    bases = base_differences(first, second)
    for text in bases:
        say(f"made for different bases: {text}\n")
    updates = [_update(name, one, two) for name in dict.fromkeys([*one.layers, *two.layers])]
    other_updates = [line for line in updates if not line.difference <= SAME_UPDATE]
    _table(say, ("update of", "rank", "rank", "difference", "cosine"), other_updates, f"{OF_NORMS}; {OF_COSINES}")
    names = dict.fromkeys([*one.full_shapes, *two.full_shapes])
    full_tensors = []
    for name in names:
        tensors = [patch.full_tensors[name] if name in patch.full_shapes else None for patch in (one, two)]
        kinds = [None if tensor is None else (tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        full_tensors.append(_values(name, kinds, [tuple(each.reshape(-1) for each in tensors if each is not None)]))
    other_tensors = [line for line in full_tensors if line.difference]
    _table(say, ("full tensor", "first", "second", "largest", "difference"), other_tensors, f"{OF_VALUES}; {OF_NORMS}")
    if not (bases or other_updates or other_tensors):
        most = max((line.difference for line in updates), default=0.0)
        compared = f"{len(updates)} updates and {len(full_tensors)} full tensors"
        bits = "exactly" if not most else f"updates within {most:.2g} of their size"
        say(f"the same: {compared}, {bits}")
        return True
    say(
        f"different: {len(other_updates)} of {len(updates)} updates,"
        f" {len(other_tensors)} of {len(full_tensors)} full tensors"
        + (", and the bases they were made for" if bases else "")
    )
    return False


def _settings(patch: Patch) -> dict[str, Any]:
    """Return the settings that decide a patch's strength, its base and its layers."""
    layers, base = patch.layers.values(), patch.metadata.get("base") or {}
    return {
        "method": patch.config.method, "rank": sorted({layer.rank for layer in layers}),
        "alpha": sorted({layer.alpha for layer in layers}), "scale": sorted({layer.scale for layer in layers}),
        "dropout": patch.config.dropout, "layers": len(layers), "full tensors": len(patch.full_shapes),
        "parameters": patch.num_parameters, "bias": patch.config.raw.get("bias", "none"),
        "modules_to_save": sorted(patch.config.modules_to_save), "task_type": patch.config.raw.get("task_type"),
        "base model": patch.config.base_model, "revision": patch.config.revision,
        "lorakit": patch.metadata.get("lorakit"), "base config": base.get("config"),
        "base dtype": base.get("rounded_to"),
    }  # fmt: skip


def _update(name: str, one: Patch, two: Patch) -> Line:
    """Compare the updates of one layer; a missing update is zero."""
    a, b = one.layers.get(name), two.layers.get(name)
    ranks = ["-" if layer is None else str(layer.rank) for layer in (a, b)]
    if a and b and (a.sizes, a.embedding) != (b.sizes, b.embedding):
        return Line(math.inf, [name, *ranks, "other shape", "-"])
    d1, d2 = (None if x is None else low_rank(dict(x.tensors), x.scale) for x in (a, b))
    if d1 and d2 and torch.equal(d1.B, d2.B) and torch.equal(d1.A, d2.A):
        return Line(0.0, [name, *ranks, "0", "1"])
    sizes = [0.0 if d is None else frobenius_norm(d) for d in (d1, d2)]
    apart = frobenius_norm(subtract_low_rank(d1, d2)) if d1 and d2 else max(sizes)
    cosine = f"{inner_product(d1, d2) / (sizes[0] * sizes[1]):.4f}" if d1 and d2 and all(sizes) else "-"
    difference = _relative(apart, sizes[0])
    return Line(difference, [name, *ranks, f"{difference:.3g}", cosine])


def _values(name: str, kinds: Sequence[Kind | None], blocks: Iterable[tuple[Tensor, ...]]) -> Line:
    """Return the row of a tensor, from pairs of blocks of its values. kinds: None on a side that lacks it."""
    shown = ["-" if kind is None else _kind(*kind) for kind in kinds]
    if None in kinds or len({kind[1] for kind in kinds if kind}) > 1:
        return Line(math.inf, [name, *shown, "-", "-"])
    largest, difference = _apart(blocks)
    return Line(difference, [name, *shown, f"{largest:.3g}", f"{difference:.3g}"])


def _diff_models(one: BaseFiles, two: BaseFiles, say: Say) -> bool:
    configs = _unequal(*(flatten(files.config()) for files in (one, two)))
    _table(say, ("config", "first", "second"), configs)
    tokenizers = {BaseIdentity(files).tokenizer for files in (one, two)}
    if len(tokenizers) > 1:
        say("tokenizer: differs, or only one has it\n")
    first, second = (
        f"{len(model.shards)} of {sum(shard.path.stat().st_size for shard in model.shards):,} bytes"
        for model in (one, two)
    )
    if first != second:
        say(f"files: {first} in the first, {second} in the second\n")
    names = dict.fromkeys([*one.shard_of, *two.shard_of])
    lines = [_stored(name, one, two) for name in names]
    unequal = [line for line in lines if line.difference]
    _table(say, ("tensor", "first", "second", "largest", "difference"), unequal, f"{OF_VALUES}; {OF_NORMS}")
    dtypes = [
        name
        for name in names
        if name in one.shard_of and name in two.shard_of and one.entry(name).dtype != two.entry(name).dtype
    ]
    if dtypes:
        kinds = sorted({f"{_kind(one.entry(name).dtype)} and {_kind(two.entry(name).dtype)}" for name in dtypes})
        say(f"dtype: {len(dtypes)} tensors differ ({', '.join(kinds)}; {dtypes[0]} first)\n")
    counted = sum(line.difference > 0 for line in configs)
    if not (unequal or counted or len(tokenizers) > 1):
        say(f"the same: {len(lines)} tensors of equal values" + (f", {len(dtypes)} in another dtype" if dtypes else ""))
        return True
    missing = [sum(name not in files.shard_of for name in names) for files in (two, one)]
    say(
        f"different: {len(unequal)} of {len(lines)} tensors ({missing[0]} only in the first, {missing[1]} only in the"
        f" second), {counted} settings of config.json" + (", the tokenizer" if len(tokenizers) > 1 else "")
    )
    return False


def _unequal(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[Line]:
    """Return a row for every key with unequal values. Keys in NOT_IDENTITY have difference 0."""
    return [
        Line(float(key.rpartition(".")[2] not in NOT_IDENTITY), [key, *(_cell(side, key) for side in (one, two))])
        for key in dict.fromkeys([*one, *two])
        if (key in one, one.get(key)) != (key in two, two.get(key))
    ]


def _cell(side: Mapping[str, Any], key: str) -> str:
    text = json.dumps(side[key], ensure_ascii=False) if key in side else "-"
    return text if len(text) <= CELL else f"{text[: CELL - 3]}..."


def _stored(name: str, one: BaseFiles, two: BaseFiles) -> Line:
    entries = [files.entry(name) if name in files.shard_of else None for files in (one, two)]
    kinds = [None if entry is None else (entry.dtype, entry.shape) for entry in entries]
    size = min(math.prod(entry.shape) for entry in entries if entry is not None)
    blocks = ((start, min(start + BLOCK_ELEMENTS, size)) for start in range(0, size, BLOCK_ELEMENTS))
    read = (tuple(files.shard_of[name].read_elements(name, *block) for files in (one, two)) for block in blocks)
    return _values(name, kinds, read)


def _apart(blocks: Iterable[tuple[Tensor, ...]]) -> tuple[float, float]:
    """Return (largest difference of two values, ||one - two|| / ||one||) over pairs of blocks.

    Equal bits are equal values, NaN included.
    """
    peaks, apart, size = [0.0], 0.0, 0.0
    for one, two in blocks:
        if one.is_complex() and two.is_complex():
            one, two = torch.view_as_real(one), torch.view_as_real(two)
        before = one.double()
        size = math.hypot(size, float(torch.linalg.vector_norm(before)))
        if one.dtype == two.dtype and torch.equal(one.view(torch.uint8), two.view(torch.uint8)):
            continue
        change = two.double() - before
        is_integer = not one.is_floating_point()  # at least 1, because different int64 may be equal as float64
        peaks.append(max(float(change.abs().max()), float(is_integer)))
        apart = math.hypot(apart, float(torch.linalg.vector_norm(change)), float(is_integer))
    return float(torch.tensor(peaks).max()), _relative(apart, size)


def _relative(apart: float, size: float) -> float:
    """Return apart / size; infinite if size is 0 or a value is not finite."""
    if not apart:
        return 0.0
    return apart / size if size and math.isfinite(apart) and math.isfinite(size) else math.inf


def _kind(dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> str:
    name = dtype_name(dtype)
    return name if shape is None else f"{name} {'x'.join(map(str, shape)) or 'scalar'}"


def _table(say: Say, header: Sequence[str], lines: Sequence[Line], legend: str = "") -> None:
    """Print what the numbers are, and aligned columns, most different first; nothing if there are no lines."""
    if not lines:
        return
    if legend:
        say(legend)
    shown = sorted(lines, key=lambda line: -line.difference)[:SHOWN]
    say_lines(say, columns([header, *(line.cells for line in shown)]))
    say(f"... and {len(lines) - len(shown)} more\n" if len(lines) > len(shown) else "")
