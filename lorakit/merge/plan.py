"""What becomes of every tensor of a base when patches are merged into it. Nothing is read or written here."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lorakit.errors import BaseModelError, MergeError
from lorakit.lora.kinds import Kind
from lorakit.lora.merging import Update
from lorakit.merge.vocabulary import Vocabulary, plan_vocabulary
from lorakit.patch import BaseFiles, Patch, Shapes, check_fits
from lorakit.patch.tensor_file import TensorFile

MERGEABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip


@dataclass(frozen=True)
class Weighted:
    """A patch and the weight of its update in the sum."""

    number: int
    folder: Path
    patch: Patch
    weight: float


@dataclass(frozen=True)
class Part:
    """What one patch does to one tensor: an update, or a whole tensor in its place."""

    of: Weighted
    place: str
    """the module of an update, the parameter of a whole tensor"""

    def update(self) -> Update:
        """The update, read from the patch now."""
        layer = self.of.patch.layers[self.place]
        return Update(layer.method, layer.scale * self.of.weight, dict(layer.tensors))


@dataclass(frozen=True)
class Piece:
    """One tensor of the merged model and what it is made of; without parts it is copied, or converted."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: TensorFile
    stored: str
    """the base's tensor it starts from"""
    module: str | None = None
    kind: Kind | None = None
    updates: tuple[Part, ...] = ()
    wholes: tuple[Part, ...] = ()

    @property
    def copied(self) -> bool:
        """Whether its bytes are the base's."""
        entry = self.file.entries[self.stored]
        return not self.updates and not self.wholes and (entry.dtype, entry.shape) == (self.dtype, self.shape)


@dataclass(frozen=True)
class Plan:
    """The merged model, file by file."""

    shards: Mapping[str, list[Piece]]
    untied: bool
    """whether the head gets a tensor of its own"""
    vocabulary: Vocabulary | None
    dtype: torch.dtype | None
    """what floating tensors are converted to; None leaves each as it is"""

    def pieces(self) -> Iterator[Piece]:
        return (piece for pieces in self.shards.values() for piece in pieces)

    @property
    def num_bytes(self) -> int:
        return sum(torch.Size(piece.shape).numel() * piece.dtype.itemsize for piece in self.pieces())


def plan_merge(
    files: BaseFiles, base: Shapes, adapters: Sequence[Weighted], *, dtype: str | None = None, untie: bool = False
) -> Plan:
    """Bind every layer and whole tensor of every patch to the stored tensor it changes, each exactly once.

    Raises:
        PatchError: something is missing in the base or has another shape. MergeError: it cannot be merged.
    """
    if files.config().get("quantization_config"):
        raise MergeError(f"{files.folder}: the base is quantised; merge into its original, unquantised weights")
    vocabulary = plan_vocabulary(base, [one.patch for one in adapters])
    if vocabulary is not None:
        base = vocabulary.resized(base)
    for one in adapters:
        check_fits(one.patch, base, files.folder)
    if dtype is not None and dtype not in DTYPES:
        raise MergeError(f"dtype: one of {', '.join(DTYPES)}, got {dtype!r}")
    target = None if dtype is None else DTYPES[dtype]
    shards = {file.path.name: _plain(file, target) for file in files.shards}
    places = _Places(files, shards)
    separate = _bind(places, base, adapters, untie)
    if vocabulary is not None:
        places.resize(vocabulary, base)
    return Plan(shards, separate, vocabulary, target)


def _plain(file: TensorFile, dtype: torch.dtype | None) -> list[Piece]:
    entries = sorted(file.entries.items(), key=lambda item: (item[1].start, item[1].end))
    return [
        Piece(name, dtype if dtype and entry.dtype in MERGEABLE else entry.dtype, entry.shape, file, name)
        for name, entry in entries
    ]


class _Places:
    """The pieces of all shards, changed by name."""

    def __init__(self, files: BaseFiles, shards: dict[str, list[Piece]]) -> None:
        self._files, self._shards = files, shards

    def stored_name(self, parameter: str) -> str:
        """The stored name of a parameter of the model."""
        module, _, key = parameter.rpartition(".")
        return self._files.tensor_name(module, key)

    def change(self, stored: str, module: str, kind: Kind | None, *, update: Part | None = None,
               whole: Part | None = None) -> None:  # fmt: skip
        """Add a part to a tensor.

        Raises:
            MergeError: it is not stored as plain floats.
        """
        pieces, index = self._find(stored)
        piece = pieces[index]
        if piece.dtype not in MERGEABLE or piece.file.entries[piece.stored].dtype not in MERGEABLE:
            entry = piece.file.entries[piece.stored]
            raise MergeError(
                f"{stored}: stored as {entry.shape} {entry.dtype}, expected {piece.shape} in a 16, 32 or 64 bit float"
            )
        pieces[index] = replace(
            piece, module=module, kind=kind or piece.kind,
            updates=piece.updates + ((update,) if update else ()), wholes=piece.wholes + ((whole,) if whole else ()),
        )  # fmt: skip

    def check_shape(self, stored: str, shape: tuple[int, ...]) -> None:
        """A stored tensor must have the shape that its layer says."""
        pieces, index = self._find(stored)
        entry = pieces[index].file.entries[pieces[index].stored]
        if entry.shape != shape:
            raise MergeError(f"{stored}: stored as {entry.shape} {entry.dtype}, expected {shape} in plain floats")

    def separate(self, head: str, embedding: str) -> str:
        """Give the head a tensor of its own, which starts as the embedding's; returns its name."""
        name = f"{head}.weight"
        pieces, index = self._find(self.stored_name(f"{embedding}.weight"))
        held = [(own, place) for own in self._shards.values() for place, p in enumerate(own) if p.name == name]
        for own, place in held:  # some bases store the shared tensor under both names
            own[place] = replace(pieces[index], name=name, updates=(), wholes=())
        if not held:
            pieces.append(replace(pieces[index], name=name, updates=(), wholes=()))
        return name

    def resize(self, vocabulary: Vocabulary, base: Shapes) -> None:
        """Give the tensors with a row per token their new number of rows."""
        for parameter in vocabulary.parameters:
            if base.tied and parameter.startswith(f"{base.tied[0]}.") and not self._holds(parameter):
                continue
            pieces, index = self._find(self.stored_name(parameter))
            if [part.of.weight for part in pieces[index].wholes] != [1.0]:
                raise MergeError(f"{parameter}: comes with another number of rows; its patch can only have weight 1")
            pieces[index] = replace(pieces[index], shape=base.parameters[parameter])

    def _holds(self, name: str) -> bool:
        return any(piece.name == name for pieces in self._shards.values() for piece in pieces)

    def _find(self, stored: str) -> tuple[list[Piece], int]:
        for pieces in self._shards.values():
            for index, piece in enumerate(pieces):
                if piece.name == stored:
                    return pieces, index
        raise BaseModelError(f"{self._files.folder}: no tensor {stored!r}")


def _bind(places: _Places, base: Shapes, adapters: Sequence[Weighted], untie: bool) -> bool:
    """Give every part its piece; True when head and embedding had to be separated."""
    separated = _separated(base, adapters, untie)
    head = places.separate(*base.tied) if separated and base.tied else None
    for one in adapters:
        shared = set() if separated else shared_places(base, one.patch)
        for module in one.patch.layers:
            if module in shared:
                continue
            kind, sizes = base.layers[module]
            stored = head if head and base.tied and module == base.tied[0] else places.stored_name(f"{module}.weight")
            if f"{module}.weight" not in one.patch.whole_shapes:
                places.check_shape(stored, sizes[::-1] if kind.transposed else sizes)
            places.change(stored, module, kind, update=Part(one, module))
        for parameter in one.patch.whole_shapes:
            if parameter in shared:
                continue
            module = parameter.rpartition(".")[0]
            stored = head if head and base.tied and parameter == head else places.stored_name(parameter)
            kind_here = base.layers[module][0] if module in base.layers else None
            places.change(stored, module, kind_here, whole=Part(one, parameter))
    return separated


def shared_places(base: Shapes, patch: Patch) -> set[str]:
    """What a patch does to the head of a tied base just as to its embedding, and is done once: module and parameter."""
    if base.tied is None or not _same_for_both(patch, *base.tied):
        return set()
    return {base.tied[0], f"{base.tied[0]}.weight"}


def _separated(base: Shapes, adapters: Sequence[Weighted], untie: bool) -> bool:
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
                f"{one.folder}: changes {changed}, which shares its weight with {other} in this base, and not the"
                f" other likewise. Say --untie (untie=True) to write {head}.weight as a tensor of its own, or keep this"
                " patch as an adapter (lorakit.load)"
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
    if names[0] in patch.whole_shapes and not torch.equal(patch.whole[names[0]], patch.whole[names[1]]):
        return False
    if head not in patch.layers:
        return True
    one, two = patch.layers[head], patch.layers[embedding]
    mirrored = one.scale == two.scale and torch.equal(one.tensors["lora_A"], two.tensors["lora_B"].T)
    return mirrored and torch.equal(one.tensors["lora_B"], two.tensors["lora_A"].T)
