"""One way to run a recipe, weighed: a backend, how many processes, and what is changed in the recipe."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, final

from lorakit.base.dtype import DTYPES
from lorakit.planning.activations import ActivationTracer, LiveBytes
from lorakit.planning.backends import supported_backends
from lorakit.planning.machine import GB, Machine
from lorakit.planning.memory import MARGIN, Memory, Setting, memory_of
from lorakit.planning.memory_counter import MicroBatch
from lorakit.planning.model_shapes import ModelShapes, read_shapes
from lorakit.planning.process_overhead import CUDA_CONTEXT, measure_process_bytes
from lorakit.planning.speed import StepTime, duration
from lorakit.planning.workload import KnownRows, Workload, inspect_rows, workload
from lorakit.recipe import Recipe

Changes = Mapping[str, Any]
"""Recipe keys and their values, beside what the recipe says."""


@dataclass(frozen=True)
class Candidate:
    """What a way takes, whether that fits, and about how long a step lasts."""

    backend: str
    num_processes: int
    changes: Changes
    checkpointing: bool
    work: Workload
    memory: Memory
    shortfall: str
    """Why it does not fit, or empty."""
    step: StepTime

    @property
    def fits(self) -> bool:
        return not self.shortfall

    def words(self) -> str:
        """As overrides on the command line."""
        return ", ".join(f"{key}={value}" for key, value in self.changes.items())


@final
class Estimator:
    """Weighs ways to run one recipe with ``num_processes``, or more on more machines of the same kind.

    Nothing of a base's weights is read.
    """

    def __init__(self, recipe: Recipe, machine: Machine, folder: Path, dtype: str, num_processes: int) -> None:
        self.recipe, self.machine, self.folder, self.dtype = recipe, machine, folder, dtype
        self.num_processes, self.backends = num_processes, supported_backends(recipe)
        self._shapes = cache(self._read_shapes)
        self._tracer = cache(self._make_tracer)
        self._live = cache(self._trace)
        self._rows: KnownRows | None = None

    def shapes(self) -> ModelShapes:
        """Of the base in the run's dtype."""
        return self._shapes(self.dtype)

    def way(self, backend: str, num_processes: int, changes: Changes) -> Candidate:
        """The recipe with ``changes``, weighed."""
        recipe = changed(self.recipe, changes)
        dtype = str(changes.get("base.dtype", self.dtype))
        checkpointing = recipe.train.activation_checkpointing == "layers"
        shapes = self._shapes(dtype)
        work = workload(recipe, self._look_at_rows(), num_processes)
        setting = self._setting(recipe, backend, num_processes, dtype, work, checkpointing)
        live = self._live(dtype, checkpointing, work.training)
        evaluating = None if work.evaluation is None else self._live(dtype, False, work.evaluation, training=False)
        memory = memory_of(shapes, setting, live, evaluating, self._process(setting, dtype))
        step = duration(shapes, setting, work, self.machine, dtype, checkpointing=checkpointing)
        return Candidate(
            backend, num_processes, changes, checkpointing, work, memory, self._lacks(setting, memory), step
        )  # fmt: skip

    def _setting(
        self, recipe: Recipe, backend: str, num_processes: int, dtype: str, work: Workload, checkpointing: bool
    ) -> Setting:
        shapes = self._shapes(dtype)
        stored = DTYPES[dtype] if shapes.packing else shapes.stored_dtype or DTYPES[dtype]
        inputs = work.training.num_tokens * shapes.hidden_size * shapes.num_layers * DTYPES[dtype].itemsize
        return Setting(
            backend=backend, num_processes=num_processes, optimizer=recipe.train.optimizer,
            local_processes=max(1, min(num_processes, self.num_processes) // self.machine.nodes),
            parallel=recipe.parallel,
            on_gpu=self.machine.gpu is not None, converts=stored != DTYPES[dtype],
            stored_bytes=0 if shapes.packing else sum(piece.numel for piece in shapes.base) * stored.itemsize,
            keeps=recipe.train.keep_checkpoints,
            layer_bytes=round(self._live(dtype, False, work.training).saved / shapes.num_layers),
            activations_on_host=inputs if checkpointing and recipe.train.activation_offload else 0,
        )  # fmt: skip

    def _lacks(self, setting: Setting, memory: Memory) -> str:
        """What there is not enough of, in words; empty when there is, with room to spare."""
        machine, local = self.machine, setting.local_processes
        need, spare = memory.peak * (1 + MARGIN), f"{MARGIN:.0%} to spare"
        if machine.gpu is None and setting.optimizer.startswith("paged"):
            return f"a GPU, whose memory {setting.optimizer} pages; on processors adamw8bit is as small"
        if machine.gpu is None and need * local > machine.host_memory_bytes:
            return f"{_gb(need * local)} with {spare}, {_gb(machine.host_memory_bytes)} of memory are free"
        if machine.gpu is not None and local > machine.gpus_per_node:
            return f"{local} GPUs in each machine, there are {machine.gpus_per_node}"
        if machine.gpu is not None and need > machine.gpu.memory_bytes:
            return f"{_gb(need)} with {spare}, one {machine.gpu.name} has {_gb(machine.gpu.memory_bytes)}"
        if machine.gpu is not None and memory.host * local > machine.host_memory_bytes:
            return f"{_gb(memory.host * local)} of host memory, there are {_gb(machine.host_memory_bytes)}"
        if machine.disk_bytes is not None and memory.disk > machine.disk_bytes:
            return f"{_gb(memory.disk)} of disk, {_gb(machine.disk_bytes)} are free"
        needs = setting.layout.needs
        if needs is not None and not machine.described and importlib.util.find_spec(needs) is None:
            return f"the package {needs}, which is not installed: pip install 'lorakit[{needs}]'"
        return ""

    def _process(self, setting: Setting, dtype: str) -> int:
        if setting.on_gpu:
            return CUDA_CONTEXT
        packs = bool(self.shapes().packing) or setting.optimizer != "adamw"
        return measure_process_bytes(self.folder, dtype, setting.layout.needs, packs=packs)

    def _look_at_rows(self) -> KnownRows:
        if self._rows is None:
            self._rows = inspect_rows(self.recipe, self.folder)
        return self._rows

    def _read_shapes(self, dtype: str) -> ModelShapes:
        return read_shapes(self.folder, self.recipe.base, self.recipe.adapter, DTYPES[dtype])

    def _make_tracer(self, dtype: str, checkpointing: bool) -> ActivationTracer:
        return ActivationTracer(
            self.folder, self.recipe.base, self.recipe.adapter, DTYPES[dtype], checkpointing=checkpointing
        )

    def _trace(self, dtype: str, checkpointing: bool, batch: MicroBatch, training: bool = True) -> LiveBytes:
        tracer = self._tracer(dtype, checkpointing)
        return tracer.training(batch) if training else tracer.evaluating(batch)


def changed(recipe: Recipe, changes: Changes) -> Recipe:
    """The recipe with other values at some keys of its sections."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        part = getattr(recipe, section).model_copy(update={name: value})
        recipe = recipe.model_copy(update={section: part})
    return recipe


def _gb(size: float) -> str:
    return f"{size / GB:,.1f} GB" if size < 100 * GB else f"{size / GB:,.0f} GB"
