"""Read how transformers would cut a model's layers over ranks, as data: its `tp_plan`. lorakit cuts them itself.

Invariant: a layer is cut only as the plan says, and a plan with a style that is not known here is refused by name.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from lorakit.errors import RunError
from lorakit.lora.targets import embedding_and_head

OUTPUTS: Final = "outputs"
INPUTS: Final = "inputs"
SHARED: Final = "shared"
STYLES: Final[Mapping[str, str]] = {
    "colwise": OUTPUTS,
    "rowwise": INPUTS,
    "replicated_with_grad_allreduce": SHARED,
}
"""transformers' style -> what is cut: a layer's outputs, its inputs, or nothing, in a module that reads a part"""
REMEDY: Final = "set parallel.tensor: 1; sequence, fsdp2 and zero3 divide such a base too"


def tensor_plan(model: nn.Module, num_ranks: int) -> dict[str, str]:
    """Return what is cut of each module that the plan names: module name -> OUTPUTS, INPUTS or SHARED.

    Embedding and head are not among them: they are cut by vocabulary.

    Raises:
        RunError: no plan, a style that is not known here, or heads that do not divide over the ranks.
    """
    styles = _styles_by_name(model)
    modules = dict(model.named_modules())
    problems = [f"{name} is {style!r}" for name, style in styles.items() if style not in STYLES]
    problems += [
        f"{name} is no linear layer"
        for name, style in styles.items()
        if STYLES.get(style) in (OUTPUTS, INPUTS) and not hasattr(modules.get(name), "out_features")
    ]
    if problems:
        raise RunError(
            f"parallel.tensor: {type(model).__name__} is cut in ways that lorakit does not have"
            f" ({'; '.join(problems[:3])}); {REMEDY}"
        )
    plan = {name: STYLES[style] for name, style in styles.items()}
    if OUTPUTS not in plan.values() or INPUTS not in plan.values():
        raise RunError(
            f"parallel.tensor: transformers has no plan (tp_plan) how to cut {type(model).__name__}; {REMEDY}"
        )
    for name, what in plan.items():
        _check_size(model, name, what, num_ranks)
    return plan


def block_of(name: str) -> str:
    """Return the name of the module that a layer is in, such as `model.layers.0.self_attn`."""
    return name.rpartition(".")[0]


def _styles_by_name(model: nn.Module) -> dict[str, str]:
    """Return the plan's style of each module, and of each parameter that it names."""
    entries: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    outside = {name for name in embedding_and_head(model) if name}
    styles = {}
    patterns = [(re.compile(re.escape(key).replace(r"\*", r"\d+")), style) for key, style in entries.items()]
    names = [*dict(model.named_modules()), *(name for name, _ in model.named_parameters(remove_duplicate=False))]
    for name in names:
        for pattern, style in patterns:
            if name not in outside and pattern.fullmatch(name):
                styles[name] = style
    return styles


def _check_size(model: nn.Module, name: str, what: str, num_ranks: int) -> None:
    """Raise RunError if a part of a layer would not be full heads, or if there are fewer columns than ranks."""
    layer, block = model.get_submodule(name), model.get_submodule(block_of(name))
    if what == SHARED:
        return
    size = int(layer.out_features if what == OUTPUTS else layer.in_features)  # type: ignore[arg-type]
    head_dim: Any = getattr(block, "head_dim", None)
    heads = size // head_dim if isinstance(head_dim, int) and size % head_dim == 0 else None
    if heads is not None and heads % num_ranks:
        raise RunError(
            f"parallel.tensor: {num_ranks} processes cannot share the {heads} heads of {name}; choose a divisor of"
            f" {heads}"
        )
    if size < num_ranks:
        raise RunError(f"parallel.tensor: {num_ranks} processes cannot share the {size} {what} of {name}")
