"""One process on one device."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn

from lorakit.batch import Batch
from lorakit.engine.base import NonFiniteStep, StepReport, StepSettings
from lorakit.errors import RunError
from lorakit.lora.inject import adapter_tensors
from lorakit.loss import loss_sum


@final
class SingleEngine:
    """The whole model and optimizer in this process. Also the reference every other engine must agree with."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def loading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, settings: StepSettings) -> None:
        self._model, self._optimizer, self._settings = model.train(), optimizer, settings
        self._unreached = set(adapter_tensors(model))

    def step(self, index: int, micro_batches: Sequence[Batch]) -> StepReport:
        num_label_tokens = sum(batch.num_label_tokens for batch in micro_batches)
        losses = []
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            for number, batch in enumerate(micro_batches):
                torch.manual_seed(dropout_seed(self._settings.seed, index, number))
                loss = loss_sum(self._model, batch.to(self.device))
                (loss / num_label_tokens).backward()
                losses.append(loss.detach())
        loss_mean = float(torch.stack(losses).sum()) / num_label_tokens
        grad_norm = self._clip()
        if not math.isfinite(loss_mean) or not math.isfinite(grad_norm):
            self._optimizer.zero_grad()
            raise NonFiniteStep(loss_mean, grad_norm, _suspects(micro_batches, losses))
        rate = self._settings.learning_rate(index)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return StepReport(loss_mean, grad_norm, rate, sum(b.num_tokens for b in micro_batches), num_label_tokens)

    def _clip(self) -> float:
        tensors = adapter_tensors(self._model)
        self._unreached -= {name for name, tensor in tensors.items() if tensor.grad is not None}
        limit = self._settings.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(tensors.values(), math.inf if limit is None else limit)
        return float(norm)

    def evaluate(self, micro_batches: Iterable[Batch], stop: Callable[[], bool]) -> float | None:
        total, num_label_tokens = 0.0, 0
        self._model.eval()
        try:
            with torch.no_grad():
                for batch in micro_batches:
                    if stop():
                        return None
                    total += float(loss_sum(self._model, batch.to(self.device)))
                    num_label_tokens += batch.num_label_tokens
        finally:
            self._model.train()
        return total / num_label_tokens

    def unreached(self) -> list[str]:
        return sorted(self._unreached)

    def gather(self) -> dict[str, Tensor]:
        return {name: _to_cpu(tensor) for name, tensor in adapter_tensors(self._model).items()}

    def gather_optimizer(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": _to_cpu(value)
            for name, tensor in adapter_tensors(self._model).items()
            for key, value in self._optimizer.state[tensor].items()
        }

    def restore(self, adapter: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        tensors = adapter_tensors(self._model)
        if adapter.keys() != tensors.keys():
            raise RunError(f"the checkpoint holds other tensors: {sorted(adapter.keys() ^ tensors.keys())[:4]}")
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(adapter[name])
        state: dict[str, dict[str, Tensor]] = {}
        for key, value in optimizer.items():
            name, _, part = key.rpartition(".")
            state.setdefault(name, {})[part] = value
        for name, parts in state.items():
            on_device = {part: value.to(self.device) for part, value in parts.items()}
            self._optimizer.state[tensors[name]] = on_device
        self._unreached -= state.keys()  # the optimizer holds state of what has had a gradient

    def observed(self) -> dict[str, Any]:
        tensors = adapter_tensors(self._model)
        trainable = {id(tensor) for tensor in tensors.values()}
        on_gpu = self.device.type == "cuda"
        return {
            "engine": type(self).__name__,
            "device": torch.cuda.get_device_name(self.device) if on_gpu else "cpu",
            "threads": torch.get_num_threads(),
            "world_size": 1,
            "base_bytes": sum(p.nbytes for p in self._model.parameters() if id(p) not in trainable),
            "adapter_bytes": sum(tensor.nbytes for tensor in tensors.values()),
            "optimizer_bytes": sum(
                value.nbytes for state in self._optimizer.state.values() for value in state.values()
            ),
        }


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """The state of dropout for a micro-batch: a function of these numbers, so that nothing has to be saved."""
    return int.from_bytes(hashlib.sha256(f"dropout/{seed}/{step}/{micro_batch}".encode()).digest()[:7], "little")


def _suspects(micro_batches: Sequence[Batch], losses: Sequence[Tensor]) -> tuple[int, ...]:
    """The rows of the micro-batches whose loss is not finite, or all rows when only a gradient is."""
    bad = [batch for batch, loss in zip(micro_batches, losses, strict=True) if not math.isfinite(float(loss))]
    return tuple(row for batch in bad or micro_batches for row in batch.rows)


def _to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)
