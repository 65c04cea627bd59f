"""Parse and build the names of tensors in a patch file, which are PEFT's keys.

``base_model.model.<module>.lora_A.weight`` is part of an update. A plain ``base_model.model.<parameter>`` is a full
tensor that replaces the base's. PEFT puts ``base_layer`` into the name of a tensor whose layer has an update.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

PREFIX: Final = "base_model.model."
WRAPPED: Final = "base_layer"
MAGNITUDE_PART: Final = "lora_magnitude_vector"
ROWS_PART: Final = "token_adapter.trainable_tokens_delta"
EXPERT_ORDER: Final = ("gate_proj", "w1", "up_proj", "w3", "gate_up_proj", "w2", "down_proj")
"""The order in which modules of experts register their parameters, and in which PEFT nests wrappers around them."""
LINEAR_PARTS: Final = {"lora_A.weight": "lora_A", "lora_B.weight": "lora_B"}
EMBEDDING_PARTS: Final = {"lora_embedding_A": "lora_A", "lora_embedding_B": "lora_B"}
COPIES: Final = ("modules_to_save", "original_module")
FOREIGN: Final = ("lora_", "token_adapter")
"""Parts of PEFT's names that mark tensors of methods which lorakit does not read."""


@dataclass(frozen=True)
class UpdateName:
    """A part of an update: ``lora_A``, ``lora_B`` or ``lora_magnitude_vector``."""

    module: str
    part: str
    embedding: bool | None
    """None for a magnitude, because its key is the same for embeddings and linear layers"""


@dataclass(frozen=True)
class RowsName:
    """Trained rows of an embedding (PEFT's ``trainable_tokens``)."""

    module: str


@dataclass(frozen=True)
class FullTensorName:
    """A parameter of the base that the patch replaces, such as ``lm_head.weight`` or ``h.0.fc.bias``."""

    parameter: str


@dataclass(frozen=True)
class CopyName:
    """A second copy of a full tensor (``modules_to_save``), or the tensor it replaced (``original_module``).

    PEFT writes both when it saves an embedding that was also resized, and uses neither.
    """

    parameter: str
    original: bool


def parse_key(key: str) -> UpdateName | RowsName | FullTensorName | CopyName | None:
    """Return the parsed name of a key in a patch file; None for a key that lorakit does not know."""
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
    return FullTensorName(f"{module.removesuffix(f'.{WRAPPED}')}.{tensor}")


def update_key(module: str, part: str, *, embedding: bool) -> str:
    """Return the key of a part of an update."""
    if part == MAGNITUDE_PART:
        return f"{PREFIX}{module}.{part}"
    parts = EMBEDDING_PARTS if embedding else LINEAR_PARTS
    return f"{PREFIX}{module}.{next(suffix for suffix, name in parts.items() if name == part)}"


def full_tensor_key(parameter: str, updated: Collection[str]) -> str:
    """Return the key of a full tensor. ``updated``: the modules that have an update."""
    module, _, tensor = parameter.rpartition(".")
    return f"{PREFIX}{module}.{WRAPPED}.{tensor}" if module in updated else f"{PREFIX}{parameter}"


def rows_key(module: str) -> str:
    """Return the key of the trained rows of an embedding."""
    return f"{PREFIX}{module}.{ROWS_PART}"


def expert_modules(module: str, parameters: Collection[str]) -> dict[str, str]:
    """Return parameter of a module of experts -> the module name under which PEFT's file has its factors.

    The parameter that PEFT wraps last has the outermost wrapper, so the fewest ``base_layer`` in its name.
    """
    order = {name: position for position, name in enumerate(EXPERT_ORDER)}
    ordered = sorted(parameters, key=lambda name: order.get(name, -1))
    return {name: module + f".{WRAPPED}" * depth for depth, name in enumerate(reversed(ordered))}


def without_wrappers(module: str) -> str:
    """Return a module's name without PEFT's ``base_layer`` wrappers."""
    while module.endswith(f".{WRAPPED}"):
        module = module.removesuffix(f".{WRAPPED}")
    return module
