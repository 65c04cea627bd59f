"""Resize the vocabulary where a patch has new tokens, or a full embedding with more (or fewer) rows than the base's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lorakit.errors import MergeError
from lorakit.patch import BaseShapes, Patch


@dataclass(frozen=True)
class Vocabulary:
    """A new vocabulary size and the tensors that it changes.

    The new tokenizer is in a folder, or is the base's with new tokens.
    """

    vocabulary_size: int
    parameters: tuple[str, ...]
    """names of the parameters with a row per token, in the new size; none if the base has spare rows"""
    tokenizer: Path | None = None
    """folder with the new tokenizer"""
    new_tokens: Mapping[str, int] = field(default_factory=dict)
    """text -> id, to be added to the base's tokenizer"""

    def resized(self, base: BaseShapes) -> BaseShapes:
        """Return the shapes of the base with ``num_tokens`` rows in embedding and head."""
        layers = dict(base.layers)
        parameters = dict(base.parameters)
        for name in self.parameters:
            parameters[name] = (self.vocabulary_size, *parameters[name][1:])
            module = name.rpartition(".")[0]
            if module in layers:
                kind, (out, width) = layers[module]
                layers[module] = (
                    kind,
                    (out, self.vocabulary_size) if kind.takes_ids else (self.vocabulary_size, width),
                )
        return replace(base, layers=layers, parameters=parameters)


def plan_vocabulary(base: BaseShapes, patches: Sequence[Patch]) -> Vocabulary | None:
    """Return the patch's new vocabulary; None if no patch changes the tokens.

    Raises:
        MergeError: only some of the tensors with a row per token have the new number of rows, the patch has no
        tokenizer, or it is not the only patch; or several bring new tokens.
    """
    names = _rows_per_token(base)
    bringing = [patch for patch in patches if patch.new_tokens]
    if len(bringing) > 1:
        raise MergeError(
            f"{bringing[0].folder} and {bringing[1].folder} both bring new tokens; a merged model has those of one."
            " Train the second one on the model merged with the first"
        )
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
            raise MergeError(
                f"{patch.folder}: {next(iter(resized))} comes with {num_tokens} rows, and {missing[0]} does not;"
                " save both with the patch (modules_to_save)"
            )
        if len(patches) > 1:
            raise MergeError(f"{patch.folder}: changes the vocabulary to {num_tokens} tokens; merge it alone")
        if not (patch.folder / "tokenizer_config.json").is_file():
            raise MergeError(
                f"{patch.folder}: {next(iter(resized))} has {num_tokens} rows, the base {base.parameters[names[0]][0]},"
                " and the folder holds no tokenizer with the new tokens; save it there"
                " (tokenizer.save_pretrained)"
            )
        return Vocabulary(num_tokens, tuple(names), patch.folder)
    if not bringing:
        return None
    num_rows = base.parameters[names[0]][0]
    size = num_rows + bringing[0].num_added_rows(num_rows)
    return Vocabulary(size, tuple(names) if size > num_rows else (), new_tokens=bringing[0].new_tokens)


def _rows_per_token(base: BaseShapes) -> list[str]:
    """Return the names of the parameters with a row per token: of the input embedding and of the output head."""
    names = [f"{module}.{key}" for module in (base.embedding, base.head) if module for key in ("weight", "bias")]
    return [name for name in names if name in base.parameters]
