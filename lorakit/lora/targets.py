"""Find the layers that get an adapter, by PEFT's matching rules, and count which share of a base they are.

Every pattern must match. A list entry matches a module's full name or a dotted suffix of it. A string is a regular
expression for full names. ``all-linear`` is every linear layer of the text model that can be adapted exactly, but the
output head.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from torch import nn

from lorakit.errors import TargetError, did_you_mean
from lorakit.files.patterns import as_ending, matches_all, matches_beginning
from lorakit.files.text import count_of, first_of
from lorakit.lora.layer_kinds import (
    IN_CODES,
    LayerKind,
    QuantizedExperts,
    expert_parameters,
    is_linear_like,
    kind_of,
    trainable_kind,
)
from lorakit.lora.spec import ALL_LINEAR, MLP, AdapterSpec, Patterns

T = TypeVar("T")
MLP_NAME: Final = re.compile(r"mlp|ffn|feed_?forward|moe|expert|\.(fc|wi|wo)_?\w*$|\.(gate|up|gate_up|down)_proj$")
"""in names of the layers of an MLP, also of experts that are layers each"""
MAX_PROBLEMS: Final = 20  # patterns without a match that an error names
READ_PAST: Final = {
    "classifier": "e_score_correction_bias", "correction_coefs": "prediction_coefs", "dt_proj": "ssm_state_size",
    "out_proj": "ssm_state_size",
}  # fmt: skip
"""layer whose weight its module (LongCat's, Gemma 3n's, Mamba's) reads past it, in training or by a kernel -> a mark"""
PARTS_LEFT_OUT: Final = {
    "indexer": "it chooses tokens, without a gradient",
    "compressor": "it reads what is further away than most rows are long",
    "embed_tokens_extend": "outside of the text model",
}
"""part of a text model whose layers `all-linear` leaves out -> why"""
ROUTED: Final = re.compile(r"(^|\.)experts\.\d+\.")  # the name of a layer of one expert in a list of them


@dataclass(frozen=True)
class Target:
    """One layer that gets an adapter, or one 3-D parameter of experts."""

    name: str
    kind: LayerKind  # of experts: of one expert's matrix
    rank: int
    alpha: float
    out_features: int
    in_features: int
    num_experts: int = 0  # 0: a layer


def find_targets(model: nn.Module, spec: AdapterSpec) -> list[Target]:
    """Return the targets of `spec` in the model's order. Raises one TargetError that names all problems."""
    modules = dict(model.named_modules())
    head = _submodule(model, "get_output_embeddings")
    candidates = {name: module for name, module in modules.items() if is_linear_like(module)}
    problems: list[str] = []
    if spec.targets in (ALL_LINEAR, MLP):
        left_out = layers_left_out(model)
        matched = [name for name, module in candidates.items() if module is not head and name not in left_out]
        if spec.targets == MLP and not (matched := [name for name in matched if MLP_NAME.search(name)]):
            problems.append("adapter.targets: this base calls no layer that way (mlp, ffn, moe ...); name its layers")
    else:
        patterns = spec.targets if isinstance(spec.targets, str) else frozenset(spec.targets)  # there may be thousands
        matched = [name for name in modules if name and matches(patterns, name)]
        problems += _unmatched("adapter.targets", spec.targets, modules, candidates)
    if spec.exclude is not None:
        problems += _unmatched("adapter.exclude", spec.exclude, modules, candidates)
        matched = [name for name in matched if not matches(spec.exclude, name)]
    if spec.layers is not None:
        # as PEFT does: a target by its full name is adapted whatever its layer index
        full_names = () if isinstance(spec.targets, str) else spec.targets
        indices = sorted({index for name in matched if (index := layer_index(name)) is not None})
        span = f"{indices[0]} to {indices[-1]}" if indices else "none"
        missing = [index for index in spec.layers if index not in indices]
        problems += [f"adapter.layers: no target has layer index {index}; found {span}" for index in missing]
        matched = [name for name in matched if name in full_names or layer_index(name) in spec.layers]
    experts = [name for name, _ in expert_parameters(model)] if spec.target_parameters else []
    adapted = [*matched, *experts]
    problems += [
        f"adapter.{table}: {key!r} matches none of the {len(adapted)} targets."
        + did_you_mean(key, (name.rpartition(".")[2] for name in adapted))
        for table in ("rank_pattern", "alpha_pattern")
        for key in getattr(spec, table)
        if not any(matches_beginning(as_ending(key), name) for name in adapted)
    ][:MAX_PROBLEMS]
    if "" in matched:
        raise TargetError("an adapter replaces layers in a model, and this is a layer: nn.Sequential(layer) is a model")
    kinds = {name: trainable_kind(modules[name]) for name in matched}
    problems += _cannot_adapt({name: modules[name] for name, kind in kinds.items() if kind is None})
    routed = [name for name in matched if ROUTED.search(name)] if spec.dropout else []
    if routed:
        why = "whose tokens a router chooses, so its mask would depend on how a step is cut"
        problems.append(f"adapter.dropout: {routed[0]} is a layer of an expert, {why}; use 0, or adapter.exclude")
    rows = spec.trainable_tokens or spec.new_tokens
    has_others = spec.target_parameters or spec.modules_to_save or rows or spec.bias == "all"
    if not matched and not problems and not has_others:
        problems.append(f"adapter: nothing is left to adapt of {len(candidates)} linear layers")
    if problems:
        raise TargetError("\n".join(problems))
    return [target_of(spec, name, kind, kind.sizes(modules[name])) for name, kind in kinds.items() if kind]


def target_of(spec: AdapterSpec, name: str, kind: LayerKind, sizes: tuple[int, int], num_experts: int = 0) -> Target:
    """Return a target with its rank and alpha by the patterns of ``spec``. sizes: (out, in)."""
    rank = lookup(spec.rank_pattern, name, spec.rank)
    return Target(name, kind, rank, lookup(spec.alpha_pattern, name, spec.alpha), *sizes, num_experts)


def layers_left_out(model: nn.Module) -> dict[str, str]:
    """Return the linear layers that ``all-linear`` leaves out besides the output head, each with the reason."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):  # a model of the caller's, who names what cannot be adapted
        return {}
    decoder = _submodule(model, "get_decoder") if config.get_text_config() is not config else None
    own = set((decoder or model).modules())
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    shared = {*tied, *tied.values()}
    head = _submodule(model, "get_output_embeddings")
    left_out = {}
    for name, module in model.named_modules():
        parent, _, last = name.rpartition(".")
        if not is_linear_like(module):
            continue
        if module not in own:
            left_out[name] = "outside of the text model"
        elif trainable_kind(module) is None:
            left_out[name] = f"a {type(module).__name__}"
        elif ".encoder_attn." in name and not config.is_encoder_decoder:
            left_out[name] = "it attends to an encoder, and there is none"
        elif part := next((each for each in name.split(".") if each in PARTS_LEFT_OUT), None):
            left_out[name] = PARTS_LEFT_OUT[part]
        elif f"{name}.weight" in shared and module is not head:
            left_out[name] = "another layer has the same weight"
        elif last in READ_PAST and hasattr(model.get_submodule(parent), READ_PAST[last]):
            left_out[name] = "its weight is read past the layer"
    return left_out


def matches(patterns: str | Collection[str], name: str) -> bool:
    """True if a module's name matches: a string as a regular expression for the full name, a list by suffix."""
    if isinstance(patterns, str):
        return matches_all(patterns, name)
    return any(end in patterns for end in _ends(name))


def _ends(name: str) -> list[str]:
    """Return a name and what follows each of its dots."""
    parts = name.split(".")
    return [".".join(parts[first:]) for first in range(len(parts))]


def layer_index(name: str) -> int | None:
    """Return the first number that is a segment of its own after two others: 3 in ``model.layers.3.mlp``; or None."""
    match = re.match(r".*?\.[^.]*\.(\d+)\.", name)  # PEFT's expression for layers_to_transform
    return int(match.group(1)) if match else None


def lookup(pattern: Mapping[str, T], name: str, default: T) -> T:
    """Return the value of the first key that matches a name's end, as in PEFT's rank_pattern and alpha_pattern."""
    return next((value for key, value in pattern.items() if matches_beginning(as_ending(key), name)), default)


def tied_head(model: nn.Module) -> tuple[str, str] | None:
    """Return the names of the output head and the input embedding if they share a weight; None if they do not."""
    embedding, head = embedding_and_head(model)
    if head is None or embedding is None:
        return None
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    is_tied = bool(getattr(text() if callable(text) else config, "tie_word_embeddings", False))
    # of a class with vision, the config around the text model's decides
    is_tied = is_tied and f"{head}.weight" in getattr(model, "all_tied_weights_keys", [f"{head}.weight"])
    # a model without a config can only show it by sharing the parameter
    if not is_tied and model.get_submodule(embedding).weight is not model.get_submodule(head).weight:
        return None
    return head, embedding


def embedding_and_head(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the input embedding and the output head, each None if the model has none."""
    names: dict[nn.Module | None, str] = {module: name for name, module in model.named_modules()}
    embedding = _submodule(model, "get_input_embeddings")
    if getattr(model, "get_input_embeddings", None) is None:  # no method of transformers: the only one there is
        layers = [module for module in names if isinstance(getattr(module, "num_embeddings", None), int)]
        embedding = layers[0] if len(layers) == 1 else None
    return names.get(embedding), names.get(_submodule(model, "get_output_embeddings"))


def _submodule(model: nn.Module, getter: str) -> nn.Module | None:
    get = getattr(model, getter, None)  # a method of transformers' models, which other models need not have
    module = get() if callable(get) else None
    return module if isinstance(module, nn.Module) else None


def _unmatched(
    key: str, patterns: Patterns, modules: Mapping[str, nn.Module], candidates: Mapping[str, nn.Module]
) -> list[str]:
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in candidates))
    names = [*ends, *candidates]
    if isinstance(patterns, str):
        missing = [] if any(matches(patterns, name) for name in modules) else [patterns]
    else:
        known = {end for name in modules for end in _ends(name)}
        missing = [pattern for pattern in patterns if pattern not in known]
    experts = [name for name, _ in expert_parameters(modules[""])] if missing and key == "adapter.targets" else []
    problems = []
    for pattern in missing[:MAX_PROBLEMS]:
        list_it = f" A text is a regular expression of full names; write [{pattern}]."
        hint = list_it if isinstance(patterns, str) and pattern in names else did_you_mean(pattern, names)
        if any(matches(patterns if isinstance(patterns, str) else (pattern,), name) for name in experts):
            hint = " Experts are named in adapter.target_parameters."
        none = f"matches none of the {len(candidates)} linear layers of this base"
        problems.append(f"{key}: {pattern!r} {none}.{hint} Their names end in: {', '.join(ends[:12])}.")
    return problems


def _cannot_adapt(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield why modules get no adapter, and what to do: each reason once, with the first module."""
    reasons: dict[str, list[str]] = {}
    for name, module in modules.items():
        experts = [key for key, tensor in module.named_parameters(recurse=False) if tensor.dim() == 3]
        if any(isinstance(part, QuantizedExperts) for part in (module, *module.children())):
            why = IN_CODES
        elif experts and not isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            why = f"experts; name them in adapter.target_parameters: {', '.join(experts)}"
        else:
            why = f"a {type(module).__name__}, which lorakit cannot adapt (only Linear, Conv1D and Embedding layers);"
            why += " take it out of adapter.targets, or leave it out with adapter.exclude"
        reasons.setdefault(why, []).append(name)
    return (f"adapter.targets: {first_of(names, 1)}: {why}" for why, names in reasons.items())


@dataclass(frozen=True)
class LayerKindCoverage:
    """The matrices whose names end in `name`: linear layers such as ``q_proj``, or 3-D parameters of experts."""

    name: str
    example: str  # full name of the first
    adapted: int  # number of matrices with an adapter, of `count`
    count: int
    parameters: int
    adapted_parameters: int  # of the matrices with an adapter
    of_experts: bool  # such as ``experts.down_proj``


@dataclass(frozen=True)
class Coverage:
    """The matrices that a base multiplies by, grouped by the last part of their names. An unadapted head has size 0."""

    kinds: tuple[LayerKindCoverage, ...]

    @property
    def share(self) -> float:
        """Return the share of all matrix parameters that are in adapted matrices."""
        return sum(kind.adapted_parameters for kind in self.kinds) / max(1, sum(kind.parameters for kind in self.kinds))


def adapter_notes(spec: AdapterSpec, left_out: Mapping[str, str]) -> tuple[str, ...]:
    """Return remarks for the user. left_out: layers that `all-linear` would adapt, and why it does not."""
    notes = []
    if spec.targets == ALL_LINEAR and left_out:
        first = {reason: name for name, reason in list(left_out.items())[::-1]}
        each = [f"{number} such as {first[reason]} ({reason})" for reason, number in Counter(left_out.values()).items()]
        notes.append(f"all-linear leaves out {count_of(len(left_out), 'layer')}: {', '.join(each)}")
    if spec.new_tokens:
        notes.append("new tokens: " + ", ".join(f"{text} ({token})" for text, token in spec.new_tokens.items()))
    return tuple(notes)


def coverage_of(model: nn.Module, adapted: Collection[str]) -> Coverage:
    """Return the coverage of a model without an adapter, if the matrices named in `adapted` get one."""
    sizes_by_kind: dict[str, dict[str, int]] = {}
    _, head = embedding_and_head(model)
    sizes = {
        name: math.prod(kind.sizes(module))
        for name, module in model.named_modules()
        if is_linear_like(module) and (kind := kind_of(module)) is not None
    }
    experts = {name: math.prod(shape) for name, (_, shape) in expert_parameters(model)}
    experts |= {name: one.num_values for name, one in model.named_modules() if isinstance(one, QuantizedExperts)}
    for name, size in [*sizes.items(), *experts.items()]:
        size = 0 if name == head and name not in adapted else size
        suffix = ".".join(name.split(".")[-1 - (name in experts) :])
        sizes_by_kind.setdefault(suffix, {})[name] = size
    kinds = []
    for suffix, own in sizes_by_kind.items():
        of_adapted = [size for name, size in own.items() if name in adapted]
        counts = len(of_adapted), len(own), sum(own.values()), sum(of_adapted)
        kinds.append(LayerKindCoverage(suffix, next(iter(own)), *counts, of_experts=next(iter(own)) in experts))
    return Coverage(tuple(kinds))
