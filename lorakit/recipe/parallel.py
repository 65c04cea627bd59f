"""The recipe's `parallel` section: backend, processes and offloading of a run.

The sentence under each field is its description in the JSON schema.
"""

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field, JsonValue, model_validator

from lorakit.recipe.section import Count, Name, Section

NEIGHBOURS = ("sequence", "tensor")
"""axes whose processes are on one machine"""


class OffloadSection(Section):
    optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Memory for optimizer state and fp32 master weights between steps; `none` is the computing device."""
    parameters: Literal["none", "cpu", "nvme", "stream"] = "none"
    """Memory for the base's shards between uses (zero3 and fsdp2), or `stream` (single)."""

    @property
    def streams(self) -> bool:
        """True if a layer of the base is in memory only while that layer computes."""
        return self.parameters == "stream"


class ElasticSection(Section):
    min: Count = 1
    """Fewest processes with which the run goes on. With fewer it stops, and saves a checkpoint."""


class ParallelSection(Section):
    backend: Literal["auto", "single", "ddp", "zero1", "zero2", "zero3", "fsdp2"] = "single"
    """How training is distributed. `single`: one process. `ddp`: a full base in each process. `zero1`, `zero2`: the
    optimizer (and gradients) sharded. `zero3`, `fsdp2`: the base sharded too. `auto`: the fastest that fits,
    with `pipeline`, `sequence` or `tensor` where no backend alone fits (`lorakit plan`)."""
    processes: Count = 1
    """Number of processes over all machines, one per GPU."""
    nodes: Count = 1
    """Number of machines. Each runs `processes / nodes` processes."""
    sequence: Count = 1
    """Neighbouring processes that share the tokens of each packed line, for rows too long for one. Goes with every
    backend of several processes and `data.packing`; the base's attention heads must divide by it."""
    pipeline: Count = 1
    """Processes that share the layers, each a part of them, for bases too large for one. Goes with ddp and fsdp2."""
    tensor: Count = 1
    """Neighbouring processes that share each weight and its adapter (ddp and fsdp2). The base's heads of attention must
    divide by it, those of keys and values too."""
    rendezvous: Name | None = None
    """`host:port` of the first machine; needed for more than one machine."""
    offload: Literal["none", "cpu", "nvme", "stream"] | OffloadSection = "none"
    """Memory for state between uses: one word for all state that the backend can offload, or `optimizer` and
    `parameters` apart. `stream` (single) has two layers of the base in memory at a time. It reads each layer when it is
    needed: on a CPU from the base's files, on a GPU from host memory."""
    nvme_path: Name | None = None
    """Folder on a fast local disk, for `offload: nvme`."""
    communication: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """Communication library between processes; `auto` is nccl on GPUs and gloo on CPUs."""
    bucket_mb: float = Field(25.0, gt=0, le=4096)
    """Megabytes of gradients that are reduced in one message during backward."""
    prefetch_mb: float = Field(100.0, ge=0, le=65536)
    """Megabytes of the base that zero3 gathers before they are used."""
    reshard_after_forward: bool = True
    """fsdp2: free a layer's gathered weights after forward. `false` keeps them for backward: faster, more memory."""
    max_restarts: int = Field(0, ge=0, le=1000)
    """How many times a run that lost a process restarts by itself from its last checkpoint. With `elastic`: how many
    lost processes are replaced while the others go on."""
    silent_seconds: float = Field(20.0, ge=1, le=3600)
    """Seconds without a heartbeat after which a process counts as dead, and the others stop."""
    stuck_seconds: float = Field(1800.0, ge=1, le=864000)
    """Seconds without progress of any process after which the run ends; the message names who waits for whom."""
    elastic: ElasticSection | None = None
    """Let a run of ddp on one machine go on without a process that it lost, from the step under way. `max_restarts`
    lost processes are replaced, by new ones that join between two steps. Needs `pip install 'lorakit[elastic]'`."""
    deepspeed: dict[str, JsonValue] = Field({})
    """Further keys of DeepSpeed's own configuration (zero backends); keys that lorakit sets are refused."""

    @model_validator(mode="after")
    def _fits_the_backend(self) -> "ParallelSection":
        problems = [*_axis_problems(self), *_elastic_problems(self)]
        problems += [*(_auto_problems(self) if self.is_auto else _parallel_problems(self))]
        if problems:
            raise ValueError("; ".join(problems))
        return self

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
        return self.backend != "single"

    @property
    def offloads(self) -> OffloadSection:
        """Memory for optimizer and parameters, with a single word expanded to all that the backend can offload."""
        if isinstance(self.offload, OffloadSection):
            return self.offload
        parameters = self.offload if self.backend in ("single", "zero3", "fsdp2") else "none"
        optimizer = "none" if self.offload == "stream" else self.offload
        return OffloadSection(optimizer=optimizer, parameters=parameters)


def _axis_problems(section: ParallelSection) -> Iterator[str]:
    local, shared = section.processes // section.nodes, [axis for axis in NEIGHBOURS if getattr(section, axis) > 1]
    inner = section.sequence * section.tensor
    if section.sequence > 1 and section.backend in ("auto", "single"):
        yield f"sequence: {section.sequence} goes with ddp, zero1-3 or fsdp2, got backend `{section.backend}`"
    for axis in ("pipeline", "tensor"):
        if getattr(section, axis) > 1 and section.backend not in ("ddp", "fsdp2"):
            why = " (DeepSpeed shards over all processes alike)" if section.backend.startswith("zero") else ""
            yield f"{axis}: {getattr(section, axis)} goes with ddp or fsdp2, got backend `{section.backend}`{why}"
    if section.backend in ("auto", "single"):
        return
    if local % inner:
        names = " x ".join(f"{axis}: {getattr(section, axis)}" for axis in shared)
        yield (
            f"{names} does not divide the {local} processes of a machine; processes that share tokens or weights are on"
            " one machine, because they send each other something in every layer"
        )
    elif section.processes % (section.pipeline * inner):
        names = " x ".join(f"{axis}: {getattr(section, axis)}" for axis in ("pipeline", *shared))
        yield f"{names} does not divide the {section.processes} processes"


def _auto_problems(section: ParallelSection) -> Iterator[str]:
    if section.nodes > 1:
        yield "backend `auto` looks at this machine alone; name what `lorakit plan RECIPE --gpu NAME --nodes N` advises"
    given = [key for key in ("offload", "nvme_path", "deepspeed") if key in section.model_fields_set]
    if given:
        yield f"{', '.join(given)}: goes with a backend that is named, got `auto`; `lorakit plan` says what would help"


def _parallel_problems(section: ParallelSection) -> Iterator[str]:
    backend = section.backend
    zero = backend in ("zero1", "zero2", "zero3")
    if backend == "single" and section.processes > 1:
        yield f"backend `single` has one process, got processes: {section.processes}; choose ddp, zero1-3 or fsdp2"
    if section.processes % section.nodes:
        yield f"processes: {section.processes} do not divide over nodes: {section.nodes}"
    if section.rendezvous is not None and not re.fullmatch(r"(.+):\d{1,5}", section.rendezvous):
        yield f"rendezvous: host:port, got {section.rendezvous!r}"
    if section.deepspeed and not zero:
        yield f"deepspeed: goes with zero1, zero2 or zero3, got backend `{backend}`"
    yield from _offload_problems(section, section.offloads)


def _elastic_problems(section: ParallelSection) -> Iterator[str]:
    if section.elastic is None:
        return
    if section.backend != "ddp":
        yield f"elastic: goes with ddp, where each process has everything, got backend `{section.backend}`"
    shared = [f"{axis}: {size}" for axis, size in section.axes.items() if size > 1]
    if shared:
        yield f"elastic: a lost process takes its part of each row or weight with it; leave out {', '.join(shared)}"
    if section.nodes > 1:
        yield f"elastic: one machine's processes, got nodes: {section.nodes}"
    if section.communication in ("nccl", "mpi"):
        yield f"elastic: the adapter's gradients go through gloo, got communication: {section.communication}"
    if section.elastic.min > section.processes:
        yield f"elastic.min: {section.elastic.min} is more than processes: {section.processes}"


def _offload_problems(section: ParallelSection, offloads: OffloadSection) -> Iterator[str]:
    backend, kinds = section.backend, {offloads.optimizer, offloads.parameters}
    if "stream" in (section.offload, offloads.parameters) and backend != "single":
        yield f"offload: stream goes with backend single, got `{backend}`"
    if kinds & {"cpu", "nvme"} and backend in ("single", "ddp"):
        yield f"offload: backend `{backend}` keeps everything where it computes; choose zero1-3 or fsdp2, or `stream`"
    if offloads.parameters != "none" and backend in ("zero1", "zero2"):
        yield f"offload.parameters: `{backend}` holds a whole base in each process; zero3 and fsdp2 can offload it"
    if "nvme" in kinds and backend != "zero3":
        yield f"offload: only zero3 offloads to nvme, got backend `{backend}`"
    if backend == "fsdp2" and offloads.optimizer != offloads.parameters:
        yield "offload: fsdp2 offloads parameters and optimizer together: `cpu` or `none`"
    if ("nvme" in kinds) != (section.nvme_path is not None):
        yield "nvme_path goes with offload: nvme, and that needs it"
