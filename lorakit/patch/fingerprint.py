"""Which base a patch belongs to: digests of the tensors it adapts, of the config and of the tokenizer.

Two forms of every adapted weight, both over its shape and its values as float32, so that neither sharding, file names
nor the storage dtype matter where values are equal. ``sampled-1``: 8 evenly spaced runs of 512 values, in
milliseconds for any base. ``full-1``: every value.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from os import cpu_count
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from torch import Tensor, nn

from lorakit.errors import BaseModelError, PatchError
from lorakit.files.base_files import BaseFiles, open_base_files, read_json
from lorakit.patch.patch import Patch

SCHEME, FULL_SCHEME = "sampled-1", "full-1"
RUNS, RUN_ELEMENTS = 8, 512
BLOCK_ELEMENTS: Final = 1 << 20
DTYPES: Final = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
NOT_IDENTITY: Final = {  # config keys that do not change what the weights mean
    "_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures",
}  # fmt: skip
Read = Callable[[int, int], Tensor]
"""(start, stop) -> these elements of a flattened tensor"""
Reader = tuple[tuple[int, ...], Read]
"""shape, and how to read"""


class BaseIdentity:
    """What a base on disk is. Every part is computed when it is first asked for."""

    def __init__(self, files: BaseFiles) -> None:
        self.files = files
        self._sampled: dict[tuple[str, str | None], str] = {}

    @cached_property
    def config(self) -> str:
        config = {key: value for key, value in self.files.config().items() if key not in NOT_IDENTITY}
        return _json_digest(config)

    @cached_property
    def tokenizer(self) -> str | None:
        path = self.files.folder / "tokenizer.json"
        if not path.is_file():
            return None
        return _json_digest(
            {key: value for key, value in read_json(path).items() if key not in ("truncation", "padding")}
        )

    def sampled(self, modules: Iterable[str], rounded_to: str | None = None) -> dict[str, str]:
        """module -> digest of samples of its weight. ``rounded_to``: the dtype values are rounded to first.

        A head that has no weight of its own, because it is tied, is left out. Experts have one digest for all that a
        layer stores of them, as their tensors may be stored one by one.
        """
        return self._digests(modules, rounded_to, self._sampled, lambda readers: [_sampled(*one) for one in readers])

    def full(self, modules: Iterable[str], rounded_to: str | None = None) -> dict[str, str]:
        """module -> digest of every value of its weight."""
        return self._digests(modules, rounded_to, {}, _in_parallel)

    def _digests(
        self, modules: Iterable[str], rounded_to: str | None, known: dict[tuple[str, str | None], str],
        digest: Callable[[list[Reader]], list[str]],
    ) -> dict[str, str]:  # fmt: skip
        stored = {module: self._stored(module) for module in modules}
        wanted = {module: names for module, names in stored.items() if names and (module, rounded_to) not in known}
        unique = list(dict.fromkeys(name for names in wanted.values() for name in names))
        found = dict(zip(unique, digest([self._reader(name, rounded_to) for name in unique]), strict=True))
        for module, names in wanted.items():
            each = [found[name] for name in names]
            known[module, rounded_to] = each[0] if len(each) == 1 else _json_digest(each)
        return {module: known[module, rounded_to] for module, names in stored.items() if names}

    def _stored(self, module: str) -> list[str]:
        """The stored tensors that hold a module's weight, or a parameter of experts."""
        if module in self.files.shard_of:
            return [module]
        if (layer := re.match(r"(.*\.\d+\.).*experts\.", module)) and f"{module}.weight" not in self.files.shard_of:
            return sorted(n for n in self.files.shard_of if n.startswith(layer[1]) and ".experts" in n)
        try:
            return [self.files.weight_name(module)]
        except BaseModelError:
            if self._tied:
                return []
            raise

    @cached_property
    def _tied(self) -> bool:
        config = self.files.config()
        text = config.get("text_config")
        return bool((text if isinstance(text, dict) else config).get("tie_word_embeddings", True))

    def _reader(self, name: str, rounded_to: str | None) -> "Reader":
        shard = self.files.shard_of[name]
        dtype = DTYPES.get(rounded_to or "", shard.entries[name].dtype)
        return shard.entries[name].shape, lambda start, stop: shard.read_elements(name, start, stop).to(dtype)


class WeightDigest:
    """``full-1`` of one weight, given piece by piece in stored order."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._state = xxhash.xxh3_128(json.dumps(shape).encode())

    def update(self, values: Tensor) -> None:
        self._state.update(values.to(torch.float32).contiguous().numpy().data)

    def hexdigest(self) -> str:
        return str(self._state.hexdigest())


def fingerprint(files: BaseFiles, modules: Iterable[str]) -> dict[str, Any]:
    """The fingerprint of a base on disk, for the given adapted modules, in both forms."""
    identity, modules = BaseIdentity(files), list(modules)
    return {
        "scheme": SCHEME, "config": identity.config, "tokenizer": identity.tokenizer, "rounded_to": None,
        "weights": identity.sampled(modules), "full": {"scheme": FULL_SCHEME, "weights": identity.full(modules)},
    }  # fmt: skip


def fingerprint_live(model: nn.Module, modules: Iterable[str]) -> dict[str, Any]:
    """The fingerprint of a base in memory: its weights alone, in the dtype they are loaded in."""
    readers, dtypes = {}, set()
    for module in modules:
        weight = model.get_submodule(module).weight
        assert isinstance(weight, Tensor)
        flat = weight.detach().reshape(-1)
        readers[module] = (tuple(weight.shape), lambda start, stop, flat=flat: flat[start:stop].cpu())
        dtypes.add(str(weight.dtype).removeprefix("torch."))
    return {
        "scheme": SCHEME, "config": None, "tokenizer": None, "rounded_to": dtypes.pop() if len(dtypes) == 1 else None,
        "weights": {module: _sampled(*reader) for module, reader in readers.items()},
        "full": {
            "scheme": FULL_SCHEME, "weights": dict(zip(readers, _in_parallel(list(readers.values())), strict=True)),
        },
    }  # fmt: skip


def check_base(patch: Patch, base: Path | BaseIdentity, *, full: bool = False) -> None:
    """Passes when ``base`` is the one the patch was trained on, or the patch does not say (a foreign one).

    ``full``: compare every value of the adapted weights, not samples of them.

    Raises:
        PatchError: another base; says what differs. Or ``full`` was asked of a patch that holds samples only.
    """
    told = patch.metadata.get("base")
    if told is None:
        return
    if told["scheme"] != SCHEME:
        raise PatchError(f"{patch.folder}: base fingerprint of an unknown scheme {told['scheme']!r}; update lorakit")
    identity = base if isinstance(base, BaseIdentity) else BaseIdentity(open_base_files(base))
    rounded_to, expected = told.get("rounded_to"), told["weights"]
    found = identity.sampled(
        [name for name, layer in patch.layers.items() if name in expected or not layer.num_experts], rounded_to
    )
    names = list(found)
    if full and all(found[name] == expected.get(name) for name in names):
        expected, found = full_digests(patch), identity.full(names, rounded_to)
        if expected is None:
            raise PatchError(f"{patch.folder}: holds samples of its base's weights, not digests of all their values")
    differing = [name for name in names if expected.get(name) != found[name]]
    parts = [f"{len(differing)} of {len(names)} adapted weights ({differing[0]} first)"] if differing else []
    for part, value in (("config", identity.config), ("tokenizer", identity.tokenizer)):
        if told.get(part) and value and told[part] != value:
            parts.append(part)
    if parts:
        raise PatchError(mismatch_message(patch, identity.files.folder, " and ".join(parts)))


def unverified_note(patch: Patch, base: object) -> str | None:
    """What to tell of a patch that does not know its base, so that its shapes alone were compared; else None."""
    if patch.metadata.get("base") is not None:
        return None
    made_for = f", for {patch.config.base_model}" if patch.config.base_model else ""
    return (
        f"note: {patch.folder} holds no digest of its base (another program wrote it{made_for});"
        f" only shapes were compared with {base}"
    )


def compared_by(patch: Patch) -> str:
    """By what a patch's base can be told: shapes alone, samples of its weights, or every value."""
    if patch.metadata.get("base") is None:
        return "shapes"
    return "samples" if full_digests(patch) is None else "every value"


def full_digests(patch: Patch) -> Mapping[str, str] | None:
    """module -> ``full-1`` digest of its base's weight, when the patch holds them."""
    full = (patch.metadata.get("base") or {}).get("full") or {}
    return full.get("weights") if full.get("scheme") == FULL_SCHEME else None


def mismatch_message(patch: Patch, base: Path, what: str) -> str:
    """The message for a patch on a base that is not its own."""
    return (
        f"{patch.folder}: trained on another base than {base}: {what} differ."
        f" It was made for {patch.made_for}; to use it here all the same, say --allow-base-mismatch"
        " (in Python allow_base_mismatch=True)"
    )


def _sampled(shape: tuple[int, ...], read: Read) -> str:
    size = math.prod(shape)
    last = max(0, size - RUN_ELEMENTS)
    starts = sorted({last * run // (RUNS - 1) for run in range(RUNS)})
    state = hashlib.sha256(json.dumps(shape).encode())
    for start in starts:
        values = read(start, min(start + RUN_ELEMENTS, size)).to(torch.float32)
        state.update(values.numpy().tobytes())
    return state.hexdigest()[:16]


def _full(shape: tuple[int, ...], read: Read) -> str:
    state, size = WeightDigest(shape), math.prod(shape)
    for start in range(0, size, BLOCK_ELEMENTS):
        state.update(read(start, min(start + BLOCK_ELEMENTS, size)))
    return state.hexdigest()


def _in_parallel(readers: list[Reader]) -> list[str]:
    with ThreadPoolExecutor(min(8, cpu_count() or 1)) as pool:
        return list(pool.map(lambda reader: _full(*reader), readers))


def _json_digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
