"""Read the values of a model's adapter from a patch: the inverse of ``patch_from_model``."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lorakit.errors import PatchError
from lorakit.lora.experts import LoraExperts
from lorakit.lora.inject import adapter_modules
from lorakit.lora.linear import LoraLinear
from lorakit.lora.methods import PLAIN, saved_as
from lorakit.lora.module import AdapterModule
from lorakit.lora.modules_to_save import TokenHead, TrainableTokens
from lorakit.patch.bind import Binding, FullTensor, bind
from lorakit.patch.fit import BaseShapes
from lorakit.patch.patch import Patch, PatchLayer, TokenRows

SHOWN = 3


def adapter_from_patch(model: nn.Module, patch: Patch) -> dict[str, Tensor]:
    """Return the values that a patch gives to the adapter of ``model``, by tensor name, in float32.

    No parameter is read, so the model may be on the meta device or sharded. A tensor that is trained in full and that
    the patch does not hold is left out: the patch does not change it.

    Raises:
        PatchError: a part of the patch has no tensor in the adapter, or a layer of the adapter no update in the patch.
    """
    modules = dict(adapter_modules(model))
    values: dict[str, Tensor] = {}
    unused = []
    for binding in bind(patch, BaseShapes.of(model)):
        part = _values(binding, modules.get(binding.module), patch)
        if part is None:
            unused.append(binding.name)
        else:
            values |= {f"{binding.module}.{name}": tensor.to(torch.float32) for name, tensor in part.items()}
    missing = [
        name
        for name, module in modules.items()
        for key in module.adapter_tensors() | module.fixed_tensors()
        if f"{name}.{key}" not in values and key not in module.full_tensors()
    ]
    problems = [
        f"{len(names)} {what}: {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
        for names, what in (
            (unused, "parts are not in the adapter"),
            (list(dict.fromkeys(missing)), "layers of the adapter are not in it"),
        )
        if names
    ]
    if problems:
        raise PatchError(f"{patch.folder}: {'; '.join(problems)}")
    return values


def _values(binding: Binding, module: AdapterModule | None, patch: Patch) -> Mapping[str, Tensor] | None:
    """Return a part's values by the adapter's names in its module; None if the adapter has no such part."""
    part = binding.part
    if isinstance(part, FullTensor):
        return {binding.key: part.tensor} if module and binding.key in module.full_tensors() else None
    if isinstance(part, TokenRows):
        if not isinstance(module, TrainableTokens | TokenHead):
            return None
        return {"trainable_tokens_delta": _rows(module.tokens, part, patch)}
    if isinstance(module, LoraLinear):
        return _linear(binding.name, module, part, patch)
    if isinstance(module, LoraExperts) and binding.key in module.adapted:
        target = module.adapted[binding.key]
        _check_alike(binding.name, (target.method, target.rank, target.alpha), part, patch)
        return {f"{binding.key}.{name}": tensor for name, tensor in part.tensors.items()}
    return None


def _linear(name: str, module: LoraLinear, layer: PatchLayer, patch: Patch) -> Mapping[str, Tensor]:
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
        raise PatchError(
            f"{patch.folder}: {name}: {layer.method}, rank {layer.rank}, alpha {layer.alpha:g} in the patch;"
            f" {method}, rank {rank}, alpha {alpha:g} in the adapter"
        )


def _rows(tokens: tuple[int, ...], rows: TokenRows, patch: Patch) -> Tensor:
    if set(rows.tokens) != set(tokens):
        raise PatchError(
            f"{patch.folder}: rows of the tokens {sorted(rows.tokens)} in the patch, {sorted(tokens)} in the adapter"
        )
    return rows.tensor[[rows.tokens.index(token) for token in tokens]]
