"""The engine: one process's model, adapter and optimizer, and one optimizer step, written once for every backend.

Law: the update equals that of one process given the micro-batches of all ranks, with the loss of
`objectives.objective`: for `sft` the sum of token losses / the number of label tokens, over all micro-batches.

The counts that divide are summed over the ranks before the first forward, because a rank's rows may have more labels
than another's: a mean of the ranks' means would weight tokens unequally.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lorakit.backends import BACKENDS
from lorakit.base.lazy import LazyBase
from lorakit.data.batch import Batch
from lorakit.errors import RunError
from lorakit.files.progress import report_progress
from lorakit.launch.libraries import quiet_libraries
from lorakit.lora.inject import adapter_tensors, checkpoint_tensors
from lorakit.objectives.cross_entropy import LossModel
from lorakit.objectives.objective import Objective, Scores, scores_of_rows
from lorakit.ops.dropout import TokenKeys, use_token_keys
from lorakit.parallel._internals import shard_of
from lorakit.parallel.adapter_state import AdapterState, BuildOptimizer, EngineState, LossScale, StepSettings, Wrapped
from lorakit.parallel.axis import axes_of
from lorakit.parallel.group import Group, Mesh
from lorakit.parallel.pipeline.stage import FORWARD, StageForward, StageSteps, one_forward_one_backward
from lorakit.parallel.sums import EvaluationSums, LossAccumulator, LossReport, step_counts

if TYPE_CHECKING:  # at run time the recipe comes from the caller, so a training loop without one needs no pydantic
    from lorakit.recipe import ParallelSection

SLACK_BYTES: Final = 4096  # DeepSpeed pads its flat buffers
MOMENT_BYTES: Final = 2 * 4  # AdamW's two moments, in float32
COUNTER_BYTES: Final = 4  # AdamW's step count, for each tensor
UnderWay = tuple[TokenKeys, StageForward, Tensor | None]
"""a micro-batch between its forward and its backward, and its loss; None where a later stage computes the loss"""
AddScores = Callable[[Batch, Scores | None], None]  # called with None on a stage of a pipeline that is not the last


@dataclass(frozen=True)
class GradientReport:
    """The numbers of a step's forward and backward passes, over all ranks."""

    loss: float
    num_tokens: int
    num_label_tokens: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class StepReport(GradientReport):
    """The numbers of an optimizer step, over all ranks. grad_norm: 2-norm of the gradient before clipping."""

    grad_norm: float
    learning_rate: float


class NonFiniteStep(Exception):
    """The loss or the gradient of a step is not finite, and nothing was updated. `rows`: the rows to suspect."""

    def __init__(self, loss: float, grad_norm: float, rows: tuple[int, ...]) -> None:
        super().__init__(f"loss {loss}, gradient norm {grad_norm}")
        self.rows = rows


class Engine(ABC):
    """One process's part of a run. A backend implements the abstract methods: how it shards, sums and restores.

    group: all ranks. mesh: the same ranks by axes; counts of rows are over `mesh.data`, of tokens over `mesh.replicas`.
    """

    adapter: AdapterState  # which steps update, from `prepare` on

    def __init__(
        self, parallel: "ParallelSection", device: torch.device, group: Group, mesh: Mesh | None = None
    ) -> None:
        """Store the ranks. mesh: of the ranks of `group`; None if only `data` is larger than 1."""
        self.parallel = parallel
        self.facts = parallel.facts
        self.device = device
        self.group = group
        self.mesh = mesh or Mesh(data=group, replicas=group)
        self.axes = axes_of(self.mesh, group, device)
        num_parts = self.mesh.pipeline.size * self.mesh.tensor.size
        # the base must be built on meta, because `prepare` reads only this rank's part of each tensor
        self.shards_base = self.facts.shards_base or parallel.offloads.streams or num_parts > 1
        self.set_phase: Callable[[str], None] = lambda phase: None  # called with the activity, for the watchdog
        self._is_verified = False
        self._all_had_gradient = False

    # --- hooks of a backend ------------------------------------------------------------------------------------------

    @abstractmethod
    def wrap(self, loss_model: LossModel, build: BuildOptimizer, weights: LazyBase | None) -> Wrapped:
        """Shard the model, fill its parameters and build the optimizer."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Run backward of one micro-batch's loss."""

    @abstractmethod
    def update(self, rate: float) -> float:
        """Clip the gradient, update, free it; return its norm, not finite where nothing was updated. Collective."""

    @abstractmethod
    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full adapter tensor) of this rank's layers, in float32 on the CPU. Collective."""

    @abstractmethod
    def gather_optimizer(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (name, part of its optimizer state, full tensor) of the same tensors, on the CPU. Collective."""

    @abstractmethod
    def scatter(self, name: str, full: Tensor) -> None:
        """Load this rank's shard of a full adapter tensor."""

    @abstractmethod
    def scatter_optimizer(self, name: str, part: str, full: Tensor) -> None:
        """Load this rank's shard of a part of an adapter tensor's optimizer state, such as `exp_avg`."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the engine's class and backend, read from the objects that really run, not from the recipe."""

    def resident(self) -> dict[str, int]:
        """Return the bytes on this rank between steps, by category: base, adapter, gradients, optimizer."""
        states = self.adapter.optimizer.state.values()
        return {
            "base": local_bytes(p for p in self._model.parameters() if not p.requires_grad),
            "adapter": local_bytes(self.adapter.tensors.values()),
            "gradients": local_bytes(self.adapter.gradients()),
            "optimizer": local_bytes(value for state in states for value in state.values()),
        }

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Return a context around a micro-batch's forward and backward. is_last: of the step."""
        return nullcontext()

    def expected_base_bytes(self, base: Sequence[Tensor]) -> int:
        """Return the most bytes of the base that one rank stores between steps. Reads shapes before `wrap`."""
        num_ranks = self.mesh.replicas.size if self.facts.shards_base else 1
        return sum(self.facts.shard_numel(tensor, num_ranks) * tensor.itemsize for tensor in base)

    # --- verbs of the training loop ----------------------------------------------------------------------------------

    def prepare(
        self, loss_model: LossModel, optimizer: BuildOptimizer, settings: StepSettings, weights: LazyBase | None = None
    ) -> None:
        """Shard the model, fill parameters on meta from ``weights``, and build the optimizer. Call once. Collective."""
        model = loss_model.model
        self._loss_model = loss_model.train()
        self._model = model
        self._objective = loss_model.objective
        self._settings = settings
        self._all_names = checkpoint_tensors(model).keys()
        chunked = loss_model.chunked
        for axis in self.axes.values():
            weights = axis.cut(loss_model, weights, settings.label_share)
        loss_model.chunked = chunked  # on every rank alike, also where another stage has the head
        base = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        num_ranks = self.mesh.replicas.size
        shards = [self.facts.shard_numel(tensor, num_ranks) for tensor in adapter_tensors(model).values()]
        base_bytes = self.expected_base_bytes(base)
        self._verify = partial(verify_layout, self.parallel.backend, self.group.size, base_bytes, shards)
        with quiet_libraries():
            self._wrapped, built = self.wrap(loss_model, optimizer, weights)
        tensors = adapter_tensors(model)
        scale = LossScale(settings.scales_loss)
        self.adapter = AdapterState(tensors, checkpoint_tensors(model), built, scale, without_gradient=set(tensors))
        self._stage_steps = StageSteps(self._wrapped, loss_model)
        self.group.run_on_all(lambda: self._verify(self.layout()))
        for axis in self.axes.values():
            axis.check_cut(loss_model)

    def step(self, index: int, micro_batches: Sequence[Batch]) -> StepReport:
        """Run optimizer step `index`, from 0. Collective. Raises NonFiniteStep on every rank, updating nothing."""
        adapter = self.adapter
        adapter.step = index
        rate = self._settings.learning_rate(index)
        while True:  # more than once only in float16, after an overflow
            report = self.accumulate(micro_batches)
            grad_norm = self.update(rate)
            if math.isfinite(grad_norm):
                break
            if not adapter.scale.back_off():
                raise NonFiniteStep(report.loss, grad_norm, self._suspect_rows(micro_batches, []))
        adapter.scale.record_good_step()
        if not self._is_verified:  # once more, because the optimizer has its state only now
            self.group.run_on_all(lambda: self._verify(self.layout()))
            self._is_verified = True
        return StepReport(**vars(report), grad_norm=grad_norm, learning_rate=rate)

    def accumulate(self, micro_batches: Sequence[Batch]) -> GradientReport:
        """Compute the gradient, once before each `update`. Collective. Raises NonFiniteStep on every rank."""
        num_tokens, num_label_tokens, *normalizers = step_counts(self._objective, micro_batches, self.mesh.data)
        sums = LossAccumulator(self._coupled(micro_batches, training=True))
        under_way: dict[int, UnderWay] = {}
        stages = self.mesh.pipeline
        for direction, number in one_forward_one_backward(stages.rank, stages.size, len(micro_batches)):
            is_last = number == len(micro_batches) - 1
            if direction == FORWARD:
                under_way[number] = self._forward(micro_batches[number], normalizers, sums, is_last)
            else:
                keys, forward, share = under_way.pop(number)
                with use_token_keys(keys), self.micro_batch(is_last):
                    self._stage_steps.backward(forward, share, self.backward)
            report_progress()
        self._stage_steps.wait()
        loss, metrics = sums.reduce(self.mesh)
        if not math.isfinite(loss):  # raised before the update, so that the adapter stays as it was
            raise NonFiniteStep(loss, math.nan, self._suspect_rows(micro_batches, sums.nonfinite(micro_batches)))
        return GradientReport(loss, int(num_tokens), int(num_label_tokens), metrics)

    def _forward(self, batch: Batch, normalizers: Sequence[float], sums: LossAccumulator, is_last: bool) -> UnderWay:
        """Run a micro-batch's forward; add its terms to the sums, and return its share of the step's loss."""
        tokens = self.slice(batch)
        keys = dropout_keys(tokens, self._settings.seed, self.adapter.step)
        tokens = tokens.to(self.device)
        loss = None
        with use_token_keys(keys), self.micro_batch(is_last):
            forward = self._stage_steps.forward(tokens)
            if forward.scores is not None:
                scores = self._objective_scores(forward.scores, tokens)
                terms = sums.add(scores, batch)
                shares = [term / count for term, count in zip(terms, normalizers, strict=True)]
                loss = reduce(torch.add, shares) * self.adapter.scale.value
        return keys, forward, loss

    def slice(self, batch: Batch) -> Batch:
        """Return what this rank computes of a micro-batch."""
        return reduce(lambda batch, axis: axis.slice(batch), self.axes.values(), batch)

    def _objective_scores(self, scores: Scores, tokens: Batch) -> Scores:
        """Return the scores that the objective reads. tokens: of a micro-batch, those of this rank."""
        if self._objective.per != "row":
            return scores
        axes = self.axes.values()
        return scores_of_rows(scores, tokens, lambda parts: reduce(lambda sums, axis: axis.add_up(sums), axes, parts))

    def _coupled(
        self, micro_batches: Iterable[Batch], stop: Callable[[], bool] = lambda: False, *, training: bool = False
    ) -> Objective:
        """Return the objective, given what its first pass collects of these micro-batches if it has one. Collective."""
        if (first := self._objective.first_pass) is None:
            return self._objective
        rows = [batch.mismatched for batch in micro_batches] if first.mismatched else micro_batches
        collected: list[Any] = []

        def add(batch: Batch, scores: Scores | None) -> None:
            if scores is not None:
                collected.append(first.collect(scores, batch))

        # with the dropout of the second pass, whose gradient is of what this one saw
        if not self._forward_all(filter(None, rows), stop, add, training=training and not first.mismatched):
            return self._objective
        of_ranks = self.mesh.data.all_gather(self.mesh.pipeline.all_gather(collected)[-1])
        with torch.set_grad_enabled(training):
            return first.given(list(chain.from_iterable(of_ranks)))

    def evaluate(self, micro_batches: Iterable[Batch], stop: Callable[[], bool]) -> LossReport | None:
        """Return loss and metrics over all ranks, or None once `stop` is True on any rank. Collective."""
        if self._objective.first_pass is not None:
            micro_batches = list(micro_batches)  # which are read twice
        sums = EvaluationSums(self._coupled(micro_batches, stop))
        return sums.report(self.mesh) if self._forward_all(micro_batches, stop, sums.add) else None

    def score(self, micro_batches: Iterable[Batch], num_rows: int) -> np.ndarray:
        """Return log p of each row's labels, (num_rows,) float32, from the micro-batches of all ranks. Collective."""
        own: dict[int, float] = {}

        def add(batch: Batch, scores: Scores | None) -> None:
            if scores is not None:
                own.update(zip(batch.row_indices, (-scores.losses).tolist(), strict=True))

        self._forward_all(micro_batches, lambda: False, add)
        scores = {row: value for part in self.group.all_gather(own) for row, value in part.items()}
        return np.array([scores[row] for row in range(num_rows)], np.float32)

    def _forward_all(
        self, micro_batches: Iterable[Batch], stop: Callable[[], bool], add: AddScores, *, training: bool = False
    ) -> bool:
        """Run micro-batches without a gradient, and add the scores of each. False once `stop` is True on any rank.

        training: with dropout. Collective.
        """
        self._wrapped.train(training)
        try:
            with torch.no_grad():
                sent = StageForward(None)
                for number, batch in enumerate(micro_batches):
                    report_progress()
                    # decided together: forward is collective where the base is sharded. Once for as many micro-batches
                    # as can be under way, because all wait here for the last stage
                    if number % self.mesh.pipeline.size == 0 and self.group.any(stop()):
                        return False
                    part = self.slice(batch)
                    tokens = part.to(self.device)
                    keys = dropout_keys(part, self._settings.seed, self.adapter.step) if training else None
                    with use_token_keys(keys):
                        forward = self._stage_steps.forward(tokens)
                    sent.wait()
                    sent = forward
                    add(batch, None if forward.scores is None else self._objective_scores(forward.scores, tokens))
                sent.wait()
        finally:
            self._wrapped.train()
        return True

    def tensors_without_gradient(self) -> list[str]:
        """Return the names of the adapter tensors that have had no gradient in any step. Collective."""
        # decided by the last exchange and not by this rank's set: a rank that skipped one alone would hang the others
        if self._all_had_gradient:
            return []
        missing = set.intersection(*self.mesh.replicas.all_gather(self.adapter.without_gradient))
        self.adapter.without_gradient = missing
        of_stages = self.mesh.pipeline.all_gather(missing)
        self._all_had_gradient = not any(of_stages)
        return sorted(set.union(*of_stages))

    def adapter_state_dict(self) -> dict[str, Tensor]:
        """Return the full adapter tensors by name, in float32 on the CPU, on rank 0; none on others. Collective."""
        return self._collect((name, name, value) for name, value in self.gather())

    def state_dict(self) -> EngineState:
        """Return everything that a checkpoint holds of this engine, on rank 0; no tensors on others. Collective."""
        adapter = self.adapter_state_dict()
        optimizer = self._collect((f"{name}.{part}", name, value) for name, part, value in self.gather_optimizer())
        return EngineState(adapter, optimizer | self.adapter.scale.state())

    def _collect(self, gathered: Iterable[tuple[str, str, Tensor]]) -> dict[str, Tensor]:
        """Return key -> full value of (key, tensor name, value of this rank's layers) on rank 0; none on others."""
        # the ranks of rank 0's pipeline collect their layers; all others drop each tensor at once
        collects = self.mesh.replicas.rank == 0 and self.mesh.tensor.rank == 0
        tensors = {}
        for key, name, value in gathered:
            for axis in self.axes.values():
                value = axis.gather(name, value)
            if collects:
                tensors[key] = value
        tensors = self.mesh.pipeline.all_gather_tensors(tensors)
        return tensors if self.group.is_rank_0 else {}

    def load_state_dict(self, state: EngineState) -> None:
        """Load the result of `state_dict`, of any backend and number of processes. Collective."""
        if state.adapter.keys() != self._all_names:
            raise RunError(f"the checkpoint holds other tensors: {sorted(state.adapter.keys() ^ self._all_names)[:4]}")
        adapter = self.adapter
        # each tensor is read once and in order, because reading may receive it from rank 0
        for name, full in state.adapter.items():
            if name in adapter.saved:  # not of another stage
                self.scatter(name, self._part(name, full))
        for key, full in state.optimizer.items():
            name, _, part = key.rpartition(".")
            if key == LossScale.KEY:
                adapter.scale.restore(full)
            elif name in adapter.tensors:
                self.scatter_optimizer(name, part, self._part(name, full))
                adapter.without_gradient.discard(name)  # which it has had, as the optimizer has state

    def _part(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's part of a full value, before the backend shards it."""
        return reduce(lambda value, axis: axis.scatter(name, value), self.axes.values(), full)

    def layout(self) -> dict[str, Any]:
        """Return the facts of this rank as they were measured: engine, device and resident bytes."""
        on_gpu = self.device.type == "cuda"
        resident = self.resident()  # first, because FSDP2 frees what forward left gathered there
        return {
            **self.describe(),
            "device": torch.cuda.get_device_name(self.device) if on_gpu else self.device.type,
            "threads": torch.get_num_threads(),
            "world_size": self.group.size,
            "mesh": self.mesh.sizes,
            **{key: value for axis in self.axes.values() for key, value in axis.facts().items()},
            **({"communication": str(dist.get_backend())} if self.group.size > 1 else {}),
            **{f"{category}_bytes": size for category, size in resident.items()},
        }

    def _suspect_rows(self, micro_batches: Sequence[Batch], nonfinite: Sequence[Batch]) -> tuple[int, ...]:
        """Return the rows, over all ranks, of the micro-batches that are not finite. If there are none, all rows."""
        rows = [[row for batch in batches for row in batch.row_indices] for batches in (nonfinite, micro_batches)]
        rows_by_rank = self.group.all_gather(rows)
        suspects = tuple(row for suspect, _ in rows_by_rank for row in suspect)
        # each once: ranks that share a line have the same rows
        return tuple(dict.fromkeys(suspects or (row for _, all_rows in rows_by_rank for row in all_rows)))


def dropout_keys(batch: Batch, seed: int, step: int) -> TokenKeys:
    """Return the keys of dropout and noise: functions of seed, step and row, so that checkpoints need no state."""
    positions = batch.position_ids.flatten()
    lengths = batch.lengths_of_tokens()
    if not batch.row_indices:  # a rank without rows: its tokens have no label
        return TokenKeys(torch.zeros_like(positions), positions, lengths)
    digests = [hashlib.sha256(f"dropout/{seed}/{step}/row {row}".encode()).digest() for row in batch.row_indices]
    seeds = torch.tensor([*(int.from_bytes(digest[:7], "little") for digest in digests), 0])  # 56 bits; 0: padding
    return TokenKeys(seeds[batch.rows_of_tokens()], positions, lengths)


def local_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes that these tensors take in this process. Shared memory counts once, a DTensor by its shard."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        # DTensors are recognised by a method, because importing their class takes 0.7 s that other backends save
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        for part in (local, shard_of(tensor)):  # under ZeRO-3 the shard is beside the tensor, which may be gathered
            if isinstance(part, Tensor) and part.device.type != "meta":
                sizes[part.data_ptr()] = max(part.nbytes, sizes.get(part.data_ptr(), 0)) if part.numel() else 0
    return sum(sizes.values())


def verify_layout(
    backend: str, num_processes: int, base_bytes: int, adapter_shards: Sequence[int], layout: Mapping[str, Any]
) -> None:
    """Raise RunError unless `Engine.layout` is that of the requested backend; without optimizer state before step 1.

    A library can do less than it was configured for, without an error. Such a run ends here.

    base_bytes: the most that a rank stores of the base. adapter_shards: elements of each adapter tensor, as a sharding
    backend has them.
    """
    facts = BACKENDS[backend]
    differences = []
    if layout["backend"] != backend:
        differences.append(f"it runs as {layout['backend']}")
    if (stored := layout["base_bytes"]) > base_bytes + SLACK_BYTES * facts.shards_base:
        differences.append(f"a process holds {stored:,} bytes of the base, {base_bytes:,} would be its part")
    part = sum(MOMENT_BYTES * numel + COUNTER_BYTES for numel in adapter_shards)
    if facts.shards_optimizer and (stored := layout["optimizer_bytes"]) > part + SLACK_BYTES:
        differences.append(f"a process holds {stored:,} bytes of optimizer state, {part:,} would be its part")
    if differences:
        raise RunError(
            f"parallel.backend: the recipe requests {backend} with {num_processes} processes, but the engine is"
            f" {layout['engine']}: {'; '.join(differences)}. Nothing was saved; this is lorakit's or its engine's"
            " mistake: choose another backend, and report it"
        )
