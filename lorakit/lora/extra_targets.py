"""Find all that an adapter trains besides linear layers: experts, full tensors, biases, token rows, tied heads."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from torch import nn

from lorakit.errors import TargetError, did_you_mean
from lorakit.lora.layer_kinds import IN_CODES, QuantizedExperts, expert_parameters, trainable_kind
from lorakit.lora.methods import METHODS
from lorakit.lora.spec import ALL_EXPERTS, RANDOM, AdapterSpec
from lorakit.lora.targets import Target, embedding_and_head, matches, target_of, tied_head

ADDITIVE_METHODS: Final = tuple(name for name, method in METHODS.items() if method.additive)


@dataclass(frozen=True)
class ExtraTargets:
    """Tensors that an adapter trains beside the factors of its linear layers."""

    experts: tuple[Target, ...]
    modules_to_save: Mapping[str, tuple[str, ...]]  # module name -> names of its own tensors that are trained in full
    token_rows: str | None  # name of the embedding with trainable rows; None: there are none
    head_rows: str | None  # name of an untied head with trainable rows, those of new tokens; None: there are none
    tied_rows: str | None  # name of a head that is tied to the embedding and uses its rows; None: there is none


def find_extra_targets(model: nn.Module, spec: AdapterSpec, targets: list[Target]) -> ExtraTargets:
    """Return what `spec` trains besides `targets`. Raises one TargetError that names all problems."""
    names = {target.name for target in targets}
    experts, problems = _experts(model, spec)
    modules_to_save, module_problems = _modules_to_save(model, spec, names)
    embedding, head = embedding_and_head(model)
    tied = tied_head(model)
    rows = embedding if spec.trainable_tokens or spec.new_tokens else None
    problems += module_problems
    if spec.trainable_tokens or spec.new_tokens:
        problems += _token_problems(model, spec, embedding, names | set(modules_to_save))
    if spec.new_tokens:
        problems += _head_problems(model, head, () if tied else names | set(modules_to_save))
    if tied is not None:
        if rows == embedding and (head in names or head in modules_to_save):
            key = "trainable_tokens" if spec.trainable_tokens else "new_tokens"
            problems.append(f"adapter.{key}: {head} is tied to {rows}, so it has their rows too; leave {head} out")
        touched = [name for name in tied if name in names or "weight" in modules_to_save.get(name, ())]
        if touched and spec.tied_head == "stop":
            pair = f"{touched[0]} shares its weight with {embedding if touched[0] == head else head}"
            problems.append(f"adapter: {pair}. `tied_head: untie` gives the head its own; without it, leave both out")
    for t in targets if spec.init not in RANDOM else ():
        if t.rank > min(t.out_features, t.in_features):
            why = f"{t.name} has no {t.rank} directions of its own, it is {t.out_features} x {t.in_features}"
            problems.append(f"adapter.init: {spec.init}: {why}; lower its rank")
    if spec.init not in RANDOM and spec.method not in ADDITIVE_METHODS:
        # others split W into size and direction, so a part of W cannot be taken off again
        problems.append(f"adapter.init: {spec.init} goes with method {', '.join(ADDITIVE_METHODS)}, got {spec.method}")
    if problems:
        raise TargetError("\n".join(problems))
    tied_rows = tied[0] if tied is not None and rows == tied[1] else None
    head_rows = head if spec.new_tokens and tied is None else None
    return ExtraTargets(tuple(experts), modules_to_save, rows, head_rows, tied_rows)


def _experts(model: nn.Module, spec: AdapterSpec) -> tuple[list[Target], list[str]]:
    requested = spec.target_parameters
    if not requested:
        return [], []
    parameters = dict(expert_parameters(model))
    if any(isinstance(module, QuantizedExperts) for module in model.modules()):
        return [], [f"adapter.target_parameters: {IN_CODES}"]
    if requested == ALL_EXPERTS:
        matched = list(parameters)
        problems = [] if parameters else ["adapter.target_parameters: this base has no experts in 3-D parameters"]
    else:
        patterns = (requested,) if isinstance(requested, str) else requested
        matched = [name for name in parameters if matches(tuple(patterns), name)]
        names = [*dict.fromkeys(".".join(name.rsplit(".", 2)[-2:]) for name in parameters), *parameters]
        missing = [pattern for pattern in patterns if not any(matches((pattern,), name) for name in parameters)]
        none = f"matches none of the {len(parameters)} 3-D parameters of experts of this base"
        problems = [f"adapter.target_parameters: {one!r} {none}.{did_you_mean(one, names)}" for one in missing]
    if spec.dropout:
        problems.append("adapter.dropout: the experts' products are not lorakit's, so it would not reach them; use 0")
    if spec.method not in ADDITIVE_METHODS or spec.init not in RANDOM:
        possible = f"method {', '.join(ADDITIVE_METHODS)} and init {', '.join(RANDOM)}"
        problems.append(f"adapter.target_parameters: with {possible} only; got {spec.method}, {spec.init}")
    experts = ((name, *parameters[name]) for name in matched)
    return [target_of(spec, name, kind, shape[1:], shape[0]) for name, kind, shape in experts], problems


def _modules_to_save(
    model: nn.Module, spec: AdapterSpec, targets: set[str]
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Return module name -> names of its own tensors to train in full, and the problems of the settings."""
    modules = dict(model.named_modules())
    modules_to_save: dict[str, tuple[str, ...]] = {}
    problems = []
    for pattern in spec.modules_to_save:
        roots = tuple(f"{name}." for name in modules if name and matches((pattern,), name))
        matched = [name for name, module in modules.items() if f"{name}.".startswith(roots) and _tensors(module)]
        if not matched:
            near = did_you_mean(pattern, (name.rpartition(".")[2] for name in modules if _tensors(modules[name])))
            problems.append(f"adapter.modules_to_save: {pattern!r} names no module with tensors.{near}")
        for name in matched:
            tensors = modules_to_save[name] = tuple(_tensors(modules[name]))
            key = f"adapter.modules_to_save: {name}"
            if name in targets:
                problems.append(f"{key} gets an adapter as well; leave it out here, or add it to exclude")
            if any(not modules[name].get_parameter(tensor).is_floating_point() for tensor in tensors):
                problems.append(f"{key} is quantised, so it cannot be trained in full; add it to base.skip_modules")
            if getattr(modules[name], "running_mean", None) is not None:
                kind = f"a {type(modules[name]).__name__}, whose running statistics no patch holds"
                problems.append(f"{key} is {kind}; leave it out, and put it into evaluation mode")
    if spec.bias != "none":
        trained = [name for name in modules if spec.bias == "all" or name in targets]
        biased = [name for name in trained if "bias" in _tensors(modules[name])]
        if not biased:
            problems.append(f"adapter.bias: {spec.bias}: no layer that it means has a bias; leave it out")
        modules_to_save |= {name: ("bias",) for name in biased if name not in modules_to_save}
    return modules_to_save, problems


def _token_problems(model: nn.Module, spec: AdapterSpec, name: str | None, taken: set[str]) -> Iterator[str]:
    """Yield why the embedding, called ``name``, cannot get trainable rows."""
    key = "adapter.trainable_tokens" if spec.trainable_tokens else "adapter.new_tokens"
    embedding = model.get_submodule(name) if name is not None else None
    if not isinstance(embedding, nn.Embedding):
        yield f"{key}: this base has no embedding of tokens"
        return
    if trainable_kind(embedding) is None:
        yield f"{key}: {name} is a {type(embedding).__name__}, whose forward is not that of an nn.Embedding"
    num_rows = embedding.num_embeddings
    if outside := [token for token in spec.trainable_tokens if not 0 <= token < num_rows]:
        yield f"adapter.trainable_tokens: {outside} of {num_rows} rows; new ones go into adapter.new_tokens"
    new = spec.new_tokens.values()
    added = sorted(token for token in new if token >= num_rows)
    if added != list(range(num_rows, num_rows + len(added))):
        ids = f"the tokenizer gives the first one the id {min(new)}, and the embedding has {num_rows} rows"
        yield f"adapter.new_tokens: {ids}; tokenizer and base do not belong together"
    tokens = (*spec.trainable_tokens, *new)
    if len(set(tokens)) < len(tokens):
        yield "adapter.trainable_tokens: a token is named twice"
    if name in taken:
        yield f"{key}: {name} is adapted or trained in full already; choose one"


def _head_problems(model: nn.Module, name: str | None, taken: Collection[str]) -> Iterator[str]:
    """Yield why the output head, called ``name``, cannot get rows of new tokens."""
    head = model.get_submodule(name) if name is not None else None
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        kind = "no output head" if head is None else f"a {type(head).__name__} as output head, not a plain Linear layer"
        yield f"adapter.new_tokens: this base has {kind}, which could get their rows"
    elif head._parameters.get("bias") is not None:
        yield f"adapter.new_tokens: {name} has a bias for each token, and a new token would have none"
    elif name in taken:
        yield f"adapter.new_tokens: {name} is adapted or trained in full already; choose one"


def _tensors(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))
