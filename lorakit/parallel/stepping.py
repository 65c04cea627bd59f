"""One optimizer step, the same for every backend; what differs is how gradients meet and who updates what.

loss = sum of token losses / number of label tokens, both over all ranks and micro-batches.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lorakit.data.batch import Batch
from lorakit.errors import RunError
from lorakit.launch.quiet import quiet_libraries
from lorakit.lora.inject import adapter_tensors, checkpoint_tensors
from lorakit.objectives.cross_entropy import LossModel, loss_sum
from lorakit.parallel.accounting import Collectives, process_group_name
from lorakit.parallel.engine import BuildOptimizer, FillParameter, NonFiniteStep, StepReport, StepSettings
from lorakit.parallel.group import Group
from lorakit.parallel.loss_scale import KEY, LossScale
from lorakit.parallel.verify import Expected, verify_layout, verify_step


class BaseEngine(ABC):
    """The step and what goes with it. A backend says how gradients meet and who updates what."""

    shards_base = False

    def __init__(self, device: torch.device, group: Group, backend: str) -> None:
        self.device, self.group, self._backend = device, group, backend
        self.rank, self.world_size = group.rank, group.size
        self.phase: Callable[[str], None] = lambda phase: None
        self._collectives = Collectives(self.world_size)

    # --- what a backend fills in -----------------------------------------------------------------------------------

    @abstractmethod
    def wrap(self, loss_model: LossModel, build: BuildOptimizer, read: FillParameter | None) -> nn.Module:
        """Spread the model and build its optimizer; returns the module to call for a forward pass."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Backward of this rank's part of the step's loss; after the last one gradients are sums over all ranks."""

    @abstractmethod
    def update(self, rate: float) -> float:
        """Unscale, clip and update; returns the gradient norm before clipping.

        When it is not finite nothing was updated, and the gradients are gone.
        """

    @abstractmethod
    def gather(self) -> dict[str, Tensor]: ...

    @abstractmethod
    def optimizer_state(self) -> dict[str, Tensor]:
        """Optimizer state by tensor name, whole, on the CPU. Collective."""

    @abstractmethod
    def load_state(self, adapter: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Adapter and optimizer state (tensor name -> part -> value) into this backend's layout."""

    @abstractmethod
    def held_bytes(self) -> dict[str, int]:
        """Bytes this rank holds: base, adapter, gradients, optimizer."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What is really there: the engine's classes and settings, looked up."""

    def shard_numel(self, shape: Sequence[int]) -> int:
        """The most elements of a frozen tensor that one rank holds at rest."""
        return math.prod(shape)

    def resident_base_bytes(self, base: Sequence[Tensor]) -> int:
        """The most bytes of a base, whose tensors still have their shapes, that one rank holds between steps."""
        return sum(self.shard_numel(p.shape) * p.itemsize for p in base)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch; gradients of different ranks need to meet in the last only."""
        return nullcontext()

    # --- what all of them share ------------------------------------------------------------------------------------

    def prepare(
        self, model: nn.Module, optimizer: BuildOptimizer, settings: StepSettings, read: FillParameter | None = None
    ) -> None:
        self.loss_model, self._model, self._settings = LossModel(model).train(), model, settings
        self._unreached = set(adapter_tensors(model))
        self._scale = LossScale(settings.scales_loss)
        base = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        adapter_bytes = sum(tensor.nbytes for tensor in adapter_tensors(model).values())
        self._expected = Expected(
            self._backend, self.world_size, sum(p.nbytes for p in base), adapter_bytes,
            self.resident_base_bytes(base),
        )  # fmt: skip
        with quiet_libraries():
            self._forward = self.wrap(self.loss_model, optimizer, read)
        self.group.run_on_all(lambda: verify_layout(self._expected, self.observed()))

    def step(self, index: int, micro_batches: Sequence[Batch]) -> StepReport:
        labels, tokens = self.group.all_reduce_sum(
            sum(batch.num_label_tokens for batch in micro_batches), sum(batch.num_tokens for batch in micro_batches)
        )
        rate = self._settings.learning_rate(index)
        while True:
            with self._collectives.of_one_step():
                losses = self._forward_and_backward(index, micro_batches, labels)
                loss = self.group.all_reduce_sum(float(torch.stack(losses).sum()))[0] / labels
                if not math.isfinite(loss):
                    raise NonFiniteStep(loss, math.nan, self._suspects(micro_batches, losses))
                grad_norm = self.update(rate)
            if math.isfinite(grad_norm):
                break
            if not self._scale.back_off():
                raise NonFiniteStep(loss, grad_norm, self._suspects(micro_batches, losses))
        self._scale.record_good_step()
        if self._collectives.just_counted():
            self.group.run_on_all(lambda: verify_step(self._expected, self.observed()))
        return StepReport(loss, grad_norm, rate, int(tokens), int(labels))

    def _forward_and_backward(self, index: int, micro_batches: Sequence[Batch], labels: float) -> list[Tensor]:
        losses = []
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self.loss_model.leaving_out():
            for number, batch in enumerate(micro_batches):
                place = number * self.world_size + self.rank
                torch.manual_seed(dropout_seed(self._settings.seed, index, place))
                with self.micro_batch(last=number == len(micro_batches) - 1):
                    loss = loss_sum(self._forward, batch.to(self.device))
                    self.backward(loss / labels * self._scale.value)
                losses.append(loss.detach())
        return losses

    def _suspects(self, micro_batches: Sequence[Batch], losses: Sequence[Tensor]) -> tuple[int, ...]:
        """The rows of the micro-batches whose loss is not finite, or all rows when only a gradient is; of all ranks."""
        bad = [batch for batch, loss in zip(micro_batches, losses, strict=True) if not math.isfinite(float(loss))]
        found = self.group.all_gather(
            ([row for b in bad for row in b.rows], [row for b in micro_batches for row in b.rows])
        )
        return tuple(row for mine, _ in found for row in mine) or tuple(row for _, mine in found for row in mine)

    def evaluate(self, micro_batches: Iterable[Batch], stop: Callable[[], bool]) -> float | None:
        total, num_label_tokens = 0.0, 0
        self._forward.eval()
        try:
            with torch.no_grad(), self.loss_model.leaving_out():
                for batch in micro_batches:
                    if self.group.any(stop()):
                        return None
                    total += float(loss_sum(self._forward, batch.to(self.device)))
                    num_label_tokens += batch.num_label_tokens
        finally:
            self._forward.train()
        total, num_labels = self.group.all_reduce_sum(total, num_label_tokens)
        return total / num_labels

    def mark_reached(self, names: Iterable[str]) -> None:
        """Note adapter tensors that had a gradient."""
        self._unreached -= set(names)

    def tensors_without_gradient(self) -> list[str]:
        if self._unreached:  # the same question on every rank: once empty, empty everywhere
            self._unreached = set.intersection(*self.group.all_gather(self._unreached))
        return sorted(self._unreached)

    def gather_optimizer(self) -> dict[str, Tensor]:
        return self.optimizer_state() | self._scale.state()

    def restore(self, adapter: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        tensors = checkpoint_tensors(self._model)
        if adapter.keys() != tensors.keys():
            raise RunError(f"the checkpoint holds other tensors: {sorted(adapter.keys() ^ tensors.keys())[:4]}")
        state: dict[str, dict[str, Tensor]] = {}
        for key, value in optimizer.items():
            name, _, part = key.rpartition(".")
            if name:
                state.setdefault(name, {})[part] = value
        self.load_state(adapter, state)
        self._scale.restore(optimizer.get(KEY))
        self.mark_reached(state)  # the optimizer holds state of what has had a gradient

    def observed(self) -> dict[str, Any]:
        on_gpu = self.device.type == "cuda"
        here = {f"{name}_bytes": size for name, size in self.held_bytes().items()}
        return {
            **self.describe(),
            "device": torch.cuda.get_device_name(self.device) if on_gpu else "cpu",
            "threads": torch.get_num_threads(),
            "world_size": self.world_size,
            **({"communication": process_group_name()} if self.world_size > 1 else {}),
            **here,
            "collectives_of_a_step": self._collectives.counts(),
        }


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """The state of dropout for a micro-batch: a function of these numbers, so that nothing has to be saved."""
    return int.from_bytes(hashlib.sha256(f"dropout/{seed}/{step}/{micro_batch}".encode()).digest()[:7], "little")


def buffers_to(model: nn.Module, device: torch.device) -> None:
    """Move what is neither base nor adapter, such as the frequencies of rotary positions, to where it is computed."""
    for module in model.modules():
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = value.to(device)


def to_cpu(tensor: Tensor) -> Tensor:
    """A float32 copy in host memory."""
    return tensor.detach().to("cpu", torch.float32, copy=True)


def to_keep(value: Any) -> Tensor:
    """A part of an optimizer's state as a tensor in host memory: floats as float32, codes and counts as they are."""
    if not isinstance(value, Tensor):
        return torch.tensor(value)
    return to_cpu(value) if value.is_floating_point() else value.detach().to("cpu", copy=True)


def as_held(value: Tensor, device: torch.device) -> Tensor | int:
    """The same back in an optimizer: a count is a number there."""
    return int(value) if value.dtype is torch.int64 and value.dim() == 0 else value.to(device)
