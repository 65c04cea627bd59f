"""Merge patches into a base: W = W0 + s B A, from files to files, one tensor at a time."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from lorakit.durable import committed_folder, write_json
from lorakit.errors import MergeError, TryAgainLater
from lorakit.lora.kinds import Kind, adaptable_layers
from lorakit.lora.methods import METHODS
from lorakit.lora.targets import tied_head
from lorakit.model import find_base, load_skeleton
from lorakit.patch import BaseFiles, Patch, check_base, check_fits, open_base_files, read_patch
from lorakit.patch.tensor_file import TensorFile, header_bytes, tensor_bytes
from lorakit.version import VERSION

NOT_COPIED: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
LEDGER: Final = "merge.json"
COPY_BYTES: Final = 1 << 24


@dataclass(frozen=True)
class Weighted:
    """A patch and the weight of its update in the sum."""

    patch: Patch
    weight: float


@dataclass(frozen=True)
class MergePlan:
    """Which stored tensor gets which updates; every layer of every patch exactly once."""

    updates: Mapping[str, list[tuple[Weighted, str]]]
    kinds: Mapping[str, Kind]
    done: list[dict[str, Any]] = field(default_factory=list)


def merge(
    base: str | Path,
    *adapters: str | Path | tuple[str | Path, float],
    out: str | Path,
    revision: str | None = None,
    allow_base_mismatch: bool = False,
) -> Path:
    """Write the base with the patches merged in as a normal model folder; returns ``out``.

    Each touched tensor is the float64 sum rounded once to its stored dtype; all others are copied byte for byte.
    An adapter may be given as (folder, weight).

    Raises:
        MergeError: ``out`` exists, or a layer cannot be merged; nothing is written. PatchError: a patch is damaged
        or of another base. TryAgainLater: the disk is full; nothing is left behind.
    """
    out, folder = Path(out), find_base(str(base), revision)
    if out.exists():
        raise MergeError(f"out: {out} exists already; choose another folder, or remove it")
    if not adapters:
        raise MergeError("no adapter to merge: name at least one patch folder")
    pairs = [adapter if isinstance(adapter, tuple) else (adapter, 1.0) for adapter in adapters]
    weighted = [Weighted(read_patch(path), weight) for path, weight in pairs]
    files = open_base_files(folder)
    plan = plan_merge(files, weighted, base)
    if not allow_base_mismatch:
        for one in weighted:
            check_base(one.patch, folder)
    _check_space(files, out)
    with committed_folder(out) as staging:
        for shard in files.shards:
            with open(staging / shard.path.name, "wb") as target, open(shard.path, "rb") as source:
                _write_shard(shard, plan, source, target)
        _copy_rest(folder, staging)
        left = set(plan.updates) - {line["tensor"] for line in plan.done}
        if left:
            raise MergeError(f"not merged: {', '.join(sorted(left))}")
        if not any(line["norm_of_change"] for line in plan.done):
            raise MergeError("nothing would change: every update is zero, or lost in rounding to the base's dtype")
        write_json(
            staging / LEDGER,
            {
                "lorakit": VERSION, "base": str(base), "allow_base_mismatch": allow_base_mismatch,
                "adapters": [{"path": str(path), "weight": weight} for path, weight in pairs], "merged": plan.done,
            },
        )  # fmt: skip
    return out


def plan_merge(files: BaseFiles, weighted: list[Weighted], base: object) -> MergePlan:
    """Bind every layer of every patch to the stored tensor it changes.

    Raises:
        PatchError: a layer is missing in the base or has other sizes. MergeError: a layer shares its tensor.
    """
    if files.config().get("quantization_config"):
        raise MergeError(f"{files.folder}: the base is quantised; merge into its original, unquantised weights")
    skeleton = load_skeleton(files.folder)
    layers, tied = adaptable_layers(skeleton), tied_head(skeleton)
    updates: dict[str, list[tuple[Weighted, str]]] = {}
    kinds = {}
    for one in weighted:
        check_fits(one.patch, layers, base)
        for module in one.patch.layers:
            if tied is not None and module == tied[0]:
                raise MergeError(
                    f"{one.patch.folder}: {module} shares its weight with {tied[1]}; merging would change both."
                    " Keep this patch as an adapter (lorakit.load), or save the base untied first"
                )
            name = files.weight_name(module)
            _check_storage(files, name, *layers[module])
            updates.setdefault(name, []).append((one, module))
            kinds[name] = layers[module][0]
    return MergePlan(updates, kinds)


def _check_storage(files: BaseFiles, name: str, kind: Kind, sizes: tuple[int, int]) -> None:
    entry = files.entry(name)
    shape = sizes[::-1] if kind.transposed else sizes
    if entry.shape != shape or entry.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise MergeError(f"{name}: stored as {entry.shape} {entry.dtype}, expected {shape} in a 16, 32 or 64 bit float")


def merged_tensor(W: Tensor, kind: Kind, updates: list[tuple[Weighted, str]]) -> Tensor:
    """W with all updates, summed in float64 and rounded once to W's dtype."""
    total = W.T if kind.transposed else W
    if len(updates) > 1:
        total = total.double()
    for one, module in updates:
        layer = one.patch.layers[module]
        total = METHODS[layer.method].merge(total, layer.tensors, layer.scale * one.weight)
    return (total.T if kind.transposed else total).to(W.dtype)


def _write_shard(shard: TensorFile, plan: MergePlan, source: BinaryIO, target: BinaryIO) -> None:
    entries = sorted(shard.entries.items(), key=lambda item: item[1].start)
    target.write(header_bytes({name: (entry.dtype, entry.shape) for name, entry in entries}, shard.metadata))
    for name, entry in entries:
        if name not in plan.updates:
            _copy_range(source, target, entry.start, entry.end - entry.start)
            continue
        W = shard.read(name)
        merged = merged_tensor(W, plan.kinds[name], plan.updates[name])
        if not merged.isfinite().all():
            raise MergeError(f"{name}: the merged values do not fit {merged.dtype}; nothing was written")
        target.write(tensor_bytes(merged))
        plan.done.append(
            {
                "tensor": name,
                "patches": len(plan.updates[name]),
                "norm_of_change": float((merged.double() - W.double()).norm()),
            }
        )


def _copy_range(source: BinaryIO, target: BinaryIO, start: int, count: int) -> None:
    target.flush()
    source.seek(start)
    while count:
        block = source.read(min(count, COPY_BYTES))
        if not block:
            raise MergeError(f"{source.name}: the file became shorter while it was read")
        target.write(block)
        count -= len(block)


def _copy_rest(folder: Path, staging: Path) -> None:
    """Config, tokenizer, index and what else belongs to a model folder."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.endswith(NOT_COPIED) and not path.name.startswith("."):
            shutil.copyfile(path, staging / path.name)


def _check_space(files: BaseFiles, out: Path) -> None:
    needed = sum(os.path.getsize(shard.path) for shard in files.shards)
    place = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed * 1.05:
        raise TryAgainLater(f"{out}: {needed} bytes are needed, {free} are free; free some space and run again")
