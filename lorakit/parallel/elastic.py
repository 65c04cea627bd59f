"""The ddp backend of an elastic run: workers leave and join between steps, and those there form torch's group anew.

Invariant: after `meet` and `share`, all members have the same adapter, optimizer state and number of steps. A step
counts where its update ran, and nothing is sent after that until the next `meet`. So a lost member costs at most
the step under way: whoever has counted it hands its state to the others, or all repeat it.
"""

import io
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from lorakit.base.lazy import LazyBase
from lorakit.errors import RunError, TemporaryFailure
from lorakit.files.safetensors import write_tensors
from lorakit.launch.environment import World
from lorakit.launch.heartbeat import process_start_time
from lorakit.launch.lighthouse import Lighthouse, Quorum
from lorakit.lora.inject import adapter_tensors
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel._internals import set_message_timeout
from lorakit.parallel.accounting import Collectives
from lorakit.parallel.ddp import sum_gradients
from lorakit.parallel.engine import BuildOptimizer, EngineState
from lorakit.parallel.group import Group
from lorakit.parallel.process_group import destroy_process_group
from lorakit.parallel.single import SingleEngine
from lorakit.recipe import ParallelSection

START_SECONDS: Final = 300.0
"""from a process's first request: for the others that the run starts with"""
CONNECT_SECONDS: Final = 30.0
"""for a new group to connect: a member that is lost meanwhile must not stop the others for long"""
END_SECONDS: Final = 10.0
"""for a process that was killed to be gone"""
POLL_SECONDS: Final = 0.1


@dataclass(frozen=True)
class Meeting:
    """A group that was formed. source: the rank whose state is the run's. workers: numbers of its members, by rank."""

    source: int
    workers: tuple[int, ...]


class ElasticEngine(SingleEngine):
    """The full model in each process, and one message of gradients among the members of the present group.

    Before its first `meet` a process is a group of its own, so that a worker which joins loads everything by itself.
    joins: the run had begun when this process started.
    """

    def __init__(self, world: World, parallel: ParallelSection, device: torch.device) -> None:
        super().__init__(device, Group(local_rank=world.local_rank), parallel.backend)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.joins = world.worker is not None
        self._worker = world.rank if world.worker is None else world.worker
        self._world, self._parallel = world, parallel
        address = f"http://{world.address}:{world.port}"
        self._lighthouse = Lighthouse(address, self._worker, parallel.silent_seconds)
        # every worker has a store, and a group uses that of its rank 0
        self._store = TCPStore(world.address, 0, is_master=True, wait_for_workers=False)
        self._began_at: float | None = None
        self._quorum = Quorum(-1, ())
        self._formed = 0
        """groups formed or tried; the largest number of the members names the next one"""
        self._broken = self._has_begun = self._is_prepared = False

    # --- members -----------------------------------------------------------------------------------------------------

    def meet(self, step: int, is_stopped: Callable[[], bool] = lambda: False) -> Meeting | None:
        """Wait for the others, and form a group of all that are there; None if it is the group of before. Collective.

        step: number of updates that this process has counted.

        Raises:
            TemporaryFailure: the run stops, or not enough workers came.
            RuntimeError: a member was lost meanwhile: call `disband`, and then this function.
        """
        while True:
            quorum = self._wait(self._request(step), is_stopped)
            members = quorum.members
            if any(member["has_begun"] for member in members):
                break
            # the workers that a run starts with go on to load together, and those that join have loaded alone: they
            # begin by themselves, after the last checkpoint, where nobody is left whom they could join
            starters = [member for member in members if _number(member) < self._world.size]
            if not starters or len(starters) == len(members) == self._world.size:
                break
            if max(member["waited"] for member in members) > START_SECONDS:
                raise TemporaryFailure(
                    f"parallel.elastic: {len(starters)} of {self._world.size} processes came in {START_SECONDS:.0f} s;"
                    " a run begins with all of them. The same command begins again"
                )
            time.sleep(POLL_SECONDS)
        if quorum.number == self._quorum.number and not any(member["broken"] for member in members):
            return None
        before, self._quorum = self._quorum, quorum
        self.disband()
        self._formed = 1 + max(member["formed"] for member in members)
        end_processes([old for old in before.members if _number(old) not in map(_number, members)])
        self._connect(members)
        self._broken, self._has_begun = False, True
        source = max(range(len(members)), key=lambda rank: (members[rank]["step"], -rank))
        return Meeting(source, tuple(map(_number, members)))

    def disband(self) -> None:
        """Leave the group, so that its other members notice, and forget the gradients of the step under way."""
        destroy_process_group()
        self._broken = True
        self._become(0, 1)
        if self._is_prepared:
            self._optimizer.zero_grad()

    def close(self) -> None:
        """Leave the run."""
        self._lighthouse.close()
        destroy_process_group()

    def share(self, source: int, text: str) -> str:
        """Load the state of rank `source`, and return its text. Collective. Tensors travel as safetensors' bytes."""
        content = torch.empty(0, dtype=torch.uint8)
        if self.group.rank == source:
            state, file = self.state_dict(), io.BytesIO()
            tensors = {f"adapter/{name}": value for name, value in state.adapter.items()}
            tensors |= {f"optimizer/{name}": value for name, value in state.optimizer.items()}
            write_tensors(file, tensors, {})
            content = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        texts = self.group.all_gather((text, len(content)))
        if self.group.size > 1:
            content = content if self.group.rank == source else torch.empty(texts[source][1], dtype=torch.uint8)
            dist.broadcast(content, src=source)
        if self.group.rank != source:
            loaded = safetensors.torch.load(content.numpy().tobytes())
            parts: dict[str, dict[str, Tensor]] = {"adapter": {}, "optimizer": {}}
            for name, tensor in loaded.items():
                kind, _, rest = name.partition("/")
                parts[kind][rest] = tensor
            self.load_state_dict(EngineState(**parts))
        return texts[source][0]

    def _request(self, step: int) -> Any:
        now = time.monotonic()
        self._began_at = self._began_at or now
        facts = {
            "worker": self._worker, "process": os.getpid(), "process_start": process_start_time(os.getpid()),
            "store": self._store.port, "step": step, "formed": self._formed, "broken": self._broken,
            "has_begun": self._has_begun, "waited": now - self._began_at,
        }  # fmt: skip
        return self._lighthouse.request(facts, self._parallel.stuck_seconds)

    def _wait(self, request: Any, is_stopped: Callable[[], bool]) -> Quorum:
        stopped_at: float | None = None
        while not wait([request], POLL_SECONDS).done:
            stopped_at = stopped_at or (time.monotonic() if is_stopped() else None)
            # the others may be in a step, after which all stop together
            if stopped_at is not None and time.monotonic() > stopped_at + self._parallel.silent_seconds:
                raise TemporaryFailure("stopped without the other processes")
        try:
            quorum: Quorum = request.result()
        except RuntimeError as problem:
            raise TemporaryFailure(
                f"parallel.elastic: no group of {self._parallel.elastic} formed: {str(problem)[:200]}"
            ) from None
        return quorum

    def _connect(self, members: Sequence[Mapping[str, Any]]) -> None:
        rank = list(map(_number, members)).index(self._worker)
        if len(members) > 1:
            limit = timedelta(seconds=CONNECT_SECONDS)
            port = members[0]["store"]
            store = TCPStore(self._world.address, port, is_master=False, wait_for_workers=False, timeout=limit)
            own = PrefixStore(f"{self._quorum.number}/{self._formed}", store)
            dist.init_process_group("gloo", store=own, rank=rank, world_size=len(members), timeout=limit)
            set_message_timeout(timedelta(seconds=self._parallel.stuck_seconds))
        self._become(rank, len(members))

    def _become(self, rank: int, size: int) -> None:
        """Be a rank of torch's default group, which was made anew."""
        self.group.rank, self.group.size, self.rank = rank, size, rank
        # what was decided with other members is decided with these
        self._all_had_gradient, self._collectives = False, Collectives(size)
        if self._is_prepared:
            self._expected = replace(self._expected, num_processes=size, num_ranks=size)

    # --- one step ----------------------------------------------------------------------------------------------------

    def wrap(self, loss_model: LossModel, build: BuildOptimizer, weights: LazyBase | None) -> nn.Module:
        self._is_prepared = True
        return super().wrap(loss_model, build, weights)

    def update(self, rate: float) -> float:
        sum_gradients(list(adapter_tensors(self._model).values()), self.mesh.tokens)
        return super().update(rate)

    def check(self, work: Callable[[], None]) -> None:
        work()  # without the others: the update has run, and one lost here would leave a step that some have counted

    def describe(self) -> dict[str, Any]:
        return {"engine": type(self).__name__, "backend": "ddp"}


def end_processes(members: Sequence[Mapping[str, Any]]) -> None:
    """Kill workers of this machine that the others go on without, and wait for their ends.

    One that was only slow or suspended must not write beside its successor.
    """
    for member in members:
        pid, start = member["process"], member["process_start"]
        end = time.monotonic() + END_SECONDS
        while start and process_start_time(pid) == start:  # else another process has the number now
            if time.monotonic() > end:
                raise RunError(f"worker {member['worker']}, process {pid}, was killed and does not end")
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                break
            time.sleep(POLL_SECONDS / 10)


def _number(member: Mapping[str, Any]) -> int:
    number: int = member["worker"]
    return number
