"""Cut a model over the ranks of the axis `tensor`: each has a part of every large weight and of its adapter.

    layer               W        A             B             sent forward      sent backward
    cut by outputs      rows     replicated *  rows          -                 gradient of x, once for a block
    cut by inputs       columns  columns       replicated *  y                 -
    embedding, head     rows     -             -             y; see the loss   gradient of the hidden states

    * the gradient is a partial sum: all of them are added in one message of a step

Every other tensor is replicated, and so is its gradient. What is sent for the base is sent for its adapter too.

Invariant: the parts side by side are the full tensor, bit for bit, so that a checkpoint does not depend on the cut.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

import torch
from torch import Tensor, nn

from lorakit.base.cut_weights import Cut, CutTensors, QuantizedCut
from lorakit.base.lazy import LazyBase
from lorakit.base.quantized import quantized_weight
from lorakit.base.tensor_plan import INPUTS, OUTPUTS, SHARED, block_of, tensor_plan
from lorakit.errors import RunError
from lorakit.lora import LoraLinear, adapter_modules, adapter_tensors
from lorakit.lora.module import AdapterModule
from lorakit.lora.targets import embedding_and_head
from lorakit.objectives.cross_entropy import LossModel
from lorakit.ops.head_exchange import token_range
from lorakit.ops.tensor_parallel import (
    CopiedInput,
    GatheredLogits,
    SummedOutput,
    VocabularyPart,
    VocabularyRows,
    WeightGroup,
)
from lorakit.parallel.group import Group
from lorakit.quant.parts import part_of_quantized

QUANTIZED_TENSORS: Final = ("weight", "block_scale", "row_scale")
"""tensors of a quantised weight, which are cut together"""
CUT_DIMS: Final[Mapping[str, Mapping[str, int]]] = {
    OUTPUTS: {"weight": 0, "block_scale": 0, "row_scale": 0, "bias": 0, "lora_B": 0, "lora_B0": 0},
    INPUTS: {"weight": 1, "block_scale": 0, "lora_A": 1, "lora_A0": 1},
}
"""what is cut -> tensor of a layer -> the dimension of which a rank has a part"""
PARTIAL: Final = {OUTPUTS: "lora_A", INPUTS: "lora_B"}
"""what is cut -> the tensor whose gradient is a partial sum on each rank"""
LINEAR_FORWARD: Final = nn.Linear.forward
METHODS: Final = ("lora", "rslora", "lora_fa")


@final
class TensorParts:
    """The parts that this rank has of a model's tensors. cuts: by name. partial: trainable tensors whose gradients are
    partial sums. summed_layers: layers that are cut by inputs."""

    def __init__(self, model: nn.Module, group: WeightGroup) -> None:
        self._model, self._group = model, group
        self.cuts: dict[str, Cut] = {}
        self.quantized: dict[str, QuantizedCut] = {}
        self.partial: set[str] = set()
        self.summed_layers = 0

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
        return self._group.concatenated(part, cut.dim, cut.shape[cut.dim])

    def sum_gradients(self, local: Callable[[Tensor], Tensor]) -> float:
        """Make the gradients of replicated tensors those of all ranks, in place, in one message. Collective.

        local: a gradient's own part here, where an engine shards it. Returns the sum of the squares of the gradients
        of all ranks; those that are replicated count once.
        """
        tensors = adapter_tensors(self._model).items()
        gradients = {name: local(tensor.grad) for name, tensor in tensors if tensor.grad is not None}
        device = next((each.device for each in gradients.values()), torch.device("cpu"))
        cut = _squares([each for name, each in gradients.items() if name in self.cuts], device)
        replicated = {name: each for name, each in gradients.items() if name not in self.cuts}
        # those that every rank has computed in full are averaged: copies must stay equal to the bit on any device
        sent = [each if name in self.partial else each / self._group.size for name, each in replicated.items()]
        summed = self._group.sum(torch.cat([cut, *(each.flatten() for each in sent)]))
        sizes = [each.numel() for each in sent]
        for gradient, full in zip(replicated.values(), summed[1:].split(sizes), strict=True):
            gradient.copy_(full.view_as(gradient))
        return float(summed[0] + _squares(list(replicated.values()), device))

    def cut(self, dims: Mapping[str, int]) -> None:
        """Replace tensors by this rank's parts, on every module that shares them. dims: of `cut_dims`."""
        parts: dict[nn.Parameter, nn.Parameter] = {}  # of each full tensor, because tied ones stay tied
        for name, dim in dims.items():
            module_name, _, key = name.rpartition(".")
            module = self._model.get_submodule(module_name)
            if key in QUANTIZED_TENSORS and quantized_weight(module) is not None:
                self._cut_quantized(module_name, module, dim)
                continue
            full = module.get_parameter(key)
            cut = Cut(dim, self._group.part(full.shape[dim]), tuple(full.shape))
            if full not in parts:
                parts[full] = nn.Parameter(cut.of(full.detach()), requires_grad=full.requires_grad)
            module.register_parameter(key, parts[full])
            self.cuts[name] = cut

    def _cut_quantized(self, name: str, layer: nn.Module, dim: int) -> None:
        """Replace the tensors of a quantised weight, on meta, by those of a part; once for all of them."""
        full = quantized_weight(layer)
        assert full is not None
        if name in self.quantized:
            return
        self.quantized[name] = QuantizedCut(dim, self._group.part(full.shape[dim]), full)
        part = part_of_quantized(full, dim, self.quantized[name].part)
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
    parts, inputs = TensorParts(model, ranks), dict[str, CopiedInput]()
    parts.cut(cut_dims(model, plan))
    for name, what in plan.items():
        layer, block = model.get_submodule(name), model.get_submodule(block_of(name))
        if what == OUTPUTS:
            if block_of(name) not in inputs:
                inputs[block_of(name)] = hook = CopiedInput(ranks)
                block.register_forward_hook(hook.forget, always_call=True)
            layer.register_forward_pre_hook(inputs[block_of(name)])
        _cut_layer(parts, layer, name, what, ranks)
    loss_model.vocabulary = _cut_vocabulary(model, ranks)
    loss_model.find_head()
    return parts


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
        weight, dim = quantized_weight(model.get_submodule(name)), CUT_DIMS.get(what, {}).get("weight")
        if weight is not None and dim is not None:
            for rank in range(num_ranks):
                part_of_quantized(weight, dim, token_range(weight.shape[dim], num_ranks, rank))
    for name, module in adapter_modules(model):
        inside = any(name == block or name.startswith(f"{block}.") for block in blocks)
        if name not in plan and inside:
            raise RunError(
                f"parallel.tensor: {name} is trained inside a block that is cut; leave it out of the adapter"
            )
        if plan.get(name) in (OUTPUTS, INPUTS):
            _check_cut_layer(name, module)
    return plan


def _check_cut_layer(name: str, module: AdapterModule) -> None:
    if not isinstance(module, LoraLinear):
        raise RunError(f"parallel.tensor: {name} is trained in full, and is cut; train it with low-rank factors")
    if module.method not in METHODS:
        raise RunError(
            f"parallel.tensor: adapter.method {module.method} reads full rows of {name}, of which a process has a"
            f" part; choose {', '.join(METHODS)}"
        )
    if "bias" in module.adapter_tensors():
        raise RunError(f"parallel.tensor: adapter.bias trains the bias of {name}, which is cut; set adapter.bias: none")


def cut_dims(model: nn.Module, plan: Mapping[str, str]) -> dict[str, int]:
    """Return the dimension of which a rank has a part, by the names of all tensors that are cut."""
    dims = {
        f"{name}.{key}": dim
        for name, what in plan.items()
        for key, dim in CUT_DIMS.get(what, {}).items()
        if model.get_submodule(name)._parameters.get(key) is not None
    }
    for name in vocabulary_modules(model):
        dims |= {f"{name}.{key}": 0 for key, _ in model.get_submodule(name).named_parameters()}
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


def _cut_layer(parts: TensorParts, layer: nn.Module, name: str, what: str, ranks: WeightGroup) -> None:
    """Connect a layer that was cut. Its sizes stay those of the full layer, as a sharded layer's do."""
    partial = _trainable(layer) if what == SHARED else _trainable(layer) & {PARTIAL[what]}
    parts.partial |= {f"{name}.{key}" for key in partial}
    if what != INPUTS:
        return
    layer.register_forward_hook(SummedOutput(ranks))
    parts.summed_layers += 1
    if isinstance(layer, LoraLinear):
        layer.first_column = ranks.part(layer.in_features).start  # of the dropout mask
    if ranks.rank > 0:
        layer.register_parameter("bias", None)  # added once to the sum


def _trainable(layer: nn.Module) -> set[str]:
    return set(layer.adapter_tensors()) if isinstance(layer, AdapterModule) else set()


def _cut_vocabulary(model: nn.Module, ranks: WeightGroup) -> VocabularyPart | None:
    """Connect embedding and head, where they were cut. Returns the head's part; None if it is not cut."""
    vocabulary = None
    for name in vocabulary_modules(model):
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding):
            rows = VocabularyRows(ranks, ranks.part(module.num_embeddings))
            module.register_forward_pre_hook(rows.before)
            module.register_forward_hook(rows.after)
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
