"""Plan a merge: for every tensor of the merged model, the base's tensor and the parts of patches added to it.

Each layer, full tensor and token row of every patch is bound exactly once. No values are read here, but for two tied
tensors that must be equal.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lorakit.errors import BaseModelError, MergeError
from lorakit.files.base_files import BaseFiles
from lorakit.files.dtypes import MODEL_DTYPES
from lorakit.files.safetensors import SafetensorsFile
from lorakit.lora.layer_kinds import LayerKind
from lorakit.lora.merge_weight import row_blocks
from lorakit.merging.experts import expert_slices
from lorakit.merging.onto import TrainedQuantization
from lorakit.merging.readers import DequantizedWeights, StoredWeights, WeightReader
from lorakit.merging.tensors import MERGEABLE, Contribution, OutputTensor
from lorakit.merging.vocabulary import Vocabulary, plan_vocabulary
from lorakit.patch import BaseShapes, Patch, PatchLayer, check_fits
from lorakit.patch.bind import FullTensor, bind
from lorakit.patch.weighted import WeightedPatch
from lorakit.quant.files import is_quantized


@dataclass(frozen=True)
class MergePlan:
    """The merged model, file by file."""

    shards: Mapping[str, tuple[OutputTensor, ...]]
    files: Mapping[str, SafetensorsFile]
    """the base's file of the same name"""
    untied: bool
    """whether the head gets a tensor of its own"""
    vocabulary: Vocabulary | None
    dtype: torch.dtype | None
    """dtype that floating tensors are converted to; None: each keeps its dtype"""
    dequantized: bool
    """whether the base's files hold quantised weights; the merged model's never do"""

    def tensors(self) -> Iterator[OutputTensor]:
        return (tensor for tensors in self.shards.values() for tensor in tensors)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors())


@dataclass(frozen=True)
class _Binding:
    """One part of a patch and the output tensor that it goes into."""

    output: str
    kind: LayerKind | None
    part: Contribution
    full: bool = False
    """whether the part is a full tensor, not an update"""


def plan_merge(
    files: BaseFiles,
    base: BaseShapes,
    adapters: Sequence[WeightedPatch],
    *,
    quantization: TrainedQuantization | None = None,
    dtype: str | None = None,
    untie: bool = False,
) -> MergePlan:
    """Bind every layer and full tensor of every patch to the stored tensor it changes, each exactly once.

    ``quantization``: merge onto the weights quantised so and dequantised; None: onto the stored weights.

    Raises:
        PatchError: the base lacks a tensor, or has it in another shape. MergeError: a patch cannot be merged.
    """
    vocabulary = plan_vocabulary(base, [one.patch for one in adapters])
    if vocabulary is not None:
        base = vocabulary.resized(base)
    for one in adapters:
        check_fits(one.patch, base, files.folder)
    if dtype is not None and dtype not in MODEL_DTYPES:
        raise MergeError(f"dtype: one of {', '.join(MODEL_DTYPES)}, got {dtype!r}")
    target = None if dtype is None else MODEL_DTYPES[dtype]
    reader = StoredWeights(files) if quantization is None else DequantizedWeights(files, quantization)
    separate = _check_untie(base, adapters, untie)
    if base.tied is not None:
        _check_mirrored(reader, *base.tied)
    copies = _copies(reader, target, base, separate=separate)
    unchanged = {tensor.name: tensor for tensors in copies.values() for tensor in tensors}
    bindings = _bind(reader.files, base, adapters, unchanged, separate=separate)
    changed = _with_parts(unchanged, bindings)
    if base.tied is not None and not separate and (head := f"{base.tied[0]}.weight") in changed:
        embedding = changed[files.weight_name(base.tied[1])]
        changed[head] = replace(embedding, name=head)
    if vocabulary is not None:
        changed |= _resized(files, base, vocabulary, changed)
    shards = {name: tuple(changed[tensor.name] for tensor in tensors) for name, tensors in copies.items()}
    return MergePlan(
        shards,
        {file.path.name: file for file in files.shards},
        separate,
        vocabulary,
        target,
        is_quantized(files.folder),
    )


def shared_names(base: BaseShapes, patch: Patch) -> set[str]:
    """Return the head's module and parameter if base and patch tie them to the embedding, whose update does both."""
    if base.tied is None or not _same_for_both(patch, *base.tied):
        return set()
    return {base.tied[0], f"{base.tied[0]}.weight"}


def _copies(
    base: WeightReader, dtype: torch.dtype | None, shapes: BaseShapes, *, separate: bool
) -> dict[str, list[OutputTensor]]:
    """Return the tensors of every file without parts, in the files' order. A separate head starts as the embedding."""
    copies = {}
    for file in base.files.shards:
        entries = [(name, base.entries[name]) for name in file.entries if name in base.entries]
        copies[file.path.name] = [
            OutputTensor(name, dtype if dtype and entry.dtype in MERGEABLE else entry.dtype, entry.shape, base, name)
            for name, entry in sorted(entries, key=lambda item: (item[1].start, item[1].end))
        ]
    if shapes.tied is None or not separate:
        return copies
    head, stored = f"{shapes.tied[0]}.weight", base.files.weight_name(shapes.tied[1])
    embedding = next(tensor for tensors in copies.values() for tensor in tensors if tensor.name == stored)
    shard = next((tensors for tensors in copies.values() if any(tensor.name == head for tensor in tensors)), None)
    if shard is not None:  # some bases store the shared tensor under both names
        shard[:] = [replace(embedding, name=head) if tensor.name == head else tensor for tensor in shard]
    else:
        copies[base.files.shard_of[stored].path.name].append(replace(embedding, name=head))
    return copies


def _with_parts(unchanged: Mapping[str, OutputTensor], bindings: Sequence[_Binding]) -> dict[str, OutputTensor]:
    """Return the tensors with the parts that are bound to them.

    Raises:
        MergeError: a tensor is not stored as plain floats.
    """
    changed = dict(unchanged)
    for binding in bindings:
        tensor = changed[binding.output]
        entry = tensor.base.entries[tensor.stored]
        if tensor.dtype not in MERGEABLE or entry.dtype not in MERGEABLE:
            raise MergeError(
                f"{binding.output}: stored as {entry.shape} {entry.dtype}, expected {tensor.shape} in a 16, 32 or 64"
                " bit float"
            )
        changed[binding.output] = replace(
            tensor, kind=binding.kind or tensor.kind,
            updates=tensor.updates if binding.full else (*tensor.updates, binding.part),
            full_tensors=(*tensor.full_tensors, binding.part) if binding.full else tensor.full_tensors,
        )  # fmt: skip
    return changed


def _bind(
    files: BaseFiles, base: BaseShapes, adapters: Sequence[WeightedPatch], tensors: Mapping[str, OutputTensor],
    *, separate: bool,
) -> list[_Binding]:  # fmt: skip
    """Return one binding for every layer, full tensor and token row of every patch, in the order of the patches.

    Raises:
        MergeError: a tensor's stored shape is not its layer's. BaseModelError: the base stores no such tensor.
    """
    head = f"{base.tied[0]}.weight" if base.tied and separate else None

    def output(parameter: str) -> str:
        return parameter if parameter == head else files.tensor_name(*parameter.rpartition(".")[::2])

    bindings: list[_Binding] = []
    for one in adapters:
        shared = set() if separate else shared_names(base, one.patch)
        for part in bind(one.patch, base):
            if part.name in shared or (isinstance(part.part, PatchLayer) and part.part.num_experts):
                continue
            name = output(part.parameter)
            if isinstance(part.part, PatchLayer) and part.parameter not in one.patch.full_shapes:
                kind, sizes = base.layers[part.module]
                _check_shape(tensors[name], kind.stored_shape(sizes))
            is_full = isinstance(part.part, FullTensor)
            bindings.append(_Binding(name, part.kind, Contribution(one, part.name), full=is_full))
    return bindings + _bind_experts(files, base, adapters, tensors)


def _bind_experts(
    files: BaseFiles, base: BaseShapes, adapters: Sequence[WeightedPatch], tensors: Mapping[str, OutputTensor]
) -> list[_Binding]:
    names = {name for one in adapters for name in one.patch.layers if name in base.experts}
    slices = expert_slices(files.folder, sorted(names)) if names else {}
    bindings = []
    for one in adapters:
        for name in one.patch.layers:
            for part in slices.get(name, ()):
                if part.stored not in tensors:
                    raise BaseModelError(f"{files.folder}: no tensor {part.stored!r}")
                bindings.append(_Binding(part.stored, part.kind, Contribution(one, name, part)))
    return bindings


def _check_shape(tensor: OutputTensor, shape: tuple[int, ...]) -> None:
    entry = tensor.base.entries[tensor.stored]
    if entry.shape != shape:
        raise MergeError(f"{tensor.name}: stored as {entry.shape} {entry.dtype}, expected {shape} in plain floats")


def _check_mirrored(base: WeightReader, head: str, embedding: str) -> None:
    """Check that a head stored beside the embedding it is tied to has the same values.

    Raises:
        MergeError: the two differ, so transformers loads the base untied whatever its config says.
    """
    if (name := f"{head}.weight") not in base.entries:
        return
    stored = base.files.weight_name(embedding)
    shape = base.entries[name].shape
    with base.open(name) as read_head, base.open(stored) as read_embedding:
        for rows in row_blocks((shape[0], shape[1])):
            start, stop = rows.start * shape[1], rows.stop * shape[1]
            if not torch.equal(read_head(start, stop), read_embedding(start, stop)):
                raise MergeError(
                    f"{base.files.folder}: config.json ties {head} to {embedding}, but the stored tensors differ, so"
                    " it is loaded untied; set tie_word_embeddings to false in the base's config.json"
                )


def _resized(
    files: BaseFiles, base: BaseShapes, vocabulary: Vocabulary, tensors: Mapping[str, OutputTensor]
) -> dict[str, OutputTensor]:
    """Return the tensors with a row per token, in the shape of the new vocabulary."""
    resized = {}
    for parameter in vocabulary.parameters:
        if base.tied and parameter.startswith(f"{base.tied[0]}.") and parameter not in tensors:
            continue
        name = parameter if parameter in tensors else files.tensor_name(*parameter.rpartition(".")[::2])
        rows = [part for part in tensors[name].updates if part.name in part.source.patch.token_rows]
        if [part.source.weight for part in (rows if vocabulary.new_tokens else tensors[name].full_tensors)] != [1.0]:
            raise MergeError(f"{parameter}: comes with another number of rows; its patch can only have weight 1")
        resized[name] = replace(tensors[name], shape=base.parameters[parameter])
    return resized


def _check_untie(base: BaseShapes, adapters: Sequence[WeightedPatch], untie: bool) -> bool:
    """True if head and embedding of a tied base get different values.

    Raises:
        MergeError: they would, and ``untie`` is False.
    """
    if base.tied is None:
        return False
    head, embedding = base.tied
    for one in adapters:
        if _same_for_both(one.patch, head, embedding):
            continue
        if not untie:
            touched = {*one.patch.layers, *(name.rpartition(".")[0] for name in one.patch.full_shapes)}
            changed, other = (head, embedding) if head in touched else (embedding, head)
            raise MergeError(
                f"{one.folder}: changes {changed} and not {other} in the same way, but this base stores one tensor for"
                f" both (they are tied). Say --untie (untie=True) to write {head}.weight as a tensor of its own, or"
                " keep this patch as an adapter (lorakit.load)"
            )
        return True
    return False


def _same_for_both(patch: Patch, head: str, embedding: str) -> bool:
    """True if the patch changes head and embedding alike (as PEFT's ``ensure_weight_tying`` saves it), or neither."""
    names = (f"{head}.weight", f"{embedding}.weight")
    if (
        len({name in patch.full_shapes for name in names}) > 1
        or len({m in patch.layers for m in (head, embedding)}) > 1
    ):
        return False
    if names[0] in patch.full_shapes and not torch.equal(patch.full_tensors[names[0]], patch.full_tensors[names[1]]):
        return False
    if head not in patch.layers:
        return True
    one, two = patch.layers[head], patch.layers[embedding]
    mirrored = one.scale == two.scale and torch.equal(one.tensors["lora_A"], two.tensors["lora_B"].T)
    return mirrored and torch.equal(one.tensors["lora_B"], two.tensors["lora_A"].T)
