"""Put an adapter into any torch model: freeze the base, replace the targets."""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from lorakit.errors import TargetError
from lorakit.lora.layer import LoraLinear
from lorakit.lora.methods import INITS, METHODS
from lorakit.lora.targets import AdapterSpec, Patterns, Target, find_targets


def inject(
    model: nn.Module,
    *,
    method: str = "lora",
    rank: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    targets: str | list[str] | tuple[str, ...] = "all-linear",
    exclude: str | list[str] | tuple[str, ...] | None = None,
    layers: list[int] | tuple[int, ...] | None = None,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    init: str = "gaussian",
    seed: int = 0,
) -> nn.Module:
    """The same model, in place, with its base frozen and an untrained adapter on every target.

    Settings as in the recipe's ``adapter`` section. Train ``adapter_tensors(model)``; write with ``save_patch``.

    Raises:
        TargetError: a pattern matches nothing, or a matched layer cannot be adapted. The model is unchanged.
    """
    if any(isinstance(module, LoraLinear) for module in model.modules()):
        raise TargetError("the model has an adapter already (inject works in place); load the base again for another")
    if method not in METHODS or init not in INITS:
        raise TargetError(
            f"method is one of {', '.join(METHODS)}, init of {', '.join(INITS)}; got {method!r}, {init!r}"
        )
    ranks, alphas = [rank, *(rank_pattern or {}).values()], [alpha, *(alpha_pattern or {}).values()]
    if any(type(r) is not int or r < 1 for r in ranks) or any(not 0 < a < math.inf for a in alphas):
        raise TargetError(f"ranks are whole numbers from 1, alphas above 0; got {ranks}, {alphas}")
    if not 0 <= dropout < 1:
        raise TargetError(f"0 <= dropout < 1; got {dropout}")
    for text in [*(p for p in (targets, exclude) if isinstance(p, str)), *(rank_pattern or {}), *(alpha_pattern or {})]:
        try:
            re.compile(text)
        except re.error as problem:
            raise TargetError(f"{text!r} is not a regular expression: {problem}") from None
    spec = AdapterSpec(
        method, rank, float(alpha), dropout, _frozen(targets), None if exclude is None else _frozen(exclude),
        None if layers is None else tuple(layers), dict(rank_pattern or {}), dict(alpha_pattern or {}), init,
    )  # fmt: skip
    return attach(model, find_targets(model, spec), spec, seed)


def attach(model: nn.Module, targets: list[Target], spec: AdapterSpec, seed: int) -> nn.Module:
    """The model with an untrained adapter on each of ``targets``; everything else is frozen.

    Each A is drawn on the CPU from its own stream, a function of the seed and the layer's name, so that the start
    does not depend on device, order or number of processes.
    """
    model.requires_grad_(False)
    for target in targets:
        layer = model.get_submodule(target.name)
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        stream = torch.Generator().manual_seed(_stream(seed, target.name))
        start = METHODS[spec.method].init(
            target.out_features, target.in_features, target.rank, spec.init, stream
        )  # fmt: skip
        adapted = LoraLinear(
            layer, target.kind, method=spec.method, rank=target.rank, alpha=target.alpha, dropout=spec.dropout,
            tensors={k: tensor if weight.is_meta else tensor.to(weight.device) for k, tensor in start.items()},
        )  # fmt: skip
        replace_module(model, layer, adapted)
    return model


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put ``new`` wherever ``old`` hangs in the model; a layer used in two places stays one layer."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children() hides the second use of a layer
            if child is old:
                parent.register_module(name, new)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """(module name, layer) of every layer that carries an adapter."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLinear))


def adapter_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable tensors by name, such as ``model.layers.0.self_attn.q_proj.lora_A``. Looked up now."""
    return {
        f"{name}.{key}": tensor
        for name, layer in adapted_layers(model)
        for key, tensor in layer.adapter_tensors().items()
    }


def _stream(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "little")


def _frozen(patterns: str | list[str] | tuple[str, ...]) -> Patterns:
    return patterns if isinstance(patterns, str) else tuple(patterns)
