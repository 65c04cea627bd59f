"""The recipe's `parallel` section: backend, processes and offloading of a run."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from lorakit.backends import BACKENDS, Backend, BackendName, backends_with
from lorakit.recipe.section import Count, Name, Section

COUNT_OR_AUTO = {"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}
"""schema of `processes`; `load_recipe` replaces `auto` before validation"""
NEIGHBOURS = ("sequence", "tensor")  # axes whose processes are on one machine


class OffloadSection(Section):
    optimizer: Literal["none", "cpu"] = "none"
    """Memory for optimizer state and fp32 master weights between steps; `none` is the computing device."""
    parameters: Literal["none", "cpu", "stream"] = "none"
    """Memory for the base's shards between uses (zero3 and fsdp2), or `stream` (single)."""

    @property
    def streams(self) -> bool:
        """True if a layer of the base is in memory only while that layer computes."""
        return self.parameters == "stream"


class ParallelSection(Section):
    backend: BackendName = "single"
    """How training is distributed. `single`: one process. `ddp`: a full base in each process. `zero1`, `zero2`: the
    optimizer (and gradients) sharded. `zero3`, `fsdp2`: the base sharded too. `auto`: the simplest that fits
    (`lorakit plan`)."""
    processes: Annotated[int, Field(ge=1), WithJsonSchema(COUNT_OR_AUTO)] = 1
    """Number of processes over all machines, one per GPU. `auto`: as many as torchrun or another launcher started, and
    another number after a restart if it then starts fewer or more."""
    nodes: Count = 1
    """Number of machines, each with `processes / nodes` processes. With `processes: auto` the launcher's."""
    sequence: Count = 1
    """Neighbouring processes that share the tokens of each packed line, for rows too long for one. Goes with every
    backend of several processes and `data.packing`; the number of attention heads must be divisible by it."""
    pipeline: Count = 1
    """Processes that share the layers, each a part of them, for bases too large for one. Goes with ddp and fsdp2."""
    tensor: Count = 1
    """Neighbouring processes that share each weight and its adapter (ddp and fsdp2). The number of
    attention heads must be divisible by it, and that of key/value heads, or it by that."""
    rendezvous: Name | None = None
    """`host:port` of the first machine; needed for more than one machine."""
    offload: Literal["none", "cpu", "stream"] | OffloadSection = "none"
    """Memory for state between uses: one word for all state that the backend can offload, or `optimizer` and
    `parameters` apart. `stream` (single) has two layers of the base in memory at a time. It reads each layer when it is
    needed: on a CPU from the base's files, on a GPU from host memory."""
    communication: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """Communication library between processes; `auto` is nccl on GPUs and gloo on CPUs."""
    bucket_mb: float = Field(25.0, gt=0, le=4096)
    """zero1-3: megabytes of gradients that are reduced in one message during backward."""
    prefetch_mb: float = Field(100.0, ge=0, le=65536)
    """Megabytes of the base that zero3 gathers before they are used."""
    reshard_after_forward: bool = True
    """fsdp2: free a layer's gathered weights after forward. `false` keeps them for backward: faster, more memory."""
    max_restarts: int = Field(0, ge=0, le=1000)
    """How many times a run that lost a process restarts by itself from its last checkpoint."""
    silent_seconds: float = Field(20.0, ge=1, le=3600)
    """Seconds without a heartbeat after which a process counts as dead, and the others stop."""
    stuck_seconds: float = Field(1800.0, ge=1, le=864000)
    """Seconds without progress of any process after which the run ends; the message names who waits for whom."""

    def problems(self) -> Iterator[str]:
        yield from _axis_problems(self)
        yield from _auto_problems(self) if self.is_auto else _parallel_problems(self)

    @property
    def is_auto(self) -> bool:
        """True if the plan chooses the backend, for the machine that starts the run."""
        return self.backend == "auto"

    @property
    def axes(self) -> dict[str, int]:
        """Processes along each axis but `data`, which has the others."""
        return {"pipeline": self.pipeline, "sequence": self.sequence, "tensor": self.tensor}

    @property
    def is_distributed(self) -> bool:
        """True if the run has worker processes of its own, even a single one."""
        return self.is_auto or self.facts.is_distributed

    @property
    def facts(self) -> Backend:
        """The facts of the backend, which is not `auto`."""
        return BACKENDS[self.backend]

    @property
    def offloads(self) -> OffloadSection:
        """Memory for optimizer and parameters, with a single word expanded to all that the backend can offload."""
        if isinstance(self.offload, OffloadSection):
            return self.offload
        parameters = "none" if self.is_auto or not self.facts.base_memory else self.offload
        optimizer = "none" if self.offload == "stream" else self.offload
        return OffloadSection(optimizer=optimizer, parameters=parameters)


def _axis_problems(section: ParallelSection) -> Iterator[str]:
    backend = None if section.is_auto else section.facts
    for axis, size in section.axes.items():
        if size > 1 and (backend is None or axis not in backend.axes):
            names = backends_with(lambda other, axis=axis: axis in other.axes)  # type: ignore[misc]
            why = " (DeepSpeed shards over all processes alike)" if backend and backend.zero_stage else ""
            yield f"{axis}: {size} goes with {names}, got backend `{section.backend}`{why}"
    if backend is None or not backend.is_distributed:
        return
    local = section.processes // section.nodes
    inner = section.sequence * section.tensor
    shared = [axis for axis in NEIGHBOURS if section.axes[axis] > 1]
    if local % inner:
        names = " x ".join(f"{axis}: {section.axes[axis]}" for axis in shared)
        # because these processes send each other something in every layer
        yield f"{names} does not divide the {local} processes of a machine, within which tokens or weights are shared"
    elif section.processes % (section.pipeline * inner):
        names = " x ".join(f"{axis}: {section.axes[axis]}" for axis in ("pipeline", *shared))
        yield f"{names} does not divide the {section.processes} processes"


def _auto_problems(section: ParallelSection) -> Iterator[str]:
    if section.nodes > 1:
        yield "backend `auto` looks at this machine alone; name what `lorakit plan RECIPE --gpu NAME --nodes N` advises"
    if section.offload != "none":
        yield "offload: goes with a backend that is named, got `auto`; `lorakit plan` says what would help"


def _parallel_problems(section: ParallelSection) -> Iterator[str]:
    name = section.backend
    backend = section.facts
    if not backend.is_distributed and section.processes > 1:
        distributed = backends_with(lambda other: other.is_distributed)
        yield f"backend `{name}` has one process, got processes: {section.processes}; choose {distributed}"
    if section.processes % section.nodes:
        yield f"processes: {section.processes} do not divide over nodes: {section.nodes}"
    if section.rendezvous is not None and not re.fullmatch(r"(.+):\d{1,5}", section.rendezvous):
        yield f"rendezvous: host:port, got {section.rendezvous!r}"
    offloads = section.offloads
    # `stream` is for the base, also where a single word names it for a backend that cannot
    parameters = "stream" if section.offload == "stream" else offloads.parameters
    for key, requested, possible, others in (
        ("optimizer", offloads.optimizer, backend.optimizer_memory, lambda other: other.optimizer_memory),
        ("parameters", parameters, backend.base_memory, lambda other: other.base_memory),
    ):
        if requested != "none" and requested not in possible:
            can = backends_with(lambda other, others=others, requested=requested: requested in others(other))  # type: ignore[misc]
            yield f"offload: `{requested}` for the {key} goes with backend {can}, got `{name}`"
    if backend.offloads_together and offloads.optimizer != offloads.parameters:
        yield f"offload: {name} offloads parameters and optimizer together: `cpu` or `none`"
