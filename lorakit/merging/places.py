"""The tensors of a merged model by their stored names, while it is being planned."""

from dataclasses import replace
from pathlib import Path

import torch

from lorakit.errors import BaseModelError, MergeError
from lorakit.lora.layer_kinds import LayerKind
from lorakit.lora.merge_weight import row_blocks
from lorakit.merging.tensors import MERGEABLE, Contribution, OutputTensor
from lorakit.merging.vocabulary import Vocabulary
from lorakit.patch import BaseFiles, BaseShapes


class OutputTensors:
    """The pieces of all shards, changed by name."""

    def __init__(self, files: BaseFiles, shards: dict[str, list[OutputTensor]]) -> None:
        self._files, self._shards = files, shards

    @property
    def folder(self) -> Path:
        return self._files.folder

    def stored_name(self, parameter: str) -> str:
        """The stored name of a parameter of the model."""
        module, _, key = parameter.rpartition(".")
        return self._files.tensor_name(module, key)

    def change(self, stored: str, kind: LayerKind | None, *, update: Contribution | None = None,
               whole: Contribution | None = None) -> None:  # fmt: skip
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
            piece, kind=kind or piece.kind,
            updates=piece.updates + ((update,) if update else ()), wholes=piece.wholes + ((whole,) if whole else ()),
        )  # fmt: skip

    def check_shape(self, stored: str, shape: tuple[int, ...]) -> None:
        """A stored tensor must have the shape that its layer says."""
        pieces, index = self._find(stored)
        entry = pieces[index].file.entries[pieces[index].stored]
        if entry.shape != shape:
            raise MergeError(f"{stored}: stored as {entry.shape} {entry.dtype}, expected {shape} in plain floats")

    def untie_head(self, head: str, embedding: str) -> str:
        """Give the head a tensor of its own, which starts as the embedding's; returns its name."""
        name = f"{head}.weight"
        pieces, index = self._find(self.stored_name(f"{embedding}.weight"))
        held = [(own, place) for own in self._shards.values() for place, p in enumerate(own) if p.name == name]
        for own, place in held:  # some bases store the shared tensor under both names
            own[place] = replace(pieces[index], name=name, updates=(), wholes=())
        if not held:
            pieces.append(replace(pieces[index], name=name, updates=(), wholes=()))
        return name

    def check_mirrored(self, head: str, embedding: str) -> None:
        """A head that is stored beside the embedding it is tied to must hold the same values.

        Raises:
            MergeError: it does not, so the base is loaded untied whatever its config says.
        """
        if not self._holds(name := f"{head}.weight"):
            return
        pieces, index = self._find(name)
        stored, at = self._find(self.stored_name(f"{embedding}.weight"))
        one, two = pieces[index], stored[at]
        for rows in row_blocks((one.shape[0], one.shape[1])):
            start, stop = rows.start * one.shape[1], rows.stop * one.shape[1]
            if not torch.equal(
                one.file.read_elements(name, start, stop), two.file.read_elements(two.stored, start, stop)
            ):
                raise MergeError(
                    f"{self._files.folder}: config.json ties {head} to {embedding}, but the stored tensors differ, so"
                    " it is loaded untied; set tie_word_embeddings to false in the base's config.json"
                )

    def copy_to_tied_head(self, head: str, embedding: str) -> None:
        """Give a head that is stored beside its embedding what the embedding gets."""
        if not self._holds(name := f"{head}.weight"):
            return
        pieces, index = self._find(name)
        stored, at = self._find(self.stored_name(f"{embedding}.weight"))
        pieces[index] = replace(stored[at], name=name)

    def resize(self, vocabulary: Vocabulary, base: BaseShapes) -> None:
        """Give the tensors with a row per token their new number of rows."""
        for parameter in vocabulary.parameters:
            if base.tied and parameter.startswith(f"{base.tied[0]}.") and not self._holds(parameter):
                continue
            pieces, index = self._find(parameter if self._holds(parameter) else self.stored_name(parameter))
            if [part.of.weight for part in pieces[index].wholes] != [1.0]:
                raise MergeError(f"{parameter}: comes with another number of rows; its patch can only have weight 1")
            pieces[index] = replace(pieces[index], shape=base.parameters[parameter])

    def _holds(self, name: str) -> bool:
        return any(piece.name == name for pieces in self._shards.values() for piece in pieces)

    def _find(self, stored: str) -> tuple[list[OutputTensor], int]:
        for pieces in self._shards.values():
            for index, piece in enumerate(pieces):
                if piece.name == stored:
                    return pieces, index
        raise BaseModelError(f"{self._files.folder}: no tensor {stored!r}")
