"""The weight files of a base: which file holds which tensor, checked before anything is read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorakit.errors import BaseModelError, PatchError, did_you_mean
from lorakit.files.safetensors import SafetensorsFile, TensorEntry, open_tensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class BaseFiles:
    """The safetensors files of a model folder, in a fixed order."""

    folder: Path
    shards: tuple[SafetensorsFile, ...]
    shard_of: Mapping[str, SafetensorsFile]

    def entry(self, name: str) -> TensorEntry:
        return self.shard_of[name].entries[name]

    def weight_name(self, module: str) -> str:
        """The stored name of a module's weight; errors as ``tensor_name``."""
        return self.tensor_name(module, "weight")

    def tensor_name(self, module: str, key: str) -> str:
        """The stored name of a module's tensor: the same name, or one that differs by a leading prefix only.

        Raises:
            BaseModelError: no such tensor, or several.
        """
        name = f"{module}.{key}"
        if name in self.shard_of:
            return name
        found = [held for held in self.shard_of if self._prefixed(name, held)]
        if len(found) != 1:
            what = "several" if found else "no"
            raise BaseModelError(
                f"{self.folder}: {what} tensors for {name!r}."
                + (f" Candidates: {', '.join(found[:3])}." if found else did_you_mean(name, self.shard_of))
            )
        return found[0]

    def _prefixed(self, name: str, held: str) -> bool:
        """Whether two names are one but for the prefix that the whole model has, or has not, in the file."""
        if held.endswith(f".{name}"):
            prefix = held.removesuffix(name)
            return sum(other.startswith(prefix) for other in self.shard_of) > len(self.shard_of) / 2
        prefix = name.removesuffix(held)
        return name.endswith(f".{held}") and not any(other.startswith(prefix) for other in self.shard_of)

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return read_json(self.folder / "config.json")


def open_base_files(folder: Path) -> BaseFiles:
    """The weight files of a model folder: one file, or an index with plain file names.

    Raises:
        BaseModelError: no safetensors, or an index that names missing, foreign or repeated tensors.
    """
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise BaseModelError(f"{folder / INDEX}: has no weight_map")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
                raise BaseModelError(
                    f"{folder / INDEX}: {name} is mapped to {file!r}; only plain file names are allowed"
                )
        names = sorted(set(weight_map.values()))
    elif (folder / SINGLE).is_file():
        weight_map, names = None, [SINGLE]
    else:
        raise BaseModelError(
            f"{folder}: neither {SINGLE} nor {INDEX}; lorakit reads safetensors only."
            " Convert other formats with transformers' save_pretrained"
        )
    try:
        shards = tuple(open_tensors(folder / name) for name in names)
    except PatchError as problem:
        raise BaseModelError(str(problem)) from None
    holders = _holders(folder, shards, weight_map)
    if weight_map is not None and SINGLE not in names and (folder / SINGLE).exists():
        raise BaseModelError(
            f"{folder}: holds {SINGLE} and an index of other files; transformers reads the first, others the second."
            " Remove what is not meant"
        )
    return BaseFiles(folder, shards, holders)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON mapping.

    Raises:
        BaseModelError: missing or not a JSON mapping.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BaseModelError(f"{path}: no such file; looked for {path.absolute()}") from None
    except (ValueError, RecursionError) as problem:
        raise BaseModelError(f"{path}: not valid JSON: {problem}") from None
    if not isinstance(value, dict):
        raise BaseModelError(f"{path}: not a JSON mapping")
    return value


def _holders(
    folder: Path, shards: tuple[SafetensorsFile, ...], weight_map: Mapping[str, str] | None
) -> dict[str, SafetensorsFile]:
    holder: dict[str, SafetensorsFile] = {}
    for shard in shards:
        for name in shard.entries:
            if name in holder:
                raise BaseModelError(f"{folder}: {name} is in {holder[name].path.name} and in {shard.path.name}")
            holder[name] = shard
    if weight_map is not None:
        for name in [*weight_map, *holder]:
            told, found = weight_map.get(name), holder[name].path.name if name in holder else None
            if told != found:
                raise BaseModelError(f"{folder / INDEX}: {name} should be in {told}, found in {found}")
    return holder
