"""Bind a patch to a model in memory: slots for hot swapping, a merged copy, or an adapter on the caller's own model.

Invariant: every tensor of the patch is bound to a layer of the model, or the patch is refused. A call that raises an
error leaves the model as it was. Only `merge_into` changes weights of the base, and it replaces parameters: no tensor
of the base is written.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lorakit.base.transformers_io import vocabulary_size
from lorakit.errors import PatchError, TargetError
from lorakit.lora import AdapterSpec, adapter_modules, attach
from lorakit.lora.experts import expert_sum, with_attributes
from lorakit.lora.inject import adapting, checkpoint_tensors, replace_modules, restore_layers
from lorakit.lora.layer_kinds import LINEAR, QuantizedLinear, expert_kind, stored_kind, weight_of
from lorakit.lora.merge_weight import RowsUpdate, merged_weight
from lorakit.lora.methods import METHODS
from lorakit.lora.targets import tied_head
from lorakit.lora.wrappers import check_unwrapped
from lorakit.ops._internals import remove_forward_hooks
from lorakit.ops.batch_invariance import is_height_dependent
from lorakit.patch import BaseShapes, Patch, PatchLayer, check_fits, read_patch
from lorakit.patch.fit import Binding, bind, with_head_names, without_copies
from lorakit.patch.model import fill_adapter, patch_from_model, patch_settings
from lorakit.patch.patch import TokenRows, is_finite
from lorakit.patch.prompting import PromptForm
from lorakit.patch.same_base import Allow, check_live_base
from lorakit.slots.bank import LayerBank
from lorakit.slots.hooks import NewTokenEmbedding, RouteLengthHook, copy_with, sharing_copy
from lorakit.slots.routing import Adapter, Slot, adapter_numbers


@dataclass(frozen=True)
class PatchSource:
    """The patch that a loaded adapter was read from."""

    folder: Path
    identity: str | None  # None where only its header was read, and nothing beside the file records its digest
    note: str | None
    """Sentence for users if only shapes could be compared, or the base is quantised in another way; else None."""
    rank: int  # the largest of its layers; 0 if it has no low-rank update
    num_bytes: int  # of its tensors, in the dtype they are stored in
    form: PromptForm  # of its rows in training


def build_adapter(
    patch: Patch, model: nn.Module, base: BaseShapes, banks: dict[str, LayerBank], facts: Any, expected_adapters: int
) -> Adapter:
    """Return the adapter of a patch that fits, with its factors in the banks by layer name. ``facts``: for the caller.

    base: the model's shapes. expected_adapters: of a new bank. Tensors are on their layer's device, in its dtype.
    Full tensors that equal the base's are left out, because PEFT saves such copies beside an adapted embedding.
    Raises PatchError: its values overflow the base's dtype.
    """
    slots: dict[str, Slot] = {}
    bindings: dict[str, list[Binding]] = {}
    for binding in bind(patch := without_copies(patch, base_values(model)), base):
        bindings.setdefault(binding.module, []).append(binding)
    for name, own in bindings.items():
        layer = model.get_submodule(name)
        full_tensors = {
            one.key: _cast(patch.full_tensors[one.name], model.get_parameter(one.parameter), one.name)
            for one in own
            if one.part is None
        }
        updates = {one.key: one.part for one in own if isinstance(one.part, PatchLayer)}
        if any(update.num_experts for update in updates.values()):
            slots[name] = Slot(replacement=_with_experts(name, copy_with(layer, full_tensors), updates))
            continue
        replacement = copy_with(layer, full_tensors) if full_tensors else None
        if replacement is not None and name == base.embedding:  # it sees the ids of other rows too
            NewTokenEmbedding.install(replacement)
        slots[name] = Slot(replacement=replacement)
        for update in updates.values():  # of its weight, if there is one
            A, B, gain = _factors(update, layer, replacement)
            bank = banks.setdefault(name, LayerBank(expected_adapters))
            slots[name] = Slot(bank.add(A, B), replacement, gain)
        for rows in (one.part for one in own if isinstance(one.part, TokenRows)):
            _add_rows(slots, name, rows, model)
    return Adapter(next(adapter_numbers), slots, patch.identity, facts, patch.num_added_rows(vocabulary_size(model)))


def base_values(model: nn.Module) -> Callable[[str], Tensor]:
    """Return parameter -> its values on the CPU."""
    return lambda name: model.get_parameter(name).detach().cpu()


def _add_rows(slots: dict[str, Slot], name: str, token_rows: TokenRows, model: nn.Module) -> None:
    """Add the slots of rows of an embedding or a head, and of a head that shares the embedding's."""
    weight = weight_of(model.get_submodule(name))
    tokens = torch.tensor(token_rows.tokens, device=weight.device)
    rows = _cast(token_rows.tensor, weight, name)
    known = tokens < len(weight)
    for module in _sharing(name, model):
        layer = model.get_submodule(module)
        if isinstance(layer, nn.Embedding):
            slots[module] = Slot(rows=(tokens, rows))
            if not known.all():
                NewTokenEmbedding.install(layer)
            continue
        new = rows[~known][tokens[~known].argsort()]  # behind those of the base
        old = (tokens[known], rows[known]) if known.any() else None
        slots[module] = Slot(rows=old, new_rows=new if len(new) else None)


def _with_experts(name: str, replacement: nn.Module, changed: Mapping[str, PatchLayer]) -> nn.Module:
    """Return a copy of a module of experts, or of a router, that computes with the patch's updates."""
    sums = {}
    for parameter, layer in changed.items():
        W = replacement.get_parameter(parameter)
        if W.dim() == 2:  # of a router: small, and its code may do more with it than multiply
            replace_tensor(replacement, parameter, merged_weight(W, LINEAR, [layer.updates()], W.dtype))
            continue
        A, B = (_cast(layer.tensors[part], W, f"{name}.{parameter}") for part in ("lora_A", "lora_B"))
        sums[parameter] = expert_sum(W, A, B.contiguous(), layer.scale, expert_kind(replacement))
    return with_attributes(replacement, sums)


@torch.no_grad()
def check_replacements_called(patch: Patch, model: nn.Module, slots: Mapping[str, Slot]) -> None:
    """Raise PatchError unless the model calls every layer that a slot replaces: else it would have no effect."""
    layers = [name for name, slot in slots.items() if slot.replacement is not None]
    if not layers:
        return
    called: set[str] = set()
    with ExitStack() as hooks:
        for name in layers:
            hook = model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.add(name))
            hooks.enter_context(hook)
        model(input_ids=torch.zeros(1, 4, dtype=torch.long, device=next(model.parameters()).device))
    if missed := [name for name in layers if name not in called]:
        raise PatchError(f"{patch.folder}: the model reads {missed[0]} without calling the layer; merge it instead")


def merged_tensors(patch: Patch, model: nn.Module, base: BaseShapes) -> dict[str, Tensor]:
    """Return changed parameter -> merged weight. Raises PatchError: quantised, or a value does not fit its dtype."""
    changed: dict[str, Tensor] = {}
    for binding in bind(patch := without_copies(patch, base_values(model)), base):
        part = binding.part
        if isinstance(part, PatchLayer) and isinstance(model.get_submodule(binding.module), QuantizedLinear):
            raise PatchError(f"{binding.name} is quantised, so nothing can be merged into it; use lorakit merge")
        old = model.get_parameter(binding.parameter)
        if part is None:
            changed[binding.parameter] = _cast(patch.full_tensors[binding.name], old, binding.name)
        elif isinstance(part, TokenRows):
            num_added = max(0, max(part.tokens) + 1 - len(old))
            grown = torch.cat([old, old.new_zeros(num_added, old.shape[1])])
            assert binding.kind is not None
            rows = merged_weight(grown, binding.kind, [[RowsUpdate(part.tokens, part.tensor)]], old.dtype)
            changed |= {f"{module}.weight": rows for module in _sharing(binding.module, model)}
        else:
            # a layer may be trained in full and adapted
            W = patch.full_tensors[binding.parameter].to(old.device) if binding.parameter in patch.full_shapes else old
            kind = binding.kind or expert_kind(model.get_submodule(binding.module))
            changed[binding.parameter] = merged_weight(W, kind, [[one] for one in part.updates()], old.dtype)
    return changed


def merged_copy(patch: Patch, model: nn.Module, base: BaseShapes) -> nn.Module:
    """Return a copy of the model with the patch merged in; unchanged tensors are shared, ``model`` is not written."""
    merged = sharing_copy(model)
    remove_forward_hooks(merged, RouteLengthHook)
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


def load_patch(
    model: nn.Module, folder: str | Path, *, dropout: float = 0.0, allow: Collection[Allow] = ()
) -> nn.Module:
    """Put a patch on any torch model, in place: the base is frozen, and the adapter goes on learning if you train it.

    The inverse of ``save_patch``. Returns the same model. dropout: of the adapter, in training. allow: ``base`` accepts
    a model with other weights than the patch was trained on, or in another dtype than the base's files have.
    Raises PatchError: no patch, or one that does not fit. TargetError: no torch model, or one with an adapter.
    """
    with adapting(model, "load_patch"):
        patch = read_patch(folder)
        shapes = BaseShapes.of(model)
        patch = with_head_names(patch, shapes, model)
        check_fits(patch, shapes, type(model).__name__)
        if "base" not in allow:
            check_live_base(patch, model)
        spec = AdapterSpec(**{**patch_settings(patch), "new_tokens": patch.new_tokens, "dropout": dropout})
        attach(model, spec, seed=0)
        fill_adapter(model, without_copies(patch, base_values(model), checkpoint_tensors(model)))
    return model


def remove(model: nn.Module) -> nn.Module:
    """Take the adapter off a model from ``inject`` or ``load_patch``, in place: every layer is the base's own.

    The base stays frozen. Returns the same model.
    Raises TargetError: no adapter, or one that trained tensors of the base in full, whose own values are gone.
    """
    _check_adapted(model, "remove")
    full = [f"{name}.{key}" for name, module in adapter_modules(model) for key in module.full_tensors()]
    if full:
        raise TargetError(f"remove: the adapter trained {full[0]} in full; reload the base, or call lorakit.merge_into")
    restore_layers(model)
    return model


def merge_into(model: nn.Module) -> nn.Module:
    """Merge the adapter of a model from ``inject`` or ``load_patch`` into its weights, in place.

    Each changed weight is the float64 sum W + s B A rounded once to its dtype, as `lorakit merge` writes it. The layers
    are the base's own, and the adapter is gone. Returns the same model.
    Raises TargetError: no adapter, a quantised base, or a value does not fit. PatchError: a value is not finite.
    """
    _check_adapted(model, "merge_into")
    values = {name: tensor.detach().to("cpu", torch.float32) for name, tensor in checkpoint_tensors(model).items()}
    patch = patch_from_model(model, values, metadata={}, base_model=None)
    restored = restore_layers(model)
    try:
        merged = merged_tensors(patch, model, BaseShapes.of(model))
    except PatchError as problem:
        replace_modules(model, dict(restored))
        raise TargetError(f"merge_into: {problem}") from None
    for name, tensor in merged.items():
        replace_tensor(model, name, tensor)
    return model


def _check_adapted(model: nn.Module, call: str) -> None:
    check_unwrapped(model, call)
    if not any(adapter_modules(model)):
        raise TargetError(f"{call}: a model from lorakit.inject or load_patch expected, and this one has no adapter")


def _sharing(embedding: str, model: nn.Module) -> list[str]:
    tied = tied_head(model)
    return [embedding, tied[0]] if tied and tied[1] == embedding else [embedding]


def _factors(
    layer: PatchLayer, module: nn.Module, replacement: nn.Module | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return A, s B and the gain as `Method.serve` gives them, in the dtype that the layer computes in.

    A and B in float32 for bfloat16 on the CPU: small products are faster so, and alike in any batch (decision 77).
    """
    weight = weight_of(module)
    like = weight.new_empty(0, dtype=module.dtype) if isinstance(module, QuantizedLinear) else weight
    own = replacement or module
    kind = stored_kind(own)
    assert kind is not None
    A, B, gain = METHODS[layer.method].serve(layer.tensors, lambda: kind.read(own).detach().double(), layer.scale)
    gain = None if gain is None else _cast(gain, like, "gain")
    like = like.new_empty(0, dtype=torch.float32) if is_height_dependent(like) else like
    return _cast(A, like, "lora_A"), _cast(layer.scale * B.double(), like, "lora_B"), gain


def _cast(tensor: Tensor, like: Tensor, name: str) -> Tensor:
    """Return the tensor on the device and in the dtype of another. Raises PatchError: its values do not fit."""
    cast = tensor.to(like.device, like.dtype)
    if cast.dtype != tensor.dtype and not is_finite(cast):
        raise PatchError(f"{name}: its values do not fit {like.dtype}; load the base with dtype='float32'")
    return cast
