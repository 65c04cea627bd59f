"""Find the tensor of a base's files that holds a weight of the model, whatever the files call it."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

from lorakit.errors import BaseModelError, did_you_mean
from lorakit.files.base_files import BaseFiles, read_json
from lorakit.ops._internals import renamed_tensors

CODES: Final = ("qweight", "weight_packed", "W_q")
"""endings of the codes of a quantised weight whose file has no tensor of the weight's own name"""
MXFP4_CODES: Final = "_blocks"  # the same, behind the name of a parameter of experts


def tensor_name(files: BaseFiles, module: str, key: str = "weight") -> str:
    """Return the stored name of a module's tensor: its own, up to a prefix, or one that transformers renames to it.

    That of a weight whose codes alone are stored ends with `weight` too. Raises BaseModelError unless it is one.
    """
    name = f"{module}.{key}"
    if name in files.shard_of:
        return name
    stored = tuple(files.shard_of)
    matches = [other for other in stored if _prefixed(name, other, stored)]
    if not matches and name in (renamed := _renamed(files.folder, stored)):
        return renamed[name]
    for codes in CODES if not matches and key == "weight" else ():
        if any(f".{other}".endswith(f".{module}.{codes}") for other in stored):
            return tensor_name(files, module, codes).removesuffix(codes) + key
    if not matches:
        near = did_you_mean(name, stored)
        remedy = "A layer whose weight the files join with another's, or split, is to be named in adapter.exclude"
        raise BaseModelError(f"{files.folder}: no tensors for {name!r}.{near} {remedy}")
    if len(matches) > 1:
        raise BaseModelError(f"{files.folder}: several tensors for {name!r}: {', '.join(matches[:3])}")
    return matches[0]


def stored_name(files: BaseFiles, name: str) -> str | None:
    """Return the stored name of a tensor, as `tensor_name`; None if the files have none."""
    module, _, key = name.rpartition(".")
    try:
        return tensor_name(files, module, key)
    except BaseModelError:
        return None


def codes_name(files: BaseFiles, name: str) -> str:
    """Return the name of the tensor that holds a stored weight: its own, or that of its codes."""
    names = (name, *(name.removesuffix("weight") + codes for codes in CODES), name + MXFP4_CODES)
    return next((each for each in names if each in files.shard_of), name)


def _prefixed(name: str, stored: str, names: tuple[str, ...]) -> bool:
    """True if two names differ only by a prefix that most names in the file have, or that none has."""
    if stored.endswith(f".{name}"):
        prefix = stored.removesuffix(name)
        return sum(other.startswith(prefix) for other in names) > len(names) / 2
    prefix = name.removesuffix(stored)
    return name.endswith(f".{stored}") and not any(other.startswith(prefix) for other in names)


@lru_cache(4)  # because every layer of a base asks
def _renamed(folder: Path, stored: tuple[str, ...]) -> Mapping[str, str]:
    config = read_json(folder / "config.json")
    classes = config.get("architectures")
    kinds = (*(classes[:1] if isinstance(classes, list) else ()), config.get("model_type"))
    names = tuple(map(str, kinds))
    text = config.get("text_config")  # of a class with vision, whose text model may have renamings of its own
    of_text = renamed_tensors(names, stored, str(text.get("model_type"))) if isinstance(text, dict) else {}
    return {**of_text, **renamed_tensors(names, stored)}
