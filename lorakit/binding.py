"""A patch meets a model in memory: its slots for hot swapping, or a copy of the model with the patch merged in."""

import copy

import torch
from torch import Tensor, nn

from lorakit.lora.merging import Update, merged_weight
from lorakit.lora.slots import Slot, SlotHook, standing_in
from lorakit.patch import Patch, PatchLayer, Shapes


def bind(patch: Patch, model: nn.Module) -> dict[str, Slot]:
    """Layer name -> slot, for a patch that fits; tensors on the layer's device, in its dtype.

    Whole tensors that equal the base's, as PEFT saves beside an adapted embedding, take no room.
    """
    own = _own_tensors(patch, model)
    slots = {}
    for name in [*patch.layers, *(name for name in own if name not in patch.layers)]:
        layer = model.get_submodule(name)
        stand_in = standing_in(layer, own[name]) if name in own else None
        slots[name] = _slot(patch.layers.get(name), layer, stand_in)
    return slots


def merged_copy(patch: Patch, model: nn.Module, base: Shapes) -> nn.Module:
    """A model with the patch merged in. It shares every tensor the patch does not change; ``model`` is not touched."""
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    merged = copy.deepcopy(model, shared)
    for module in merged.modules():
        for number, hook in list(module._forward_hooks.items()):
            if isinstance(hook, SlotHook):
                del module._forward_hooks[number]
    changed = {f"{name}.{key}": t for name, own in _own_tensors(patch, model).items() for key, t in own.items()}
    for name, layer in patch.layers.items():
        old = model.get_parameter(f"{name}.weight")
        W = patch.whole[f"{name}.weight"].to(old.device) if f"{name}.weight" in patch.whole else old
        changed[f"{name}.weight"] = merged_weight(W, base.layers[name][0], [update_of(layer)], old.dtype)
    for name, tensor in changed.items():
        module_name, _, key = name.rpartition(".")
        merged.get_submodule(module_name).register_parameter(key, nn.Parameter(tensor, requires_grad=False))
    return merged


def update_of(layer: PatchLayer, weight: float = 1.0) -> Update:
    """A layer's update, times a weight."""
    return Update(layer.method, layer.scale * weight, layer.tensors)


def _slot(layer: PatchLayer | None, module: nn.Module, stand_in: nn.Module | None) -> Slot:
    if layer is None:
        return Slot(stand_in=stand_in)
    weight = module.weight
    assert isinstance(weight, Tensor)
    A, B = (layer.tensors[part].to(weight.device, weight.dtype) for part in ("lora_A", "lora_B"))
    return Slot(layer.scale, A, B, stand_in)


def _own_tensors(patch: Patch, model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """module -> parameter -> tensor, of the whole tensors that differ from the base's."""
    own: dict[str, dict[str, Tensor]] = {}
    for name, tensor in patch.whole.items():
        module, _, key = name.rpartition(".")
        old = model.get_parameter(name)
        new = tensor.to(old.device, old.dtype)
        if not torch.equal(new, old):
            own.setdefault(module, {})[key] = new
    return own
