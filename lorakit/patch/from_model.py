"""The adapter of a model as a patch: what was trained becomes what PEFT's files can say."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lorakit.errors import PatchError
from lorakit.lora.experts import LoraExperts
from lorakit.lora.inject import adapter_modules
from lorakit.lora.linear import LoraLinear, TiedLoraHead
from lorakit.lora.methods import METHODS
from lorakit.lora.modules_to_save import TrainableModule, TrainableTokens
from lorakit.patch.patch import Patch, PatchLayer, TokenRows
from lorakit.patch.write import new_patch


@dataclass
class _Gathered:
    layers: dict[str, PatchLayer] = field(default_factory=dict)
    whole: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, TokenRows] = field(default_factory=dict)
    tied: bool = False


def patch_from_model(
    model: nn.Module, tensors: Mapping[str, Tensor], *, facts: Mapping[str, Any], base_model: str | None,
    revision: str | None = None,
) -> Patch:  # fmt: skip
    """The adapter of ``model`` as a patch; ``tensors`` are its whole tensors by name, fixed ones too, in float32.

    An adapter that began at a part of W (pissa, olora) becomes a plain one of twice the rank, on W itself.

    Raises:
        PatchError: the model has no adapter, or a tensor is missing, mis-shaped or not finite.
    """
    found = _Gathered()
    dropout, transposed = 0.0, list[bool]()
    for name, carrier in adapter_modules(model):
        if isinstance(carrier, LoraLinear):
            found.layers[name] = _linear(name, carrier, tensors)
            dropout, transposed = carrier.dropout.p, [*transposed, carrier.kind.transposed]
        elif isinstance(carrier, LoraExperts):
            found.layers |= _experts(name, carrier, tensors)
        elif isinstance(carrier, TrainableTokens):
            rows = _taken(tensors, f"{name}.trainable_tokens_delta", (len(carrier.tokens), carrier.embedding_dim))
            found.rows[name] = TokenRows(carrier.tokens, rows)
        if isinstance(carrier, TrainableModule | LoraLinear):
            found.whole |= {
                f"{name}.{key}": _taken(tensors, f"{name}.{key}", None)
                for key in carrier.adapter_tensors()
                if not key.startswith("lora_")
            }
        if isinstance(carrier, TiedLoraHead):
            _mirror(name, carrier, model, found)
        if isinstance(carrier, TrainableModule) and carrier.shared is not None:
            found.whole[f"{name}.weight"] = _taken(tensors, carrier.shared, None)
            found.tied = True
    if not found.layers:
        raise PatchError("the model has no adapter: call lorakit.inject first")
    return new_patch(
        found.layers, whole=found.whole, rows=found.rows, tied=found.tied,
        facts=facts, base_model=base_model, revision=revision, dropout=dropout,
        all_modules=[name for name, _ in model.named_modules()],
        task_type="CAUSAL_LM" if type(model).__name__.endswith("ForCausalLM") else None,
        fan_in_fan_out=bool(transposed) and all(transposed),
    )  # fmt: skip


def _linear(name: str, layer: LoraLinear, tensors: Mapping[str, Tensor]) -> PatchLayer:
    sizes, rank = (layer.out_features, layer.in_features), layer.rank
    shapes = {"lora_A": (rank, sizes[1]), "lora_B": (sizes[0], rank)}
    own = {part: _taken(tensors, f"{name}.{part}", shape) for part, shape in shapes.items()}
    for part in set(layer.adapter_tensors()) - set(own) - {"bias"}:
        own[part] = _taken(tensors, f"{name}.{part}", (sizes[0],))
    embedding = layer.kind.name == "Embedding"
    method = "lora" if METHODS[layer.method].fixed == ("lora_A",) else layer.method
    if "lora_A0" not in layer.fixed_tensors():
        return PatchLayer(method, rank, layer.alpha, sizes, own, embedding)
    A0, B0 = (_taken(tensors, f"{name}.{part}0", shape) for part, shape in shapes.items())
    both = {"lora_A": torch.cat([own["lora_A"], A0]), "lora_B": torch.cat([own["lora_B"], -B0], dim=1)}
    return PatchLayer("lora", 2 * rank, layer.scale * 2 * rank, sizes, both, embedding)


def _experts(name: str, layer: LoraExperts, tensors: Mapping[str, Tensor]) -> dict[str, PatchLayer]:
    found = {}
    for parameter, update in layer.adapted.items():
        own = {
            part: _taken(tensors, f"{name}.{parameter}.{part}", shape)
            for part, shape in (
                ("lora_A", (update.num_experts * update.rank, update.in_features)),
                ("lora_B", (update.out_features, update.rank * update.num_experts)),
            )
        }
        sizes = (update.out_features, update.in_features)
        method = "lora" if METHODS[update.method].fixed == ("lora_A",) else update.method
        found[f"{name}.{parameter}"] = PatchLayer(
            method, update.rank, update.alpha, sizes, own, num_experts=update.num_experts
        )
    return found


def _mirror(name: str, head: TiedLoraHead, model: nn.Module, found: _Gathered) -> None:
    """The head's own factors, which are the embedding's the other way round."""
    embedding = next(
        other for other, carrier in adapter_modules(model)
        if isinstance(carrier, LoraLinear) and carrier.get_parameter("lora_A") is head.get_parameter("lora_A")
    )  # fmt: skip
    layer = found.layers[embedding]
    mirrored = {"lora_A": layer.tensors["lora_B"].T.contiguous(), "lora_B": layer.tensors["lora_A"].T.contiguous()}
    found.layers[name] = PatchLayer(layer.method, layer.rank, layer.alpha, layer.sizes[::-1], mirrored)
    found.tied = True


def _taken(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...] | None) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or (shape is not None and tuple(tensor.shape) != shape):
        got = "nothing" if tensor is None else tuple(tensor.shape)
        raise PatchError(f"{name}: {shape or 'a tensor'} was trained, {got} arrived to be saved")
    return tensor
