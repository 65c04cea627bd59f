"""Read the values of a model's adapter from a patch: the inverse of ``patch_from_model``."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from lorakit.errors import PatchError
from lorakit.lora.experts import LoraExperts
from lorakit.lora.inject import adapter_modules
from lorakit.lora.linear import LoraLinear, TiedLoraHead
from lorakit.lora.methods import METHODS
from lorakit.lora.modules_to_save import TokenHead, TrainableModule, TrainableTokens
from lorakit.patch.patch import Patch, PatchLayer

SHOWN = 3


def adapter_from_patch(model: nn.Module, patch: Patch) -> dict[str, Tensor]:
    """Return the values that a patch gives to the adapter of ``model``, by tensor name, in float32.

    No parameter is read, so the model may be on the meta device or sharded. A tensor that is trained in full and that
    the patch does not hold is left out: the patch does not change it.

    Raises:
        PatchError: a part of the patch has no tensor in the adapter, or a layer of the adapter no update in the patch.
    """
    values: dict[str, Tensor] = {}
    used: set[str] = set()
    missing: list[str] = []
    for name, carrier in adapter_modules(model):
        for layer_name, tensors in _updates(name, carrier, patch):
            if tensors is None:
                missing.append(layer_name)
            else:
                values |= tensors
                used.add(layer_name)
        if isinstance(carrier, TiedLoraHead) and name in patch.layers:  # its factors are the embedding's
            _check_mirrored(name, patch)
            used.add(name)
        if isinstance(carrier, TrainableTokens | TokenHead):
            if name not in patch.token_rows:
                missing.append(name)
                continue
            values[f"{name}.trainable_tokens_delta"] = _rows(carrier, patch, name)
            used.add(name)
        full = {f"{name}.{key}" for key in carrier.adapter_tensors()} & set(patch.full_shapes)
        values |= {key: patch.full_tensors[key].to(torch.float32) for key in full}
        used |= full
        if isinstance(carrier, TrainableModule) and carrier.tied_name is not None:
            used.add(f"{name}.weight")
    _check_all_used(patch, used, missing)
    return values


def _check_mirrored(head: str, patch: Patch) -> None:
    """Raise an error unless a tied head has the update of an embedding, transposed and with its factors swapped."""
    A, B = (patch.layers[head].tensors[part] for part in ("lora_A", "lora_B"))
    for layer in patch.layers.values():
        if layer.embedding and torch.equal(layer.tensors["lora_B"].T, A) and torch.equal(layer.tensors["lora_A"].T, B):
            return
    raise PatchError(f"{patch.folder}: {head} has another update than the embedding whose weight it shares")


def _check_all_used(patch: Patch, used: set[str], missing: list[str]) -> None:
    unused = [name for name in (*patch.layers, *patch.full_shapes, *patch.token_rows) if name not in used]
    problems = [
        f"{len(names)} {what}: {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
        for names, what in ((unused, "parts are not in the adapter"), (missing, "layers of the adapter are not in it"))
        if names
    ]
    if problems:
        raise PatchError(f"{patch.folder}: {'; '.join(problems)}")


def _updates(name: str, carrier: nn.Module, patch: Patch) -> Iterator[tuple[str, dict[str, Tensor] | None]]:
    """Yield (layer, its adapter's tensors by name) for the low-rank updates of a module; None: not in the patch."""
    if isinstance(carrier, LoraLinear):
        layer = patch.layers.get(name)
        yield name, None if layer is None else _linear(name, carrier, layer, patch)
    elif isinstance(carrier, LoraExperts):
        for parameter, target in carrier.adapted.items():
            full_name = f"{name}.{parameter}"
            layer = patch.layers.get(full_name)
            if layer is not None:
                _check_alike(full_name, (target.method, target.rank, target.alpha), layer, patch)
            yield full_name, None if layer is None else _named(full_name, layer.tensors)


def _linear(name: str, carrier: LoraLinear, layer: PatchLayer, patch: Patch) -> dict[str, Tensor]:
    if "lora_A0" not in carrier.fixed_tensors():
        _check_alike(name, (carrier.method, carrier.rank, carrier.alpha), layer, patch)
        return _named(name, layer.tensors)
    # [B, -B0] [A; A0], as `patch_from_model` writes an adapter that started at a part of W
    rank = carrier.rank
    _check_alike(name, ("lora", 2 * rank, carrier.scale * 2 * rank), layer, patch)
    A, B = layer.tensors["lora_A"], layer.tensors["lora_B"]
    parts = {"lora_A": A[:rank], "lora_A0": A[rank:], "lora_B": B[:, :rank], "lora_B0": -B[:, rank:]}
    return _named(name, {part: tensor.contiguous() for part, tensor in parts.items()})


def _check_alike(name: str, settings: tuple[str, int, float], layer: PatchLayer, patch: Patch) -> None:
    method, rank, alpha = settings
    saved_as = "lora" if METHODS[method].fixed == ("lora_A",) else method
    if (saved_as, rank, alpha) != (layer.method, layer.rank, layer.alpha):
        raise PatchError(
            f"{patch.folder}: {name}: {layer.method}, rank {layer.rank}, alpha {layer.alpha:g} in the patch;"
            f" {method}, rank {rank}, alpha {alpha:g} in the adapter"
        )


def _named(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{part}": tensor.to(torch.float32) for part, tensor in tensors.items()}


def _rows(carrier: TrainableTokens | TokenHead, patch: Patch, name: str) -> Tensor:
    rows = patch.token_rows[name]
    if set(rows.tokens) != set(carrier.tokens):
        raise PatchError(
            f"{patch.folder}: rows of the tokens {sorted(rows.tokens)} in the patch, {sorted(carrier.tokens)} in the"
            " adapter"
        )
    return rows.tensor[[rows.tokens.index(token) for token in carrier.tokens]].to(torch.float32)
