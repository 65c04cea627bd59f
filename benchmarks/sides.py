"""The two sides of a training step, on the same rows and from the same adapter: lorakit's engine, and torch with PEFT.

Whoever imports this has imported what any side needs; no recipe is read here, so torch, transformers and PEFT do.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lorakit.backends import BACKENDS
from lorakit.base.device import training_products
from lorakit.lora import adapter_tensors, inject
from lorakit.objectives.cross_entropy import LossModel
from lorakit.objectives.objective import SFT, Objective
from lorakit.ops.fuse import fuse_model
from lorakit.ops.packed_attention import enable_packed_attention, varlen_kernel
from lorakit.ops.products import use_products
from lorakit.parallel import Group, StepSettings
from lorakit.parallel.adapter_state import build_optimizer
from lorakit.parallel.single import SingleEngine

RANK, RATE, CLIP = 16, 1e-4, 1.0


def lorakit_engine(
    model: nn.Module, adapter: Mapping[str, Tensor], device: torch.device, objective: Objective = SFT
) -> SingleEngine:
    """lorakit's own engine for packed rows, with an adapter of these values on the model."""
    inject(model, rank=RANK, alpha=2.0 * RANK)
    fuse_model(model)
    put(adapter, adapter_tensors(model))
    section = SimpleNamespace(backend="single", facts=BACKENDS["single"], offloads=SimpleNamespace(streams=False))
    engine = SingleEngine(section, device, Group())  # type: ignore[arg-type] # no pydantic
    train = SimpleNamespace(
        optimizer="adamw", beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0, loraplus_lr_ratio=None
    )
    loss_model = LossModel(model, objective)
    use_products(loss_model, training_products(next(model.parameters()).dtype, device))
    build = partial(build_optimizer, train)  # type: ignore[arg-type] # no pydantic
    engine.prepare(loss_model, build, StepSettings(0, CLIP, lambda step: RATE))
    loss_model.packed_attention, loss_model.kernel = enable_packed_attention(model), varlen_kernel(device)
    return engine


def patch_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a patch, by the names of `adapter_tensors`."""
    from lorakit.patch import read_patch  # here, because it needs packages that a rented GPU machine lacks

    layers = read_patch(folder).layers
    return {f"{layer}.{key}": tensor for layer, one in layers.items() for key, tensor in one.tensors.items()}


def peft_model(model: Any, adapter: Mapping[str, Tensor], *, defaults: bool) -> Any:
    """The model with PEFT's adapter of these values, in PEFT's best form or as it comes."""
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    adapted = get_peft_model(model, config, autocast_adapter_dtype=defaults)
    learning = {name: tensor for name, tensor in adapted.named_parameters() if tensor.requires_grad}
    plain = {name.removeprefix("base_model.model.").removesuffix(".default.weight"): t for name, t in learning.items()}
    put(adapter, plain)
    return adapted


def put(adapter: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    """The adapter's values into tensors of the same names."""
    if adapter.keys() != into.keys():
        raise ValueError(f"adapters of other layers: {sorted(adapter.keys() ^ into.keys())[:4]}")
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(adapter[name])


def adamw(model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
    """torch's own, over everything that learns."""
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=RATE, weight_decay=0.0, fused=fused)


def frozen(model: Any) -> Any:
    """The base alone, with a backward pass to its first layer."""
    model.requires_grad_(False)
    model.enable_input_require_grads()
    return model


def torch_step(
    model: Any, optimizer: torch.optim.Optimizer | None, micro_batches: Sequence[Mapping[str, Tensor]]
) -> tuple[Tensor, Tensor | None]:
    """Loss and gradient norm of one step in a loop without Trainer's extras, over micro-batches of as many labels."""
    losses = []
    for inputs in micro_batches:
        loss = model(**inputs, use_cache=False).loss / len(micro_batches)
        loss.backward()
        losses.append(loss.detach())
    norm = None
    if optimizer is not None:
        norm = nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).sum(), norm
