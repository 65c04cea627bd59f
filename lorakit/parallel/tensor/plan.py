"""Read how transformers would cut a model's layers over ranks, as data: its `tp_plan`. `axis` cuts them.

Embedding and output head are cut by vocabulary, where they are frozen and plain.

Invariant: a layer is cut only as the plan says, and a plan with a style that is not known here is refused by name.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from torch import nn

from lorakit.base.layers import repeated_layers
from lorakit.base.quantized import quantized_weight
from lorakit.errors import RunError
from lorakit.lora import LoraLinear, adapter_modules
from lorakit.lora.experts import GROUPED_ALIGNMENT
from lorakit.lora.methods import METHODS
from lorakit.lora.targets import embedding_and_head
from lorakit.parallel.tensor.shards import CutDim

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
ROWS: Final = CutDim(0)
COLUMNS: Final = CutDim(1)


def _dims_over(axis: str) -> dict[str, CutDim]:
    """Return the dimension of each tensor of the methods that runs over a layer's `out` or `in`."""
    tensors = [item for method in METHODS.values() for item in method.tensors.items()]
    return {name: CutDim(each.axes.index(axis)) for name, each in tensors if axis in each.axes}


CUT_DIMS: Final[Mapping[str, Mapping[str, CutDim]]] = {
    OUTPUTS: dict.fromkeys(("weight", "bias", "lora_B0"), ROWS) | _dims_over("out"),
    INPUTS: dict.fromkeys(("weight", "lora_A0"), COLUMNS) | _dims_over("in"),
    EXPERTS: {
        "gate_up_proj": CutDim(1, pieces=2),
        "gate_up_proj_lora_B": CutDim(0, pieces=2),
        "down_proj": CutDim(2),
        "down_proj_lora_A": COLUMNS,
    },
}
"""what is cut -> tensor of a layer -> the dimension of which a rank has a part"""


def checked_plan(model: nn.Module, num_ranks: int) -> dict[str, str]:
    """Return `tensor_plan` if a model and its adapter can be cut. Raises RunError: the tensors that cannot."""
    if num_ranks == 1:
        return {}
    plan = tensor_plan(model, num_ranks)
    blocks = {block_of(name) for name, what in plan.items() if what == OUTPUTS}
    for name in plan:
        if quantized_weight(model.get_submodule(name)) is not None:
            raise RunError(f"parallel.tensor: {name} is quantised, and only weights in floats are cut; {REMEDY}")
    for name, module in adapter_modules(model):
        inside = any(name == block or name.startswith(f"{block}.") for block in blocks)
        if name not in plan and inside and mixture_of(name, plan) is None:
            raise RunError(f"parallel.tensor: {name} is trained in a block that is cut; leave it out of the adapter")
        has_bias = module._parameters.get("bias") is not None
        if plan.get(name) == INPUTS and has_bias and not isinstance(module, LoraLinear):
            # its own code would add the bias on every rank
            raise RunError(f"parallel.tensor: {name} is trained in full, and has a bias; train it with factors")
    return plan


def cut_dims(model: nn.Module, plan: Mapping[str, str], num_ranks: int) -> dict[str, CutDim]:
    """Return the dimension of which a rank has a part, by the names of all tensors that are cut."""
    dims = {
        f"{name}.{key}": replace(dim, copies=_copies(model, name, what, num_ranks))
        for name, what in plan.items()
        for key, dim in CUT_DIMS.get(what, {}).items()
        if model.get_submodule(name)._parameters.get(key) is not None
    }
    for name in vocabulary_modules(model):
        dims |= {f"{name}.{key}": ROWS for key, _ in model.get_submodule(name).named_parameters()}
    return dims


def vocabulary_modules(model: nn.Module) -> list[str]:
    """Return the names of the vocabulary-parallel modules: frozen nn.Embedding and frozen, plain nn.Linear head."""
    modules = {name: model.get_submodule(name) for name in embedding_and_head(model) if name is not None}
    cut = []
    for name, module in modules.items():
        is_plain_head = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        is_frozen = not any(parameter.requires_grad for parameter in module.parameters())
        if is_frozen and (is_plain_head or isinstance(module, nn.Embedding)):
            cut.append(name)
    are_tied = len({id(module._parameters.get("weight")) for module in modules.values()}) < len(modules)
    return [] if are_tied and len(cut) < len(modules) else cut  # one of two that share a weight may read it in full


def tensor_plan(model: nn.Module, num_ranks: int) -> dict[str, str]:
    """Return module name -> OUTPUTS, INPUTS, EXPERTS or SHARED, but for embedding and head, cut by vocabulary.

    Raises RunError: no plan, a style that is not known here, or heads that do not divide over the ranks.
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
        shown = "; ".join(problems[:3])
        raise RunError(f"parallel.tensor: {type(model).__name__} is not cut as lorakit can ({shown}); {REMEDY}")
    plan = {name: STYLES[style] for name, style in styles.items()}
    if not plan.keys() & experts and (OUTPUTS not in plan.values() or INPUTS not in plan.values()):
        raise RunError(f"parallel.tensor: transformers has no plan (tp_plan) to cut {type(model).__name__}; {REMEDY}")
    for name, what in plan.items():
        _check_size(model, name, what, num_ranks)
    return plan


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
    names = [*dict(model.named_modules()), *(name for name, _ in model.named_parameters(remove_duplicate=False))]
    # the plan has `*` where a name has the number of a layer
    keys = {name: re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names if name not in outside}
    return {name: entries[key] for name, key in keys.items() if key in entries}


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
    elif model.get_submodule(block_of(name)) in repeated_layers(model):
        yield f"{name} is in a layer itself, and not in a module beside its router"


def _heads(block: nn.Module, size: int) -> int | None:
    """Return the heads of a projection of so many values; None outside of attention."""
    head_dim: Any = getattr(block, "head_dim", None)
    return size // head_dim if isinstance(head_dim, int) and size % head_dim == 0 else None


def _copies(model: nn.Module, name: str, what: str, num_ranks: int) -> int:
    """Return the neighbouring ranks that have the same head of keys or values; 1: each has heads of its own."""
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    kv_heads = getattr(config, "num_key_value_heads", None)
    if what != OUTPUTS or not kv_heads or num_ranks % kv_heads or config.num_attention_heads % num_ranks:
        return 1
    heads = _heads(model.get_submodule(block_of(name)), int(model.get_submodule(name).out_features))  # type: ignore[arg-type]
    return num_ranks // kv_heads if heads == kv_heads else 1


def _check_size(model: nn.Module, name: str, what: str, num_ranks: int) -> None:
    """Raise RunError if a part would not be full heads, or of an expert aligned rows, or would have no columns."""
    layer = model.get_submodule(name)
    block = model.get_submodule(block_of(name))
    refusal = f"parallel.tensor: {num_ranks} processes cannot share the"
    if what == SHARED:
        return
    if what == EXPERTS:
        down_proj = layer.get_parameter("down_proj")
        columns = down_proj.shape[-1]
        aligned = GROUPED_ALIGNMENT // down_proj.element_size()
        if columns < num_ranks or (columns % aligned == 0 and columns % (aligned * num_ranks)):
            # grouped products read rows of GROUPED_ALIGNMENT bytes
            raise RunError(f"{refusal} {columns} columns of each expert of {name}: each needs a multiple of {aligned}")
        return
    size = int(layer.out_features if what == OUTPUTS else layer.in_features)  # type: ignore[arg-type]
    heads = _heads(block, size)
    if heads is not None and heads % num_ranks and _copies(model, name, what, num_ranks) == 1:
        remedy = f"choose a divisor of {heads}" if heads > 1 else "leave it out"
        raise RunError(f"{refusal} {heads} heads of {name}; {remedy}")
    if size < num_ranks:
        raise RunError(f"{refusal} {size} {what} of {name}")
