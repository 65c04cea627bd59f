"""Packed bases without their weights: which layers are packed and how, by the recipe or by the base's config.

The layers are those that a run computes with, on the meta device, so that what unpacking allocates is seen.
"""

import re
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from lorakit.base.loading import quantization
from lorakit.base.quantized import QuantConfig, layers_to_quantize, linear_layers, replace_with_quantized
from lorakit.lora.targets import embedding_and_head
from lorakit.quant.bnb import FOUR_BITS, PIECE_ELEMENTS, QuantizedWeight, QuantScheme, code_tables
from lorakit.quant.files import quantization_config
from lorakit.recipe import BaseSection

META: Final = torch.device("meta")
PACKING_BYTES: Final = 64  # for each of PIECE_ELEMENTS values, which are packed at a time
ROUNDING_BYTES: Final = 10  # for each value that becomes a byte: one float16, and two products in float32


def pack_skeleton(model: nn.Module, section: BaseSection, folder: Path, dtype: torch.dtype) -> nn.Module:
    """The same model, with packed layers where the run would have them.

    Raises:
        BaseModelError: its files are packed as lorakit cannot read, or nothing can be packed as asked.
    """
    how = _stored(folder, model) or quantization(section)
    if how is not None:
        if how.packing.name in FOUR_BITS:
            code_tables(how.packing.name, META)  # kept; they cannot be made where nothing has values
        for name, facts in layers_to_quantize(folder, model, how, dtype).items():
            replace_with_quantized(model, name, facts)
    return model


def facts_of(layer: nn.Module) -> QuantizedWeight | None:
    """What the tensors of a layer stand for; None for a layer in floats."""
    facts = getattr(layer, "packed", None)
    return facts if isinstance(facts, QuantizedWeight) else None


def bytes_to_pack(facts: QuantizedWeight) -> int:
    """Taken while one weight is packed: the weight in floats, what packing it needs, and its parts before they meet."""
    size = facts.shape[0] * facts.shape[1]
    four = facts.scheme.name in FOUR_BITS
    needs = PACKING_BYTES * min(size, PIECE_ELEMENTS) if four else ROUNDING_BYTES * size
    return size * facts.dtype.itemsize + needs + facts.scheme.num_bytes(*facts.shape)


def _stored(folder: Path, model: nn.Module) -> QuantConfig | None:
    """How config.json says that the files are packed; None when they are not.

    It is what transformers goes by: all linear layers but the output head, or but those that the config names.
    """
    told = quantization_config(folder)
    if told is None:
        return None
    packing = QuantScheme("int8")
    if not told.get("load_in_8bit", told.get("_load_in_8bit")):
        packing = QuantScheme(told.get("bnb_4bit_quant_type", "fp4"), bool(told.get("bnb_4bit_use_double_quant")))
    kept = told.get("llm_int8_skip_modules")
    _, head = embedding_and_head(model)
    names = [name for name in linear_layers(model) if (name != head if kept is None else not _is_kept(name, kept))]
    return QuantConfig(packing, only=tuple(names))


def _is_kept(name: str, patterns: list[Any]) -> bool:
    """As transformers reads them: from the start up to a dot, or at the end."""
    return any(re.match(rf"(?:{key})(?:(?<=\.)|(?=\.|$))", name) or name.endswith(key) for key in patterns)
