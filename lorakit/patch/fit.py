"""Check that a patch fits a base, and bind each of its parts to the parameter of the base that the part changes."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from lorakit.errors import PatchError, did_you_mean
from lorakit.lora.layer_kinds import IN_CODES, Experts, LayerKind, QuantizedExperts, patched_parameters, stored_kind
from lorakit.lora.linear import AdapterModule
from lorakit.lora.methods import METHODS
from lorakit.lora.own_head import OF_ENCODER
from lorakit.lora.spec import ALL_LINEAR
from lorakit.lora.targets import embedding_and_head, layer_index, matches, tied_head
from lorakit.ops.encoder_head import is_encoder
from lorakit.patch.own_head import WEIGHT, encoder_name, head_names
from lorakit.patch.patch import Patch, PatchLayer, TokenRows

T = TypeVar("T")
EXPERT: Final = re.compile(r"(.*\.experts\.)(\d+)\.(?:w1|gate_proj|(w3|up_proj)|(w2|down_proj))")


@dataclass(frozen=True)
class BaseShapes:
    """Shapes of the layers and parameters of a base that a patch can change."""

    layers: Mapping[str, tuple[LayerKind, tuple[int, int]]]  # every layer that can be adapted: (kind, (out, in))
    parameters: Mapping[str, tuple[int, ...]]  # every parameter, tied ones under each of their names
    experts: Mapping[str, Experts]  # every 3-D parameter of experts, and every router's weight as of one expert
    tied: tuple[str, str] | None  # output head and input embedding if they share their weight, else None
    embedding: str | None  # input embedding; None if the model has none
    head: str | None  # output head; None if the model has none
    architecture: str  # the model's class
    quantized_experts: frozenset[str] = frozenset()  # parameters of experts that stay in codes

    @classmethod
    def of(cls, model: nn.Module) -> "BaseShapes":
        """Return the shapes of a model, which may be on the meta device."""
        layers = {}
        for name, module in model.named_modules():
            layer = module.original() if isinstance(module, AdapterModule) else module
            if (kind := stored_kind(layer)) is not None:
                layers[name] = kind, kind.sizes(layer)
        return cls(
            layers,
            {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)},
            dict(patched_parameters(model)),
            tied_head(model),
            *embedding_and_head(model),
            type(model).__name__,
            frozenset(name for name, module in model.named_modules() if isinstance(module, QuantizedExperts)),
        )


def with_head_names(patch: Patch, base: BaseShapes, model: nn.Module) -> Patch:
    """Return a patch in the names of a model with a head, if it was saved from one without: there they lack its prefix.

    PEFT and sentence-transformers put adapters of embeddings on such a model, transformers' ``AutoModel``. A patch is
    returned as it is if any of its names is the base's, or any is not the base's with the prefix either. That of a
    classifier is returned in the names of its encoder, if this is the model.
    """
    patch = _with_base_layers(patch, base)
    if is_encoder(model):
        return in_encoder_names(patch)
    prefix = getattr(model, "base_model_prefix", "")
    names = [*patch.layers, *patch.full_shapes, *patch.token_rows]
    known = base.layers.keys() | base.parameters.keys() | base.experts.keys()
    if not names or any(name in known or f"{prefix}.{name}" not in known for name in names):
        return patch
    return _renamed(patch, lambda name: f"{prefix}.{name}")


def _with_base_layers(patch: Patch, base: BaseShapes) -> Patch:
    """Return the patch with its updates under the names of the base's layers and parameters. Raises as `_stacked`.

    A Linear's weight in `target_parameters` is a layer. Experts that were Linear layers in transformers 4 are stacked.
    """
    weights = {f"{name}.weight": name for name, (kind, _) in base.layers.items() if kind.stored_axis == "out"}
    layers: dict[str, PatchLayer] = {}
    experts: dict[str, dict[tuple[bool, int], PatchLayer]] = {}
    for name, layer in patch.layers.items():
        renamed = name.replace(".block_sparse_moe.", ".mlp.")
        match = EXPERT.fullmatch(renamed)
        if layer.num_experts == 1 and name in weights:
            layers[weights[name]] = replace(layer, num_experts=0)
        elif match and (stack := match[1] + ("down_proj" if match[4] else "gate_up_proj")) in base.experts:
            experts.setdefault(stack, {})[bool(match[3]), int(match[2])] = layer
        else:
            is_router = not layer.num_experts and f"{renamed}.weight" in base.experts
            layers[f"{renamed}.weight" if is_router else name] = replace(layer, num_experts=1) if is_router else layer
    if len(layers) + sum(map(len, experts.values())) < len(patch.layers) or layers.keys() & experts.keys():
        raise PatchError(f"{patch.folder}: holds two updates of one layer, under names of two versions of transformers")
    layers |= {name: _stacked(patch, name, own, base.experts[name][1][0]) for name, own in experts.items()}
    if layers.keys() == patch.layers.keys():
        return patch
    moved = {name for name in layers.keys() - patch.layers.keys() if layers[name].num_experts != 1}  # no router
    ranks = {re.escape(name): layers[name].rank for name in moved}
    alphas = {re.escape(name): layers[name].alpha for name in moved}
    config = replace(
        patch.config, exclude=(), layers=None,
        targets=tuple(name for name, layer in layers.items() if not layer.num_experts),
        target_parameters=tuple(name for name, layer in layers.items() if layer.num_experts),
        rank_pattern=ranks | dict(patch.config.rank_pattern) | ranks,  # before the file's, and instead of the same one
        alpha_pattern=alphas | dict(patch.config.alpha_pattern) | alphas,
    )  # fmt: skip
    return replace(patch, layers=layers, config=config)


def _stacked(patch: Patch, name: str, parts: Mapping[tuple[bool, int], PatchLayer], num_experts: int) -> PatchLayer:
    """Return one update of all experts. parts: (True for the second half of the rows, expert) -> its own update."""
    halves = sorted({half for half, _ in parts})
    one = next(iter(parts.values()))
    alike = all((x.plain, x.rank, x.scale, x.sizes) == (True, one.rank, one.scale, one.sizes) for x in parts.values())
    has_halves = len(halves) == 1 + name.endswith("gate_up_proj")
    if not alike or not has_halves or parts.keys() != {(half, n) for half in halves for n in range(num_experts)}:
        problem = "its experts' updates differ in rank or scale, or some (of w1, of w3) are missing"
        remedy = "merge it with PEFT (merge_and_unload), and lorakit extract makes a patch of the result"
        raise PatchError(f"{patch.folder}: {name}: {problem}; {remedy}")
    A = [parts[half, n].tensors["lora_A"] for n in range(num_experts) for half in halves]
    B = [torch.block_diag(*(parts[half, n].tensors["lora_B"] for half in halves)) for n in range(num_experts)]
    tensors = {"lora_A": torch.cat(A), "lora_B": torch.stack(B, -1).flatten(1)}
    rank = one.rank * len(halves)
    alpha = one.scale / METHODS[one.method].scale(1.0, rank)
    return PatchLayer(one.method, rank, alpha, (len(B[0]), one.sizes[1]), tensors, num_experts=num_experts)


def in_encoder_names(patch: Patch) -> Patch:
    """Return the patch of an encoder's classifier in the names of the encoder, its head's behind OF_ENCODER.

    Every other patch, and one with such names, is returned as it is.
    """
    head = head_names(patch)
    if not head or head[0] == WEIGHT or head[0].startswith(OF_ENCODER):
        return patch
    prefix = f"{encoder_name(patch)}."
    for name in patch.layers:
        if not name.startswith(prefix) or ".pooler." in name:
            raise PatchError(f"{patch.folder}: adapts {name} of the head; one is read that is saved in full")

    def own_name(name: str) -> str:
        return OF_ENCODER + name if name in head else name.removeprefix(prefix)

    def own_keys(pattern: Mapping[str, T]) -> dict[str, T]:
        escaped = re.escape(prefix)
        return {key.replace(escaped, "", 1).replace(prefix, "", 1): value for key, value in pattern.items()}

    config = patch.config
    if isinstance(config.targets, str) or isinstance(config.exclude, str):  # expressions for names with the prefix
        config = replace(config, targets=tuple(patch.layers), exclude=())
    targets, exclude = (tuple(map(own_name, names)) for names in (config.targets, config.exclude))
    ranks, alphas = own_keys(config.rank_pattern), own_keys(config.alpha_pattern)
    config = replace(config, targets=targets, exclude=exclude, rank_pattern=ranks, alpha_pattern=alphas)
    return replace(_renamed(patch, own_name), config=config)


def _renamed(patch: Patch, rename: Callable[[str], str]) -> Patch:
    def renamed(part: Mapping[str, T]) -> dict[str, T]:
        return {rename(name): value for name, value in part.items()}

    return replace(
        patch, layers=renamed(patch.layers), full_tensors=renamed(patch.full_tensors),
        metadata=renamed_weights(patch.metadata, renamed), full_shapes=renamed(patch.full_shapes),
        token_rows=renamed(patch.token_rows), bias_scales=renamed(patch.bias_scales),
    )  # fmt: skip


def renamed_weights(metadata: Mapping[str, Any], rename: Callable[[Mapping[str, T]], dict[str, T]]) -> dict[str, Any]:
    """Return the metadata of a patch whose base's weights have other names. rename: name -> value of weights."""
    if (recorded := metadata.get("base")) is None:
        return dict(metadata)
    full = recorded.get("full") or {}
    tables = {"full": {**full, "weights": rename(full["weights"])}} if "weights" in full else {}
    return {**metadata, "base": recorded | {"weights": rename(recorded["weights"])} | tables}


def fit_problems(patch: Patch, base: BaseShapes) -> Iterator[tuple[str, str]]:
    """Yield (module or parameter, problem) for every part of the patch that does not fit the base."""
    yield from _update_problems(patch, base)
    for name, shape in patch.full_shapes.items():
        if name not in base.parameters:
            yield name, f"{name} is not a parameter of this base.{did_you_mean(name, base.parameters)}"
        elif base.parameters[name] != shape:
            grown = base.parameters[name][1:] == shape[1:] and name.rpartition(".")[0] in (base.embedding, base.head)
            why = ": it was trained with another vocabulary. Merge it (lorakit merge), or resize the base likewise"
            yield name, f"{name} is {base.parameters[name]} in the base, {shape} in the patch{why if grown else ''}"
    yield from _bias_problems(patch, base)
    yield from _rows_problems(patch, base)
    yield from _selection_problems(patch, base)
    if base.tied is not None:
        replaced = [m for m in base.tied if f"{m}.weight" in patch.full_shapes and m not in patch.layers]
        if len(replaced) == 1 and not patch.config.modules_to_save:
            yield replaced[0], f"{replaced[0]}.weight is tied to another layer's, and the patch holds one of both"
    for saved in patch.config.modules_to_save:
        for name in base.parameters:
            if name not in patch.full_shapes and f"{saved}." in name:
                yield name, f"{name} belongs to modules_to_save ({saved!r}), and the patch holds no tensor for it"


def _bias_problems(patch: Patch, base: BaseShapes) -> Iterator[tuple[str, str]]:
    """Yield biases that the config declares as trained and the file lacks."""
    declared = patch.config.raw.get("bias") or "none"
    for name in base.parameters if declared != "none" else ():
        module, _, key = name.rpartition(".")
        if key == "bias" and (declared == "all" or module in patch.layers) and name not in patch.full_shapes:
            yield name, f"{name} is trained (bias: {declared}), and the patch holds no tensor for it; some PEFT lost it"


def _rows_problems(patch: Patch, base: BaseShapes) -> Iterator[tuple[str, str]]:
    needed = {base.embedding} | ({base.head} if patch.new_tokens and base.tied is None else set())
    for name in needed - set(patch.token_rows) if patch.token_rows else ():
        yield str(name), f"{name} gets no rows from the patch, which has new tokens; this base's head is not tied"
    for name, rows in patch.token_rows.items():
        shape = base.parameters.get(f"{name}.weight")
        if name not in needed or shape is None:
            yield name, f"{name} is not the embedding of this base ({base.embedding}), and the patch holds rows of it"
            continue
        added = sorted(token for token in rows.tokens if token >= shape[0])
        is_grown = added == list(range(shape[0], shape[0] + patch.num_added_rows(shape[0])))
        if shape[1] != rows.tensor.shape[1] or not is_grown:
            both = f"{shape} in the base; the patch holds rows of {rows.tensor.shape[1]} for {rows.tokens}"
            yield name, f"{name} is {both}"


def _selection_problems(patch: Patch, base: BaseShapes) -> Iterator[tuple[str, str]]:
    """Yield layers that the config selects and the file lacks, or the reverse, because PEFT would compute otherwise."""
    config = patch.config
    if not config.targets or config.targets == ALL_LINEAR:
        return
    by_pattern = bool(config.raw.get("layers_pattern"))
    tied = set(base.tied or ()) if config.raw.get("ensure_weight_tying") else set()
    selectors = (config.targets, config.exclude)  # of which there may be a million
    targets, exclude = (one if isinstance(one, str) else frozenset(one) for one in selectors)
    for name in base.layers:
        selected = matches(targets, name) and not (exclude and matches(exclude, name))
        if selected and config.layers is not None and name not in targets:
            selected = layer_index(name) in config.layers or by_pattern
        if selected and name not in patch.layers and not tied and not by_pattern:
            yield name, f"{name} is selected by target_modules, and the patch holds no tensors for it"
        if not selected and name in patch.layers and name not in tied:
            yield name, f"{name} is not selected by the patch's target_modules, so PEFT would leave it out"


def _update_problems(patch: Patch, base: BaseShapes) -> Iterator[tuple[str, str]]:
    version = re.match(r"0\.(\d+)", str(patch.config.raw.get("peft_version")))
    # PEFT took (E, out, in) for (E, in, out) then
    exchanges_experts = version is not None and int(version[1]) < 19 and patch.config.raw.get("target_parameters")
    for name, layer in patch.layers.items():
        if layer.num_experts:
            expected = (layer.num_experts, *layer.sizes)
            kind, actual = base.experts.get(name, (None, None))
            if exchanges_experts and kind is not None and kind.stored_axis == "out":
                writer = f"PEFT {patch.config.raw['peft_version']}"
                why = f"{writer} wrote its factors with in and out exchanged, which newer ones read otherwise too"
                remedy = "Merge it with that PEFT (merge_and_unload), and lorakit extract makes a patch of the result"
                yield name, f"{name}: {why}. {remedy}"
            elif name in base.quantized_experts:
                yield name, f"{name}: {IN_CODES}"
            elif actual is None:
                yield name, f"{name} is no parameter of experts of this base.{did_you_mean(name, base.experts)}"
            elif actual != expected:
                yield name, f"{name} is {actual} (experts, out, in) in the base, {expected} here"
        elif name not in base.layers:
            yield name, f"{name} is not a layer of this base that can be adapted.{did_you_mean(name, base.layers)}"
        elif base.layers[name][0].takes_ids != layer.embedding:
            yield name, f"{name} is {'no' if layer.embedding else 'an'} embedding in the base, not so in the patch"
        elif (sizes := base.layers[name][1]) != layer.sizes:
            yield name, f"{name} is {sizes} (out, in) in the base, {layer.sizes} in the patch"


def check_fits(patch: Patch, base: BaseShapes, name: object) -> None:
    """Raise PatchError unless every tensor of the patch fits the base, called ``name`` in the message."""
    all_problems = list(fit_problems(patch, base))
    if not all_problems:
        return
    problems = [text for _, text in all_problems]
    wrong = {name for name, _ in all_problems}
    own = {*patch.layers, *patch.full_shapes, *patch.token_rows}
    more = [f"... and {len(problems) - 3} more"] if len(problems) > 3 else []
    made_for = [] if patch.made_for == str(name) else [f"it was made for {patch.made_for}"]
    counts = [f"{len(wrong & own)} of its {len(own)} parts"] if wrong & own else []
    counts += [f"{len(wrong - own)} that it lacks"] if wrong - own else []
    what = f"{patch.folder}: does not fit {name} ({base.architecture}): {', '.join(counts)}"
    raise PatchError("\n  ".join([what, *problems[:3], *more, *made_for]))


@dataclass(frozen=True)
class Binding:
    """One part of a patch, and the parameter of the base that it changes."""

    name: str  # of the part in the patch: a module; the parameter of experts or of a full tensor
    module: str
    key: str  # the parameter's name in its module
    kind: LayerKind | None  # of the layer whose weight the parameter is; None for other parameters, experts among them
    part: PatchLayer | TokenRows | None  # None for a full tensor, which is read when it is used

    @property
    def parameter(self) -> str:
        return f"{self.module}.{self.key}"


def bind(patch: Patch, shapes: BaseShapes) -> Iterator[Binding]:
    """Yield each part of a patch that fits, exactly once: the only such walk, for training, serving and merging."""
    kinds = {name: kind for name, (kind, _) in shapes.layers.items()}
    for name, layer in patch.layers.items():
        if layer.num_experts:
            module, _, key = name.rpartition(".")
            yield Binding(name, module, key, None, layer)
        else:
            yield Binding(name, name, "weight", kinds.get(name), layer)
    for parameter in patch.full_shapes:
        module, _, key = parameter.rpartition(".")
        yield Binding(parameter, module, key, kinds.get(module), None)
    for name, rows in patch.token_rows.items():
        yield Binding(name, name, "weight", kinds.get(name), rows)


def without_copies(patch: Patch, read: Callable[[str], Tensor], trained: Collection[str] = ()) -> Patch:
    """Return the patch without full tensors that are the base's own, which PEFT saves beside adapted embeddings.

    The base's own biases are added to those of `lora_bias`.
    read: parameter -> the base's values, on the CPU. trained: parameters that stay, equal or not.
    """
    added = {name: read(name).double() + s * patch.full_tensors[name].double() for name, s in patch.bias_scales.items()}
    if added:
        patch = replace(patch, full_tensors={**patch.full_tensors, **added}, bias_scales={})

    def is_copy(name: str) -> bool:
        value = patch.full_tensors[name]
        own = read(name)
        return torch.equal(own.to(value.dtype), value) or torch.equal(value.to(own.dtype), own)

    return patch.with_full_tensors(name for name in patch.full_shapes if name in trained or not is_copy(name))
