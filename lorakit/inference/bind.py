"""Bind a patch to a model in memory: slots for hot swapping, or a copy of the model with the patch merged in.

Invariant: every tensor of the patch is bound to a layer of the model, or the patch is refused.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lorakit.errors import PatchError
from lorakit.lora.bank import AdapterBank
from lorakit.lora.experts import expert_factors, expert_sum, is_transposed, transposed_experts, with_attributes
from lorakit.lora.layer_kinds import CONV1D, EMBEDDING, LINEAR, QuantizedLinear, kind_of, weight_of
from lorakit.lora.merge_weight import Update, merged_weight, rows_update
from lorakit.lora.methods import MAGNITUDE, METHODS, merge_low_rank, row_gain
from lorakit.lora.routing import Adapter, Slot, adapter_numbers
from lorakit.lora.slot_hook import KnownTokensForward, PassHook, SlotHook, TokenwiseForward, copy_with
from lorakit.lora.targets import embedding_and_head, tied_head
from lorakit.ops._internals import remove_forward_hooks, remove_forward_pre_hooks
from lorakit.patch import BaseShapes, Patch, PatchLayer
from lorakit.patch.patch import is_finite
from lorakit.patch.prompting import PromptForm, trained_form


@dataclass(frozen=True)
class PatchSource:
    """The patch that a loaded adapter was read from."""

    folder: Path
    identity: str | None
    note: str | None
    """Sentence for users if only shapes could be compared, or the base is quantised in another way; else None."""
    rank: int
    """the largest of its layers; 0 if it has no low-rank update"""
    num_bytes: int
    """of its tensors, in the dtype they are stored in"""
    form: PromptForm
    """of its rows in training"""

    @classmethod
    def of(cls, patch: Patch, note: str | None) -> "PatchSource":
        """Return the source of a patch that is in memory."""
        tensors = [*patch.full_tensors.values(), *(rows.tensor for rows in patch.token_rows.values())]
        tensors += [tensor for layer in patch.layers.values() for tensor in layer.tensors.values()]
        rank = max((layer.rank for layer in patch.layers.values()), default=0)
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        return cls(patch.folder, patch.identity, note, rank, num_bytes, trained_form(patch.metadata))


def build_adapter(patch: Patch, model: nn.Module, bank: AdapterBank, facts: Any = None) -> Adapter:
    """Return the adapter of a patch that fits, with its factors in the bank. ``facts``: for the caller.

    Tensors are on their layer's device, in its dtype.

    Full tensors that equal the base's are left out, because PEFT saves such copies beside an adapted embedding.

    Raises:
        PatchError: its values overflow the base's dtype.
    """
    own, number = _own_tensors(patch, model), next(adapter_numbers)
    layers = [name for name, layer in patch.layers.items() if not layer.num_experts]
    slots, embedding = _expert_slots(patch, model, own), embedding_and_head(model)[0]
    for name in [*layers, *(name for name in own if name not in patch.layers and name not in slots)]:
        layer = model.get_submodule(name)
        replacement = copy_with(layer, own[name]) if name in own else None
        if replacement is not None and name == embedding:  # it sees the ids of other rows too
            KnownTokensForward.install(replacement)
        slots[name] = Slot(replacement=replacement)
        if name in patch.layers:
            A, B, gain = _factors(patch.layers[name], layer, replacement)
            factors = bank.add(name, A, B, patch.layers[name].scale, number)
            slots[name] = Slot(factors, replacement, gain)
    num_new = 0
    for name, token_rows in patch.token_rows.items():
        weight = weight_of(model.get_submodule(name))
        tokens, rows = torch.tensor(token_rows.tokens, device=weight.device), _cast(token_rows.tensor, weight, name)
        for module in _sharing(name, model):
            is_embedding = isinstance(model.get_submodule(module), nn.Embedding)
            slots[module] = Slot(tokens=tokens, rows=rows) if is_embedding else _head_slot(tokens, rows, len(weight))
            if is_embedding and (num_new := patch.num_added_rows(len(weight))):
                KnownTokensForward.install(model.get_submodule(module))
    return Adapter(number, slots, patch.identity, facts, num_new)


def _head_slot(tokens: Tensor, rows: Tensor, num_base_rows: int) -> Slot:
    """Return the slot of a head with the patch's rows of some tokens; those of new tokens come behind the base's."""
    is_known = tokens < num_base_rows
    new = rows[~is_known][tokens[~is_known].argsort()]
    new_rows = new if len(new) else None
    return (
        Slot(tokens=tokens[is_known], rows=rows[is_known], new_rows=new_rows)
        if bool(is_known.any())
        else Slot(new_rows=new_rows)
    )


def _expert_slots(patch: Patch, model: nn.Module, own: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Slot]:
    """Return module -> slot for the experts and routers that the patch changes: copies that run in their place."""
    parts: dict[str, dict[str, PatchLayer]] = {}
    for name, layer in patch.layers.items():
        if layer.num_experts:
            module, _, parameter = name.rpartition(".")
            parts.setdefault(module, {})[parameter] = layer
    slots = {}
    for name, changed in parts.items():
        replacement = copy_with(model.get_submodule(name), own.get(name, {}))
        sums = {}
        for parameter, layer in changed.items():
            W = replacement.get_parameter(parameter)
            A, B = (_cast(layer.tensors[part], W, f"{name}.{parameter}") for part in ("lora_A", "lora_B"))
            if W.dim() == 2:  # of a router: small, and its code may do more with it than multiply
                merged = _merged_experts(layer, W, transposed=False)
                replacement.register_parameter(parameter, nn.Parameter(merged, requires_grad=False))
            else:
                sums[parameter] = expert_sum(W, A, B.contiguous(), layer.scale, transposed=is_transposed(replacement))
        slots[name] = Slot(replacement=with_attributes(replacement, sums))
    return slots


@torch.no_grad()
def check_replacements_called(patch: Patch, model: nn.Module, slots: Mapping[str, Slot]) -> None:
    """Return if the model calls every layer that a slot replaces.

    Raises:
        PatchError: the model reads a layer's weight without calling the layer, so its replacement would have no effect.
    """
    layers = [name for name, slot in slots.items() if slot.replacement is not None]
    if not layers:
        return
    called: set[str] = set()
    handles = [
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.add(name)) for name in layers
    ]
    try:
        model(input_ids=torch.zeros(1, 4, dtype=torch.long, device=next(model.parameters()).device))
    finally:
        for handle in handles:
            handle.remove()
    if missed := [name for name in layers if name not in called]:
        raise PatchError(
            f"{patch.folder}: brings tensors of {missed[0]}, which this model reads without calling the layer; it"
            " cannot be served beside others. Merge it (lorakit merge, or model.merged)"
        )


def merged_tensors(patch: Patch, model: nn.Module, base: BaseShapes) -> dict[str, Tensor]:
    """Return parameter -> the weight of a base with the patch merged in, for all that the patch changes.

    Raises:
        PatchError: a layer is quantised, or a value does not fit the base's dtype.
    """
    changed = {f"{name}.{key}": t for name, own in _own_tensors(patch, model).items() for key, t in own.items()}
    for name, layer in patch.layers.items():
        if layer.num_experts:
            changed[name] = _merged_experts(layer, model.get_parameter(name), name in transposed_experts(model))
            continue
        if isinstance(model.get_submodule(name), QuantizedLinear):
            raise PatchError(
                f"{patch.folder}: {name} is quantised, so nothing can be merged into it; merge files (lorakit merge)"
            )
        old = model.get_parameter(f"{name}.weight")
        W = patch.full_tensors[f"{name}.weight"].to(old.device) if f"{name}.weight" in patch.full_tensors else old
        changed[f"{name}.weight"] = merged_weight(W, base.layers[name][0], [layer_update(layer)], old.dtype)
    for name, token_rows in patch.token_rows.items():
        old = model.get_parameter(f"{name}.weight")
        num_added = max(0, max(token_rows.tokens) + 1 - len(old))
        grown = torch.cat([old, old.new_zeros(num_added, old.shape[1])])
        merged_rows = merged_weight(grown, EMBEDDING, [rows_update(token_rows.tensor, token_rows.tokens)], old.dtype)
        changed |= {f"{module}.weight": merged_rows for module in _sharing(name, model)}
    return changed


def merged_copy(patch: Patch, model: nn.Module, base: BaseShapes) -> nn.Module:
    """Return a copy of the model with the patch merged in; unchanged tensors are shared, ``model`` is not written."""
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    merged = copy.deepcopy(model, shared)  # a tensor in deepcopy's memo is not copied
    for module in merged.modules():  # else the copy would follow the routes of the base
        remove_forward_hooks(module, SlotHook)
        TokenwiseForward.remove(module)
        KnownTokensForward.remove(module)
    remove_forward_pre_hooks(merged, PassHook)
    for name, tensor in merged_tensors(patch, model, base).items():
        replace_tensor(merged, name, tensor)
    return merged


def replace_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter of a model; an embedding or head may have more rows then."""
    module_name, _, key = name.rpartition(".")
    module = model.get_submodule(module_name)
    module.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
    if key == "weight" and isinstance(module, nn.Embedding):
        module.num_embeddings = len(tensor)
    elif key == "weight" and isinstance(module, nn.Linear):
        module.out_features = len(tensor)


def _sharing(embedding: str, model: nn.Module) -> list[str]:
    """Return the embedding and the head that is tied to it."""
    tied = tied_head(model)
    return [embedding, tied[0]] if tied and tied[1] == embedding else [embedding]


def _merged_experts(layer: PatchLayer, W: Tensor, transposed: bool) -> Tensor:
    """Return the merged weights of experts, (E, ...), or the one of a router."""
    if W.dim() == 2:
        return merged_weight(W, LINEAR, [layer_update(layer)], W.dtype)
    A, B = expert_factors(layer.tensors["lora_A"], layer.tensors["lora_B"], layer.num_experts)
    updates = [Update(layer.method, layer.scale, {"lora_A": a, "lora_B": b}) for a, b in zip(A, B, strict=True)]
    kind = CONV1D if transposed else LINEAR
    return torch.stack([merged_weight(w, kind, [update], W.dtype) for w, update in zip(W, updates, strict=True)])


def quantization_note(patch: Patch, model: nn.Module) -> str | None:
    """Return a sentence if the patch was trained with another quantisation of the base than the model's; else None."""
    if patch.metadata.get("base") is None:
        return None
    quantization = patch.metadata["base"].get("quantized")
    trained = None if quantization is None else str(quantization.get("name"))
    here = next((module.name for module in model.modules() if isinstance(module, QuantizedLinear)), None)
    if trained == here:
        return None
    forms = [f"quantised as {name}" if name else "in floats" for name in (trained, here)]
    return f"note: {patch.folder} was trained on a base {forms[0]}, and this one is {forms[1]}; answers differ a little"


def layer_update(layer: PatchLayer) -> Update:
    """Return the merge update of a layer."""
    return Update(layer.method, layer.scale, layer.tensors)


def _factors(
    layer: PatchLayer, module: nn.Module, replacement: nn.Module | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return A, B and, for DoRA, the gain, by which B is multiplied already."""
    like = _like_layer(module)
    A, B = layer.tensors["lora_A"], layer.tensors["lora_B"]
    gain = None
    if not METHODS[layer.method].additive:
        gain = _gain(layer, replacement or module)
        B = gain[:, None] * B.to(gain.device)
        gain = _cast(gain, like, "gain")
    return _cast(A, like, "lora_A"), _cast(B, like, "lora_B"), gain


def _like_layer(module: nn.Module) -> Tensor:
    """Return a tensor on the layer's device, in the dtype of its computation."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    if isinstance(module, QuantizedLinear):
        return torch.empty(0, dtype=module.dtype, device=weight.device)
    return weight


def _gain(layer: PatchLayer, module: nn.Module) -> Tensor:
    """Return DoRA's gain m / |W + s B A|, (out,) float32."""
    kind = kind_of(module) or EMBEDDING
    stored = kind.dequantized(module).detach().double()
    W = stored.T if kind.transposed else stored
    tensors = {name: tensor.to(W.device) for name, tensor in layer.tensors.items()}
    V = merge_low_rank(W.clone(), {part: tensors[part] for part in ("lora_A", "lora_B")}, layer.scale)
    return row_gain(tensors[MAGNITUDE].double(), torch.linalg.vector_norm(V, dim=1)).float()


def _cast(tensor: Tensor, like: Tensor, name: str) -> Tensor:
    """Return the tensor on the device and in the dtype of another.

    Raises:
        PatchError: its values do not fit.
    """
    cast = tensor.to(like.device, like.dtype)
    if cast.dtype != tensor.dtype and not is_finite(cast):
        raise PatchError(f"{name}: its values do not fit {like.dtype}; load the base with dtype='float32'")
    return cast


def _own_tensors(patch: Patch, model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return module -> parameter -> full tensor, for the full tensors that differ from the base's."""
    own: dict[str, dict[str, Tensor]] = {}
    for name, tensor in patch.full_tensors.items():
        module, _, key = name.rpartition(".")
        old = model.get_parameter(name)
        new = _cast(tensor, old, name)
        if not torch.equal(new, old):
            own.setdefault(module, {})[key] = new
    return own
