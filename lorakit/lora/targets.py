"""Which layers get an adapter, and with which rank and alpha: PEFT's matching rules, and no silent miss.

A list entry matches a module's whole name or a dotted suffix of it; a text is a regular expression for the whole
name; ``all-linear`` is every linear layer but the output head. Every pattern must match something.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from lorakit.errors import TargetError, did_you_mean
from lorakit.lora.experts import expert_parameters
from lorakit.lora.layer_kinds import LayerKind, is_linear_like, trainable_kind
from lorakit.lora.spec import ALL_LINEAR, AdapterSpec, Patterns

T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """One layer that gets an adapter."""

    name: str
    kind: LayerKind
    rank: int
    alpha: float
    out_features: int
    in_features: int

    @property
    def num_parameters(self) -> int:
        return self.rank * (self.in_features + self.out_features)


def find_targets(model: nn.Module, spec: AdapterSpec) -> list[Target]:
    """Every target of ``spec`` in ``model``, in the model's order. Works on the meta device.

    Raises:
        TargetError: all problems at once: a pattern that matches nothing, or a layer that cannot be adapted.
    """
    modules = dict(model.named_modules())
    head = _output_head(model)
    candidates = {name: module for name, module in modules.items() if is_linear_like(module)}
    problems: list[str] = []
    if spec.targets == ALL_LINEAR:
        matched = [name for name, module in candidates.items() if module is not head]
    else:
        matched = [name for name in modules if name and matches(spec.targets, name)]
        problems += _unmatched("adapter.targets", spec.targets, modules, candidates)
    if spec.exclude is not None:
        problems += _unmatched("adapter.exclude", spec.exclude, modules, candidates)
        matched = [name for name in matched if not matches(spec.exclude, name)]
    if spec.layers is not None:
        whole_names = () if isinstance(spec.targets, str) else spec.targets  # PEFT lets a whole name through
        reached = {layer_index(name) for name in matched}
        problems += [
            f"adapter.layers: no target has layer index {index}; found {_range(reached)}"
            for index in spec.layers
            if index not in reached
        ]
        matched = [name for name in matched if name in whole_names or layer_index(name) in spec.layers]
    stacked = [f"{name}.{key}" for name, _, key in expert_parameters(model)] if spec.target_parameters else []
    problems += _bad_patterns(spec, [*matched, *stacked])
    problems += [_cannot_adapt(name, modules[name]) for name in matched if trainable_kind(modules[name]) is None]
    if not matched and not problems and not has_other_targets(spec):
        problems.append(f"adapter: nothing is left to adapt of {len(candidates)} linear layers")
    if problems:
        raise TargetError("\n".join(problems))
    return [_target(name, modules[name], spec) for name in matched]


def has_other_targets(spec: AdapterSpec) -> bool:
    """Whether an adapter has something to learn without any low-rank target."""
    return bool(spec.target_parameters or spec.modules_to_save or spec.trainable_tokens or spec.bias == "all")


def matches(patterns: Patterns, name: str) -> bool:
    """Whether a module's name matches: a text as a whole-name regular expression, a list by suffix."""
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return any(name == pattern or name.endswith(f".{pattern}") for pattern in patterns)


def layer_index(name: str) -> int | None:
    """The first number that is a whole segment below the second one: 3 in ``model.layers.3.mlp``."""
    found = re.match(r".*?\.[^.]*\.(\d+)\.", name)
    return int(found.group(1)) if found else None


def lookup(pattern: Mapping[str, T], name: str, default: T) -> T:
    """The value of the first key that matches the name's end, as PEFT's rank_pattern and alpha_pattern work."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", name)), default)


def tied_head(model: nn.Module) -> tuple[str, str] | None:
    """Names of the output head and of the input embedding whose weight it shares, or None when it has its own."""
    head, embedding = _output_head(model), _part(model, "get_input_embeddings")
    if head is None or embedding is None:
        return None
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    told = bool(getattr(text() if callable(text) else config, "tie_word_embeddings", False))
    if not told and embedding.weight is not head.weight:
        return None
    names = {module: name for name, module in model.named_modules()}
    return names[head], names[embedding]


def embedding_and_head(model: nn.Module) -> tuple[str | None, str | None]:
    """Names of the input embedding and the output head; None for what the model has not."""
    names = {module: name for name, module in model.named_modules()}
    embedding, head = _part(model, "get_input_embeddings"), _output_head(model)
    return None if embedding is None else names[embedding], None if head is None else names[head]


def _target(name: str, module: nn.Module, spec: AdapterSpec) -> Target:
    kind = trainable_kind(module)
    assert kind is not None
    out_features, in_features = kind.sizes(module)
    rank = lookup(spec.rank_pattern, name, spec.rank)
    return Target(name, kind, rank, lookup(spec.alpha_pattern, name, spec.alpha), out_features, in_features)


def _output_head(model: nn.Module) -> nn.Module | None:
    return _part(model, "get_output_embeddings")


def _part(model: nn.Module, getter: str) -> nn.Module | None:
    get = getattr(model, getter, None)  # transformers models have it, others need not
    part = get() if callable(get) else None
    return part if isinstance(part, nn.Module) else None


def _unmatched(
    key: str, patterns: Patterns, modules: Mapping[str, nn.Module], candidates: Mapping[str, nn.Module]
) -> list[str]:
    names = [*dict.fromkeys(name.rpartition(".")[2] for name in candidates), *candidates]
    each: list[Patterns] = [patterns] if isinstance(patterns, str) else [(pattern,) for pattern in patterns]
    return [
        f"{key}: {pattern if isinstance(pattern, str) else pattern[0]!r} matches none of the"
        f" {len(candidates)} linear layers of this base."
        + did_you_mean(pattern if isinstance(pattern, str) else pattern[0], names)
        + f" Their names end in: {', '.join(list(dict.fromkeys(name.rpartition('.')[2] for name in candidates))[:12])}."
        for pattern in each
        if not any(matches(pattern, name) for name in modules)
    ]


def _bad_patterns(spec: AdapterSpec, matched: list[str]) -> list[str]:
    tables: dict[str, Iterable[str]] = {"rank_pattern": spec.rank_pattern, "alpha_pattern": spec.alpha_pattern}
    return [
        f"adapter.{table}: {key!r} matches none of the {len(matched)} targets."
        + did_you_mean(key, (name.rpartition(".")[2] for name in matched))
        for table, keys in tables.items()
        for key in keys
        if not any(re.match(rf"(.*\.)?({key})$", name) for name in matched)
    ]


def _cannot_adapt(name: str, module: nn.Module) -> str:
    stacked = [key for key, tensor in module._parameters.items() if tensor is not None and tensor.dim() == 3]
    if stacked:
        return f"adapter.targets: {name} holds experts; name them in adapter.target_parameters: {', '.join(stacked)}"
    return (
        f"adapter.targets: {name} is a {type(module).__name__}, which lorakit cannot adapt"
        " (only Linear, Conv1D and Embedding layers); leave it out with adapter.exclude"
    )


def _range(indices: set[int | None]) -> str:
    numbers = sorted(index for index in indices if index is not None)
    return f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
