"""Which base a patch belongs to: digests of the tensors it adapts, of the config and of the tokenizer.

Scheme ``sampled-1``: of every adapted weight, its shape and 8 evenly spaced runs of 512 values, as float32. So the
answer does not depend on sharding, file names or storage dtype where values are equal, and takes milliseconds.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from lorakit.errors import PatchError
from lorakit.patch.base_files import BaseFiles, open_base_files, read_json
from lorakit.patch.patch import Patch

SCHEME: Final = "sampled-1"
RUNS, RUN_ELEMENTS = 8, 512
DTYPES: Final = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
NOT_IDENTITY: Final = {  # config keys that do not change what the weights mean
    "_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures",
}  # fmt: skip


def fingerprint(files: BaseFiles, modules: Iterable[str], rounded_to: str | None = None) -> dict[str, Any]:
    """The fingerprint of a base on disk, for the given adapted modules.

    ``rounded_to``: the dtype the values are rounded to first, when the base was seen in that dtype only.
    """

    def one(module: str) -> str:
        name = files.weight_name(module)
        shard = files.holder[name]
        entry = shard.entries[name]
        dtype = DTYPES.get(rounded_to or "", entry.dtype)
        return _digest(entry.shape, lambda start, stop: shard.read_elements(name, start, stop).to(dtype))

    config = {key: value for key, value in files.config().items() if key not in NOT_IDENTITY}
    return {
        "scheme": SCHEME,
        "config": _hash(config),
        "tokenizer": _tokenizer(files.folder),
        "rounded_to": rounded_to,
        "weights": {module: one(module) for module in modules},
    }


def fingerprint_live(model: nn.Module, modules: Iterable[str]) -> dict[str, Any]:
    """The fingerprint of a base in memory: its weights alone, in the dtype they are loaded in."""
    weights, dtypes = {}, set()
    for module in modules:
        weight = model.get_submodule(module).weight
        assert isinstance(weight, Tensor)
        flat = weight.detach().reshape(-1)
        weights[module] = _digest(tuple(weight.shape), lambda start, stop, flat=flat: flat[start:stop].cpu())  # type: ignore[misc]
        dtypes.add(str(weight.dtype).removeprefix("torch."))
    rounded_to = dtypes.pop() if len(dtypes) == 1 else None
    return {"scheme": SCHEME, "config": None, "tokenizer": None, "rounded_to": rounded_to, "weights": weights}


def check_base(patch: Patch, base: Path) -> None:
    """Passes when ``base`` is the one the patch was trained on, or the patch does not say (a foreign one).

    Raises:
        PatchError: another base; says what differs.
    """
    told = patch.facts.get("base")
    if told is None:
        return
    if told["scheme"] != SCHEME:
        raise PatchError(f"{patch.folder}: base fingerprint of an unknown scheme {told['scheme']!r}; update lorakit")
    found = fingerprint(open_base_files(base), patch.layers, told.get("rounded_to"))
    differing = [name for name, value in found["weights"].items() if told["weights"].get(name) != value]
    parts = [f"{len(differing)} of {len(found['weights'])} adapted weights ({differing[0]} first)"] if differing else []
    parts += [part for part in ("config", "tokenizer") if told.get(part) and found[part] and told[part] != found[part]]
    if parts:
        raise PatchError(
            f"{patch.folder}: trained on another base than {base}: {' and '.join(parts)} differ."
            f" It was made for {patch.made_for}; to use it here all the same, say --allow-base-mismatch"
            " (in Python allow_base_mismatch=True)"
        )


def _digest(shape: tuple[int, ...], read: Callable[[int, int], Tensor]) -> str:
    size = math.prod(shape)
    last = max(0, size - RUN_ELEMENTS)
    starts = sorted({last * run // (RUNS - 1) for run in range(RUNS)})
    state = hashlib.sha256(json.dumps(shape).encode())
    for start in starts:
        values = read(start, min(start + RUN_ELEMENTS, size)).to(torch.float32)
        state.update(values.numpy().tobytes())
    return state.hexdigest()[:16]


def _tokenizer(folder: Path) -> str | None:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    content = read_json(path)
    return _hash({key: value for key, value in content.items() if key not in ("truncation", "padding")})


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
