"""What an adapter changes besides single linear layers: experts, whole tensors, biases, token rows, tied heads."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from lorakit.errors import TargetError, did_you_mean
from lorakit.lora.experts import ExpertTarget, expert_parameters, is_transposed, stacked_sizes
from lorakit.lora.init import RANDOM
from lorakit.lora.methods import METHODS
from lorakit.lora.spec import ALL_EXPERTS, AdapterSpec
from lorakit.lora.targets import Target, embedding_and_head, lookup, matches, tied_head

PLAIN_METHODS = tuple(name for name, method in METHODS.items() if method.additive)


@dataclass(frozen=True)
class ExtraTargets:
    """Beside the targets."""

    experts: tuple[ExpertTarget, ...] = ()
    modules_to_save: Mapping[str, tuple[str, ...]] | None = None
    """module -> its own tensors that learn as a whole"""
    token_rows: str | None = None
    """the embedding of which some rows learn"""
    tied: tuple[str, str] | None = None
    """head and embedding that share a weight and change alike"""


def find_extras(model: nn.Module, spec: AdapterSpec, targets: list[Target]) -> ExtraTargets:
    """Everything else of ``spec`` in ``model``. Works on the meta device.

    Raises:
        TargetError: all problems at once.
    """
    names = {target.name for target in targets}
    experts, problems = _experts(model, spec)
    modules_to_save, more = _learnt(model, spec, names)
    tied = tied_head(model)
    rows, wrong = _token_rows(model, spec, names | set(modules_to_save))
    problems += [*more, *wrong, *_tied_problems(tied, spec, names, modules_to_save, rows)]
    problems += [
        f"adapter.init: {spec.init}: {t.name} has no {t.rank} directions of its own, it is {t.out_features} x"
        f" {t.in_features}; lower its rank"
        for t in targets
        if spec.init not in RANDOM and t.rank > min(t.out_features, t.in_features)
    ]
    if spec.init not in RANDOM and spec.method not in PLAIN_METHODS:
        problems.append(
            f"adapter.init: {spec.init} goes with method {', '.join(PLAIN_METHODS)}, got {spec.method}; {spec.method}"
            " splits W into size and direction, so a part of W cannot be taken off again"
        )
    if problems:
        raise TargetError("\n".join(problems))
    touched = tied is not None and (tied[1] in names or tied[1] in modules_to_save or rows == tied[1])
    tied = tied if touched and (spec.tied_head == "both" or rows is not None) else None
    return ExtraTargets(tuple(experts), modules_to_save, rows, tied)


def _experts(model: nn.Module, spec: AdapterSpec) -> tuple[list[ExpertTarget], list[str]]:
    asked = spec.target_parameters
    if not asked:
        return [], []
    found = {f"{name}.{key}": (name, module, key) for name, module, key in expert_parameters(model)}
    if asked == ALL_EXPERTS:
        chosen, problems = list(found), []
        if not found:
            problems.append("adapter.target_parameters: this base has no experts that are stored as 3-D parameters")
    else:
        patterns = (asked,) if isinstance(asked, str) else asked
        chosen = [name for name in found if matches(tuple(patterns), name)]
        kinds = list(dict.fromkeys(".".join(name.rsplit(".", 2)[-2:]) for name in found))
        problems = [
            f"adapter.target_parameters: {pattern!r} matches none of the {len(found)} 3-D parameters of experts of this"
            f" base.{did_you_mean(pattern, [*kinds, *found])}"
            for pattern in patterns
            if not any(matches((pattern,), name) for name in found)
        ]
    if spec.dropout:
        problems.append("adapter.dropout: the experts' products are not lorakit's, so it would not reach them; use 0")
    if spec.method not in PLAIN_METHODS or spec.init not in RANDOM:
        problems.append(
            f"adapter.target_parameters: with method {', '.join(PLAIN_METHODS)} and init {', '.join(RANDOM)} only; got"
            f" {spec.method}, {spec.init}"
        )
    return [_expert_target(*found[name], spec) for name in chosen], problems


def _expert_target(name: str, module: nn.Module, key: str, spec: AdapterSpec) -> ExpertTarget:
    whole = f"{name}.{key}"
    return ExpertTarget(
        name, key, spec.method, lookup(spec.rank_pattern, whole, spec.rank),
        lookup(spec.alpha_pattern, whole, spec.alpha),
        *stacked_sizes(module, key), is_transposed(module),
    )  # fmt: skip


def _learnt(model: nn.Module, spec: AdapterSpec, targets: set[str]) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Module -> its own tensors that learn, and what is wrong with the choice."""
    modules = dict(model.named_modules())
    modules_to_save: dict[str, tuple[str, ...]] = {}
    problems = []
    for pattern in spec.modules_to_save:
        roots = [name for name in modules if name and matches((pattern,), name)]
        own = [
            name for name, module in modules.items()
            if any(name == root or name.startswith(f"{root}.") for root in roots) and _tensors(module)
        ]  # fmt: skip
        if not own:
            names = dict.fromkeys(name.rpartition(".")[2] for name, module in modules.items() if _tensors(module))
            problems.append(
                f"adapter.modules_to_save: {pattern!r} names no module with tensors.{did_you_mean(pattern, names)}"
            )
        problems += [
            f"adapter.modules_to_save: {name} gets an adapter as well; leave it out of one of them"
            for name in own if name in targets
        ]  # fmt: skip
        problems += [
            f"adapter.modules_to_save: {name} is quantised, so it cannot learn as a whole; add it to base.skip_modules"
            for name in own if any(not tensor.is_floating_point() for tensor in _tensors(modules[name]).values())
        ]  # fmt: skip
        modules_to_save |= {name: tuple(_tensors(modules[name])) for name in own}
    if spec.bias != "none":
        biased = [name for name, module in modules.items() if "bias" in _tensors(module)]
        if spec.bias == "lora_only":
            biased = [name for name in biased if name in targets]
        if not biased:
            problems.append(f"adapter.bias: {spec.bias}: no layer that it means has a bias; leave it out")
        modules_to_save |= {name: ("bias",) for name in biased if name not in modules_to_save}
    return modules_to_save, problems


def _token_rows(model: nn.Module, spec: AdapterSpec, taken: set[str]) -> tuple[str | None, list[str]]:
    if not spec.trainable_tokens:
        return None, []
    name, _ = embedding_and_head(model)
    embedding = model.get_submodule(name) if name is not None else None
    if not isinstance(embedding, nn.Embedding) or name is None:
        return None, ["adapter.trainable_tokens: this base has no embedding of tokens"]
    problems = []
    outside = [token for token in spec.trainable_tokens if not 0 <= token < embedding.num_embeddings]
    if outside:
        problems.append(
            f"adapter.trainable_tokens: {outside} of {embedding.num_embeddings} rows; add rows to the base first"
            " (resize_token_embeddings, save_pretrained)"
        )
    if len(set(spec.trainable_tokens)) < len(spec.trainable_tokens):
        problems.append("adapter.trainable_tokens: a token is named twice")
    if name in taken:
        problems.append(f"adapter.trainable_tokens: {name} is adapted or learns as a whole already; choose one")
    return name, problems


def _tied_problems(
    tied: tuple[str, str] | None, spec: AdapterSpec, targets: set[str], modules_to_save: Mapping[str, tuple[str, ...]],
    rows: str | None,
) -> Iterator[str]:  # fmt: skip
    if tied is None:
        if spec.tied_head == "both":
            yield "adapter.tied_head: both: the output head of this base has a weight of its own; name both in targets"
        return
    head, embedding = tied
    if rows == embedding and (head in targets or head in modules_to_save):
        yield f"adapter.trainable_tokens: {head} is tied to {embedding}, so it has their rows too; leave {head} out"
    touched = [name for name in tied if name in targets or "weight" in modules_to_save.get(name, ())]
    if not touched:
        return
    if spec.tied_head == "stop":
        yield (
            f"adapter: {touched[0]} shares its weight with {embedding if touched[0] == head else head}. Say what should"
            " happen: `tied_head: both` changes the shared weight, `tied_head: untie` gives the head one of its own"
        )
    elif spec.tied_head == "both":
        yield from _both_problems(head, embedding, spec, targets, modules_to_save)


def _both_problems(
    head: str, embedding: str, spec: AdapterSpec, targets: set[str], modules_to_save: Mapping[str, tuple[str, ...]]
) -> Iterator[str]:
    """What keeps head and embedding from changing alike."""
    if embedding not in targets and "weight" not in modules_to_save.get(embedding, ()):
        yield f"adapter.tied_head: both: name the embedding, {embedding}, and not the head alone"
    if head in modules_to_save and embedding not in modules_to_save:
        yield f"adapter.tied_head: both: {head} would learn in another way than {embedding}; leave {head} out"
    elif "bias" in modules_to_save.get(head, ()):
        yield f"adapter.tied_head: both: the bias of {head} would not learn; leave `bias: all` out, or untie"
    if embedding in targets and (spec.method not in PLAIN_METHODS or spec.init not in RANDOM):
        yield (
            f"adapter.tied_head: both: with method {', '.join(PLAIN_METHODS)} and init {', '.join(RANDOM)} only;"
            f" got {spec.method}, {spec.init}"
        )


def _tensors(module: nn.Module) -> dict[str, nn.Parameter]:
    return {key: tensor for key, tensor in module._parameters.items() if tensor is not None}
