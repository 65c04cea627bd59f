"""Write one file of a merged model: unchanged tensors are copied by range, the others computed block by block.

Each tensor is written at its own offset, so several can be computed at a time.
"""

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor
from torch.linalg import vector_norm

from lorakit.errors import MergeError
from lorakit.files.safetensors import SafetensorsFile, header_bytes, parse_dtype, tensor_bytes, with_length_prefix
from lorakit.lora.low_rank import add_low_rank, frobenius_norm, low_rank
from lorakit.lora.merge_weight import LowRankUpdate, merged_blocks, rounded_once
from lorakit.merging.tensors import Contribution, OutputTensor
from lorakit.patch.fingerprint import ReadElements, WeightDigest
from lorakit.patch.read import LazyPatchTensors
from lorakit.patch.same_base import full_digests, mismatch

COPY_BYTES: Final = 1 << 26
MAX_WORKERS: Final = 4


def write_shard(
    path: Path, file: SafetensorsFile, tensors: Sequence[OutputTensor], *, check_base: bool
) -> list[dict[str, Any]]:
    """Write the tensors as a safetensors file; returns one line of the ledger for every part.

    ``file``: the base's of the same name. ``check_base``: compare changed tensors with the digests in the patches.
    Raises MergeError if a value does not fit its dtype, PatchError if a patch was trained on another base.
    """
    header = _header(file, tensors)
    offsets = accumulate((tensor.num_bytes for tensor in tensors), initial=len(header))
    path.write_bytes(header)

    def write(tensor: OutputTensor, offset: int) -> list[dict[str, Any]]:
        entry = tensor.base.entries[tensor.stored]
        is_same = (entry.dtype, entry.shape) == (tensor.dtype, tensor.shape)
        is_stored_here = tensor.base.is_stored(tensor.stored) and tensor.base.files.shard_of[tensor.stored] is file
        with open(path, "r+b") as target, open(file.path, "rb") as source:
            target.seek(offset)
            if is_same and is_stored_here and not tensor.updates and not tensor.full_tensors:
                copy_range(source.fileno(), target.fileno(), entry.start, entry.end - entry.start, offset)
                return []
            return write_tensor(tensor, target, check_base=check_base)

    # one thread per tensor, because the blocks are too small to share one among threads
    workers = min(MAX_WORKERS, torch.get_num_threads())
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return [line for lines in pool.map(write, tensors, offsets) for line in lines]


def copy_range(source: int, target: int, start: int, count: int, offset: int) -> None:
    """Copy ``count`` bytes, in the kernel and sharing blocks where possible. Raises MergeError if the source ends."""
    while count:
        try:
            copied = os.copy_file_range(source, target, min(count, COPY_BYTES), start, offset)
        except (AttributeError, OSError):  # macOS has no such call, and some file systems refuse it
            copied = os.pwrite(target, os.pread(source, min(count, COPY_BYTES), start), offset)
        if not copied:
            raise MergeError("the base's files became shorter while they were read")
        start = start + copied
        offset = offset + copied
        count = count - copied


def write_tensor(tensor: OutputTensor, target: BinaryIO, *, check_base: bool) -> list[dict[str, Any]]:
    """Compute a tensor and write it; returns its lines of the ledger. Raises as ``write_shard``."""
    updates = list(zip(*(part.updates() for part in tensor.updates), strict=True)) or [()]  # of each matrix
    *above, width = tensor.shape if len(tensor.shape) > 1 else (*tensor.shape, 1)
    read = tensor.base.reader(tensor.stored)
    # the norm of a sum of s B A is computed from the factors; any other change is measured block by block
    measured = bool(tensor.full_tensors) or len(updates) > 1 or not all(update.additive for update in updates[0])
    recorded = list(_recorded_digests(tensor)) if check_base else []
    digests = {rounded_to: WeightDigest(tensor.stored_shape) for _, _, rounded_to in recorded}
    change = 0.0  # norm of the change, and below that of its part lost in rounding
    loss = 0.0
    changed = tensor.stored_shape != tensor.shape
    for rows, merge in merged_blocks(tensor.kind, updates, (math.prod(above) // len(updates), width)):
        before = _base_rows(tensor, read, rows, width)
        for rounded_to, digest in digests.items():
            digest.update(before.to(parse_dtype(rounded_to) or before.dtype))
        exact = merge(_starting_rows(tensor, before, rows, width))
        if measured:
            change = math.hypot(change, vector_norm(exact - before))
        rounded = rounded_once(exact, tensor.dtype)
        lost = float(vector_norm(rounded.double() - exact))
        loss = math.hypot(loss, lost)
        target.write(tensor_bytes(rounded))
        changed = changed or not torch.equal(rounded, rounded_once(before.double(), tensor.dtype))
        if not math.isfinite(lost):
            _check_finite(tensor, before, rounded)
    for part, expected, rounded_to in recorded:
        if digests[rounded_to].hexdigest() != expected:
            raise mismatch(part.source.patch, tensor.base.files.name, f"values of {part.name}")
    if not measured and updates[0]:
        terms = [low_rank(one.tensors, one.scale * one.weight) for one in updates[0] if isinstance(one, LowRankUpdate)]
        change = frobenius_norm(add_low_rank(terms))
    effect = {"changed": changed, "norm_of_rounding": loss, "lost_to_rounding": loss / change if change else 0.0}
    parts = [("parameter", part) for part in tensor.full_tensors] + [("layer", part) for part in tensor.updates]
    return [{"patch": part.source.index, key: part.name, "tensor": tensor.name, **effect} for key, part in parts]


def _check_finite(tensor: OutputTensor, before: Tensor, rounded: Tensor) -> None:
    """Raise MergeError unless infinities and NaNs are only where nothing is added to the base's own."""
    unchanged = not (tensor.updates or tensor.full_tensors)
    if unchanged and torch.equal(before.isfinite(), rounded.isfinite()):
        return
    if not before.isfinite().all():
        raise MergeError(f"{tensor.stored}: the base holds values that are not finite; nothing was written")
    raise MergeError(f"{tensor.name}: the merged values do not fit {tensor.dtype}; nothing was written")


def _base_rows(tensor: OutputTensor, read: ReadElements, rows: slice, width: int) -> Tensor:
    """Return some rows of the base, with zeros for those of new tokens."""
    num_base_rows = math.prod(tensor.stored_shape) // max(1, width)
    first = min(rows.start, num_base_rows)
    last = min(rows.stop, num_base_rows)
    values = read(first * width, last * width).view(last - first, width)
    num_new = rows.stop - rows.start - len(values)
    return torch.cat([values, values.new_zeros(num_new, width)]) if num_new else values


def _starting_rows(tensor: OutputTensor, before: Tensor, rows: slice, width: int) -> Tensor:
    """Return the float64 rows that updates are added to: the base's, moved or replaced by full tensors of patches."""
    total = before.to(torch.float64, copy=True)  # which the caller may overwrite
    parts = tensor.full_tensors
    for part in parts:
        tensors = part.source.patch.full_tensors
        if isinstance(tensors, LazyPatchTensors):
            own = tensors.elements(part.name, rows.start * width, rows.stop * width)
        else:  # `with_head_names` has read them
            own = tensors[part.name].flatten()[rows.start * width : rows.stop * width]
        new = own.view(-1, width).to(torch.float64, copy=True)
        if (scale := part.source.patch.bias_scales.get(part.name)) is not None:
            new = before.double() + scale * new
        total += part.source.weight * (new - before.double())
    # a single full tensor with weight 1 is used as it is, because W0 + (W - W0) could round
    return new if len(parts) == 1 and parts[0].source.weight == 1.0 else total


def _recorded_digests(tensor: OutputTensor) -> Iterator[tuple[Contribution, str, str | None]]:
    """Yield each update whose patch has a full digest of the tensor's base, the digest, and its `rounded_to`."""
    if tensor.stored_shape != tensor.shape or not tensor.base.is_stored(tensor.stored):
        return  # without stored values of the trained shape there is nothing to compare
    for part in tensor.updates:
        digests = full_digests(part.source.patch) or {}
        name = part.experts.stored if part.experts else part.name
        if name in digests:
            yield part, digests[name], part.source.patch.metadata["base"].get("rounded_to")


def _header(file: SafetensorsFile, tensors: Sequence[OutputTensor]) -> bytes:
    """Return the base's own header if no dtype, shape or name in it changes, else a new one."""
    stored = {name: (entry.dtype, entry.shape) for name, entry in file.entries.items()}
    planned = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
    return with_length_prefix(file.header) if stored == planned else header_bytes(planned, file.metadata)
