"""Cut a model over the ranks of the axis `tensor`: each has a part of every large weight and of its adapter.

    layer               W        A             B             sent forward      sent backward
    cut by outputs      rows     replicated *  rows          -                 gradient of x, once for a block
    cut by inputs       columns  columns       replicated *  y                 -
    embedding, head     rows     -             -             y; see the loss   gradient of the hidden states
    experts             rows of each gate and up, columns of each down; A and B likewise

    * the gradient is a partial sum: all of them are added in one message of a step

Every other tensor is replicated, and so is its gradient, but those of norms between the blocks: where each rank has a
part of the tokens there (`ops.token_parts`), theirs are partial sums too. Then x of a block is gathered and y is
reduce-scattered. What is sent for the base is sent for its adapter too.

A module with experts is one block: all ranks choose the same experts for all tokens, and compute a part of each. Its
output is one sum, so the gradient of all that is trained in it, of a router too, is a partial sum (decision 53).

Invariant: the parts side by side are the full tensor, bit for bit, so that a checkpoint does not depend on the cut.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lorakit.base.cut_weights import Cut, CutDim, CutTensors, QuantizedCut
from lorakit.base.layers import repeated_layers
from lorakit.base.lazy import LazyBase
from lorakit.base.quantized import quantized_weight
from lorakit.base.tensor_plan import EXPERTS, INPUTS, OUTPUTS, SHARED, block_of, exchange_block, mixture_of, tensor_plan
from lorakit.errors import RunError
from lorakit.lora import LoraLinear, adapter_modules, adapter_tensors
from lorakit.lora.module import AdapterModule
from lorakit.lora.targets import embedding_and_head
from lorakit.objectives.cross_entropy import LossModel
from lorakit.ops.embedding_noise import has_noise
from lorakit.ops.expert_choices import ExpertChoices
from lorakit.ops.head_exchange import token_range
from lorakit.ops.tensor_parallel import GatheredLogits, VocabularyPart, VocabularyRows, WeightGroup
from lorakit.ops.token_parts import BlockInput, TokenParts
from lorakit.parallel.group import Group
from lorakit.parallel.verify import IN_PARTS
from lorakit.quant.parts import part_of_quantized

QUANTIZED_TENSORS: Final = ("weight", "block_scale", "row_scale")
"""tensors of a quantised weight, which are cut together"""
ROWS, COLUMNS, PAIRED_ROWS = CutDim(0), CutDim(1), CutDim(0, pieces=2)
CUT_DIMS: Final[Mapping[str, Mapping[str, CutDim]]] = {
    OUTPUTS: {
        "weight": ROWS,
        "block_scale": ROWS,
        "row_scale": ROWS,
        "bias": ROWS,
        "lora_B": ROWS,
        "lora_B0": ROWS,
        "lora_magnitude_vector": ROWS,
        "weight_norm": ROWS,
    },
    INPUTS: {"weight": COLUMNS, "block_scale": ROWS, "lora_A": COLUMNS, "lora_A0": COLUMNS},
    EXPERTS: {
        "gate_up_proj": CutDim(1, pieces=2),
        "gate_up_proj_lora_B": PAIRED_ROWS,
        "down_proj": CutDim(2),
        "down_proj_lora_A": COLUMNS,
    },
}
"""what is cut -> tensor of a layer -> the dimension of which a rank has a part"""
PARTIAL: Final = {
    OUTPUTS: {"lora_A"},
    INPUTS: {"lora_B", "lora_magnitude_vector", "bias"},
    EXPERTS: {"gate_up_proj.lora_A", "down_proj.lora_B"},
}
"""what is cut -> the adapter's tensors whose gradients are partial sums on each rank"""
LINEAR_FORWARD: Final = nn.Linear.forward


@final
class TensorParts:
    """The parts that this rank has of a model's tensors. cuts: by name. partial: trainable tensors whose gradients are
    partial sums. summed_layers: layers and blocks whose outputs are summed. num_blocks: those whose inputs are."""

    def __init__(self, model: nn.Module, plan: Mapping[str, str], tokens: TokenParts) -> None:
        self._model, self.plan, self._group, self.tokens = model, plan, tokens.group, tokens
        self.cuts: dict[str, Cut] = {}
        self.quantized: dict[str, QuantizedCut] = {}
        self.partial: set[str] = set()
        self.summed_layers = 0
        self.num_blocks = 0
        self.choices = ExpertChoices()
        self.cuts_embedding = False

    def facts(self) -> dict[str, Any]:
        """Return what a rank has between the blocks: its tokens alone, or all of them and why."""
        tokens = self.tokens
        scatters = tokens.problem is None and tokens.scatters_embedding
        return {"blocks": self.num_blocks, "tokens": tokens.problem or IN_PARTS, "scatters_embedding": scatters}

    def module(self, name: str) -> nn.Module:
        """Return a module of the model."""
        return self._model.get_submodule(name)

    def weights(self, weights: LazyBase) -> LazyBase:
        """Return the base's weights as this rank's parts."""
        return CutTensors(weights, self.cuts, self.quantized)

    def part_of(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor of this name, or of an optimizer's state of its shape."""
        cut = self.cuts.get(name)
        return full if cut is None or full.shape != cut.shape else cut.of(full)

    def join(self, name: str, part: Tensor) -> Tensor:
        """Return the full tensor of this name, or of an optimizer's state of its shape. Collective."""
        cut = self.cuts.get(name)
        if cut is None or part.shape != cut.part_shape:
            return part
        return cut.join(part, self._group.concatenated)

    def begin(self, modules: Iterable[str]) -> None:
        """Begin to count the choices of steps, after the check. modules: those that get some of the tokens alone."""
        self.sum_trained(modules)
        self.choices.take()

    def sum_trained(self, modules: Iterable[str]) -> None:
        """Sum the gradients of what is trained of these modules: on a rank they are those of a part of the terms."""
        for name in modules:
            if name not in self.plan:
                self.partial |= {f"{name}.{key}" for key in _trainable(self._model.get_submodule(name))}

    def sum_gradients(self, local: Callable[[Tensor], Tensor]) -> float:
        """Make the gradients of replicated tensors those of all ranks, in place, in one message. Collective.

        local: a gradient's own part here, where an engine shards it. Returns the sum of the squares of the gradients
        of all ranks; those that are replicated count once.

        Raises:
            RunError: ranks have chosen different experts for a token, so that their parts are not those of one sum.
        """
        tensors = adapter_tensors(self._model).items()
        gradients = {name: local(tensor.grad) for name, tensor in tensors if tensor.grad is not None}
        device = next((each.device for each in gradients.values()), torch.device("cpu"))
        cut = _squares([each for name, each in gradients.items() if name in self.cuts], device)
        replicated = {name: each for name, each in gradients.items() if name not in self.cuts}
        # those that every rank has computed in full are averaged: copies must stay equal to the bit on any device
        sent = [each if name in self.partial else each / self._group.size for name, each in replicated.items()]
        chosen = self.choices.take()
        first = [cut] if chosen is None else [cut, chosen.float().view(1)]
        summed = self._group.sum(torch.cat([*first, *(each.flatten() for each in sent)]))
        if chosen is not None and float(summed[1]) != self._group.size * float(chosen):
            raise RunError(
                "parallel.tensor: ranks that share the experts chose different ones for the same tokens, so their parts"
                " are not those of one sum; do they compute on different devices?"
            )
        sizes = [each.numel() for each in sent]
        for gradient, full in zip(replicated.values(), summed[len(first) :].split(sizes), strict=True):
            gradient.copy_(full.view_as(gradient))
        return float(summed[0] + _squares(list(replicated.values()), device))

    def cut(self, dims: Mapping[str, CutDim]) -> None:
        """Replace tensors by this rank's parts, on every module that shares them. dims: of `cut_dims`."""
        parts: dict[nn.Parameter, nn.Parameter] = {}  # of each full tensor, because tied ones stay tied
        for name, dim in dims.items():
            module_name, _, key = name.rpartition(".")
            module = self._model.get_submodule(module_name)
            if key in QUANTIZED_TENSORS and quantized_weight(module) is not None:
                self._cut_quantized(module_name, module, dim.dim)
                continue
            full = module.get_parameter(key)
            cut = dim.cut(tuple(full.shape), self._group.part)
            if full not in parts:
                parts[full] = nn.Parameter(cut.of(full.detach()), requires_grad=full.requires_grad)
            module.register_parameter(key, parts[full])
            self.cuts[name] = cut
            if isinstance(module, AdapterModule):
                self.cuts[f"{module_name}.{module.name_in_adapter(key)}"] = cut

    def _cut_quantized(self, name: str, layer: nn.Module, dim: int) -> None:
        """Replace the tensors of a quantised weight, on meta, by those of a part; once for all of them."""
        full = quantized_weight(layer)
        assert full is not None
        if name in self.quantized:
            return
        self.quantized[name] = QuantizedCut(dim, self._group.part(full.shape[dim]), full)
        part = part_of_quantized(name, full, dim, self.quantized[name].part)
        for key in full.scheme.shapes(*full.shape):
            del layer._parameters[key]
        for key, (shape, dtype) in part.scheme.shapes(*part.shape).items():
            empty = torch.empty(shape, dtype=dtype, device="meta")
            layer.register_parameter(key, nn.Parameter(empty, requires_grad=False))
        layer.quantization = part  # type: ignore[assignment]


def cut_weights(loss_model: LossModel, group: Group) -> TensorParts:
    """Cut a model, whose parameters may be on meta, and its adapter, in place.

    Raises:
        RunError: transformers has no plan for it that lorakit knows, or an adapter that cannot be cut.
    """
    model = loss_model.model
    ranks = WeightGroup(group.device_group, group.rank, group.size)
    plan = checked_plan(model, group.size)
    tokens = loss_model.token_parts = TokenParts(ranks)
    parts, inputs = TensorParts(model, plan, tokens), dict[str, BlockInput]()
    parts.cut(cut_dims(model, plan))
    for name, what in plan.items():
        layer, block = model.get_submodule(name), exchange_block(name, plan)
        if what in (OUTPUTS, EXPERTS) and block not in inputs:
            inputs[block] = _exchange_input(parts, block, is_mixture=mixture_of(name, plan) is not None)
        if what == OUTPUTS:
            layer.register_forward_pre_hook(inputs[block].before_layer)
            if isinstance(layer, LoraLinear):
                layer.block_input = inputs[block]
                layer.block_input.factors.append(partial(layer.get_parameter, "lora_A"))
        elif what == EXPERTS:
            layer.register_forward_pre_hook(parts.choices.before_experts)
            _sum_output(parts, block)
            _count_shared_once(model, block, plan, ranks)
        _cut_layer(parts, layer, name, what)
    parts.sum_trained(name for name, _ in adapter_modules(model) if mixture_of(name, plan) is not None)
    loss_model.vocabulary = _cut_vocabulary(model, tokens)
    parts.cuts_embedding = bool(set(vocabulary_modules(model)) & {embedding_and_head(model)[0]})
    loss_model.find_head()
    _cut_tokens(loss_model, plan, tokens)
    return parts


def _exchange_input(parts: TensorParts, block: str, *, is_mixture: bool) -> BlockInput:
    """Connect the input of a block whose layers are cut by outputs."""
    module, hook = parts.module(block), BlockInput(parts.tokens, sums_all=is_mixture)
    parts.num_blocks += 1
    module.register_forward_pre_hook(hook.before, with_kwargs=True)
    module.register_forward_hook(hook.forget, always_call=True)
    return hook


def _sum_output(parts: TensorParts, name: str) -> None:
    """Connect the output of a layer, or of a block, that is a partial sum."""
    parts.module(name).register_forward_hook(parts.tokens.after)
    parts.summed_layers += 1


def _count_shared_once(model: nn.Module, mixture: str, plan: Mapping[str, str], ranks: WeightGroup) -> None:
    """Let one rank add the shared experts that are not cut: all of them compute these in full."""
    block = model.get_submodule(mixture)
    width = model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
    for name, child in block.named_children():
        is_cut = any(layer == f"{mixture}.{name}" or layer.startswith(f"{mixture}.{name}.") for layer in plan)
        layers = (layer for layer in child.modules() if layer is not child)
        if not is_cut and any(getattr(layer, "out_features", None) == width for layer in layers):
            child.register_forward_hook(lambda module, args, output: output * float(ranks.rank == 0))


def _cut_tokens(loss_model: LossModel, plan: Mapping[str, str], tokens: TokenParts) -> None:
    """Cut the tokens before the first layer and put them together after the last one, where that can be exact."""
    model = loss_model.model
    names = {id(module): name for name, module in model.named_modules()}
    layers = [names[id(layer)] for layer in repeated_layers(model)]
    blocks = {exchange_block(name, plan) for name, what in plan.items() if what != SHARED}
    outside = [block for block in blocks if not any(block.startswith(f"{layer}.") for layer in layers)]
    adapted = [
        name
        for name, module in adapter_modules(model)
        if isinstance(module, LoraLinear)
        and name not in plan
        and any(name.startswith(f"{layer}.") for layer in layers)
        and mixture_of(name, plan) is None
    ]
    if len({block_of(layer) for layer in layers}) != 1 or outside:
        tokens.problem = f"{(outside or ['no block'])[0]} is cut outside of a list of layers"
    elif adapted:
        tokens.problem = f"{adapted[0]} is adapted between the blocks"
    else:
        model.get_submodule(layers[0]).register_forward_pre_hook(tokens.enter, with_kwargs=True)
        if loss_model.stage is None or loss_model.stage.link.is_last:
            head = model.get_output_embeddings()  # type: ignore[operator]
            head.register_forward_pre_hook(tokens.before_head, prepend=True)
        else:
            model.get_submodule(layers[-1]).register_forward_hook(tokens.leave)


def checked_plan(model: nn.Module, num_ranks: int) -> dict[str, str]:
    """Return `tensor_plan` of a model with or without an adapter, if its tensors and those of the adapter can be cut.

    Raises:
        RunError: names those that cannot, as `tensor_plan`.
    """
    if num_ranks == 1:
        return {}
    plan = tensor_plan(model, num_ranks)
    blocks = {block_of(name) for name, what in plan.items() if what == OUTPUTS}
    for name, what in plan.items():
        weight, cut = quantized_weight(model.get_submodule(name)), CUT_DIMS.get(what, {}).get("weight")
        if weight is not None and cut is not None:
            for rank in range(num_ranks):
                part_of_quantized(name, weight, cut.dim, token_range(weight.shape[cut.dim], num_ranks, rank))
    for name, module in adapter_modules(model):
        inside = any(name == block or name.startswith(f"{block}.") for block in blocks)
        if name not in plan and inside and mixture_of(name, plan) is None:
            raise RunError(
                f"parallel.tensor: {name} is trained inside a block that is cut; leave it out of the adapter"
            )
        if plan.get(name) in (OUTPUTS, INPUTS):
            _check_cut_layer(name, plan[name], module)
    return plan


def _check_cut_layer(name: str, what: str, module: AdapterModule) -> None:
    # its own code would add the bias on every rank
    if not isinstance(module, LoraLinear) and what == INPUTS and module._parameters.get("bias") is not None:
        raise RunError(
            f"parallel.tensor: {name} is trained in full, and its bias is added after its parts; train it with"
            " low-rank factors"
        )


def cut_dims(model: nn.Module, plan: Mapping[str, str]) -> dict[str, CutDim]:
    """Return the dimension of which a rank has a part, by the names of all tensors that are cut."""
    dims = {
        f"{name}.{key}": dim
        for name, what in plan.items()
        for key, dim in CUT_DIMS.get(what, {}).items()
        if model.get_submodule(name)._parameters.get(key) is not None
    }
    for name in vocabulary_modules(model):
        dims |= {f"{name}.{key}": ROWS for key, _ in model.get_submodule(name).named_parameters()}
    return dims


def vocabulary_modules(model: nn.Module) -> list[str]:
    """Return the names of embedding and head, those of them that are cut by tokens: frozen and plain ones."""
    names = [name for name in embedding_and_head(model) if name is not None]
    modules = [model.get_submodule(name) for name in names]
    plain = [
        isinstance(module, nn.Embedding) or (isinstance(module, nn.Linear) and type(module).forward is LINEAR_FORWARD)
        for module in modules
    ]
    cut = [
        name for name, module, is_plain in zip(names, modules, plain, strict=True) if is_plain and _is_frozen(module)
    ]
    are_tied = len({id(module._parameters.get("weight")) for module in modules}) < len(modules)
    return [] if are_tied and len(cut) < len(names) else cut  # one of two that share a weight may read it in full


def _cut_layer(parts: TensorParts, layer: nn.Module, name: str, what: str) -> None:
    """Connect a layer that was cut. Its sizes stay those of the full layer, as a sharded layer's do."""
    partial = _trainable(layer) if what == SHARED else _trainable(layer) & PARTIAL[what]
    parts.partial |= {f"{name}.{key}" for key in partial}
    if what != INPUTS:
        return
    ranks = parts.tokens.group
    if mixture_of(name, parts.plan) is None:  # else the block's output is summed
        _sum_output(parts, name)
    if isinstance(layer, LoraLinear):
        layer.first_column = ranks.part(layer.in_features).start  # of the dropout mask
        layer.column_ranks = ranks
        if "bias" in _trainable(layer):
            layer.has_bias = ranks.rank == 0
            return
    if ranks.rank > 0:
        layer.register_parameter("bias", None)  # added once to the sum


def _trainable(layer: nn.Module) -> set[str]:
    return set(layer.adapter_tensors()) if isinstance(layer, AdapterModule) else set()


def _cut_vocabulary(model: nn.Module, tokens: TokenParts) -> VocabularyPart | None:
    """Connect embedding and head, where they were cut. Returns the head's part; None if it is not cut."""
    vocabulary, ranks = None, tokens.group
    for name in vocabulary_modules(model):
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding):
            rows = VocabularyRows(ranks.part(module.num_embeddings), tokens.embedded)
            tokens.may_scatter = not has_noise(module)
            module.register_forward_pre_hook(rows.before)
            module.register_forward_hook(rows.after, prepend=True)  # before noise is added, as every rank does
            module.padding_idx = None  # which speaks of gradients
        elif isinstance(module, nn.Linear):
            vocabulary = VocabularyPart(ranks, module.out_features)
            logits = GatheredLogits(vocabulary)
            module.register_forward_pre_hook(logits.before)
            module.register_forward_hook(logits.after)
    return vocabulary


def _squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all values, (1,) float32."""
    return sum((gradient.float().square().sum() for gradient in gradients), torch.zeros(1, device=device))


def _is_frozen(module: nn.Module) -> bool:
    return not any(parameter.requires_grad for parameter in module.parameters())
