"""Bases whose files hold packed weights, as transformers and bitsandbytes write them: found, and read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from lorakit.errors import BaseModelError
from lorakit.patch.base_files import BaseFiles, open_base_files
from lorakit.patch.tensor_file import Entry
from lorakit.quant import BLOCK, FOUR_BITS, NESTED_BLOCK, Packing

STATE: Final = ".quant_state.bitsandbytes__"
BYTE_ROWS: Final = "SCB"
METHOD: Final = "bitsandbytes"


@dataclass(frozen=True)
class StoredPacked:
    """A weight that is packed in its file."""

    name: str
    packing: Packing
    shape: tuple[int, int]
    offset: float
    device: torch.device


def is_packed(folder: Path) -> bool:
    """Whether config.json says that the weights are packed.

    Raises:
        BaseModelError: in a way that lorakit cannot read.
    """
    told = open_base_files(folder).config().get("quantization_config")
    if told is None:
        return False
    method = told.get("quant_method") if isinstance(told, dict) else told
    if method != METHOD:
        raise BaseModelError(
            f"{folder}: quantised with {method!r}; lorakit reads {METHOD} (nf4, fp4, int8)."
            " Use the base it was made from"
        )
    return True


def stored_packed(files: BaseFiles, device: torch.device) -> dict[str, StoredPacked]:
    """Stored weight name -> how it is packed, for every weight that is."""
    found = {}
    for name in files.holder:
        if STATE in name:
            weight = name.partition(STATE)[0]
            found[weight] = _four_bits(files, weight, name, device)
        elif name.endswith(f".{BYTE_ROWS}"):
            weight = f"{name.removesuffix(BYTE_ROWS)}weight"
            out, wide = files.entry(weight).shape
            found[weight] = StoredPacked(weight, Packing("int8"), (out, wide), 0.0, device)
    return found


def _four_bits(files: BaseFiles, weight: str, state: str, device: torch.device) -> StoredPacked:
    told = json.loads(bytes(files.holder[state].read(state).tolist()))
    name, nested = told["quant_type"], told.get("nested_blocksize")
    if name not in FOUR_BITS or told["blocksize"] != BLOCK or nested not in (None, NESTED_BLOCK):
        raise BaseModelError(
            f"{files.folder}: {weight}: packed as {name} in blocks of {told['blocksize']} ({nested} of scales); lorakit"
            f" reads blocks of {BLOCK} ({NESTED_BLOCK})"
        )
    return StoredPacked(
        weight, Packing(name, nested is not None), tuple(told["shape"]), float(told.get("nested_offset", 0.0)), device
    )


def stored_tensors(files: BaseFiles, one: StoredPacked) -> dict[str, Tensor]:
    def read(name: str) -> Tensor:
        return files.holder[name].read(name).to(one.device)

    weight = read(one.name)
    if one.packing.name == "int8":
        return {"weight": weight, "row_scale": read(f"{one.name.removesuffix('weight')}{BYTE_ROWS}").float()}
    found = {"weight": weight.view(torch.uint8).reshape(-1), "block_scale": read(f"{one.name}.absmax")}
    if not one.packing.double:
        return found
    return found | {
        "nested_scale": read(f"{one.name}.nested_absmax"), "offset": torch.tensor([one.offset], device=one.device)
    }  # fmt: skip


def promised(files: BaseFiles, stored: Mapping[str, StoredPacked]) -> dict[str, Entry]:
    """The stored tensors as they were before they were packed."""
    modules = {name.removesuffix(".weight") for name in stored}
    parts = (f".{BYTE_ROWS}", ".weight_format")
    return {
        name: Entry(torch.float32, stored[name].shape, 0, 0) if name in stored else files.entry(name)
        for name in files.holder
        if name.partition(".weight.")[0] not in modules
        and not (name.endswith(parts) and name.rpartition(".")[0] in modules)
    }
