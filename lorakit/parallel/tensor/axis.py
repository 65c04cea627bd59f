"""The axis `tensor`, as an engine uses it: each rank has a part of every large weight and of its adapter.

    layer               W        A             B             sent forward      sent backward
    cut by outputs      rows     replicated *  rows          -                 gradient of x, once for a block
    cut by inputs       columns  columns       replicated *  y                 -
    embedding, head     rows     -             -             y; see the loss   gradient of the hidden states
    experts             rows of each gate and up, columns of each down; A and B likewise

    * the gradient is a partial sum: all of them are added in one message of a step

If there are fewer heads of keys and values than ranks, each is on as many neighbours as read it, and its gradients are
partial sums too.

Every other tensor is replicated, and so is its gradient. A message for the base serves its adapter too.

A module with experts is one block: all ranks choose the same experts for all tokens, and compute a part of each. Its
output is one sum, so the gradients of its trainable tensors, of a router too, are partial sums (decision 53).

Invariant: the parts side by side are the full tensor, bit for bit, so that a checkpoint does not depend on the cut.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor, nn

from lorakit.base.lazy import LazyBase
from lorakit.errors import RunError
from lorakit.lora import LoraLinear, adapter_modules, adapter_tensors
from lorakit.lora.inject import replace_modules
from lorakit.lora.linear import AdapterModule
from lorakit.lora.spec import AdapterSpec
from lorakit.objectives.cross_entropy import LossHead, LossModel, loss_head
from lorakit.parallel.axis import Axis
from lorakit.parallel.group import Group
from lorakit.parallel.tensor.partial_sums import (
    BlockInput,
    TensorParallelLoraLinear,
    VocabularyShard,
    copy_input,
    sum_output,
)
from lorakit.parallel.tensor.plan import (
    EXPERTS,
    INPUTS,
    OUTPUTS,
    block_of,
    checked_plan,
    cut_dims,
    mixture_of,
    vocabulary_modules,
)
from lorakit.parallel.tensor.probe import Probe
from lorakit.parallel.tensor.shards import Cut, CutTensors


@final
class TensorAxis(Axis):
    """Ranks with other parts of each weight."""

    name: ClassVar[str] = "tensor"
    shards: "TensorShards"  # the parts that are here, from `cut` on

    @staticmethod
    def check_fits(model: nn.Module, spec: AdapterSpec | None, num_ranks: int) -> None:
        checked_plan(model, num_ranks)

    def cut(self, loss_model: LossModel, weights: LazyBase | None, label_share: float) -> LazyBase | None:
        assert weights is not None
        self._probe = Probe(loss_model.model, weights, self.device)
        self.shards = self.world.run_on_all(lambda: cut_weights(loss_model, self.group))
        return CutTensors(weights, self.shards.cuts)

    def check_cut(self, loss_model: LossModel) -> None:
        self._probe.check(loss_model, self.world)
        del self._probe  # frees the copies
        self.shards.choices.take()  # those of the comparison do not count

    def gather(self, name: str, value: Tensor) -> Tensor:
        cut = self.shards.cuts.get(name)
        if cut is None or value.shape != cut.part_shape:
            return value
        return cut.gather(value, self.shards.group.concatenated)

    def scatter(self, name: str, full: Tensor) -> Tensor:
        cut = self.shards.cuts.get(name)
        return full if cut is None or full.shape != cut.shape else cut.scatter(full)

    def sum_gradients(self, local: Callable[[Tensor], Tensor]) -> float:
        return self.shards.sum_gradients(local)


@final
class TensorShards:
    """The parts that this rank has of a model's tensors."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        """Replace tensors, perhaps on meta, by this rank's parts, in every module. Raises as `checked_plan`."""
        self._model = model
        self.group = group
        self.plan = checked_plan(model, group.size)
        self.cuts: dict[str, Cut] = {}  # by the names of the tensors
        self.partial: set[str] = set()  # names of trainable tensors whose gradients are partial sums
        self.choices = ExpertChoices()
        self.vocabulary: VocabularyShard | None = None  # the rows of the output head here; None if it is not cut
        parts: dict[nn.Parameter, nn.Parameter] = {}  # of each full tensor, because tied ones stay tied
        for name, dim in cut_dims(model, self.plan, group.size).items():
            module_name, _, key = name.rpartition(".")
            module = model.get_submodule(module_name)
            full = module.get_parameter(key)
            cut = dim.cut(tuple(full.shape), group)
            if full not in parts:
                parts[full] = nn.Parameter(cut.scatter(full.detach()), requires_grad=full.requires_grad)
            module.register_parameter(key, parts[full])
            self.cuts[name] = cut
            if isinstance(module, AdapterModule):
                self.cuts[f"{module_name}.{module.name_in_adapter(key)}"] = cut
            if cut.copies > 1:  # the query heads here read one head of keys and values
                heads = model.config.get_text_config().num_attention_heads  # type: ignore[union-attr, operator]
                model.get_submodule(block_of(module_name)).num_key_value_groups = heads // group.size

    def sum_gradients(self, local: Callable[[Tensor], Tensor]) -> float:
        """Make the gradients of replicated tensors those of all ranks, in place, in one message. Collective.

        local: a gradient's own part here, where an engine shards it. Returns the sum of the squares of the gradients
        of all ranks; those that are replicated count once. Raises RunError: ranks have chosen different experts.
        """
        tensors = adapter_tensors(self._model).items()
        gradients = {name: local(tensor.grad) for name, tensor in tensors if tensor.grad is not None}
        device = next((each.device for each in gradients.values()), torch.device("cpu"))
        copies = {name: self.cuts[name].copies if name in self.cuts else self.group.size for name in gradients}
        slots = {name: self.group.rank // number for name, number in copies.items() if number > 1}
        sent = []
        for name, own in slots.items():
            sent.append(gradients[name].new_zeros(self.group.size // copies[name], gradients[name].numel()))
            # those that every rank has computed in full are averaged: copies must stay equal to the bit on any device
            divisor = 1 if name in self.partial or name in self.cuts else self.group.size
            sent[-1][own] = gradients[name].flatten() / divisor
        cut = _squares([each for name, each in gradients.items() if name not in slots], device)
        chosen = self.choices.take().to(device, torch.float32)
        summed = self.group.sum(torch.cat([cut, chosen, *(each.flatten() for each in sent)]))
        if float(summed[1]) != self.group.size * float(chosen):
            why = "ranks chose different experts for the same tokens; do they compute on different devices?"
            raise RunError(f"parallel.tensor: {why}")
        totals = summed[2:].split([each.numel() for each in sent])
        for (name, own), parts, total in zip(slots.items(), sent, totals, strict=True):
            gradients[name].copy_(total.view_as(parts)[own].view_as(gradients[name]))
        return float(summed[0] + _squares(totals, device))


def cut_weights(loss_model: LossModel, group: Group) -> TensorShards:
    """Cut a model and its adapter, and connect the parts with hooks, in place. Raises as `TensorShards`."""
    model = loss_model.model
    shards = TensorShards(model, group)
    plan = shards.plan
    inputs: dict[nn.Module, BlockInput] = {}
    replacements: dict[nn.Module, nn.Module] = {}
    for name, what in plan.items():
        layer = model.get_submodule(name)
        block = model.get_submodule(block_of(name))
        if what == OUTPUTS and mixture_of(name, plan) is None:
            if block not in inputs:
                inputs[block] = BlockInput(group)
                block.register_forward_hook(inputs[block].after_block, always_call=True)
            layer.register_forward_pre_hook(inputs[block].before_layer)
        elif what == EXPERTS:
            layer.register_forward_pre_hook(shards.choices.before_experts)
            block.register_forward_pre_hook(partial(copy_input, group), with_kwargs=True)
            block.register_forward_hook(partial(sum_output, group))
            _count_shared_once(model, block_of(name), plan, group)
        elif what == INPUTS:
            if isinstance(layer, LoraLinear):
                replacements[layer] = TensorParallelLoraLinear(layer, group)
            _sum_partial_outputs(shards, replacements.get(layer, layer), name)
    replace_modules(model, replacements)
    for name, module in adapter_modules(model):
        if name in plan or mixture_of(name, plan) is not None:  # a layer of which a rank computes a part
            shards.partial |= {f"{name}.{key}" for key in module.adapter_tensors()} - shards.cuts.keys()
    _cut_vocabulary(loss_model, shards)
    return shards


def _sum_partial_outputs(shards: TensorShards, layer: nn.Module, name: str) -> None:
    """Connect a layer that is cut by inputs. Its sizes stay those of the full layer, as a sharded layer's do."""
    if mixture_of(name, shards.plan) is None:  # else the block's output is summed
        layer.register_forward_hook(partial(sum_output, shards.group))
    is_trained = isinstance(layer, TensorParallelLoraLinear) and "bias" in layer.adapter_tensors()
    if not shards.group.is_rank_0 and not is_trained:
        layer.register_parameter("bias", None)  # added once to the sum


def _count_shared_once(model: nn.Module, mixture: str, plan: Mapping[str, str], group: Group) -> None:
    """Let one rank add the shared experts that are not cut: all of them compute these in full."""
    block = model.get_submodule(mixture)
    width = model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
    for name, child in block.named_children():
        is_cut = any(layer == f"{mixture}.{name}" or layer.startswith(f"{mixture}.{name}.") for layer in plan)
        layers = (layer for layer in child.modules() if layer is not child)
        if not is_cut and any(getattr(layer, "out_features", None) == width for layer in layers):
            child.register_forward_hook(lambda module, args, output: output * float(group.is_rank_0))


def _cut_vocabulary(loss_model: LossModel, shards: TensorShards) -> None:
    """Connect embedding and head, where they were cut, and read the head's tensors anew."""
    model = loss_model.model
    loss_model.head = loss_head(model)
    for name in vocabulary_modules(model):
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding):
            rows = VocabularyShard(shards.group, module.num_embeddings)
            module.register_forward_pre_hook(rows.before_embedding)
            module.register_forward_hook(rows.after_embedding, prepend=True)  # before noise, as every rank adds it
            module.padding_idx = None  # it is about gradients only
        elif isinstance(module, nn.Linear):
            shards.vocabulary = VocabularyShard(shards.group, module.out_features)
            if (head := loss_model.head) is not None:
                loss_model.head = LossHead(module, head.transform, shards.vocabulary)
            module.register_forward_pre_hook(shards.vocabulary.before_head)
            module.register_forward_hook(shards.vocabulary.after_head)


def _squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all values, (1,) float32."""
    return sum((gradient.float().square().sum() for gradient in gradients), torch.zeros(1, device=device))


MODULUS: Final = 65_521  # a prime below 2^16: sums over 256 ranks are exact in float32


@final
class ExpertChoices:
    """A checksum of all choices since it was last taken. The hook works on any module of experts of transformers."""

    def __init__(self) -> None:
        self._total = torch.zeros(1, dtype=torch.int64)

    def before_experts(self, experts: nn.Module, args: tuple[Any, ...]) -> None:
        """Add the choice, as a forward pre-hook of experts: called with hidden states, indices (tokens, k), weights."""
        if len(args) < 2 or not isinstance(args[1], Tensor) or args[1].is_floating_point():
            raise RuntimeError("experts are called without the indices of those that were chosen")
        chosen = args[1].detach().flatten().long() + 1
        factors = torch.arange(1, len(chosen) + 1, device=chosen.device) % MODULUS
        self._total = (31 * self._total.to(chosen.device) + (chosen * factors).sum()) % MODULUS

    def take(self) -> Tensor:
        """Return the checksum, (1,) int64, and begin anew; 0 if no expert was called."""
        total = self._total
        self._total = torch.zeros_like(total)
        return total
