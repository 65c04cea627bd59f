"""Parse and build the names of tensors in a patch file, which are PEFT's keys.

``base_model.model.<module>.lora_A.weight`` is part of an update. A plain ``base_model.model.<parameter>`` is a full
tensor that replaces the base's. PEFT puts ``base_layer`` into the name of a tensor whose layer has an update.
"""

import re
from collections.abc import Collection
from typing import Final

from lorakit.lora.layer_kinds import PEFT_NAMES
from lorakit.lora.methods import own_tensor_names

PREFIX: Final = "base_model.model."
WRAPPED: Final = "base_layer"
ROWS_PART: Final = "token_adapter.trainable_tokens_delta"
B_BIAS: Final = "lora_B.bias"
EXPERT_ORDER: Final = ("gate_proj", "w1", "up_proj", "w3", "gate_up_proj", "w2", "down_proj")
"""The order in which modules of experts register their parameters, and in which PEFT nests wrappers around them."""
FOREIGN: Final = ("lora_", "token_adapter")
"""Parts of PEFT's names that mark tensors of methods which lorakit does not read."""


def plain_key(key: str) -> str:
    """Return a key as PEFT saves it, without what torch.compile, DDP and a model's own state dict have in names."""
    key = key.replace("_orig_mod.", "").removeprefix("module.")
    if ".default" in key:
        key = re.sub(r"\.(lora_(?:embedding_)?[AB])\.default(?=\.weight$|$)", r".\1", key)
    if key.startswith(PREFIX) or not re.search(r"\.lora_(embedding_)?[AB](\.weight)?$", key):
        return key
    return f"{PREFIX}{key}"


def parse_key(key: str) -> tuple[str, str] | None:
    """Return a module and the end of a key, also ROWS_PART or B_BIAS, or a parameter and ""; None if unknown."""
    if not key.startswith(PREFIX):
        return None
    name = key.removeprefix(PREFIX)
    factors = [end for ends in PEFT_NAMES.values() for end in ends.values()]
    for end in (*factors, *own_tensor_names(), ROWS_PART, B_BIAS):
        if name.endswith(f".{end}"):
            return name.removesuffix(f".{end}"), end
    module, _, tensor = name.rpartition(".")
    if any(piece.startswith(FOREIGN) for piece in name.split(".")) or not module:
        return None
    return f"{module.removesuffix(f'.{WRAPPED}')}.{tensor}", ""


def update_key(module: str, part: str, *, embedding: bool) -> str:
    """Return the key of a tensor of an update, of trained rows of an embedding (ROWS_PART), or of B_BIAS."""
    return f"{PREFIX}{module}.{PEFT_NAMES[embedding].get(part, part)}"


def full_tensor_key(parameter: str, updated: Collection[str]) -> str:
    """Return the key of a full tensor. ``updated``: the modules that have an update."""
    module, _, tensor = parameter.rpartition(".")
    return f"{PREFIX}{module}.{WRAPPED}.{tensor}" if module in updated else f"{PREFIX}{parameter}"


def expert_modules(module: str, parameters: Collection[str]) -> dict[str, str]:
    """Return parameter of experts -> module name in PEFT's file: the one wrapped last has the fewest ``base_layer``."""
    order = {name: position for position, name in enumerate(EXPERT_ORDER)}
    ordered = sorted(parameters, key=lambda name: order.get(name, -1))
    return {name: module + f".{WRAPPED}" * depth for depth, name in enumerate(reversed(ordered))}
