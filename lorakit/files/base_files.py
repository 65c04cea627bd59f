"""Open the weight files of a base, and map every tensor to its file, checked before a tensor is read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorakit.errors import BaseModelError, PatchError, translate_error
from lorakit.files.safetensors import SafetensorsFile, TensorEntry, open_tensors

SINGLE = "model.safetensors"
MAX_JSON_BYTES = 1 << 28  # tokenizers take tens of megabytes
PROCESSOR_TEMPLATE = "chat_template.json"  # of bases that see images; transformers' tokenizers do not read it
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class BaseFiles:
    """The safetensors files of a model folder."""

    folder: Path
    shards: tuple[SafetensorsFile, ...]  # sorted by file name
    shard_of: Mapping[str, SafetensorsFile]  # by stored tensor name

    @property
    def name(self) -> str:
        """What users call the base: the name of a built-in one, else the folder."""
        is_builtin = self.folder.parent == Path(__file__).parent.parent / "assets"
        return f"builtin:{self.folder.name}" if is_builtin else str(self.folder)

    def entry(self, name: str) -> TensorEntry:
        return self.shard_of[name].entries[name]

    def config(self) -> dict[str, Any]:
        return read_json(self.folder / "config.json")


def open_base_files(folder: Path) -> BaseFiles:
    """Return the weight files of a model folder. Raises BaseModelError without safetensors, or for a wrong index."""
    weight_map = _read_index(folder / INDEX) if (folder / INDEX).is_file() else {}
    names = sorted(set(weight_map.values())) or [SINGLE]
    if not weight_map and not (folder / SINGLE).is_file():
        remedy = "convert other formats with transformers' save_pretrained"
        raise BaseModelError(f"{folder}: neither {SINGLE} nor {INDEX}; {remedy}")
    with translate_error(PatchError, BaseModelError):
        shards = tuple(open_tensors(folder / name) for name in names)
    shard_of: dict[str, SafetensorsFile] = {}
    for shard in shards:
        for name in shard.entries:
            if name in shard_of:
                raise BaseModelError(f"{folder}: {name} is in {shard_of[name].path.name} and in {shard.path.name}")
            shard_of[name] = shard
    actual = {name: shard.path.name for name, shard in shard_of.items()}
    for name in [*weight_map, *actual] if weight_map else ():
        if weight_map.get(name) != actual.get(name):
            raise BaseModelError(f"{folder / INDEX}: {name}: {weight_map.get(name)} expected, {actual.get(name)} found")
    if SINGLE not in names and (folder / SINGLE).exists():
        raise BaseModelError(f"{folder}: holds {SINGLE} and an index of other files; remove what is not meant")
    return BaseFiles(folder, shards, shard_of)


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BaseModelError(f"{path}: has no weight_map")
    for name, file in weight_map.items():
        is_file_name = isinstance(file, str) and Path(file).name == file and file not in ("", ".", "..")
        if not is_file_name or not f"{name}{file}".isprintable():
            raise BaseModelError(f"{path}: {name!r} is mapped to {file!r}; only plain file names are allowed")
    return weight_map


def read_json(path: Path, kind: type[Any] = dict) -> Any:
    """Return the mapping in a JSON file, or the list. Raises BaseModelError: it is missing, too large, or no such."""
    try:
        if not path.is_file() and path.exists():
            raise BaseModelError(f"{path}: not a regular file")  # reading a pipe would wait for ever
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise BaseModelError(f"{path}: {size:,} bytes, and {MAX_JSON_BYTES:,} are allowed")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BaseModelError(f"{path}: no such file; looked for {path.absolute()}") from None
    except (ValueError, RecursionError) as problem:
        raise BaseModelError(f"{path}: not valid JSON: {problem}") from None
    if not isinstance(value, kind):
        raise BaseModelError(f"{path}: not a JSON {'mapping' if kind is dict else 'list'}")
    return value
