"""The estimate of one candidate: a backend, a number of processes and changes of the recipe.

Its workload is the longest micro-batch of the actual rows if these are cheap to read: tokenised already, or few.
Otherwise every row is assumed to have `data.max_tokens`, all of them label tokens, and the plan's text says so.
"""

import contextlib
import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from lorakit.backends import BACKENDS
from lorakit.base.from_recipe import load_recipe_tokenizer
from lorakit.data.dataset import TokenDataset
from lorakit.data.load import load_datasets, row_sets
from lorakit.data.sampler import BatchSampler
from lorakit.errors import BaseModelError, DataError
from lorakit.files.safetensors import MODEL_DTYPES
from lorakit.files.text import size
from lorakit.ops.encoder_head import is_encoder
from lorakit.parallel.pipeline.axis import split_layers
from lorakit.planning.activations import LiveBytes, MicroBatch, TracedModel
from lorakit.planning.machine import Machine
from lorakit.planning.memory import MARGIN, Memory, Setting, memory_of
from lorakit.planning.skeleton import EMBEDDING, HEAD, ModelShapes, read_stored_dtype
from lorakit.recipe import ParallelSection, Recipe
from lorakit.recipe.schema import batch_sizes, count_steps
from lorakit.run.display import row_progress

MAX_TOKENIZED_BYTES: Final = 20_000_000  # of row files: tokenising them takes seconds
MAX_SIMULATED_ROWS: Final = 4_000_000  # rows of a run whose micro-batches are computed one by one
NUM_LABEL_COUNTS: Final = 16  # longest micro-batches whose labels are counted
Changes = Mapping[str, Any]  # Recipe keys -> values that replace the recipe's own.


@dataclass(frozen=True)
class Workload:
    """The longest micro-batches of one process."""

    training: MicroBatch
    evaluation: MicroBatch | None  # None without held-out rows.
    micro_batches: int  # Micro-batches of each process in a step, one after the other.
    source: str  # Where these numbers come from, for the plan's text.


@dataclass(frozen=True)
class Candidate:
    """One way to run a recipe: its memory, and whether that fits the machine."""

    backend: str
    num_processes: int
    changes: Changes
    checkpointing: bool
    work: Workload
    memory: Memory
    shortfall: str  # Why it does not fit; empty if it fits.
    missing_package: str | None
    """The package that the backend imports, if this machine lacks it. A described machine is taken to have all."""
    axes: Mapping[str, int]  # Axis -> processes along it: `pipeline`, `sequence` and `tensor`, those above 1.

    @property
    def fits(self) -> bool:
        """True if memory and disk suffice, whether or not the backend's package is installed."""
        return not self.shortfall

    @property
    def can_run(self) -> bool:
        return self.fits and self.missing_package is None

    @property
    def name(self) -> str:
        """Return backend, processes and axes, such as ``ddp x 4, tensor 2``."""
        processes = f" x {self.num_processes}" if self.num_processes > 1 else ""
        return ", ".join([f"{self.backend}{processes}", *(f"{axis} {ranks}" for axis, ranks in self.axes.items())])

    @property
    def lacks(self) -> str:
        """Name everything that is lacking; empty if it can run."""
        package = self.missing_package
        missing = f"the package {package}, which is not installed: pip install 'lorakit[{package}]'" if package else ""
        return "; and ".join(filter(None, (self.shortfall, missing)))

    def overrides(self) -> str:
        """Return backend and changes as overrides of the command line."""
        return ", ".join(f"{key}={value}" for key, value in {"parallel.backend": self.backend, **self.changes}.items())


@final
class Estimator:
    """Estimates candidates of one recipe for ``num_processes``, or for more. No weight of the base is read."""

    def __init__(self, recipe: Recipe, machine: Machine, folder: Path, dtype: str, num_processes: int) -> None:
        self.recipe = recipe
        self.machine = machine
        self.dtype = dtype
        self.num_processes = num_processes
        # `sequence` goes with every backend of several processes
        axes = {name: axis_sizes(name, recipe.parallel) | {"sequence": 1} for name in BACKENDS}
        self.refusals = {name: why for name, sizes in axes.items() if (why := why_refused(recipe, name, sizes))}
        """Backend -> why other keys of the recipe refuse it."""
        self.backends = [name for name in BACKENDS if name not in self.refusals]
        device_type = "cpu" if machine.gpu is None else "cuda"
        # every call gives the same keywords, because they are the cache's key
        self._traced = cache(partial(TracedModel, folder, recipe, device_type=device_type))
        self._rows = cache(lambda: inspect_rows(recipe, folder))
        self._stored_dtype = cache(lambda: read_stored_dtype(folder))

    def model(self) -> TracedModel:
        """Return the full base with its adapter, in the run's dtype."""
        return self._traced(MODEL_DTYPES[self.dtype], checkpointing=False, tensor=1)

    def estimate(self, backend: str, num_processes: int, changes: Changes) -> Candidate:
        """Estimate the recipe with ``changes``."""
        recipe = apply_changes(self.recipe, {"parallel.backend": backend, **changes})
        dtype = str(changes.get("base.dtype", self.dtype))
        checkpointing = recipe.train.activation_checkpointing == "layers"
        axes = axis_sizes(backend, recipe.parallel)
        tensor = axes["tensor"]
        # the processes with the same layers and the same part of each weight, over which tensors are sharded
        num_ranks = num_processes // (tensor * axes["pipeline"])
        compute = MODEL_DTYPES[dtype]
        traced = self._traced(compute, checkpointing=False, tensor=1)
        full = traced.shapes
        if is_encoder(traced.model):  # whose rows are padded
            recipe = apply_changes(recipe, {"data.packing": False})
        work = make_workload(recipe, self._rows(), num_ranks // axes["sequence"], axes["sequence"])
        training = self._traced(compute, checkpointing=checkpointing, tensor=tensor).count(work.training)
        part = self._traced(compute, checkpointing=False, tensor=tensor)
        saving_all = part.count(work.training)
        stored = compute if full.quantization else self._stored_dtype() or compute
        inputs = work.training.num_tokens * full.hidden_size * full.num_layers * compute.itemsize
        setting = Setting(
            recipe=recipe,
            num_processes=num_ranks,
            tensor=tensor,
            local_processes=max(1, min(num_processes, self.num_processes) // self.machine.nodes),
            on_gpu=self.machine.gpu is not None,
            dtype=dtype,
            converts=stored != compute,
            stored_bytes=0 if full.quantization else sum(tensor.numel() for tensor in full.base) * stored.itemsize,
            layer_bytes=round(saving_all.saved / full.num_layers),
            activations_on_host=inputs if checkpointing and recipe.train.activation_offload else 0,
        )
        evaluation = part.count(work.evaluation, backward=False) if work.evaluation else LiveBytes(0.0, 0.0, 0.0)
        ranges = [range(full.num_layers)]
        if axes["pipeline"] > 1:
            rows = self._rows()
            counts = None if isinstance(rows, str) else rows["train"].counts
            # every token of unknown rows counts as a label
            label_share = 1.0 if counts is None else counts.label_tokens / counts.tokens
            ranges = split_layers(part.model, axes["pipeline"], label_share)
        memories = []
        for number, stage in enumerate(stages_of(part.shapes, ranges)):
            num_waiting = min(len(ranges) - number, work.micro_batches)  # micro-batches in memory at once
            share = num_waiting * stage.num_layers / full.num_layers
            has_head = number == len(ranges) - 1
            live = (LiveBytes(one.saved * share, one.head * has_head, one.layer) for one in (training, evaluation))
            memories.append(memory_of(stage, setting, *live))
        memory = max(memories, key=lambda one: one.peak)
        package = setting.facts.package
        has_package = package is None or self.machine.described or importlib.util.find_spec(package) is not None
        return Candidate(
            backend=backend,
            num_processes=num_processes,
            changes=changes,
            checkpointing=checkpointing,
            work=work,
            memory=memory,
            shortfall=self._shortfall(setting, memory),
            missing_package=None if has_package else package,
            axes={axis: ranks for axis, ranks in axes.items() if ranks > 1},
        )

    def _shortfall(self, setting: Setting, memory: Memory) -> str:
        """Name the resource that the machine lacks, margin included; empty if nothing is lacking."""
        machine = self.machine
        local = setting.local_processes
        need = memory.peak * (1 + MARGIN)
        spare = f"{MARGIN:.0%} to spare"
        if machine.gpu is None and setting.recipe.train.optimizer.startswith("paged"):
            return f"a GPU, whose memory {setting.recipe.train.optimizer} pages; on processors adamw8bit is as small"
        if machine.gpu is None and need * local > machine.host_memory_bytes:
            return f"{size(need * local)} with {spare}, {size(machine.host_memory_bytes)} of memory are free"
        if machine.gpu is not None and local > machine.gpus_per_node:
            return f"{local} GPUs in each machine, there are {machine.gpus_per_node}"
        if machine.gpu is not None and need > machine.gpu.memory_bytes:
            return f"{size(need)} with {spare}, one {machine.gpu.name} has {size(machine.gpu.memory_bytes)}"
        if machine.gpu is not None and memory.host * local > machine.host_memory_bytes:
            return f"{size(memory.host * local)} of host memory, there are {size(machine.host_memory_bytes)}"
        if machine.disk_bytes is not None and memory.disk > machine.disk_bytes:
            return f"{size(memory.disk)} of disk, {size(machine.disk_bytes)} are free"
        return ""


def inspect_rows(recipe: Recipe, folder: Path) -> dict[str, TokenDataset] | str:
    """Return the tokenised rows of a recipe, as `load_datasets`, or why they are unknown: missing, bad or large."""
    files: set[Path | None] = {None}
    with contextlib.suppress(DataError):
        files = {source.path for one in row_sets(recipe) for source in one.sources()}
    if None in files:
        return "the rows are not on this machine"
    if sum(path.stat().st_size for path in files if path) > MAX_TOKENIZED_BYTES:
        return f"the rows are more than {MAX_TOKENIZED_BYTES // 1_000_000} MB"
    try:
        return load_datasets(recipe, load_recipe_tokenizer(recipe, folder), row_progress)
    except (DataError, BaseModelError) as problem:
        return f"the rows cannot be read: {str(problem).splitlines()[0]}"


def make_workload(recipe: Recipe, rows: Mapping[str, TokenDataset] | str, num_data: int, num_sharing: int) -> Workload:
    """Return each process's workload. num_data: groups with other rows. num_sharing: processes that share a line."""
    max_tokens = recipe.data.max_tokens
    packing = bool(recipe.data.packing)
    batch_size, micro_batch_size = batch_sizes(recipe)
    size = min(micro_batch_size, math.ceil(batch_size / num_data))
    evaluation = None
    if isinstance(rows, str):
        longest = _micro_batch([max_tokens] * size, [max_tokens] * size, packing)
        evaluation = longest if recipe.data.has_eval else None
        source = f"{rows}: each is taken to have max_tokens {max_tokens}, all of them labels"
    else:
        training = rows["train"]
        longest = _longest(training, _training_batches(recipe, training, size, num_data), packing)
        if (eval_rows := rows.get("eval")) is not None:
            sampler = BatchSampler(eval_rows, batch_size, size, packing, recipe.train.seed)
            evaluation = _longest(eval_rows, sampler.eval_batches(), packing)
        source = f"{len(training) // training.group_size:,}, of which the longest count"
    return Workload(
        training=_part(longest, num_sharing),
        evaluation=None if evaluation is None else _part(evaluation, num_sharing),
        micro_batches=math.ceil(math.ceil(batch_size / size) / num_data),
        source=source,
    )


def stages_of(shapes: ModelShapes, ranges: Sequence[range]) -> list[ModelShapes]:
    """Return the tensors of each stage of a base that is cut into these ranges of layers."""
    uses: list[set[int | str]] = [set(layers) for layers in ranges]
    uses[0].add(EMBEDDING)
    uses[-1].add(HEAD)
    stages = []
    for layers, own in zip(ranges, uses, strict=True):
        tensors = {key: tensor for key, tensor in shapes.tensors.items() if shapes.uses.get(tensor, own) & own}
        stages.append(replace(shapes, tensors=tensors, num_layers=len(layers)))
    return stages


def why_refused(recipe: Recipe, backend: str, axes: Mapping[str, int]) -> str:
    """Return why the recipe's other sections refuse a backend with these sizes of axes; empty if they do not."""
    parallel: dict[str, Any] = {"backend": backend, **axes, "processes": math.prod(axes.values())}
    try:
        Recipe.model_validate(recipe.model_dump() | {"parallel": parallel})
    except ValueError as problem:
        first: Any = problem.errors()[0]  # type: ignore[attr-defined]  # pydantic's
        return str(first["msg"]).removeprefix("Value error, ").partition(", got ")[0]
    return ""


def axis_sizes(backend: str, parallel: ParallelSection) -> dict[str, int]:
    """Return axis -> processes along it, where a backend has several processes."""
    return parallel.axes if BACKENDS[backend].is_distributed else dict.fromkeys(parallel.axes, 1)


def apply_changes(recipe: Recipe, changes: Changes) -> Recipe:
    """Return the recipe with other values at some keys of its sections."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        part = getattr(recipe, section).model_copy(update={name: value})
        recipe = recipe.model_copy(update={section: part})
    return recipe


def _part(batch: MicroBatch, num_sharing: int) -> MicroBatch:
    """Return the most tokens of one process; in attention it has all of some heads, which are as many values."""
    if num_sharing == 1:
        return batch
    lengths = tuple(math.ceil(length / num_sharing) for length in batch.row_lengths)
    return replace(batch, width=sum(lengths), row_lengths=lengths, num_labels=min(batch.num_labels, sum(lengths)))


def _training_batches(recipe: Recipe, rows: TokenDataset, size: int, num_processes: int) -> Iterable[list[int]]:
    """Return the micro-batches that this run will make; of a very long run, the longest possible."""
    steps = count_steps(recipe, rows.rows_per_epoch)
    batch_size, _ = batch_sizes(recipe)
    if steps * batch_size > MAX_SIMULATED_ROWS:
        return [np.argsort(rows.lengths)[-size:].tolist()]
    packing = bool(recipe.data.packing)
    sampler = BatchSampler(rows, batch_size, size, packing, recipe.train.seed, num_ranks=num_processes)
    return (part for step in range(steps) for part in sampler.cut(sampler.rows_of_step(step)))


def _longest(rows: TokenDataset, micro_batches: Iterable[list[int]], packing: bool) -> MicroBatch:
    """Return the longest micro-batch, with the most labels of any of the NUM_LABEL_COUNTS longest."""
    lengths = np.asarray(rows.lengths)

    def num_tokens(row_numbers: list[int]) -> int:
        return int(lengths[row_numbers].sum() if packing else lengths[row_numbers].max() * len(row_numbers))

    longest = []
    for row_numbers in sorted(micro_batches, key=num_tokens)[-NUM_LABEL_COUNTS:]:
        labels = [int(rows.label_mask(row)[1:].sum()) for row in row_numbers]
        longest.append(_micro_batch(lengths[row_numbers].tolist(), labels, packing))
    num_labels = min(longest[-1].num_tokens, max(batch.num_labels for batch in longest))
    return replace(longest[-1], num_labels=num_labels, masked=any(batch.masked for batch in longest))


def _micro_batch(lengths: list[int], num_labels: list[int], packing: bool) -> MicroBatch:
    """Return the shape of a micro-batch of rows with these tokens and labels per row."""
    labels = max(1, sum(num_labels))
    if packing:
        return MicroBatch(1, sum(lengths), labels, packed=True, masked=len(lengths) > 1, row_lengths=tuple(lengths))
    return MicroBatch(len(lengths), max(lengths), labels, packed=False, masked=len(set(lengths)) > 1)
