"""Put an adapter on any torch model: freeze the base, and replace the target layers."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import Tensor, nn

from lorakit.errors import LorakitError, TargetError
from lorakit.lora.experts import LoraExperts
from lorakit.lora.extra_targets import ExtraTargets, find_extra_targets
from lorakit.lora.linear import AdapterModule, LoraLinear
from lorakit.lora.methods import METHODS
from lorakit.lora.modules_to_save import TokenHead, TrainableModule, TrainableTokens
from lorakit.lora.own_head import OWN_HEAD, add_own_head
from lorakit.lora.spec import RANDOM, AdapterSpec, Patterns, init_factors
from lorakit.lora.targets import Target, find_targets
from lorakit.lora.untrained import check_untrained
from lorakit.lora.wrappers import check_unwrapped, named_unwrapped

ReadWeight = Callable[[str], Tensor]  # parameter name -> its values, for a model that is on the meta device still


def inject(
    model: nn.Module,
    *,
    method: str = "lora",
    rank: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    targets: str | Sequence[str] = "all-linear",
    exclude: str | Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    init: str = "gaussian",
    target_parameters: str | Sequence[str] = (),
    bias: str = "none",
    modules_to_save: Sequence[str] = (),
    trainable_tokens: Sequence[int] = (),
    new_tokens: Mapping[str, int] | None = None,
    tied_head: str = "stop",
    seed: int = 0,
) -> nn.Module:
    """Freeze a model and put an untrained adapter on every target, in place. Returns the same model.

    Settings as in the recipe's ``adapter`` section; ``new_tokens``: text -> id in your tokenizer. Train
    ``adapter_tensors(model)``; write with ``save_patch``. Raises TargetError, with the model unchanged, where a pattern
    matches nothing, a layer cannot be adapted, or an untrained adapter would change a layer's output.
    """
    spec = AdapterSpec(
        method=method,
        rank=rank,
        alpha=float(alpha),
        dropout=dropout,
        targets=_frozen(targets),
        exclude=None if exclude is None else _frozen(exclude),
        layers=None if layers is None else tuple(layers),
        rank_pattern=dict(rank_pattern or {}),
        alpha_pattern=dict(alpha_pattern or {}),
        init=init,
        target_parameters=_frozen(target_parameters),
        bias=bias,
        modules_to_save=tuple(modules_to_save),
        trainable_tokens=tuple(trainable_tokens),
        new_tokens=new_tokens or {},
        tied_head=tied_head,
    )
    with adapting(model, "inject"):
        attach(model, spec, seed)
        check_untrained(model)
    return model


@contextmanager
def adapting(model: nn.Module, call: str) -> Iterator[None]:
    """Let the block put an adapter on a model without one. If it raises a LorakitError, the model is as before."""
    check_unwrapped(model, call)
    if any(isinstance(module, AdapterModule) for module in model.modules()):
        raise TargetError(f"{call}: the model has an adapter already; take it off first: lorakit.remove(model)")
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        yield
    except LorakitError:
        restore_layers(model)
        for parameter in trainable:
            parameter.requires_grad_()
        raise


def attach(model: nn.Module, spec: AdapterSpec, seed: int, read_weight: ReadWeight | None = None) -> None:
    """Put an untrained adapter on each target of `spec`, and freeze everything else, in place.

    `read_weight`: of a model on the meta device; None: the values are in the model. Raises TargetError, with the model
    unchanged, if the spec's targets do not fit it.
    """
    targets = find_targets(model, spec)
    extras = find_extra_targets(model, spec, targets)
    model.requires_grad_(False)
    read: ReadWeight = read_weight or model.get_parameter
    layers = [(model.get_submodule(target.name), target) for target in targets]
    replace_modules(model, {layer: _adapted_linear(layer, target, spec, seed, read_weight) for layer, target in layers})
    for module, experts in groupby(extras.experts, lambda expert: expert.name.rpartition(".")[0]):
        _attach_experts(model, module, experts, spec, seed)
    for name, keys in extras.modules_to_save.items():
        layer = model.get_submodule(name)
        trained = layer if isinstance(layer, LoraLinear) else TrainableModule(layer)  # of a LoraLinear its bias
        replace_modules(model, {layer: trained})
        for key in keys:
            trained.make_trainable(key, read(f"{name}.{key}"))
    if extras.token_rows is not None:
        _attach_rows(model, extras, spec, read)
    if spec.num_values:
        add_own_head(model, spec.num_values, _layer_seed(seed, OWN_HEAD))


def _adapted_linear(
    layer: nn.Module, target: Target, spec: AdapterSpec, seed: int, read_weight: ReadWeight | None
) -> LoraLinear:
    method = METHODS[spec.method]

    def W() -> Tensor:
        weight = read_weight(f"{target.name}.weight") if read_weight else target.kind.dequantized(layer).detach()
        weight = weight if weight.is_meta else weight.cpu()  # where every backend and device gives the same start
        return target.kind.matrix(weight)

    s = method.scale(target.alpha, target.rank)
    sizes = target.out_features, target.in_features, target.rank
    tensors = init_factors(spec.init, *sizes, s, _layer_seed(seed, target.name), W)
    if method.start is not None:
        tensors |= method.start(W())
    return LoraLinear(layer, target, method=spec.method, dropout=spec.dropout, tensors=tensors)


def _attach_experts(model: nn.Module, name: str, experts: Iterable[Target], spec: AdapterSpec, seed: int) -> None:
    layer = model.get_submodule(name)
    updates = {}
    for e in experts:
        # a stream for each expert, so that an expert's start does not depend on the number of experts
        seeds = (_layer_seed(seed, f"{e.name}.{number}") for number in range(e.num_experts))
        streams = (torch.Generator().manual_seed(own) for own in seeds)
        A = torch.cat([RANDOM[spec.init](e.in_features, e.rank, stream) for stream in streams])
        updates[e] = {"lora_A": A, "lora_B": torch.zeros(e.out_features, e.rank * e.num_experts)}
    replace_modules(model, {layer: LoraExperts(layer, spec.method, updates)})


def _attach_rows(model: nn.Module, extras: ExtraTargets, spec: AdapterSpec, read: ReadWeight) -> None:
    """Put trainable rows on the embedding, and on the head: its own for new tokens, or the embedding's if tied."""
    name = str(extras.token_rows)
    new = tuple(spec.new_tokens.values())
    embedding = model.get_submodule(name)
    assert isinstance(embedding, nn.Embedding)
    weight = read(f"{name}.weight").detach()
    rows = TrainableTokens(embedding, (*spec.trainable_tokens, *new), spec.new_tokens)
    old = weight[list(spec.trainable_tokens)].to(torch.float32)
    rows.add_tensor("trainable_tokens_delta", torch.cat([old, _mean_rows(weight, new)]))
    replace_modules(model, {embedding: rows})
    if extras.head_rows is not None:
        head = model.get_submodule(extras.head_rows)
        weight = read(f"{extras.head_rows}.weight").detach()
        own = TokenHead(head, new, len(weight))
        own.add_tensor("trainable_tokens_delta", _mean_rows(weight, new))
        replace_modules(model, {head: own})
    if extras.tied_rows is not None:
        tied = model.get_submodule(extras.tied_rows)
        shared = TokenHead(tied, rows.tokens, rows.num_base_rows)
        shared.register_parameter("trainable_tokens_delta", rows.get_parameter("trainable_tokens_delta"))
        replace_modules(model, {tied: shared})


def _mean_rows(weight: Tensor, tokens: tuple[int, ...]) -> Tensor:
    """Return new tokens' first rows: the mean of all rows before them, because a base's spare rows are untrained."""
    if not tokens:
        return weight.new_empty(0, weight.shape[1], dtype=torch.float32)
    return weight[: min(tokens)].mean(0, dtype=torch.float32).expand(len(tokens), -1).contiguous()


def replace_modules(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules, old to new, wherever the model uses them: a layer that is used twice stays one layer."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # because named_children() hides a second use
            if child is not None and child in replacements:
                parent.register_module(name, replacements[child])


def restore_layers(model: nn.Module) -> list[tuple[nn.Module, AdapterModule]]:
    """Put the base's own layers back, in place; return each with the adapted layer that it replaced."""
    pairs = [(adapted.original(), adapted) for _, adapted in adapter_modules(model)]
    replace_modules(model, {adapted: layer for layer, adapted in pairs})
    return pairs


def adapted_names(model: nn.Module) -> list[str]:
    """Return the names of the layers, and of the experts' parameters, that have low-rank factors."""
    names = []
    for name, module in adapter_modules(model):
        if isinstance(module, LoraLinear):
            names.append(name)
        elif isinstance(module, LoraExperts):
            names += [f"{name}.{key}" for key in module.adapted]
    return names


def adapter_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable tensors by name, such as ``model.layers.0.self_attn.q_proj.lora_A``."""
    return _named(model, AdapterModule.adapter_tensors)


def checkpoint_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the tensors that a checkpoint stores of the adapter: trainable and fixed ones, without derived ones."""
    return _named(model, lambda layer: layer.adapter_tensors() | layer.fixed_tensors())


def _named(model: nn.Module, tensors: Callable[[AdapterModule], dict[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    # in each call, because engines replace parameter objects
    return {f"{name}.{key}": tensor for name, one in adapter_modules(model) for key, tensor in tensors(one).items()}


def adapter_modules(model: nn.Module) -> Iterator[tuple[str, AdapterModule]]:
    """Yield (module name, module) of every module with a tensor of the adapter."""
    return ((name, module) for name, module in named_unwrapped(model) if isinstance(module, AdapterModule))


def _layer_seed(seed: int, name: str) -> int:
    """Return a layer's own seed, so that its start does not depend on device, order or number of processes."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "little")


def _frozen(patterns: str | Sequence[str]) -> Patterns:
    return patterns if isinstance(patterns, str) else tuple(patterns)
