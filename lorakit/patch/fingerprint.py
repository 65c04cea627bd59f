"""Fingerprint a base on disk or in memory: digests by which a patch recognises its base.

A fingerprint has digests of the tensors that a patch adapts, of those that none adapts (embedding, norms, head), of the
config, of the tokenizer and of how prompts are written (prompting.py). Digests of weights are over their shape and
their values as float32, so that storage dtype and files do not matter. An adapted weight has two: ``sampled-1`` covers
8 evenly spaced runs of 512 values and takes milliseconds for any base, ``full-1`` covers every value.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from os import cpu_count
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from torch import Tensor, nn

from lorakit.errors import BaseModelError
from lorakit.files.atomic import measured_once
from lorakit.files.base_files import BaseFiles, read_json
from lorakit.files.safetensors import dtype_name, parse_dtype
from lorakit.lora.layer_kinds import is_linear_like
from lorakit.lora.linear import AdapterModule
from lorakit.lora.wrappers import full_value, named_unwrapped
from lorakit.ops._internals import as_saved
from lorakit.ops.stored_names import codes_name, tensor_name
from lorakit.patch.prompting import chat_template_digest, prompt_digest, tokenizer_settings_digest

SCHEME: Final = "sampled-1"
FULL_SCHEME: Final = "full-1"
PROMPTING: Final = ("chat_template", "tokenizer_settings")  # parts of a fingerprint that say how prompts are written
NOT_IDENTITY: Final = {  # config keys that do not change what the weights mean
    "_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures",
    "is_matryoshka", "matryoshka_dimensions",
}  # fmt: skip
RUNS: Final = 8
RUN_ELEMENTS: Final = 512
BLOCK_ELEMENTS: Final = 1 << 20
ReadElements = Callable[[int, int], Tensor]  # (start, stop) -> these elements of a flattened tensor
Source = tuple[tuple[int, ...], ReadElements]  # shape of a weight, and the function that reads it


class WeightDigest:
    """``full-1`` digest of one weight, updated with its values in stored order."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._state = xxhash.xxh3_128(json.dumps(shape).encode())

    def update(self, values: Tensor) -> None:
        self._state.update(values.reshape(-1).float().numpy().data)

    def hexdigest(self) -> str:
        return str(self._state.hexdigest())


def sample_digest(shape: tuple[int, ...], read: ReadElements, runs: int = RUNS) -> str:
    """Return the ``sampled-1`` digest of a weight; another number of ``runs`` gives another digest."""
    size = math.prod(shape)
    last = max(0, size - RUN_ELEMENTS)
    starts = sorted({last * run // (runs - 1) for run in range(runs)})
    state = hashlib.sha256(json.dumps(shape).encode())
    for start in starts:
        values = read(start, min(start + RUN_ELEMENTS, size)).to(torch.float32)
        state.update(values.numpy().tobytes())
    return state.hexdigest()[:16]


def _full(shape: tuple[int, ...], read: ReadElements) -> str:
    state = WeightDigest(shape)
    size = math.prod(shape)
    for start in range(0, size, BLOCK_ELEMENTS):
        state.update(read(start, min(start + BLOCK_ELEMENTS, size)))
    return state.hexdigest()


def value_digests(sources: Mapping[str, Source]) -> dict[str, str]:
    """Return the ``full-1`` digest of each weight, by name."""
    with ThreadPoolExecutor(min(8, cpu_count() or 1)) as pool:
        return dict(zip(sources, pool.map(lambda source: _full(*source), sources.values()), strict=True))


class BaseIdentity:
    """Digests of a base on disk. Each is computed when it is first used, then cached."""

    def __init__(
        self, files: BaseFiles, tokenizer: Path | None = None, template: str | None = None, *, brought: bool = False
    ) -> None:
        self.files = files
        self.tokenizer_folder = tokenizer or files.folder
        self.template = template  # in use; None: the tokenizer's
        self.brought = brought
        """True if an adapter brought the template, with which a patch without a record of its own was not trained"""
        self._samples: dict[tuple[str, str | None], str] = {}
        self._full: dict[tuple[str, str | None], str] = {}

    @cached_property
    def config_values(self) -> dict[str, Any]:
        return {key: value for key, value in self.files.config().items() if key not in NOT_IDENTITY}

    @cached_property
    def config(self) -> str:
        return _json_digest(self.config_values)

    @cached_property
    def tokenizer(self) -> str | None:
        path = self.tokenizer_folder / "tokenizer.json"
        if not path.is_file():
            return None
        # without the settings of the last call, which saving a tokenizer writes there
        facts = {key: value for key, value in read_json(path).items() if key not in ("truncation", "padding")}
        return _json_digest(facts)

    @cached_property
    def chat_template(self) -> str | None:
        return chat_template_digest(self.tokenizer_folder) if self.template is None else prompt_digest(self.template)

    @cached_property
    def tokenizer_settings(self) -> str | None:
        return tokenizer_settings_digest(self.tokenizer_folder)

    @cached_property
    def unadapted(self) -> dict[str, Any]:
        """Digests of the rest: ``outside`` layers (embedding, head, norm), and all ``vectors``, ``matrices`` of layers.

        Adapted matrices too, with two samples each, because a base of experts has ten thousands of them.
        """
        outside = set()
        vectors = []
        matrices = []
        for name, shard in sorted(self.files.shard_of.items()):
            entry = shard.entries[name]
            in_layer = re.search(r"\.\d+\.", name) is not None
            is_weight = name.endswith(".weight") or ".experts." in name  # and not a buffer, such as GPT-2's causal mask
            if in_layer and is_weight and len(entry.shape) > 1:
                matrices.append(sample_digest(*self._source(name, None), runs=2))
            elif not entry.dtype.is_floating_point or not name.endswith((".weight", ".bias")):
                continue  # the state of a quantised weight, or a buffer
            elif not in_layer:
                outside.add(sample_digest(*self._source(name, None)))  # a set, because a tied head may be stored or not
            elif len(entry.shape) == 1:
                vectors.append(sample_digest(*self._source(name, None)))
        return {"outside": sorted(outside), "vectors": _json_digest(vectors), "matrices": _json_digest(matrices)}

    def stored_names(self, adapted: str) -> list[str]:
        """Return the names of the digests of an adapted weight: its own, or those of all stored experts of its layer.

        The latter where files hold its parameter in several tensors, whatever they call the parent of the experts:
        `block_sparse_moe.experts.0.w1.weight` and others for `mlp.experts.gate_up_proj`.
        """
        if adapted in self.files.shard_of or not adapted.rpartition(".")[0].endswith(".experts"):
            return [adapted]
        layer = re.findall(r"\.\d+\.", adapted)[:1]
        stored = (name for name in self.files.shard_of if ".experts." in name)
        return [name for name in stored if re.findall(r"\.\d+\.", name)[:1] == layer] or [adapted]

    def scales_of(self, adapted: Iterable[str]) -> list[str]:
        """Return the stored tensors that turn the codes of adapted layers into values: scales, zeros, row orders.

        Codes of 32 bits too, because the digests by the names of weights are of floats, which lack their last bits.
        """
        stored = {name for each in adapted if (name := self._stored_name(each)) and name.endswith(".weight")}
        layers = {name.removesuffix(".weight") for name in stored}
        codes = {name for each in stored if not self._is_wide(name := codes_name(self.files, each))}
        not_scales = codes | {f"{layer}.bias" for layer in layers}
        parents = ((name, name.rpartition(".")[0].removesuffix(".weight")) for name in self.files.shard_of)
        return [name for name, parent in parents if parent in layers and name not in not_scales]

    def sampled(self, names: Iterable[str], rounded_to: str | None = None) -> dict[str, str]:
        """Return name -> ``sampled-1`` digest of the weight of a layer, or of a stored tensor.

        ``rounded_to``: dtype name that values are rounded to first, or None. A tied head has no weight and is left out.
        """
        digests = {}
        for name in names:
            key = name, rounded_to
            if key not in self._samples and (source := self._weight_source(*key)) is not None:
                self._samples[key] = sample_digest(*source)
            if key in self._samples:
                digests[name] = self._samples[key]
        return digests

    def full(self, names: Iterable[str], rounded_to: str | None = None) -> dict[str, str]:
        """Return name -> ``full-1`` digest; arguments as of ``sampled``. The values are read once, then cached."""
        names = list(names)
        missing = (
            (name, self._weight_source(name, rounded_to)) for name in names if (name, rounded_to) not in self._full
        )
        if sources := {name: source for name, source in missing if source is not None}:
            question = f"{FULL_SCHEME} of {sorted(sources)}, rounded to {rounded_to}, in {self._signatures()}"
            digests = measured_once(question, lambda: self._digests(sources))
            if not isinstance(digests, dict) or digests.keys() != sources.keys():  # a damaged cache
                digests = self._digests(sources)
            self._full |= {(name, rounded_to): digest for name, digest in digests.items()}
        return {name: self._full[name, rounded_to] for name in names if (name, rounded_to) in self._full}

    def _signatures(self) -> list[tuple[str, list[int] | None]]:
        return [(str(shard.path.resolve()), shard.signature()) for shard in self.files.shards]

    def _digests(self, sources: Mapping[str, Source]) -> dict[str, str]:
        before = self._signatures()
        digests = value_digests(sources)
        if self._signatures() != before:
            raise BaseModelError(f"{self.files.folder}: its files changed while they were read; try again")
        return digests

    def _weight_source(self, name: str, rounded_to: str | None) -> Source | None:
        """Return the source of a layer's weight, or of a stored tensor; None for a tied head."""
        stored = self._stored_name(name)
        return None if stored is None else self._source(stored, rounded_to)

    def _stored_name(self, name: str) -> str | None:
        try:
            return name if name in self.files.shard_of else tensor_name(self.files, name)
        except BaseModelError:
            config = self.files.config()
            text = config.get("text_config")
            is_tied = (text if isinstance(text, dict) else config).get("tie_word_embeddings", True)
            if is_tied and ".experts." not in name:
                return None
            raise

    def _is_wide(self, name: str) -> bool:
        """True of whole numbers that a float32 does not hold."""
        dtype = self.files.shard_of[name].entries[name].dtype
        return not dtype.is_floating_point and dtype.itemsize >= 4

    def _source(self, name: str, rounded_to: str | None) -> Source:
        is_own = name in self.files.shard_of  # and not the name of the weight that codes stand for
        name = codes_name(self.files, name)
        shard = self.files.shard_of[name]
        entry = shard.entries[name]
        if is_own and self._is_wide(name):  # byte by byte
            return entry.shape, lambda start, stop: shard.read_elements(name, start, stop).view(torch.uint8)
        dtype = parse_dtype(rounded_to) or entry.dtype
        return entry.shape, lambda start, stop: shard.read_elements(name, start, stop).to(dtype)


def fingerprint(identity: BaseIdentity, modules: Iterable[str]) -> dict[str, Any]:
    """Return the fingerprint of a base on disk for the given adapted modules, with both digests."""
    weights = [name for module in modules for name in identity.stored_names(module)]
    names = list(dict.fromkeys((*weights, *identity.scales_of(weights))))
    return {
        "scheme": SCHEME, "config": identity.config, "tokenizer": identity.tokenizer, "rounded_to": None,
        "config_values": identity.config_values, "unadapted": identity.unadapted,
        **{part: getattr(identity, part) for part in PROMPTING},
        "weights": identity.sampled(names), "full": {"scheme": FULL_SCHEME, "weights": identity.full(names)},
    }  # fmt: skip


def fingerprint_live(model: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """Return the fingerprint of a base in memory, for the named layers and experts, or else all linear layers."""
    modules = list(names) or [name for name, module in named_unwrapped(model) if is_linear_like(module)]
    dtypes = {live_weight(model, name).dtype for name in modules}
    sampled: dict[str, str] = {}
    full: dict[str, str] = {}
    for sources in live_sources(model, modules):
        sampled |= {name: sample_digest(*source) for name, source in sources.items()}
        full |= value_digests(sources)
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    config = json.loads(to_json(use_diff=False)) if to_json else {}
    return {
        "scheme": SCHEME,
        "config": None,  # because a config in memory has keys that files lack; its values are for readers
        "config_values": {key: value for key, value in config.items() if key not in NOT_IDENTITY},
        "tokenizer": None,
        "rounded_to": dtype_name(dtypes.pop()) if len(dtypes) == 1 else None,
        "weights": sampled,
        "full": {"scheme": FULL_SCHEME, "weights": full},
    }


def live_sources(
    model: nn.Module, names: Iterable[str], dtype: torch.dtype | None = None
) -> Iterator[dict[str, Source]]:
    """Yield the sources of weights in memory by the names of ``BaseIdentity.stored_names``: of layers, then of experts.

    Experts that files hold one by one are split as ``save_pretrained`` splits them, and yielded by modules, because
    splitting copies them. dtype: that values are rounded to first; None: none.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        parent, _, key = name.rpartition(".")
        is_expert = parent.endswith(".experts") and key in model.get_submodule(parent)._parameters
        is_split = is_expert and hasattr(model, "save_pretrained")
        groups.setdefault(parent if is_split else "", []).append(name)
    for parent, own in groups.items():
        weights = {name: live_weight(model, name) for name in own}
        if parent:
            module = model.get_submodule(parent)
            base = module.original() if isinstance(module, AdapterModule) else module
            parameters = base.named_parameters(parent, recurse=False)
            stored = as_saved(model, {name: full_value(parameter) for name, parameter in parameters})
            weights = weights if weights.keys() <= stored.keys() else stored
        yield {name: _live_source(full_value(weight), dtype) for name, weight in weights.items()}


def live_weight(model: nn.Module, name: str) -> Tensor:
    """Return the weight of a layer, or a parameter of experts, by name."""
    parent, _, key = name.rpartition(".")
    parameter = model.get_submodule(parent)._parameters.get(key)
    weight = model.get_submodule(name).weight if parameter is None else parameter
    assert isinstance(weight, Tensor)
    return weight


def _live_source(weight: Tensor, dtype: torch.dtype | None) -> Source:
    flat = weight.reshape(-1)
    return tuple(weight.shape), lambda start, stop: flat[start:stop].cpu().to(dtype or flat.dtype)


def _json_digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
