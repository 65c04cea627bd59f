"""Plan a merge: for every tensor of the merged model, the base's tensor and the parts of patches added to it.

Each layer, full tensor and token row of every patch is bound exactly once. No values are read here, but for two tied
tensors that must be equal.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path

import torch
from torch import nn

from lorakit.base.transformers_io import load_skeleton, named_classes
from lorakit.errors import BaseModelError, MergeError
from lorakit.files.base_files import BaseFiles
from lorakit.files.safetensors import MODEL_DTYPES
from lorakit.lora.layer_kinds import LayerKind
from lorakit.merging.tensors import Contribution, OutputTensor, TrainedQuantization, WeightReader, expert_slices
from lorakit.ops.stored_names import codes_name, stored_name, tensor_name
from lorakit.patch import BaseShapes, Patch, PatchLayer, check_fits
from lorakit.patch.find import WeightedPatch
from lorakit.patch.fit import Binding, bind, fit_problems, with_head_names
from lorakit.patch.own_head import OwnHead, own_head
from lorakit.patch.patch import FLOATS

Tensors = dict[str, OutputTensor]  # of the merged model, by name


@dataclass(frozen=True)
class Vocabulary:
    """A new vocabulary size and its tensors. The new tokenizer is in a folder, or is the base's with new tokens."""

    vocabulary_size: int
    parameters: tuple[str, ...]
    """names of the parameters with a row per token, in the new size; none if the base has spare rows"""
    tokenizer: Path | None = None  # folder with the new tokenizer
    new_tokens: Mapping[str, int] = field(default_factory=dict)  # text -> id, to be added to the base's tokenizer

    def resized(self, base: BaseShapes) -> BaseShapes:
        """Return the shapes of the base with ``vocabulary_size`` rows in embedding and head."""
        layers = dict(base.layers)
        parameters = dict(base.parameters)
        for name in self.parameters:
            parameters[name] = (self.vocabulary_size, *parameters[name][1:])
            module, _, key = name.rpartition(".")
            if module in layers and key == "weight":
                kind = layers[module][0]
                layers[module] = kind, kind.stored_shape((parameters[name][0], parameters[name][1]))
        return replace(base, layers=layers, parameters=parameters)


@dataclass(frozen=True)
class MergePlan:
    """The merged model, file by file."""

    shards: Mapping[str, Sequence[OutputTensor]]  # by the name of the base's file
    untied: bool  # whether the head gets a tensor of its own
    vocabulary: Vocabulary | None
    dtype: torch.dtype | None  # dtype that floating tensors are converted to; None: each keeps its dtype
    head: OwnHead | None = None  # that a patch brings to a base without one
    embedding: Patch | None = None  # a patch whose pooling the model has

    def tensors(self) -> Iterator[OutputTensor]:
        return (tensor for tensors in self.shards.values() for tensor in tensors)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors())


def skeleton_for(folder: Path, patches: Sequence[Patch]) -> tuple[nn.Module, BaseShapes, list[Patch]]:
    """Build on meta the model that the patches fit best: the class that config.json names, or the causal one.

    Training and answers need a causal language model. A patch may belong to another class of the same folder, such as a
    classifier, and is compared with and merged into that class. One with a head of its own makes a classifier of any
    folder. Also returns its shapes, and the patches in its names.
    """

    def fitted(model: nn.Module) -> tuple[int, nn.Module, BaseShapes, list[Patch]]:
        shapes = BaseShapes.of(model)
        named = [with_head_names(patch, shapes, model) for patch in patches]
        return sum(1 for patch in named for _ in fit_problems(patch, shapes)), model, shapes, named

    best = fitted(load_skeleton(folder, named_classes(folder)))
    if best[0]:
        # of some kinds transformers has no causal language model
        with contextlib.suppress(BaseModelError):
            best = min(best, fitted(load_skeleton(folder)), key=itemgetter(0))  # the named one if equal
    head = next(filter(None, map(own_head, patches)), None)
    if best[0] and head is not None:
        if len(patches) > 1 or patches[0].new_tokens:
            raise MergeError(f"{patches[0].folder}: a head of its own is merged without other patches and new tokens")
        try:
            best = min(best, fitted(load_skeleton(folder, num_labels=head.num_values)), key=itemgetter(0))
        except BaseModelError:
            raise MergeError(f"{folder}: transformers has no such classifier; keep the patch as an adapter") from None
    return best[1:]


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
    Raises PatchError if the base lacks a tensor or has another shape, MergeError if a patch cannot be merged.
    """
    vocabulary = plan_vocabulary(base, [one.patch for one in adapters])
    if vocabulary is not None:
        base = vocabulary.resized(base)
    for one in adapters:
        check_fits(one.patch, base, files.name)
    if dtype is not None and dtype not in MODEL_DTYPES:
        raise MergeError(f"dtype: one of {', '.join(MODEL_DTYPES)}, got {dtype!r}")
    target = None if dtype is None else MODEL_DTYPES[dtype]
    reader = WeightReader(files, quantization)
    separate = _check_untie(base, adapters, untie)
    if base.tied is not None:
        _check_mirrored(reader, *base.tied)
    tensors = {
        name: OutputTensor(name, target if target and entry.dtype in FLOATS else entry.dtype, entry.shape, reader, name)
        # in their order in a file, those that it holds quantised before the others
        for name, entry in sorted(reader.entries.items(), key=lambda item: (item[1].start, item[1].end))
    }
    head = f"{base.tied[0]}.weight" if base.tied else ""
    stored = tensor_name(files, base.tied[1]) if base.tied else ""
    if separate:  # a head of its own starts as the embedding
        tensors[head] = replace(tensors[stored], name=head)
    own = _replace_head(tensors, files, base, adapters)
    _add_parts(tensors, files, base, adapters, own_head=head if separate else None)
    if head in tensors and not separate:  # some bases store the shared tensor under both names
        tensors[head] = replace(tensors[stored], name=head)
    if vocabulary is not None:
        tensors |= _resized(files, base, vocabulary, tensors)
    shards: dict[str, list[OutputTensor]] = {file.path.name: [] for file in files.shards}
    for name, tensor in tensors.items():
        origin = name if name in reader.entries else tensor.stored
        shards[files.shard_of[codes_name(files, origin)].path.name].append(tensor)
    poolings = {one.patch.pooling for one in adapters}
    if len(poolings) > 1:
        folders = " and ".join(str(one.folder) for one in adapters)
        raise MergeError(f"{folders}: their embeddings are not pooled alike, so no model has both")
    embedding = None if poolings <= {None} else adapters[0].patch
    return MergePlan(shards, separate, vocabulary, target, own, embedding)


def _replace_head(
    tensors: Tensors, files: BaseFiles, base: BaseShapes, adapters: Sequence[WeightedPatch]
) -> OwnHead | None:
    """Put the head that a patch brings, if one does with weight 1, in place of the base's own, and return it."""
    head = next(filter(None, (own_head(one.patch) for one in adapters)), None)
    if head is None:
        return None
    shapes = {stored_name(files, name) or name: tuple(tensor.shape) for name, tensor in head.tensors.items()}
    added = {name: shape for name, shape in shapes.items() if name not in tensors or tensors[name].shape != shape}
    if not added:  # a classifier's own folder, whose labels another program's patch does not name
        return head if "recipe" in adapters[0].patch.metadata else None
    if adapters[0].weight != 1:  # the only one, as `skeleton_for` wants it
        raise MergeError(f"{adapters[0].folder}: brings a head of its own, so it is merged with weight 1")
    like = tensors[tensor_name(files, str(base.embedding))]
    for name, shape in added.items():
        tensors[name] = replace(like, name=name, shape=shape)
    for unused in [name for name in tensors if name.rpartition(".")[0].endswith(("lm_head", "embed_out"))]:
        del tensors[unused]
    return head


def _add_parts(
    tensors: Tensors, files: BaseFiles, base: BaseShapes, adapters: Sequence[WeightedPatch], *, own_head: str | None
) -> None:
    """Add every part of every patch to the tensors. ``own_head``: of a head that is no longer tied to the embedding."""
    experts = {name for one in adapters for name in one.patch.layers if name in base.experts}
    slices = expert_slices(files.folder, sorted(experts)) if experts else {}

    def add(
        output: str, kind: LayerKind | None, part: Contribution, *, full: bool, shape: tuple[int, ...] | None = None
    ) -> None:
        tensor = tensors[output]
        entry = tensor.base.entries[tensor.stored]
        if not {tensor.dtype, entry.dtype} <= set(FLOATS) or shape not in (None, entry.shape):
            expected = f"{shape or tensor.shape} in a 16, 32 or 64 bit float"
            raise MergeError(f"{output}: stored as {entry.shape} {entry.dtype}, expected {expected}")
        updates = tensor.updates if full else (*tensor.updates, part)
        full_tensors = (*tensor.full_tensors, part) if full else tensor.full_tensors
        tensors[output] = replace(tensor, kind=kind or tensor.kind, updates=updates, full_tensors=full_tensors)

    # a tied head is changed with the embedding: `_check_untie` refuses patches that change them otherwise
    shared = {base.tied[0], f"{base.tied[0]}.weight"} if base.tied and not own_head else set()
    for one in adapters:
        for binding in bind(one.patch, base):
            if binding.name in slices:
                for part in slices[binding.name]:
                    add(part.stored, part.kind, Contribution(one, binding.name, part), full=False)
            elif binding.name not in shared:
                name = binding.parameter  # unless it is stored under another one
                name = name if name in tensors else tensor_name(files, binding.module, binding.key)
                is_update = isinstance(binding.part, PatchLayer) and binding.parameter not in one.patch.full_shapes
                shape = base.parameters[binding.parameter] if is_update else None  # else it may have other rows
                add(name, binding.kind, Contribution(one, binding.name), full=binding.part is None, shape=shape)
                if own_head and _is_heads_too(binding, one.patch, base):
                    add(own_head, binding.kind, Contribution(one, binding.name), full=True)


def _is_heads_too(binding: Binding, patch: Patch, base: BaseShapes) -> bool:
    """True for the weight below an embedding's update, to which PEFT ties a head without tensors of its own."""
    assert base.tied is not None
    head, embedding = base.tied
    is_below = binding.part is None and binding.module == embedding and embedding in patch.layers
    return is_below and f"{head}.weight" not in patch.full_shapes


def _check_mirrored(base: WeightReader, head: str, embedding: str) -> None:
    """Raise MergeError if a head is stored with other values than the embedding that it is tied to."""
    if (name := f"{head}.weight") not in base.entries:
        return
    stored = tensor_name(base.files, embedding)
    one, two = (base.reader(each)(0, math.prod(base.entries[each].shape)) for each in (name, stored))
    if not torch.equal(one, two):
        problem = f"{head} is stored with other values than {embedding}, to which config.json ties it"
        raise MergeError(f"{base.files.folder}: {problem}; set tie_word_embeddings to false there")


def _resized(files: BaseFiles, base: BaseShapes, vocabulary: Vocabulary, tensors: Tensors) -> Tensors:
    """Return the tensors with a row per token, in the shape of the new vocabulary."""
    resized = {}
    for parameter in vocabulary.parameters:
        if base.tied and parameter.startswith(f"{base.tied[0]}.") and parameter not in tensors:
            continue
        name = parameter if parameter in tensors else tensor_name(files, *parameter.rpartition(".")[::2])
        rows = [part for part in tensors[name].updates if part.name in part.source.patch.token_rows]
        if [part.source.weight for part in (rows if vocabulary.new_tokens else tensors[name].full_tensors)] != [1.0]:
            raise MergeError(f"{parameter}: comes with another number of rows; its patch can only have weight 1")
        resized[name] = replace(tensors[name], shape=base.parameters[parameter])
    return resized


def _check_untie(base: BaseShapes, adapters: Sequence[WeightedPatch], untie: bool) -> bool:
    """True if head and embedding of a tied base get different values; MergeError without ``untie``."""
    if base.tied is None:
        return False
    head, embedding = base.tied
    one = next((one for one in adapters if not _same_for_both(one.patch, head, embedding)), None)
    if one is not None and not untie:
        touched = {*one.patch.layers, *(name.rpartition(".")[0] for name in one.patch.full_shapes)}
        changed, other = (head, embedding) if head in touched else (embedding, head)
        why = f"changes {changed} and not {other} in the same way, but this base stores one tensor for both"
        remedy = f"Say --untie (untie=True) to write {head}.weight too, or keep this patch as an adapter"
        raise MergeError(f"{one.folder}: {why}. {remedy}")
    return one is not None


def _same_for_both(patch: Patch, head: str, embedding: str) -> bool:
    """True if the patch changes head and embedding alike (as PEFT's ``ensure_weight_tying`` saves it), or neither."""
    names = (f"{head}.weight", f"{embedding}.weight")
    in_full = {name in patch.full_shapes for name in names}
    if len(in_full) > 1 or (head in patch.layers) != (embedding in patch.layers):
        return False
    if names[0] in patch.full_shapes and not torch.equal(patch.full_tensors[names[0]], patch.full_tensors[names[1]]):
        return False
    if head not in patch.layers:
        return True
    one, two = patch.layers[head], patch.layers[embedding]
    # a magnitude is of the rows of one of them, and of the columns of the other
    mirrored = one.plain and two.plain and one.scale == two.scale
    mirrored = mirrored and torch.equal(one.tensors["lora_A"], two.tensors["lora_B"].T)
    return mirrored and torch.equal(one.tensors["lora_B"], two.tensors["lora_A"].T)


def plan_vocabulary(base: BaseShapes, patches: Sequence[Patch]) -> Vocabulary | None:
    """Return the vocabulary of a patch that resizes all tensors with a row per token, if any. Raises MergeError."""
    # the parameters with a row per token: of the input embedding and of the output head
    names = [f"{module}.{key}" for module in (base.embedding, base.head) if module for key in ("weight", "bias")]
    names = [name for name in names if name in base.parameters]
    bringing = [patch for patch in patches if patch.new_tokens]
    if len(bringing) > 1:
        one, two = (patch.folder for patch in bringing[:2])
        raise MergeError(f"{one} and {two} both bring new tokens; a merged model has those of one, so merge one alone")
    for patch in patches:
        sizes = {name: patch.full_shapes[name][0] for name in names if name in patch.full_shapes}
        resized = {name: size for name, size in sizes.items() if size != base.parameters[name][0]}
        if not resized:
            continue
        if bringing:
            raise MergeError(f"{bringing[0].folder}: brings new tokens, and {patch.folder} another vocabulary")
        num_tokens = next(iter(resized.values()))
        shared = {f"{module}.weight" for module in base.tied} if base.tied else set()
        covered = shared if any(sizes.get(name) == num_tokens for name in shared) else set()
        missing = [name for name in names if sizes.get(name) != num_tokens and name not in covered]
        if missing:
            raise MergeError(f"{patch.folder}: {missing[0]} lacks the new rows; save it too (modules_to_save)")
        if len(patches) > 1:
            raise MergeError(f"{patch.folder}: changes the vocabulary to {num_tokens} tokens; merge it alone")
        if not (patch.folder / "tokenizer_config.json").is_file():
            rows = f"{next(iter(resized))} has {num_tokens} rows, the base {base.parameters[names[0]][0]}"
            raise MergeError(f"{patch.folder}: {rows}, and the folder holds no tokenizer; save the new one there")
        return Vocabulary(num_tokens, tuple(names), patch.folder)
    if not bringing:
        return None
    num_rows = base.parameters[names[0]][0]
    size = num_rows + bringing[0].num_added_rows(num_rows)
    return Vocabulary(size, tuple(names) if size > num_rows else (), new_tokens=bringing[0].new_tokens)
