"""The backend of one process on one device. Every other backend must give the same updates as this one."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lorakit.base.lazy import LazyBase
from lorakit.lora.inject import adapter_tensors, checkpoint_tensors
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.accounting import local_bytes
from lorakit.parallel.engine import BuildOptimizer
from lorakit.parallel.optimizer import set_rate
from lorakit.parallel.stepping import BaseEngine, state_to_cpu, state_to_device, to_cpu


class SingleEngine(BaseEngine):
    """The full model in this process, and a torch optimizer over the adapter's own tensors.

    DDP and FSDP2 extend this class, because their optimizers are torch's too.
    """

    def wrap(self, loss_model: LossModel, build: BuildOptimizer, weights: LazyBase | None) -> nn.Module:
        self._optimizer = build(adapter_tensors(loss_model.model))
        return loss_model

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self, rate: float) -> float:
        tensors = adapter_tensors(self._model)
        self.record_gradient(name for name, tensor in tensors.items() if tensor.grad is not None)
        if self._scale.dynamic:
            for tensor in tensors.values():
                if tensor.grad is not None:
                    tensor.grad.div_(self._scale.value)
        limit = self._settings.max_grad_norm
        # an infinite limit clips nothing but still computes the norm, which the check below needs
        norm = self.clip(tensors, math.inf if limit is None else limit)
        if math.isfinite(norm):
            set_rate(self._optimizer.param_groups, rate)
            self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def clip(self, tensors: Mapping[str, nn.Parameter], limit: float) -> float:
        """Scale the gradients down to a norm of `limit` if theirs is larger. Returns their norm before that."""
        gradients = [tensor.grad for tensor in tensors.values() if tensor.grad is not None]
        squares = self.axes.sum_gradients(lambda gradient: gradient)
        norm = float(get_total_norm(gradients)) if squares is None else math.sqrt(squares)
        norm = self.axes.norm_over_layers(norm)
        clip_grads_with_norm_(tensors.values(), limit, torch.tensor(norm, device=self.device))
        return norm

    def stage_adapter(self) -> dict[str, Tensor]:
        return {name: self.join(name, to_cpu(tensor)) for name, tensor in checkpoint_tensors(self._model).items()}

    def stage_optimizer_state(self) -> dict[str, Tensor]:
        return {
            f"{name}.{part}": self.join(name, state_to_cpu(value))
            for name, tensor in adapter_tensors(self._model).items()
            for part, value in self._optimizer.state[tensor].items()
        }

    def load_state(self, adapter: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Tensor]]) -> None:
        tensors = adapter_tensors(self._model)
        with torch.no_grad():
            for name, tensor in checkpoint_tensors(self._model).items():
                tensor.copy_(self.part(name, adapter[name]))
        for name in state.keys() & tensors.keys():
            self._optimizer.state[tensors[name]] = {
                part: state_to_device(self.part(name, value), self.device) for part, value in state[name].items()
            }

    def resident_bytes(self) -> dict[str, int]:
        adapter = list(adapter_tensors(self._model).values())
        adapter_ids = {id(tensor) for tensor in adapter}
        return {
            "base": local_bytes(p for p in self._model.parameters() if id(p) not in adapter_ids),
            "adapter": local_bytes(adapter),
            "gradients": local_bytes(tensor.grad for tensor in adapter),
            "optimizer": local_bytes(v for state in self._optimizer.state.values() for v in state.values()),
        }

    def describe(self) -> dict[str, Any]:
        return {"engine": type(self._model).__name__, "backend": "single"}
