"""Read a patch folder, with every tensor and setting checked before a tensor is allocated."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ConfigDict, NonNegativeInt, PositiveInt, ValidationError, create_model
from torch import Tensor

from lorakit.errors import PatchError, did_you_mean, translate_error
from lorakit.files.atomic import fast_digest
from lorakit.files.safetensors import SafetensorsFile, open_tensors
from lorakit.lora.layer_kinds import PEFT_NAMES
from lorakit.lora.methods import METHODS, peft_keys
from lorakit.lora.targets import lookup, matches
from lorakit.patch.adapter_config import CONFIG_FILE, TRAINING_STATE, PatchConfig, arithmetic_settings, read_config
from lorakit.patch.patch import FLOATS, MAX_RANK, SIDECAR, TENSOR_FILE, Patch, PatchLayer, TokenRows, is_finite
from lorakit.patch.peft_names import B_BIAS, ROWS_PART, WRAPPED, expert_modules, full_tensor_key, parse_key, plain_key
from lorakit.patch.pooling import patch_pooling

MAX_PATCH_BYTES: Final = 64 << 30  # of the tensor file; these limits are checked before anything is allocated
MAX_PATCH_HEADER_BYTES: Final = 32 << 20
MAX_SIDECAR_BYTES: Final = 1 << 20
_form: Final[Any] = partial(create_model, "Form", __config__=ConfigDict(strict=True))  # key=(type, default or ...)
TEXT: Final = (str | None, None)
NUMBER: Final = (int | None, None)
MAPPING: Final[Any] = (dict[str, Any], {})
RECIPE: Final = _form(
    base=MAPPING, train=MAPPING, adapter=(_form(targets=(str | list[str] | None, None)), None),
    data=(_form(max_tokens=(PositiveInt, 1), on_long_rows=(str, ""), loss_on=(str, ""), turns=(str, "")), None),
    objective=(_form(
        name=(str, ...), labels=(list[Any] | None, None), problem_type=TEXT, matryoshka_dims=(list[int] | None, None),
        pooling=(Literal["lasttoken", "mean", "cls"] | None, None),
    ), None),
)  # fmt: skip
BASE: Final = _form(
    scheme=(str, ...), weights=(dict[str, str], ...), rounded_to=TEXT, config_values=(dict[str, Any] | None, None),
    full=(_form(scheme=TEXT, weights=(dict[str, str], {})) | None, None), unadapted=(dict[str, Any] | None, None),
    quantized=(_form(
        name=(str, ...), double=(bool, ...), dtype=(Literal["float32", "bfloat16", "float16"], ...),
        layers=(list[str], ...),
    ) | None, None),
)  # fmt: skip
FACTS: Final = _form(
    base=(BASE | None, None), recipe=(RECIPE, None), adapter=MAPPING, start=MAPPING, results=(dict[str, float], {}),
    data=(_form(train=(_form(sources=(list[str], ...), rows=NUMBER, plain=NUMBER, system=TEXT), None)), None),
    chat_template=TEXT, chat_template_kwargs=(dict[str, Any] | None, None), new_tokens=(dict[str, NonNegativeInt], {}),
)  # fmt: skip
"""lorakit's own facts: the keys that other code reads have a form, all others may have any value"""


class LazyPatchTensors(Mapping[str, Tensor]):
    """Tensors of a patch, read and checked to be finite each time. ``keys_in_file``: name here -> key in the file."""

    def __init__(self, file: SafetensorsFile, keys_in_file: Mapping[str, str]) -> None:
        self._file = file
        self.keys_in_file = keys_in_file

    def __getitem__(self, name: str) -> Tensor:
        return self._finite(name, self._file.read(self.keys_in_file[name]))

    def elements(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements ``start`` to ``stop`` of a flattened tensor; no other elements are read."""
        return self._finite(name, self._file.read_elements(self.keys_in_file[name], start, stop))

    def _finite(self, name: str, tensor: Tensor) -> Tensor:
        if not is_finite(tensor):
            raise PatchError(f"{self._file.path}: {self.keys_in_file[name]} holds values that are not finite")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_in_file)

    def __len__(self) -> int:
        return len(self.keys_in_file)


def open_patch(folder: str | Path, *, verify: bool = True) -> Patch:
    """Return a patch whose tensors are read, and checked to be finite, when they are used. Raises as ``read_patch``.

    verify: compute the file's digest, and compare it with the one that was saved; else this one, if any, is taken.
    """
    folder = Path(folder)
    config = read_config(folder)
    path = folder / TENSOR_FILE
    if not path.exists() and (folder / "adapter_model.bin").exists():
        raise PatchError(
            f"{folder}: holds adapter_model.bin, a pickle, which can run code when it is opened. Where you trust it:\n"
            '  python -c "import torch; from safetensors.torch import save_file;'
            f" t = torch.load({str(folder / 'adapter_model.bin')!r}, weights_only=True, map_location='cpu');"
            f' save_file({{k: v.contiguous().clone() for k, v in t.items()}}, {str(path)!r})"'
        )
    recorded = _recorded_digest(path, config)
    patch = build_patch(folder, config, open_tensors(path, MAX_PATCH_HEADER_BYTES, MAX_PATCH_BYTES))
    digest = fast_digest(path) if verify else recorded
    if recorded not in (None, digest):
        raise PatchError(f"{path}: is not the file that was saved (its xxh3_128 differs from {SIDECAR})")
    return replace(patch, digest=digest)


def read_patch(folder: str | Path) -> Patch:
    """Return a patch of lorakit or PEFT with all tensors in memory; header and config are checked before any is read.

    Raises PatchError: cut, altered, foreign, too large, or a missing, extra, mis-shaped or non-finite tensor.
    """
    patch = open_patch(folder)
    layers = {name: replace(layer, tensors=dict(layer.tensors)) for name, layer in patch.layers.items()}
    return replace(patch, layers=layers, full_tensors=dict(patch.full_tensors))


def _recorded_digest(path: Path, config: PatchConfig) -> str | None:
    """Return the XXH3-128 in the sidecar; None without one. Raises PatchError if the config was edited after saving."""
    sidecar = path.parent / SIDECAR
    if not sidecar.is_file():
        return None
    failures = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
    with translate_error(failures, PatchError, f"{sidecar}: cannot be read"):
        with open(sidecar, "rb") as file:
            record = json.loads(file.read(MAX_SIDECAR_BYTES))
        digest = str(record["xxh3_128"][TENSOR_FILE])
        saved = arithmetic_settings(record.get("settings", config.raw))
        actual = arithmetic_settings(config.raw)
        edited = [key for key in saved | actual if saved.get(key) != actual.get(key)]
    if edited:
        changes = "; ".join(f"{key} {actual.get(key)}, saved with {saved.get(key)}" for key in edited)
        remedy = f"Write the saved values back, or delete {sidecar} to use the new ones"
        raise PatchError(f"{path.parent / CONFIG_FILE}: was edited after the patch was saved: {changes}. {remedy}")
    return digest


def build_patch(folder: Path, config: PatchConfig, file: SafetensorsFile) -> Patch:
    """Return the patch that a checked header describes; reads token rows alone. Raises PatchError unless all agrees."""
    updates: dict[str, dict[str, str]] = {}
    rows: dict[str, str] = {}
    biases: dict[str, str] = {}
    full_keys: dict[str, str] = {}
    others = {ROWS_PART: rows, B_BIAS: biases, "": full_keys}
    plain_keys = {key: plain_key(key) for key in file.entries}
    misnamed = next((key for key, plain in plain_keys.items() if plain != key), None)
    if len({*plain_keys.values()}) < len(plain_keys):
        raise PatchError(f"{file.path}: holds a tensor under two names, one with a wrapper such as {misnamed}")
    for key, entry in file.entries.items():
        plain = plain_keys[key]
        if plain.rpartition(".")[0].endswith((".modules_to_save", ".original_module")):
            continue  # two copies of a full tensor, which PEFT writes for a resized embedding and does not read
        if any(part in TRAINING_STATE.values() for part in plain.split(".")):
            continue
        parsed = parse_key(plain)
        if entry.dtype not in FLOATS:
            raise PatchError(f"{file.path}: {key}: {entry.dtype}; the tensors of a patch are 16, 32 or 64 bit floats")
        if parsed is None:
            raise PatchError(_unknown(file.path, key))
        name, end = parsed
        if end in others:
            others[end][name] = key
        else:
            updates.setdefault(name, {})[end] = key
    if not updates and not full_keys and not rows:
        raise PatchError(f"{file.path}: holds no tensors; the adapter was lost when it was saved")
    experts = _expert_parameters(file.path, config, list(updates))
    names = {module: experts.get(module, module) for module in updates}
    layers = {
        names[module]: _layer(file, config, names[module], keys, stacked=module in experts)
        for module, keys in updates.items()
    }
    bias_keys = _bias_keys(file.path, config, biases, layers, full_keys)
    tensor_keys = full_keys | bias_keys
    metadata = _facts(file.path, file.metadata)
    patch = Patch(
        folder,
        config,
        layers,
        full_tensors=LazyPatchTensors(file, tensor_keys),
        full_shapes={parameter: file.entries[key].shape for parameter, key in tensor_keys.items()},
        bias_scales={name: layers[name.rpartition(".")[0]].scale for name in bias_keys},
        metadata=metadata,
        token_rows={module: _rows(file, config, module, key) for module, key in rows.items()},
        pooling=patch_pooling(folder, config.raw.get("task_type"), metadata),
        misnamed=misnamed,
        num_bytes=sum(entry.end - entry.start for entry in file.entries.values()),
    )
    _check_declared(patch, file.path, full_keys)
    return patch


def _bias_keys(
    path: Path, config: PatchConfig, biases: Mapping[str, str], layers: Collection[str], full: Collection[str]
) -> dict[str, str]:
    """Return bias -> key of its change. Raises PatchError unless each layer has one with `lora_bias`, and else none."""
    declared = bool(config.raw.get("lora_bias"))
    if wrong := biases.keys() ^ set(layers if declared else ()):
        state = "there" if min(wrong) in biases else "missing"
        raise PatchError(f"{path}: lora_bias is {declared} in the config, and {min(wrong)}.{B_BIAS} is {state}")
    if beside := [module for module in biases if f"{module}.bias" in full]:
        raise PatchError(f"{path}: {beside[0]} has {B_BIAS} and a bias in full; one of both is read")
    return {f"{module}.bias": key for module, key in biases.items()}


def _check_declared(patch: Patch, path: Path, full_keys: Mapping[str, str]) -> None:
    """Raise PatchError if declared experts or rows are not in the file, or a full tensor has a name PEFT ignores."""
    for parameter, key in full_keys.items():
        if plain_key(key) != (expected := full_tensor_key(parameter, patch.layers)):
            raise PatchError(f"{path}: {key}: PEFT would not read it; expected the name {expected}")
    if patch.config.target_parameters and not any(layer.num_experts for layer in patch.layers.values()):
        raise PatchError(f"{path}: target_parameters names experts, and no tensors of theirs are there")
    if patch.layers and "target_modules" in patch.config.raw and patch.config.raw["target_modules"] is None:
        names = sorted({name.rpartition(".")[2] for name in patch.layers})
        problem = "target_modules is null, for which PEFT takes its own defaults of the base"
        remedy = f"the file has {', '.join(names[:8])}: name them there"
        raise PatchError(f"{path.parent / CONFIG_FILE}: {problem}; {remedy}")
    rows = patch.token_rows.values()
    if patch.config.token_indices and not rows:
        raise PatchError(f"{path}: trainable_token_indices names tokens, and their rows are not there")
    for name, token in patch.new_tokens.items():
        if not rows or not all(token in own.tokens for own in rows):
            raise PatchError(f"{path}: the new token {name!r} (id {token}) has no row in the patch")


def _expert_parameters(path: Path, config: PatchConfig, modules: list[str]) -> dict[str, str]:
    """Return module name in the file -> parameter of experts that the config names, whose factors are there."""
    parameters: dict[str, str] = {}
    by_module: dict[str, set[str]] = {}
    for name in modules:
        by_module.setdefault(re.sub(rf"(\.{WRAPPED})+$", "", name), set()).add(name)
    for module, names in by_module.items():
        targets = _targets_of(module, len(names), config)
        if names <= {module} and not targets:
            continue
        expected = {name: f"{module}.{parameter}" for parameter, name in expert_modules(module, targets).items()}
        if names != set(expected):
            named = f"target_parameters names {len(targets)}: {', '.join(targets) or 'none'}"
            raise PatchError(f"{path}: {module}: factors of {len(names)} parameters of experts are there, {named}")
        parameters |= expected
    return parameters


def _targets_of(module: str, count: int, config: PatchConfig) -> list[str]:
    """Return the parameters of a module that `target_parameters` names, if the file has factors of `count` of them.

    A name without its module, such as ``down_proj``, may be a parameter of any module. So where the file has factors
    for as many as are named with their module, these are they, and a layer of `target_modules` has none.
    """
    if count == 1 and matches(config.targets, module):
        return []
    prefixed = []
    others = []
    for prefix, _, name in (name.rpartition(".") for name in config.target_parameters):
        if not prefix:
            others.append(name)
        elif module == prefix or module.endswith(f".{prefix}"):
            prefixed.append(name)
    return prefixed if len(prefixed) == count else [*prefixed, *others]


def _rows(file: SafetensorsFile, config: PatchConfig, module: str, key: str) -> TokenRows:
    named = (ids for name, ids in config.token_indices.items() if not name or matches((name,), module))
    tokens = next(named, ())
    tensor = LazyPatchTensors(file, {module: key})[module]
    if not tokens or tensor.dim() != 2 or tensor.shape[0] != len(tokens):
        raise PatchError(f"{file.path}: {module}: rows {tuple(tensor.shape)} for {len(tokens)} trainable_token_indices")
    return TokenRows(tokens, tensor)


def _unknown(path: Path, key: str) -> str:
    suffixes = [suffix for factors in PEFT_NAMES.values() for suffix in factors.values()]
    end = ".".join(key.rsplit(".", 2)[-2:])
    known = f"base_model.model.<module>.{{{', '.join(suffixes)}}} and whole tensors base_model.model.<parameter>"
    remedy = f"{did_you_mean(end, suffixes)} A patch of PEFT has such names after save_pretrained"
    return f"{path}: {key}: a tensor lorakit does not know; it reads {known}.{remedy}"


def _layer(
    file: SafetensorsFile, config: PatchConfig, module: str, ends: Mapping[str, str], *, stacked: bool
) -> PatchLayer:
    path = file.path
    kinds = [embedding for embedding, names in PEFT_NAMES.items() if not ends.keys().isdisjoint(names.values())]
    if len(kinds) > 1:
        raise PatchError(f"{path}: a layer has both lora_A and lora_embedding_A")
    parts = {end: part for names in PEFT_NAMES.values() for part, end in names.items()}
    keys = {parts.get(end, end): key for end, key in ends.items()}  # a method's own tensors have their own name
    entries = {part: file.entries[key] for part, key in keys.items()}
    for part in ("lora_A", "lora_B"):
        if part not in entries:
            raise PatchError(f"{path}: {module}.{part} is missing")
        if len(entries[part].shape) != 2:
            raise PatchError(f"{path}: {module}.{part}: {entries[part].shape}, not a matrix")
    rank = lookup(config.rank_pattern, module, config.rank)
    alpha = lookup(config.alpha_pattern, module, config.alpha)
    a = entries["lora_A"].shape
    b = entries["lora_B"].shape
    num_experts = a[0] // rank if stacked else 0
    if not a[0] == b[1] == rank * max(1, num_experts):
        raise PatchError(f"{path}: {module}: the config says rank {rank}, but A is {a} and B is {b}")
    if rank > MAX_RANK:
        raise PatchError(f"{path}: {module}: rank {rank}, {MAX_RANK} is allowed")
    shapes = METHODS[config.method].stored_shapes((b[0], a[1]), a[0])
    for part in sorted(shapes.keys() ^ entries.keys()):
        settings = ", ".join(f"{key} is {bool(config.raw.get(key))}" for key in peft_keys())
        state = "missing" if part in shapes else "there"
        raise PatchError(f"{path}: {module}: {settings} in the config, and {part} is {state}")
    for part, shape in shapes.items():
        if entries[part].shape != shape:
            raise PatchError(f"{path}: {module}: {part} is {entries[part].shape}, not {shape}")
    return PatchLayer(config.method, rank, alpha, (b[0], a[1]), LazyPatchTensors(file, keys), kinds[0], num_experts)


def _facts(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return lorakit's own part of a file's metadata. Raises PatchError: it has another form than other code reads."""
    try:
        own = json.loads(metadata.get("lorakit", "{}"))
        FACTS.model_validate(own)
    except (ValueError, RecursionError) as problem:
        key = ".".join(map(str, problem.errors()[0]["loc"])) if isinstance(problem, ValidationError) else ""
        raise PatchError(f"{path}: lorakit's own facts in the metadata are damaged: {key or 'no mapping'}") from None
    return dict(own)
