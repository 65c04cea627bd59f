"""The estimate of one candidate: a backend, a number of processes and changes of the recipe."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, final

from lorakit.files.dtypes import MODEL_DTYPES
from lorakit.planning.activations import ActivationTracer, LiveBytes, MicroBatch, activations_of_part
from lorakit.planning.axes import AxisTraffic, axis_traffic, data_traffic
from lorakit.planning.backends import sharing_weights, supported_backends
from lorakit.planning.gpus import GB
from lorakit.planning.layouts import AllowedSizes, allowed_sizes, num_heads
from lorakit.planning.machine import Machine
from lorakit.planning.memory import MARGIN, Memory, Setting, memory_of
from lorakit.planning.model_shapes import ModelShapes, adapted_skeleton, read_shapes
from lorakit.planning.process_overhead import CUDA_CONTEXT, measure_process_bytes
from lorakit.planning.speed import StepTime, step_time
from lorakit.planning.stages import num_stages, stages_of
from lorakit.planning.workload import KnownRows, Workload, inspect_rows, make_workload, sharing_processes
from lorakit.quant.bnb import OPTIMIZERS as BNB_OPTIMIZERS
from lorakit.recipe import Recipe

Changes = Mapping[str, Any]
"""Recipe keys -> values that replace the recipe's own."""


@dataclass(frozen=True)
class Candidate:
    """One way to run a recipe: its memory, whether that fits the machine, and the expected time of a step."""

    backend: str
    num_processes: int
    changes: Changes
    checkpointing: bool
    work: Workload
    memory: Memory
    shortfall: str
    """Why it does not fit; empty if it fits."""
    missing_package: str | None
    """The package that the backend imports, if this machine lacks it. A described machine is taken to have all."""
    step: StepTime
    axes: Mapping[str, int]
    """Axis -> processes along it: `pipeline`, `sequence` and `tensor`, those above 1."""
    traffic: Mapping[str, AxisTraffic]
    """Axis -> what a process sends along it in a step; `data` for rows and shards."""
    idle: float
    """Share of a step in which a stage of a pipeline waits for others."""

    @property
    def fits(self) -> bool:
        """True if memory and disk suffice, whether or not the backend's package is installed."""
        return not self.shortfall

    @property
    def can_run(self) -> bool:
        return self.fits and self.missing_package is None

    @property
    def lacks(self) -> str:
        """Name everything that is lacking; empty if it can run."""
        package = self.missing_package
        missing = [f"the package {package}, which is not installed: {install(package)}"] if package else []
        return "; and ".join([*([self.shortfall] if self.shortfall else []), *missing])

    def overrides(self) -> str:
        """Return the changes as overrides of the command line."""
        return ", ".join(f"{key}={value}" for key, value in self.changes.items())


@final
class Estimator:
    """Estimates candidates of one recipe for ``num_processes``, or for more on more machines of the same kind.

    No weight of the base is read. Shapes and activations are computed once per dtype and kind of micro-batch.
    """

    def __init__(self, recipe: Recipe, machine: Machine, folder: Path, dtype: str, num_processes: int) -> None:
        self.recipe, self.machine, self.folder, self.dtype = recipe, machine, folder, dtype
        self.num_processes, self.backends = num_processes, supported_backends(recipe)
        self._shapes = cache(self._read_shapes)
        self._tracer = cache(self._make_tracer)
        self._live = cache(self._trace)
        self._allowed = cache(self._allowed_sizes)
        self._rows = cache(self._inspect_rows)

    def shapes(self) -> ModelShapes:
        """Return the shapes of the base in the run's dtype."""
        return self._shapes(self.dtype, 1)

    def allowed(self) -> tuple[AllowedSizes, int]:
        """Return the sizes of axes that recipe and base allow, and the heads of a layer's attention."""
        return self._allowed()

    def estimate(self, backend: str, num_processes: int, changes: Changes) -> Candidate:
        """Estimate the recipe with ``changes``."""
        recipe = apply_changes(self.recipe, changes)
        dtype = str(changes.get("base.dtype", self.dtype))
        checkpointing = recipe.train.activation_checkpointing == "layers"
        tensor = sharing_weights(backend, recipe.parallel, num_processes)
        number = num_stages(recipe.parallel, backend, num_processes // tensor)
        work = make_workload(recipe, self._rows(), num_processes // (tensor * number))
        setting = self._setting(recipe, backend, num_processes, dtype, work, checkpointing)
        # of the processes with the same layers, over which tensors are sharded and tokens are divided
        of_stage = replace(setting, num_processes=setting.num_processes // number)
        training = self._activations(dtype, checkpointing, work.training, tensor)
        evaluation = None
        if work.evaluation is not None:
            evaluation = self._activations(dtype, False, work.evaluation, tensor, training=False)
        memories, steps = [], []
        shapes = self._shapes(dtype, tensor).part(tensor)
        for stage in stages_of(shapes, number, work.micro_batches, self._label_share()):
            evaluating = None if evaluation is None else stage.live(evaluation)
            process = self._process_bytes(setting, dtype)
            memories.append(memory_of(stage.shapes, of_stage, stage.live(training), evaluating, process))
            axes = axis_traffic(stage, number, of_stage, work, dtype, checkpointing=checkpointing)
            step = step_time(stage.shapes, of_stage, work, self.machine, dtype, checkpointing=checkpointing, axes=axes)
            data = data_traffic(stage.shapes, of_stage, work)
            steps.append((replace(step, waiting=step.waiting + stage.idle * step.computing), axes | data))
        step, traffic = max(steps, key=lambda one: one[0].total)
        sizes = {"pipeline": number, "sequence": sharing_processes(recipe.parallel, of_stage.num_processes)}
        return Candidate(
            backend=backend,
            num_processes=num_processes,
            changes=changes,
            checkpointing=checkpointing,
            work=work,
            memory=(memory := max(memories, key=lambda one: one.peak)),
            shortfall=self._shortfall(setting, memory),
            missing_package=self._missing_package(setting),
            step=step,
            axes={axis: size for axis, size in (sizes | {"tensor": tensor}).items() if size > 1},
            traffic=traffic,
            idle=(number - 1) / (work.micro_batches + number - 1),
        )

    def _activations(
        self, dtype: str, checkpointing: bool, batch: MicroBatch, tensor: int, training: bool = True
    ) -> LiveBytes:
        full = self._live(dtype, checkpointing, batch, 1, training)
        if tensor == 1:
            return full
        part = self._live(dtype, checkpointing, batch, tensor, training)
        if self._shapes(dtype, tensor).cuts_experts:
            return part  # experts compute all tokens, and their inputs are not told from those of norms: an upper bound
        return activations_of_part(full, part, tensor)

    def _label_share(self) -> float:
        """Return the share of the training rows' tokens that have a label; 1 where the rows are not known."""
        rows = self._rows().training
        return 1.0 if rows is None else rows.counts.label_tokens / rows.counts.tokens

    def _setting(
        self, recipe: Recipe, backend: str, num_processes: int, dtype: str, work: Workload, checkpointing: bool
    ) -> Setting:
        shapes, tensor = self._shapes(dtype, 1), sharing_weights(backend, recipe.parallel, num_processes)
        stored = MODEL_DTYPES[dtype] if shapes.quantization else shapes.stored_dtype or MODEL_DTYPES[dtype]
        inputs = work.training.num_tokens * shapes.hidden_size * shapes.num_layers * MODEL_DTYPES[dtype].itemsize
        return Setting(
            backend=backend,
            num_processes=num_processes // tensor,
            tensor=tensor,
            local_processes=max(1, min(num_processes, self.num_processes) // self.machine.nodes),
            optimizer=recipe.train.optimizer,
            parallel=recipe.parallel,
            on_gpu=self.machine.gpu is not None,
            converts=stored != MODEL_DTYPES[dtype],
            stored_bytes=0 if shapes.quantization else sum(t.numel for t in shapes.base) * stored.itemsize,
            num_checkpoints=recipe.train.keep_checkpoints,
            layer_bytes=round(self._activations(dtype, False, work.training, tensor).saved / shapes.num_layers),
            activations_on_host=inputs if checkpointing and recipe.train.activation_offload else 0,
        )

    def _shortfall(self, setting: Setting, memory: Memory) -> str:
        """Name the resource that the machine lacks, margin included; empty if nothing is lacking."""
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
        return ""

    def _missing_package(self, setting: Setting) -> str | None:
        package = setting.layout.package
        if package is None or self.machine.described or importlib.util.find_spec(package) is not None:
            return None
        return package

    def _process_bytes(self, setting: Setting, dtype: str) -> int:
        if setting.on_gpu:
            return CUDA_CONTEXT
        quantizes = bool(self.shapes().quantization) or setting.optimizer in BNB_OPTIMIZERS
        return measure_process_bytes(self.folder, dtype, setting.layout.package, quantizes=quantizes)

    def _inspect_rows(self) -> KnownRows:
        return inspect_rows(self.recipe, self.folder)

    def _allowed_sizes(self) -> tuple[AllowedSizes, int]:
        recipe, local = self.recipe, max(1, self.num_processes // self.machine.nodes)
        model = adapted_skeleton(self.folder, recipe.base, recipe.adapter, MODEL_DTYPES[self.dtype])
        return allowed_sizes(recipe, model, self.num_processes, local), num_heads(model)

    def _read_shapes(self, dtype: str, tensor: int) -> ModelShapes:
        return read_shapes(self.folder, self.recipe.base, self.recipe.adapter, MODEL_DTYPES[dtype], tensor)

    def _make_tracer(self, dtype: str, checkpointing: bool, tensor: int) -> ActivationTracer:
        return ActivationTracer(
            self.folder,
            self.recipe.base,
            self.recipe.adapter,
            MODEL_DTYPES[dtype],
            checkpointing=checkpointing,
            device_type="cpu" if self.machine.gpu is None else "cuda",
            tensor=tensor,
        )

    def _trace(self, dtype: str, checkpointing: bool, batch: MicroBatch, tensor: int, training: bool) -> LiveBytes:
        tracer = self._tracer(dtype, checkpointing, tensor)
        return tracer.training(batch) if training else tracer.evaluating(batch)


def apply_changes(recipe: Recipe, changes: Changes) -> Recipe:
    """Return the recipe with other values at some keys of its sections."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        part = getattr(recipe, section).model_copy(update={name: value})
        recipe = recipe.model_copy(update={section: part})
    return recipe


def install(package: str) -> str:
    """Return the command that installs an optional package."""
    return f"pip install 'lorakit[{package}]'"


def _gb(size: float) -> str:
    return f"{size / GB:,.1f} GB" if size < 100 * GB else f"{size / GB:,.0f} GB"
