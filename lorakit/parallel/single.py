"""The full base in every process: `single`, whose updates every other backend must give, and `ddp`.

An adapter's gradients are about 1 % of its base, so they are summed in one message a step, and not during backward, as
torch's DistributedDataParallel does. With `pipeline` and `tensor`, "full" is the rank's part.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lorakit.base.lazy import LazyBase
from lorakit.base.quantized import materialize
from lorakit.lora.inject import adapter_tensors
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.adapter_state import BuildOptimizer, Wrapped, set_rate, to_cpu
from lorakit.parallel.engine import Engine
from lorakit.parallel.group import Group


class SingleEngine(Engine):
    """A full copy of the model on every rank, and torch's optimizer over the adapter's tensors, as FSDP2 has too."""

    def wrap(self, loss_model: LossModel, build: BuildOptimizer, weights: LazyBase | None) -> Wrapped:
        self.fill(loss_model, weights)
        return loss_model, build(adapter_tensors(loss_model.model))  # last, because FSDP2 replaces the parameters

    def fill(self, loss_model: LossModel, weights: LazyBase | None) -> None:
        """Shard the model, if the engine does, and read the parameters that are on meta."""
        if weights is not None:  # of which this rank has a part
            materialize(loss_model.model, weights, self.device)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self, rate: float) -> float:
        adapter = self.adapter
        if adapter.scale.dynamic:
            for gradient in adapter.gradients():
                gradient.div_(adapter.scale.value)
        norm = self.reduce()
        adapter.without_gradient -= {name for name, tensor in adapter.tensors.items() if tensor.grad is not None}
        if math.isfinite(norm):
            limit = self._settings.max_grad_norm
            gradients = adapter.gradients()
            if limit is not None and gradients:
                # on the gradients' device, where torch would otherwise copy it to
                clip_grads_with_norm_(adapter.tensors.values(), limit, torch.tensor(norm, device=gradients[0].device))
            set_rate(adapter.optimizer.param_groups, rate)
            adapter.optimizer.step()
            adapter.step += 1
        adapter.optimizer.zero_grad()
        return norm

    def reduce(self) -> float:
        """Make the adapter's gradients sums over all ranks. Returns their norm over all tensors. Collective."""
        sum_gradients(list(self.adapter.tensors.values()), self.mesh.replicas)
        return self.norm(lambda gradient: gradient, Group())

    def norm(self, local: Callable[[Tensor], Tensor], shards: Group) -> float:
        """Add up the gradients of ranks that share weights; return the norm over all tensors of all ranks. Collective.

        local: returns a gradient's part here. shards: the ranks that have the other parts.
        """
        sums = [axis.sum_gradients(local) for axis in self.axes.values()]
        squares = next((each for each in sums if each is not None), None)
        if squares is None:
            squares = float(get_total_norm([local(each) for each in self.adapter.gradients()])) ** 2
        of_stage = shards.all_reduce_sum(squares)
        return math.sqrt(self.mesh.pipeline.all_reduce_sum(*of_stage)[0])

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.adapter.saved.items():
            yield name, self.to_host(tensor)

    def gather_optimizer(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, tensor in self.adapter.tensors.items():
            for part, value in self.adapter.optimizer.state[tensor].items():
                yield name, part, self.to_host(value)

    def to_host(self, value: Any) -> Tensor:
        """Return a value of adapter or optimizer state in full on the CPU: floats in float32, others in their dtype."""
        if not isinstance(value, Tensor):
            return torch.tensor(value)
        return to_cpu(value) if value.is_floating_point() else value.detach().to("cpu", copy=True)

    def scatter(self, name: str, full: Tensor) -> None:
        self.adapter.saved[name].detach().copy_(full)

    def scatter_optimizer(self, name: str, part: str, full: Tensor) -> None:
        is_int = full.dtype is torch.int64 and full.dim() == 0  # bitsandbytes counts its steps in Python ints
        value = int(full) if is_int else full.to(self.device, copy=True)
        self.adapter.optimizer.state[self.adapter.tensors[name]][part] = value

    def describe(self) -> dict[str, Any]:
        if self.parallel.backend == "single":
            return {"engine": type(self._model).__name__, "backend": "single"}
        return {"engine": "DDP", "backend": "ddp"}


def sum_gradients(tensors: Sequence[nn.Parameter], group: Group) -> None:
    """Replace each gradient by its sum over a group's ranks, in one message. None stays where no rank has one."""
    if group.size == 1 or not tensors:  # a stage may have nothing to train
        return
    parts = [(torch.zeros_like(t) if t.grad is None else t.grad).flatten() for t in tensors]
    counts = torch.tensor([float(tensor.grad is not None) for tensor in tensors], device=parts[0].device)
    flat = torch.cat([*parts, counts])
    dist.all_reduce(flat, group=group.device_group)
    *sums, counts = flat.split([*(tensor.numel() for tensor in tensors), len(tensors)])
    for tensor, total, count in zip(tensors, sums, counts.tolist(), strict=True):
        tensor.grad = total.view_as(tensor) if count else None
