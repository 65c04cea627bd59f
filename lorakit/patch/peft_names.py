"""The names of tensors in a patch file: PEFT's keys, both ways.

``base_model.model.<module>.lora_A.weight`` belongs to an update; a plain ``base_model.model.<parameter>`` is a whole
tensor that takes the place of the base's. PEFT puts ``base_layer`` into the name of a tensor whose layer has an update.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

PREFIX: Final = "base_model.model."
WRAPPED: Final = "base_layer"
MAGNITUDE_PART: Final = "lora_magnitude_vector"
ROWS_PART: Final = "token_adapter.trainable_tokens_delta"
EXPERT_ORDER: Final = ("gate_proj", "w1", "up_proj", "w3", "gate_up_proj", "w2", "down_proj")
"""In which order modules of experts register their parameters; PEFT nests the wrapper of each around the one before."""
LINEAR_PARTS: Final = {"lora_A.weight": "lora_A", "lora_B.weight": "lora_B"}
EMBEDDING_PARTS: Final = {"lora_embedding_A": "lora_A", "lora_embedding_B": "lora_B"}
COPIES: Final = ("modules_to_save", "original_module")
FOREIGN: Final = ("lora_", "token_adapter")
"""Parts of PEFT's names that say: more than a plain tensor, and not one of ours."""


@dataclass(frozen=True)
class UpdateName:
    """A part of an update: ``lora_A``, ``lora_B``, or DoRA's magnitude, which alone does not tell an embedding."""

    module: str
    part: str
    embedding: bool | None


@dataclass(frozen=True)
class RowsName:
    """Rows of an embedding: ``trainable_tokens``."""

    module: str


@dataclass(frozen=True)
class WholeName:
    """A parameter of the base that the patch replaces, such as ``lm_head.weight`` or ``h.0.fc.bias``."""

    parameter: str


@dataclass(frozen=True)
class CopyName:
    """A second copy of a whole tensor (``modules_to_save``), or what it took the place of (``original_module``).

    PEFT writes them when it saves an embedding that was also resized, and does not use them.
    """

    parameter: str
    original: bool


def parse_key(key: str) -> UpdateName | RowsName | WholeName | CopyName | None:
    """What a key of a patch file names, or None when it is nothing lorakit knows."""
    if not key.startswith(PREFIX):
        return None
    name = key.removeprefix(PREFIX)
    for parts, embedding in ((LINEAR_PARTS, False), (EMBEDDING_PARTS, True)):
        for suffix, part in parts.items():
            if name.endswith(f".{suffix}"):
                return UpdateName(name.removesuffix(f".{suffix}"), part, embedding)
    if name.endswith(f".{MAGNITUDE_PART}"):
        return UpdateName(name.removesuffix(f".{MAGNITUDE_PART}"), MAGNITUDE_PART, None)
    if name.endswith(f".{ROWS_PART}"):
        return RowsName(name.removesuffix(f".{ROWS_PART}"))
    module, _, tensor = name.rpartition(".")
    for copy in COPIES:
        if module.endswith(f".{copy}"):
            return CopyName(f"{module.removesuffix(f'.{copy}')}.{tensor}", copy == "original_module")
    if any(piece.startswith(FOREIGN) for piece in name.split(".")) or not module:
        return None
    return WholeName(f"{module.removesuffix(f'.{WRAPPED}')}.{tensor}")


def update_key(module: str, part: str, *, embedding: bool) -> str:
    """The key of a part of an update."""
    if part == MAGNITUDE_PART:
        return f"{PREFIX}{module}.{part}"
    parts = EMBEDDING_PARTS if embedding else LINEAR_PARTS
    return f"{PREFIX}{module}.{next(suffix for suffix, name in parts.items() if name == part)}"


def whole_key(parameter: str, updated: Collection[str]) -> str:
    """The key of a whole tensor; ``updated``: the modules that have an update."""
    module, _, tensor = parameter.rpartition(".")
    return f"{PREFIX}{module}.{WRAPPED}.{tensor}" if module in updated else f"{PREFIX}{parameter}"


def rows_key(module: str) -> str:
    """The key of learnt rows of an embedding."""
    return f"{PREFIX}{module}.{ROWS_PART}"


def expert_modules(module: str, parameters: Collection[str]) -> dict[str, str]:
    """Parameter of a module of experts -> where PEFT's file has its factors: the last wrapped is the outermost."""
    known = {name: place for place, name in enumerate(EXPERT_ORDER)}
    ordered = sorted(parameters, key=lambda name: known.get(name, -1))
    return {name: module + f".{WRAPPED}" * depth for depth, name in enumerate(reversed(ordered))}


def stripped(module: str) -> str:
    """A module's name without PEFT's wrappers."""
    while module.endswith(f".{WRAPPED}"):
        module = module.removesuffix(f".{WRAPPED}")
    return module
