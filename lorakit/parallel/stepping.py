"""One optimizer step, written once for every backend. A backend fills in sharding, backward and update.

Law: the update equals that of one process given the micro-batches of all ranks, with the loss of
`objectives.objective`: for `sft` the sum of token losses / the number of label tokens, over all micro-batches.

The counts that divide are summed over the ranks before the first forward, because a rank's rows may have more labels
than another's: a mean of the ranks' means would weight tokens unequally.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lorakit.base.lazy import LazyBase
from lorakit.data.batch import Batch
from lorakit.errors import RunError
from lorakit.launch.quiet import quiet_libraries
from lorakit.lora.inject import adapter_tensors, checkpoint_tensors
from lorakit.objectives.cross_entropy import LossModel
from lorakit.ops.dropout import TokenKeys, use_token_keys
from lorakit.parallel.accounting import Collectives
from lorakit.parallel.axes import Axes
from lorakit.parallel.engine import (
    BuildOptimizer,
    EngineState,
    LossReport,
    NonFiniteStep,
    StepReport,
    StepSettings,
)
from lorakit.parallel.expected import expected_messages
from lorakit.parallel.group import Group
from lorakit.parallel.loss_scale import LOSS_SCALE_KEY, LossScale
from lorakit.parallel.mesh import Mesh
from lorakit.parallel.pipeline import FORWARD, StageForward
from lorakit.parallel.seeds import derived_seed, dropout_keys
from lorakit.parallel.sums import ScoreSums, StepCounts, count_step, terms_of
from lorakit.parallel.verify import ExpectedLayout, verify_layout, verify_step


class BaseEngine(ABC):
    """The part of an engine that all backends share: prepare, step, evaluate, restore.

    A backend implements the abstract methods and overrides the other hooks where it shards.
    """

    shards_base = False

    def __init__(self, device: torch.device, group: Group, backend: str, mesh: Mesh | None = None) -> None:
        """Mesh: of the ranks of ``group``; None if only ``data`` is larger than 1."""
        self.device, self.group, self._backend = device, group, backend
        self.rank, self.mesh = group.rank, mesh or Mesh(data=group, tokens=group)
        self.set_phase: Callable[[str], None] = lambda phase: None
        self._collectives = Collectives(group.size)
        self.axes = Axes(self.mesh, group, device)

    # --- hooks of a backend ------------------------------------------------------------------------------------------

    @abstractmethod
    def wrap(self, loss_model: LossModel, build: BuildOptimizer, weights: LazyBase | None) -> nn.Module:
        """Shard the model, fill its parameters, build the optimizer. Returns the module to call for a forward pass."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Run backward for one micro-batch. After the step's last one, gradients are sums over all ranks."""

    @abstractmethod
    def update(self, rate: float) -> float:
        """Unscale and clip the gradients, update, and free the gradients. Returns their norm before clipping.

        A norm that is not finite means: nothing was updated.
        """

    @abstractmethod
    def stage_adapter(self) -> dict[str, Tensor]:
        """Return the full adapter tensors of this rank's layers, by name, in float32 on the CPU. Collective."""

    @abstractmethod
    def stage_optimizer_state(self) -> dict[str, Tensor]:
        """Return the full optimizer state of the same tensors, on the CPU, as `<tensor name>.<part>`. Collective."""

    @abstractmethod
    def load_state(self, adapter: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load full adapter tensors, and optimizer state as name -> part -> full tensor, into this rank's shards.

        Both are of all layers, also of those that other ranks have.
        """

    @abstractmethod
    def resident_bytes(self) -> dict[str, int]:
        """Return the bytes on this rank between steps, by category: base, adapter, gradients, optimizer."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the engine's class and backend, read from the objects that really run, not from the recipe."""

    def check(self, work: Callable[[], None]) -> None:
        """Run a check of the engine after an update; its problem on any rank is raised on all. Collective."""
        self.group.run_on_all(work)

    def shard_numel(self, shape: Sequence[int]) -> int:
        """Return the most elements that one rank stores of a frozen tensor of this shape."""
        return math.prod(shape)

    def resident_base_bytes(self, base: Sequence[Tensor]) -> int:
        """Return an upper bound of the base's bytes on one rank between steps.

        Call it before `wrap`, because full shapes are read from `base`.
        """
        return sum(self.shard_numel(p.shape) * p.itemsize for p in base)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Return a context around a micro-batch's forward and backward. The last one's backward sums over ranks."""
        return nullcontext()

    # --- shared by all backends --------------------------------------------------------------------------------------

    def prepare(
        self,
        loss_model: LossModel,
        optimizer: BuildOptimizer,
        settings: StepSettings,
        weights: LazyBase | None = None,
    ) -> None:
        model = loss_model.model
        self._loss_model, self._model = loss_model.train(), model
        self._objective, self._settings = loss_model.objective, settings
        self._num_micro_batches = self._num_tokens = 0
        self._counted_step: dict[str, int] = {}
        self._all_names = checkpoint_tensors(model).keys()
        weights = self.axes.cut(loss_model, settings.label_share, weights)
        self._without_gradient, self._all_had_gradient = set(adapter_tensors(model)), False
        self._scale = LossScale(settings.scales_loss)
        base = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        adapter_bytes = sum(tensor.nbytes for tensor in adapter_tensors(model).values())
        self._expected = ExpectedLayout(
            self._backend,
            self.group.size,
            self.mesh.tokens.size,
            sum(p.nbytes for p in base),
            adapter_bytes,
            self.resident_base_bytes(base),
        )
        with quiet_libraries():
            self._wrapped = self.wrap(loss_model, optimizer, weights)
        self._stage_steps = self.axes.steps(self._wrapped)
        # accelerate can return another engine than the requested one, without an error
        self.group.run_on_all(lambda: verify_layout(self._expected, self.layout()))
        self.axes.check()

    def step(self, index: int, micro_batches: Sequence[Batch]) -> StepReport:
        counts = count_step(self._objective, micro_batches, self.mesh.data)
        rate = self._settings.learning_rate(index)
        while True:  # more than once only in float16, after an overflow
            with self._collectives.counting():
                report = self._accumulate(index, micro_batches, counts)
                grad_norm = self.update(rate)
            if math.isfinite(grad_norm):
                break
            if not self._scale.back_off():
                raise NonFiniteStep(report.loss, grad_norm, self._suspect_rows(micro_batches, []))
        self._scale.record_good_step()
        if self._collectives.counts_are_new():
            self._counted_step = {"micro_batches": self._num_micro_batches, "tokens": self._num_tokens}
            numbers = self._counted_step.values()
            bounds = expected_messages(self._loss_model, self.axes, self.mesh, *numbers)
            self.check(lambda: verify_step(self._expected, bounds, self.layout()))
        return StepReport(report.loss, grad_norm, rate, counts.num_tokens, counts.num_label_tokens, report.metrics)

    def accumulate(self, index: int, micro_batches: Sequence[Batch]) -> LossReport:
        return self._accumulate(index, micro_batches, count_step(self._objective, micro_batches, self.mesh.data))

    def _accumulate(self, index: int, micro_batches: Sequence[Batch], counts: StepCounts) -> LossReport:
        sums = ScoreSums(self._objective)
        self._num_micro_batches, self._num_tokens = len(micro_batches), 0
        under_way: dict[int, tuple[TokenKeys, StageForward, Tensor | None]] = {}
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            for direction, number in self.axes.schedule(len(micro_batches)):
                last = number == len(micro_batches) - 1
                if direction == FORWARD:
                    batch = micro_batches[number]
                    torch.manual_seed(self._seed_of(index, number))
                    part = self.axes.slice(batch)
                    self._num_tokens += part.input_ids.numel()
                    keys, loss = dropout_keys(part, self._settings.seed, index), None
                    with use_token_keys(keys), self.micro_batch(last):
                        forward = self._stage_steps.forward(part.to(self.device))
                        if forward.scores is not None:
                            terms = terms_of(self._objective, forward.scores, batch)
                            shares = [term / count for term, count in zip(terms, counts.normalizers, strict=True)]
                            loss = reduce(torch.add, shares) * self._scale.value
                            sums.add(forward.scores, terms, batch)
                    under_way[number] = keys, forward, loss
                else:
                    keys, forward, loss = under_way.pop(number)
                    with use_token_keys(keys), self.micro_batch(last):
                        self._stage_steps.backward(forward, loss, self.backward)
                    del forward, loss
            self._stage_steps.wait()
        report = LossReport(*sums.reduce(self.mesh))
        if not math.isfinite(report.loss):  # raised before the update, so that the adapter stays as it was
            pairs = zip(micro_batches, sums.terms, strict=False)  # only the last stage has terms
            nonfinite = [batch for batch, terms in pairs if not all(map(torch.isfinite, terms))]
            raise NonFiniteStep(report.loss, math.nan, self._suspect_rows(micro_batches, nonfinite))
        return report

    def _seed_of(self, index: int, number: int) -> int:
        """Return the seed of a micro-batch for dropout of the base's own."""
        # of all ranks' micro-batches and stages, so that no two of them share a mask
        position = number * self.mesh.tokens.size + self.mesh.tokens.rank
        stage = self.mesh.pipeline.rank
        return derived_seed(self._settings.seed, index, f"stage {stage} {position}" if stage else position)

    def _suspect_rows(self, micro_batches: Sequence[Batch], nonfinite: Sequence[Batch]) -> tuple[int, ...]:
        """Return the rows, over all ranks, of the micro-batches that are not finite. If there are none, all rows."""
        own = [[row for batch in batches for row in batch.row_indices] for batches in (nonfinite, micro_batches)]
        rows_by_rank = self.group.all_gather(own)
        suspects = tuple(row for suspect, _ in rows_by_rank for row in suspect)
        # each once: ranks that share a line have the same rows
        return tuple(dict.fromkeys(suspects or (row for _, all_rows in rows_by_rank for row in all_rows)))

    def evaluate(self, micro_batches: Iterable[Batch], stop: Callable[[], bool]) -> LossReport | None:
        sums = ScoreSums(self._objective)
        by_source: dict[str, ScoreSums] = {}
        self._wrapped.eval()
        try:
            with torch.no_grad():
                sent = StageForward(None)
                for number, batch in enumerate(micro_batches):
                    # decided together: forward is collective where the base is sharded. Once for as many micro-batches
                    # as there are stages, because all wait here for the last one
                    if number % self.axes.num_ahead == 0 and self.group.any(stop()):
                        return None
                    forward = self._stage_steps.forward(self.axes.slice(batch).to(self.device))
                    sent.wait()
                    sent = forward
                    own = [sums]
                    if batch.source is not None:  # on every stage, because reducing is collective
                        own.append(by_source.setdefault(batch.source, ScoreSums(self._objective)))
                    if forward.scores is not None:
                        terms = terms_of(self._objective, forward.scores, batch)
                        for one in own:
                            one.add(forward.scores, terms, batch)
                sent.wait()
        finally:
            self._wrapped.train()
        reports = {source: LossReport(*own.reduce(self.mesh)) for source, own in by_source.items()}
        return LossReport(*sums.reduce(self.mesh), reports)

    def record_gradient(self, names: Iterable[str]) -> None:
        """Note that these adapter tensors have had a gradient."""
        self._without_gradient -= set(names)

    def tensors_without_gradient(self) -> list[str]:
        # decided by the last exchange and not by this rank's set: a rank that skipped one alone would hang the others
        if not self._all_had_gradient:
            self._without_gradient = set.intersection(*self.mesh.tokens.all_gather(self._without_gradient))
            of_stages = self.mesh.pipeline.all_gather(self._without_gradient)
            self._all_had_gradient = not any(of_stages)
            return sorted(set.union(*of_stages))
        return []

    def state_dict(self) -> EngineState:
        optimizer = self.axes.gather_layers(self.stage_optimizer_state())
        return EngineState(self.adapter_state_dict(), optimizer | self._scale.state())

    def adapter_state_dict(self) -> dict[str, Tensor]:
        return self.axes.gather_layers(self.stage_adapter())

    def load_state_dict(self, state: EngineState) -> None:
        if state.adapter.keys() != self._all_names:
            raise RunError(f"the checkpoint holds other tensors: {sorted(state.adapter.keys() ^ self._all_names)[:4]}")
        parts_by_name: dict[str, dict[str, Tensor]] = {}
        for key, value in state.optimizer.items():
            name, _, part = key.rpartition(".")
            if name:  # the loss scale has none
                parts_by_name.setdefault(name, {})[part] = value
        self.load_state(state.adapter, parts_by_name)
        self._scale.restore(state.optimizer.get(LOSS_SCALE_KEY))
        self.record_gradient(parts_by_name)  # an optimizer has state only for tensors that have had a gradient

    def decoding(self) -> AbstractContextManager[None]:
        return self.axes.decoding()

    def join(self, name: str, value: Tensor) -> Tensor:
        """Return the full tensor of an adapter's tensor or its optimizer state, where ranks have parts. Collective."""
        return self.axes.gather(name, value)

    def part(self, name: str, full: Tensor) -> Tensor:
        """Undo `join`."""
        return self.axes.scatter(name, full)

    def _collectives_by_axis(self) -> dict[str, Any]:
        """Return the collectives along each axis of the mesh, and the groups that are none of its axes."""
        axes = self.mesh.ranks
        # by kind too, because the ranks of `sequence` may be those of `tokens`
        along = {
            axis: {
                kind: count
                for kind, count in self._collectives.counts(ranks).items()
                if (kind == "all_to_all") == (axis == "sequence")
            }
            for axis, ranks in axes.items()
        }
        others = {ranks for ranks in self._collectives.groups() if len(ranks) > 1} - set(axes.values())
        return {"collectives_by_axis": along, "groups_of_no_axis": sorted(map(list, others))}

    def layout(self) -> dict[str, Any]:
        on_gpu = self.device.type == "cuda"
        resident = self.resident_bytes()  # first, because FSDP2 frees what forward left gathered there
        return {
            **self.describe(),
            "device": torch.cuda.get_device_name(self.device) if on_gpu else self.device.type,
            "threads": torch.get_num_threads(),
            "world_size": self.group.size,
            "mesh": self.mesh.sizes,
            "micro_batches": self._num_micro_batches,
            **self.axes.facts(),
            **({"communication": str(dist.get_backend())} if self.group.size > 1 else {}),
            **{f"{category}_bytes": size for category, size in resident.items()},
            "counted_step": self._counted_step,
            "collectives_of_a_step": self._collectives.counts(),
            **self._collectives_by_axis(),
        }


def to_cpu(tensor: Tensor) -> Tensor:
    """Return a float32 copy in host memory."""
    return tensor.detach().to("cpu", torch.float32, copy=True)


def state_to_cpu(value: Any) -> Tensor:
    """Return a value of an optimizer's state as a tensor in host memory: floats in float32, others in their dtype."""
    if not isinstance(value, Tensor):
        return torch.tensor(value)
    return to_cpu(value) if value.is_floating_point() else value.detach().to("cpu", copy=True)


def state_to_device(value: Tensor, device: torch.device) -> Tensor | int:
    """Undo `state_to_cpu`: a scalar int64 becomes an int, because bitsandbytes counts its steps in Python ints."""
    return int(value) if value.dtype is torch.int64 and value.dim() == 0 else value.to(device)
