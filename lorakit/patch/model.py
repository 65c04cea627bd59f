"""Turn the adapter of a model into a patch, and a patch into the values and the settings of a model's adapter."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from lorakit.errors import PatchError
from lorakit.files.patterns import as_ending, matches_beginning
from lorakit.files.text import first_of
from lorakit.lora.experts import LoraExperts
from lorakit.lora.inject import adapted_names, adapter_modules, checkpoint_tensors
from lorakit.lora.layer_kinds import fan_in_fan_out
from lorakit.lora.linear import AdapterModule, LoraLinear
from lorakit.lora.methods import METHODS, PLAIN, saved_as
from lorakit.lora.modules_to_save import TokenHead, TrainableTokens
from lorakit.lora.own_head import OF_ENCODER, own_head_of
from lorakit.lora.targets import Target
from lorakit.lora.wrappers import full_value, is_sharded, meet, named_unwrapped, reshard, unwrapped
from lorakit.ops.encoder_head import EncoderHead
from lorakit.patch.fingerprint import fingerprint_live
from lorakit.patch.fit import BaseShapes, Binding, bind, renamed_weights
from lorakit.patch.own_head import TASK_TYPE
from lorakit.patch.patch import Patch, PatchLayer, TokenRows
from lorakit.patch.write import new_patch, write_patch
from lorakit.version import VERSION

SHOWN = 3
T = TypeVar("T")
SELECTION: Final = ("targets", "exclude", "layers")
"""keys that select layers together, so that they are taken from the patch together or not at all"""
FIXED: Final = (
    "method", "rank", "alpha", *SELECTION, "target_parameters", "rank_pattern", "alpha_pattern", "bias",
    "modules_to_save", "trainable_tokens", "new_tokens", "tied_head",
)  # fmt: skip
"""keys of the `adapter` section that a patch decides"""


def save_patch(model: nn.Module, folder: str | Path, *, base_model: str | None = None, overwrite: bool = False) -> Path:
    """Write the adapter of a model from your own training loop as a patch folder; return the folder.

    The model may be wrapped by DDP, DeepSpeed, Lightning's Fabric or torch.compile. Of one that FSDP2 or ZeRO-3 shards,
    every process must call this, because the tensors are gathered. Of one in such a wrapper or sharded, rank 0 writes.
    ``base_model``: the name that others load the base by; None takes the name from the model's config.
    Raises PatchError: no adapter, a tensor that is not finite or would be left out, a process that does not call this,
    or a patch is there and ``overwrite`` is off.
    """
    if not isinstance(model, nn.Module):
        raise PatchError(
            f"save_patch writes the adapter of a model from lorakit.inject, got a {type(model).__name__}; a patch that"
            " was loaded is a file already: copy its folder, or write_patch(folder, read_patch(path))"
        )
    model, has_copies = unwrapped(model)
    reshard(model)
    parameters = checkpoint_tensors(model)
    _check_complete(model, parameters)
    if any(map(is_sharded, parameters.values())):
        has_copies = True
        meet("save_patch")
    tensors = {name: full_value(parameter).to("cpu", torch.float32) for name, parameter in parameters.items()}
    base_model = base_model or getattr(getattr(model, "config", None), "_name_or_path", None) or None
    metadata = {"lorakit": VERSION, "base": fingerprint_live(model, adapted_names(model))}
    patch = patch_from_model(model, tensors, metadata=metadata, base_model=base_model)
    if has_copies and torch.distributed.get_rank() > 0:
        return Path(folder)
    return write_patch(folder, patch, overwrite=overwrite)


def _check_complete(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Raise PatchError unless the adapter is all that is trained here, with values, and on this model."""
    own = set(map(id, parameters.values()))
    layers = ((name, layer.name) for name, layer in adapter_modules(model) if isinstance(layer, LoraLinear))
    if moved := next((pair for pair in layers if pair[0] != pair[1] and not hasattr(model, "save_pretrained")), None):
        why = f"so a patch of this {type(model).__name__} would fit no base: save the model inside of it"
        raise PatchError(f"save_patch: {moved[0]} was {moved[1]} when it was injected, {why}")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise PatchError(f"save_patch: {name} is on the meta device, its values are elsewhere (offloaded)")
        if own and parameter.requires_grad and id(parameter) not in own:
            problem = f"{name} can be trained and is no part of the adapter, so the patch would lack it"
            remedy = "name its module in modules_to_save, or freeze it (requires_grad_(False))"
            raise PatchError(f"save_patch: {problem}: {remedy}")


def patch_from_model(
    model: nn.Module, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, Any], base_model: str | None,
    revision: str | None = None, embeds: bool = False,
) -> Patch:  # fmt: skip
    """Return the adapter of ``model`` as a patch.

    ``tensors``: all of the adapter by name, fixed ones included, unsharded and in float32. An adapter that started as a
    part of W (pissa, olora) becomes a plain update of twice the rank on W itself. ``embeds``: in the names of a model
    without a head, transformers' ``AutoModel``, on which programs of embeddings put it.
    Raises PatchError: no adapter, or a tensor is missing, mis-shaped or not finite.
    """
    layers: dict[str, PatchLayer] = {}
    full_tensors: dict[str, Tensor] = {}
    token_rows: dict[str, TokenRows] = {}
    linear = [carrier for _, carrier in adapter_modules(model) if isinstance(carrier, LoraLinear)]
    for name, carrier in adapter_modules(model):
        if isinstance(carrier, LoraLinear):
            layers[name] = _linear(name, carrier, tensors)
        elif isinstance(carrier, LoraExperts):
            for key, target in carrier.adapted.items():
                layers[f"{name}.{key}"] = _update(f"{name}.{key}", target, carrier.method, tensors, target.num_experts)
        elif isinstance(carrier, TrainableTokens | TokenHead) and carrier.adapter_tensors():  # no tied head
            rows = _checked(tensors, f"{name}.trainable_tokens_delta", (len(carrier.tokens), carrier.embedding_dim))
            token_rows[name] = TokenRows(carrier.tokens, rows)
        if isinstance(carrier, TrainableTokens) and carrier.new_tokens:
            metadata = {**metadata, "new_tokens": carrier.new_tokens}
        if isinstance(carrier, LoraLinear | LoraExperts):  # which the config cannot always name
            metadata = {**metadata, "adapter": {"method": carrier.method}}
        full_tensors |= {f"{name}.{key}": _checked(tensors, f"{name}.{key}", None) for key in carrier.full_tensors()}
    if not (layers or full_tensors or token_rows):
        raise PatchError("the model has no adapter: call lorakit.inject first")
    head = own_head_of(model)
    name_in_file = _names_in_file(model, embeds=embeds)

    def renamed(part: Mapping[str, T]) -> dict[str, T]:
        return {name_in_file(name): value for name, value in part.items()}

    return new_patch(
        renamed(layers),
        full_tensors=renamed(full_tensors),
        rows=renamed(token_rows),
        metadata=renamed_weights(metadata, renamed),
        base_model=base_model,
        revision=revision,
        dropout=linear[0].dropout if linear else 0.0,
        all_modules=[name_in_file(name) for name, _ in named_unwrapped(model)],
        head_parts=head.parts() if isinstance(head, EncoderHead) else (),
        task_type=_task_type(model, embeds=embeds),
        fan_in_fan_out=fan_in_fan_out(layer.kind for layer in linear),
    )


def _names_in_file(model: nn.Module, *, embeds: bool) -> Callable[[str], str]:
    """Return what gives the name in a patch of a module or parameter."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    if isinstance(own_head_of(model), EncoderHead):  # a classifier, of which the encoder is a part
        return lambda name: name.removeprefix(OF_ENCODER) if name.startswith(OF_ENCODER) else prefix + name
    return lambda name: name.removeprefix(prefix) if embeds else name


def _task_type(model: nn.Module, *, embeds: bool) -> str | None:
    """Return PEFT's word for what an adapter is for."""
    if embeds:
        return "FEATURE_EXTRACTION"
    if own_head_of(model) is not None:
        return TASK_TYPE
    return "CAUSAL_LM" if type(model).__name__.endswith("ForCausalLM") else None


def _update(
    name: str, target: LoraLinear | Target, method: str, tensors: Mapping[str, Tensor], num_experts: int = 0
) -> PatchLayer:
    sizes = (target.out_features, target.in_features)
    shapes = METHODS[method].stored_shapes(sizes, target.rank * max(1, num_experts))
    parts = {part: _checked(tensors, f"{name}.{part}", shape) for part, shape in shapes.items()}
    return PatchLayer(saved_as(method), target.rank, target.alpha, sizes, parts, target.kind.takes_ids, num_experts)


def _linear(name: str, layer: LoraLinear, tensors: Mapping[str, Tensor]) -> PatchLayer:
    update = _update(name, layer, layer.method, tensors)
    if "lora_A0" not in layer.fixed_tensors():
        return update
    # the layer computes W + s (B A - B0 A0) x, which is one update with both pairs of factors side by side
    A, B = update.tensors["lora_A"], update.tensors["lora_B"]
    A0, B0 = (_checked(tensors, f"{name}.{part}0", tuple(update.tensors[part].shape)) for part in ("lora_A", "lora_B"))
    both = {"lora_A": torch.cat([A, A0]), "lora_B": torch.cat([B, -B0], dim=1)}
    rank = 2 * layer.rank
    return PatchLayer(PLAIN, rank, layer.scale * rank, update.sizes, both, update.embedding)


def _checked(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...] | None) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or (shape is not None and tuple(tensor.shape) != shape):
        got = "nothing" if tensor is None else tuple(tensor.shape)
        raise PatchError(f"{name}: {shape or 'a tensor'} was trained, {got} arrived to be saved")
    return tensor


def adapter_from_patch(model: nn.Module, patch: Patch) -> dict[str, Tensor]:
    """Return the values that a patch gives to the adapter of ``model``, by tensor name, in float32.

    No parameter is read, so the model may be on meta or sharded. Full tensors that the patch lacks are left out.
    Raises PatchError if a part has no tensor in the adapter, or a layer of the adapter no update in the patch.
    """
    modules = dict(adapter_modules(model))
    values: dict[str, Tensor] = {}
    unused = []
    for binding in bind(patch, BaseShapes.of(model)):
        part = _part_values(binding, modules.get(binding.module), patch)
        if part is None:
            unused.append(binding.name)
        else:
            values |= {f"{binding.module}.{name}": tensor.to(torch.float32) for name, tensor in part.items()}
    missing = dict.fromkeys(
        name
        for name, module in modules.items()
        for key in module.adapter_tensors() | module.fixed_tensors()
        if f"{name}.{key}" not in values and key not in module.full_tensors()
    )
    lists = ((unused, "parts are not in the adapter"), ([*missing], "layers of the adapter are not in it"))
    if problems := [f"{len(names)} {what}: {first_of(names, SHOWN)}" for names, what in lists if names]:
        raise PatchError(f"{patch.folder}: {'; '.join(problems)}")
    return values


@torch.no_grad()
def fill_adapter(model: nn.Module, patch: Patch) -> None:
    """Copy a patch's values into an adapter. Raises PatchError: as ``adapter_from_patch``, with nothing copied."""
    tensors = checkpoint_tensors(model)
    for name, value in adapter_from_patch(model, patch).items():
        tensors[name].copy_(value)


def _part_values(binding: Binding, module: AdapterModule | None, patch: Patch) -> Mapping[str, Tensor] | None:
    """Return a part's values by the adapter's names in its module; None if the adapter has no such part."""
    part = binding.part
    if part is None:
        full = patch.full_tensors[binding.name]
        return {binding.key: full} if module and binding.key in module.full_tensors() else None
    if isinstance(part, TokenRows):
        if not isinstance(module, TrainableTokens | TokenHead):
            return None
        if set(part.tokens) != set(module.tokens):
            both = f"{sorted(part.tokens)}, the adapter's {sorted(module.tokens)}"
            raise PatchError(f"{patch.folder}: rows of tokens {both}")
        return {"trainable_tokens_delta": part.tensor[[part.tokens.index(token) for token in module.tokens]]}
    if isinstance(module, LoraLinear):
        return _linear_values(binding.name, module, part, patch)
    if isinstance(module, LoraExperts) and binding.key in module.adapted:
        target = module.adapted[binding.key]
        _check_alike(binding.name, (module.method, target.rank, target.alpha), part, patch)
        return {f"{binding.key}.{name}": tensor for name, tensor in part.tensors.items()}
    return None


def _linear_values(name: str, module: LoraLinear, layer: PatchLayer, patch: Patch) -> Mapping[str, Tensor]:
    if "lora_A0" not in module.fixed_tensors():
        _check_alike(name, (module.method, module.rank, module.alpha), layer, patch)
        return layer.tensors
    # [B, -B0] [A; A0], as `patch_from_model` writes an adapter that started at a part of W
    rank = module.rank
    _check_alike(name, (PLAIN, 2 * rank, module.scale * 2 * rank), layer, patch)
    A = layer.tensors["lora_A"]
    B = layer.tensors["lora_B"]
    parts = {"lora_A": A[:rank], "lora_A0": A[rank:], "lora_B": B[:, :rank], "lora_B0": -B[:, rank:]}
    return {part: tensor.contiguous() for part, tensor in parts.items()}


def _check_alike(name: str, settings: tuple[str, int, float], layer: PatchLayer, patch: Patch) -> None:
    method, rank, alpha = settings
    if (saved_as(method), rank, alpha) != (layer.method, layer.rank, layer.alpha):
        there = f"{layer.method}, rank {layer.rank}, alpha {layer.alpha:g} in the patch"
        here = f"{method}, rank {rank}, alpha {alpha:g} in the adapter"
        raise PatchError(f"{patch.folder}: {name}: {there}; {here}")


def patch_settings(patch: Patch) -> dict[str, Any]:
    """Return the keys of a recipe's `adapter` section as a patch has them, for an adapter on top of it."""
    config = patch.config
    raw = config.raw
    linear = tuple(name for name, layer in patch.layers.items() if not layer.num_experts)
    is_tied = bool(raw.get("ensure_weight_tying"))  # PEFT's: the patch has head and embedding, the config one of them
    full_names = [f".{name}" for name in patch.full_shapes]  # of PEFT's names for a head one is there
    modules_to_save = tuple(name for name in config.modules_to_save if any(f".{name}." in one for one in full_names))
    if is_tied and modules_to_save:
        full = (name.rpartition(".")[0] for name in patch.full_shapes if not name.endswith(".bias"))
        modules_to_save = tuple(sorted(set(full)))
    selection = (config.targets, config.exclude or None, config.layers)
    if not config.targets or not linear or is_tied or raw.get("layers_pattern"):  # which lorakit has no key for
        selection = (linear, None, None)
    biased = {name for name in patch.full_shapes if name.endswith(".bias")}
    rows = next(iter(patch.token_rows.values()), None)
    new = set(patch.new_tokens.values())
    known = () if rows is None else tuple(token for token in rows.tokens if token not in new)
    method = patch.metadata.get("adapter", {}).get("method")  # which a config cannot name always: of `lora_fa` `lora`
    if not isinstance(method, str) or method not in METHODS or saved_as(method) != config.method:
        method = config.method
    # a patch without updates has no method, rank and alpha
    numbers = {"method": method, "rank": config.rank, "alpha": float(config.alpha)} if patch.layers else {}
    return {
        **numbers,
        **dict(zip(SELECTION, selection, strict=True)),
        "target_parameters": config.target_parameters,
        "rank_pattern": _matching(config.rank_pattern, patch.layers),
        "alpha_pattern": {key: float(alpha) for key, alpha in _matching(config.alpha_pattern, patch.layers).items()},
        "bias": "lora_only" if patch.bias_scales else (raw.get("bias") or "none") if biased else "none",
        "modules_to_save": modules_to_save,
        "trainable_tokens": known, "new_tokens": tuple(patch.new_tokens),
        "tied_head": "untie",
    }  # fmt: skip


def _matching(pattern: Mapping[str, Any], layers: Iterable[str]) -> dict[str, Any]:
    """Return the entries of a pattern that mean a layer of the patch; PEFT allows others, a recipe does not."""
    return {key: value for key, value in pattern.items() if any(matches_beginning(as_ending(key), n) for n in layers)}
