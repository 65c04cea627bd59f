"""What becomes of every tensor of a base when patches are merged into it. Nothing is read or written here."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lorakit.errors import MergeError
from lorakit.files.safetensors import SafetensorsFile
from lorakit.lora.layer_kinds import CONV1D, EMBEDDING, LINEAR
from lorakit.merging.experts import expert_places
from lorakit.merging.places import OutputTensors
from lorakit.merging.tensors import MERGEABLE, Contribution, OutputTensor, WeightedPatch
from lorakit.merging.vocabulary import Vocabulary, plan_vocabulary
from lorakit.patch import BaseFiles, BaseShapes, Patch, check_fits

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip


@dataclass(frozen=True)
class MergePlan:
    """The merged model, file by file."""

    shards: Mapping[str, list[OutputTensor]]
    files: Mapping[str, SafetensorsFile]
    """the base's file of the same name"""
    untied: bool
    """whether the head gets a tensor of its own"""
    vocabulary: Vocabulary | None
    dtype: torch.dtype | None
    """what floating tensors are converted to; None leaves each as it is"""
    unpacked: bool = False
    """whether the base's files hold packed weights, and the merged model's do not"""

    def pieces(self) -> Iterator[OutputTensor]:
        return (piece for pieces in self.shards.values() for piece in pieces)

    @property
    def num_bytes(self) -> int:
        return sum(torch.Size(piece.shape).numel() * piece.dtype.itemsize for piece in self.pieces())


def plan_merge(
    files: BaseFiles,
    base: BaseShapes,
    adapters: Sequence[WeightedPatch],
    *,
    dtype: str | None = None,
    untie: bool = False,
) -> MergePlan:
    """Bind every layer and whole tensor of every patch to the stored tensor it changes, each exactly once.

    Raises:
        PatchError: something is missing in the base or has another shape. MergeError: it cannot be merged.
    """
    vocabulary = plan_vocabulary(base, [one.patch for one in adapters])
    if vocabulary is not None:
        base = vocabulary.resized(base)
    for one in adapters:
        check_fits(one.patch, base, files.folder)
    if dtype is not None and dtype not in DTYPES:
        raise MergeError(f"dtype: one of {', '.join(DTYPES)}, got {dtype!r}")
    target = None if dtype is None else DTYPES[dtype]
    shards = {file.path.name: _plain(file, target) for file in files.shards}
    places = OutputTensors(files, shards)
    separate = _bind(places, base, adapters, untie)
    if base.tied is not None and not separate:
        places.copy_to_tied_head(*base.tied)
    if vocabulary is not None:
        places.resize(vocabulary, base)
    return MergePlan(shards, {file.path.name: file for file in files.shards}, separate, vocabulary, target)


def _plain(file: SafetensorsFile, dtype: torch.dtype | None) -> list[OutputTensor]:
    entries = sorted(file.entries.items(), key=lambda item: (item[1].start, item[1].end))
    return [
        OutputTensor(name, dtype if dtype and entry.dtype in MERGEABLE else entry.dtype, entry.shape, file, name)
        for name, entry in entries
    ]


def _bind(places: OutputTensors, base: BaseShapes, adapters: Sequence[WeightedPatch], untie: bool) -> bool:
    """Give every part its piece; True when head and embedding had to be separated."""
    separated = _separated(base, adapters, untie)
    if base.tied is not None:
        places.check_mirrored(*base.tied)
    head = places.untie_head(*base.tied) if separated and base.tied else None
    for one in adapters:
        shared = set() if separated else shared_places(base, one.patch)
        for module in one.patch.layers:
            if module in shared or module in base.experts:
                continue
            kind, sizes = base.layers[module]
            stored = head if head and base.tied and module == base.tied[0] else places.stored_name(f"{module}.weight")
            if f"{module}.weight" not in one.patch.whole_shapes:
                places.check_shape(stored, sizes[::-1] if kind.transposed else sizes)
            places.change(stored, kind, update=Contribution(one, module))
        for parameter in one.patch.whole_shapes:
            if parameter in shared:
                continue
            module = parameter.rpartition(".")[0]
            stored = head if head and base.tied and parameter == head else places.stored_name(parameter)
            kind_here = base.layers[module][0] if module in base.layers else None
            places.change(stored, kind_here, whole=Contribution(one, parameter))
        for module in one.patch.token_rows:
            places.change(places.stored_name(f"{module}.weight"), EMBEDDING, update=Contribution(one, module))
    _bind_experts(places, base, adapters)
    return separated


def _bind_experts(places: OutputTensors, base: BaseShapes, adapters: Sequence[WeightedPatch]) -> None:
    names = {name for one in adapters for name in one.patch.layers if name in base.experts}
    if not names:
        return
    found = expert_places(places.folder, sorted(names))
    for one in adapters:
        for name in one.patch.layers:
            for place in found.get(name, ()):
                kind = CONV1D if place.transposed else LINEAR
                places.change(place.stored, kind, update=Contribution(one, name, place))


def shared_places(base: BaseShapes, patch: Patch) -> set[str]:
    """What a patch does to the head of a tied base just as to its embedding, and is done once: module and parameter."""
    if base.tied is None or not _same_for_both(patch, *base.tied):
        return set()
    return {base.tied[0], f"{base.tied[0]}.weight"}


def _separated(base: BaseShapes, adapters: Sequence[WeightedPatch], untie: bool) -> bool:
    """Whether head and embedding of a tied base get different values.

    Raises:
        MergeError: they would, and ``untie`` was not said.
    """
    if base.tied is None:
        return False
    head, embedding = base.tied
    for one in adapters:
        if _same_for_both(one.patch, head, embedding):
            continue
        if not untie:
            touched = {*one.patch.layers, *(name.rpartition(".")[0] for name in one.patch.whole_shapes)}
            changed, other = (head, embedding) if head in touched else (embedding, head)
            raise MergeError(
                f"{one.folder}: changes {changed} and not {other} in the same way, but this base stores one tensor for"
                f" both (they are tied). Say --untie (untie=True) to write {head}.weight as a tensor of its own, or"
                " keep this patch as an adapter (lorakit.load)"
            )
        return True
    return False


def _same_for_both(patch: Patch, head: str, embedding: str) -> bool:
    """Whether the patch does the same to both, as PEFT saves it with ``ensure_weight_tying``, or nothing to either."""
    names = (f"{head}.weight", f"{embedding}.weight")
    if (
        len({name in patch.whole_shapes for name in names}) > 1
        or len({m in patch.layers for m in (head, embedding)}) > 1
    ):
        return False
    if names[0] in patch.whole_shapes and not torch.equal(patch.full_tensors[names[0]], patch.full_tensors[names[1]]):
        return False
    if head not in patch.layers:
        return True
    one, two = patch.layers[head], patch.layers[embedding]
    mirrored = one.scale == two.scale and torch.equal(one.tensors["lora_A"], two.tensors["lora_B"].T)
    return mirrored and torch.equal(one.tensors["lora_B"], two.tensors["lora_A"].T)
