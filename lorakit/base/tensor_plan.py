"""Read how transformers would cut a model's layers over ranks, as data: its `tp_plan`. lorakit cuts them itself.

Invariant: a layer is cut only as the plan says, and a plan with a style that is not known here is refused by name.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import Tensor, nn

from lorakit.base.layers import repeated_layers
from lorakit.errors import RunError
from lorakit.lora.low_rank_sum import GROUPED_ALIGNMENT
from lorakit.lora.targets import embedding_and_head

OUTPUTS: Final = "outputs"
INPUTS: Final = "inputs"
SHARED: Final = "shared"
EXPERTS: Final = "experts"
STYLES: Final[Mapping[str, str]] = {
    "colwise": OUTPUTS,
    "rowwise": INPUTS,
    "replicated_with_grad_allreduce": SHARED,
    "moe_tp_experts": EXPERTS,
}
"""transformers' style -> what is cut: a layer's outputs, its inputs, each expert of a module of experts between its two
products, or nothing, in a module that reads a part"""
EXPERT_STYLES: Final[Mapping[str, str]] = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
"""the parameters of a module of experts, (experts, out, in), gate above up -> their style"""
REMEDY: Final = "set parallel.tensor: 1; sequence, fsdp2 and zero3 divide such a base too"


def tensor_plan(model: nn.Module, num_ranks: int) -> dict[str, str]:
    """Return what is cut of each module that the plan names: module name -> OUTPUTS, INPUTS, EXPERTS or SHARED.

    Embedding and head are not among them: they are cut by vocabulary.

    Raises:
        RunError: no plan, a style that is not known here, or heads that do not divide over the ranks.
    """
    styles = _styles_by_name(model)
    experts = [name for name, style in styles.items() if STYLES.get(style) == EXPERTS]
    problems = [problem for name in experts for problem in _expert_problems(model, name, styles)]
    of_experts = {f"{name}.{key}" for name in experts for key in EXPERT_STYLES}
    styles = {name: style for name, style in styles.items() if name not in of_experts}
    modules = dict(model.named_modules())
    problems += [f"{name} is {style!r}" for name, style in styles.items() if style not in STYLES]
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
    if not plan.keys() & experts and (OUTPUTS not in plan.values() or INPUTS not in plan.values()):
        raise RunError(
            f"parallel.tensor: transformers has no plan (tp_plan) how to cut {type(model).__name__}; {REMEDY}"
        )
    for name, what in plan.items():
        _check_size(model, name, what, num_ranks)
    return plan


def exchange_block(name: str, plan: Mapping[str, str]) -> str:
    """Return the module at whose borders ranks exchange what a layer of the plan reads and writes.

    It is the module that the layer is in. A module that has experts is one such block with all that is in it: router,
    experts and shared experts read one input, and their outputs are one sum.
    """
    return mixture_of(name, plan) or block_of(name)


def mixture_of(name: str, plan: Mapping[str, str]) -> str | None:
    """Return the name of the module with experts that a module is in, or is; None if it is in none."""
    mixtures = (block_of(module) for module, what in plan.items() if what == EXPERTS)
    return next((mixture for mixture in mixtures if name == mixture or name.startswith(f"{mixture}.")), None)


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


def _expert_problems(model: nn.Module, name: str, styles: Mapping[str, str]) -> Iterator[str]:
    """Yield why the experts of a module cannot be cut."""
    module = model.get_submodule(name)
    own = {key for key in module._parameters if "lora_" not in key}
    if any(styles.get(f"{name}.{key}") != style for key, style in EXPERT_STYLES.items()) or own != EXPERT_STYLES.keys():
        given = {key: styles.get(f"{name}.{key}", "not in the plan") for key in sorted(own | EXPERT_STYLES.keys())}
        yield f"{name} has {', '.join(f'{key} ({style})' for key, style in given.items())}"
    elif getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True):
        yield f"{name} stores its experts transposed, or gate and up row by row in turn"
    elif getattr(module, "has_post_expert_norm", False):
        yield f"{name} has a norm behind each expert, which needs its full output"
    elif any(block_of(name) == layer for layer in _layer_names(model)):
        yield f"{name} is in a layer itself, and not in a module beside its router"


def _layer_names(model: nn.Module) -> list[str]:
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(layer)] for layer in repeated_layers(model)]


def _check_size(model: nn.Module, name: str, what: str, num_ranks: int) -> None:
    """Raise RunError if a part of a layer would not be full heads, or if there are fewer columns than ranks."""
    layer, block = model.get_submodule(name), model.get_submodule(block_of(name))
    if what == SHARED:
        return
    if what == EXPERTS:
        _check_expert_size(name, layer.get_parameter("down_proj"), num_ranks)
        return
    size = int(layer.out_features if what == OUTPUTS else layer.in_features)  # type: ignore[arg-type]
    head_dim: Any = getattr(block, "head_dim", None)
    heads = size // head_dim if isinstance(head_dim, int) and size % head_dim == 0 else None
    if heads is not None and heads % num_ranks:
        raise RunError(
            f"parallel.tensor: {num_ranks} processes cannot share the {heads} heads of {name};"
            f" {f'choose a divisor of {heads}' if heads > 1 else 'leave it out'}"
        )
    if size < num_ranks:
        raise RunError(f"parallel.tensor: {num_ranks} processes cannot share the {size} {what} of {name}")


def _check_expert_size(name: str, down_proj: Tensor, num_ranks: int) -> None:
    """Raise RunError if a part of an expert has no columns, or rows that are not aligned as those of the full one."""
    size, aligned = down_proj.shape[-1], GROUPED_ALIGNMENT // down_proj.element_size()
    if size < num_ranks or (size % aligned == 0 and size % (aligned * num_ranks)):
        raise RunError(
            f"parallel.tensor: {num_ranks} processes cannot share the {size} columns of each expert of {name}: a part"
            f" needs a multiple of {aligned}, because grouped products read rows of {GROUPED_ALIGNMENT} bytes"
        )
