"""The plan of a recipe: the memory of a process with every backend on a machine, and the advice, as text and JSON.

Advised is the simplest candidate that fits, in the order of BACKENDS, or the change that makes one fit. The `auto` keys
of a recipe get the advised values, or those of the run in its output folder.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from lorakit.backends import BACKENDS
from lorakit.base.device import choose_dtype
from lorakit.base.find import find_base
from lorakit.errors import RunError
from lorakit.files.text import columns, count, flatten, size
from lorakit.parallel.axis import check_axes
from lorakit.planning.estimate import Candidate, Changes, Estimator
from lorakit.planning.machine import GB, Machine, detect_machine
from lorakit.planning.memory import CATEGORIES, MARGIN
from lorakit.planning.skeleton import adapted_skeleton
from lorakit.recipe import Recipe
from lorakit.run.record import recorded_run
from lorakit.run.start_from import find_start

BACKEND: Final = "parallel.backend"
CHECKPOINTING: Final = "train.activation_checkpointing"
RECOMPUTE: Final[Changes] = {CHECKPOINTING: "layers"}
MAX_PROCESSES: Final = 4096  # the search for more processes ends here


@dataclass(frozen=True)
class Plan:
    """The estimates of a recipe on a machine, and the advice."""

    estimator: Estimator
    backends: tuple[Candidate, ...]  # all, with the recipe as written
    requested: tuple[Candidate, ...]  # those of them that run with as many processes as are planned
    best: Candidate | None  # the simplest of these that fits
    change: Candidate | None  # if none does, the first changed candidate that fits

    @property
    def why(self) -> str:
        """Return why the advised candidate is the simplest that fits; empty if none is."""
        if self.best is None:
            return ""
        simpler = self.requested[: self.requested.index(self.best)]
        closest = min(simpler, key=lambda candidate: candidate.memory.peak, default=None)
        return _simplest(self.best) + (f"; {closest.name} needs {closest.lacks}" if closest else "")

    @property
    def refusal(self) -> str | None:
        """Name the change that makes the recipe fit if nothing fits as it is written; else None."""
        if self.best is not None:
            return None
        text = "nothing fits as the recipe stands"
        if self.change is not None:
            return f"{text}; it would with {self.change.overrides()}, {_peak(self.change)}"
        smallest = min(self.requested, key=lambda one: one.memory.peak)
        recomputing = "" if smallest.checkpointing else " with nothing recomputed"
        return (
            f"{text}, and no change known here helps: take a smaller base, shorter rows (data.max_tokens) or more"
            f" memory; the smallest{recomputing}, {smallest.name}, needs {smallest.lacks}"
        )

    @property
    def text(self) -> str:
        """The plan for a person to read: facts of the recipe, a table of all backends, the advice."""
        return "\n\n".join("\n".join(part) for part in (self._recipe_facts(), self._table(), self._advice()))

    def _recipe_facts(self) -> list[str]:
        """Return lines on machine, base, adapter and rows."""
        base = self.estimator.recipe.base.model
        dtype = self.estimator.dtype
        model = self.estimator.model()
        work = self.backends[-1].work
        batch = work.training
        total = count(model.facts.num_parameters)
        tokens = f"{batch.width}" if batch.packed else f"{batch.lines} x {batch.width}"
        labels = f"{batch.num_labels} labels; {work.micro_batches} of each process in a step"
        bytes_of_base = size(model.shapes.base_bytes)
        return columns([
            ("machine", self.estimator.machine.describe()),
            ("base", f"{base}, {model.facts.architecture}, {total} parameters in {dtype}, {bytes_of_base}"),
            *([("quantised", model.facts.quantization)] if model.facts.quantization else []),
            ("adapter", f"{count(model.facts.num_trainable)} parameters in float32"),
            ("micro-batch", f"{tokens} tokens, {labels}"),
            ("rows", work.source),
        ])  # fmt: skip

    def _table(self) -> list[str]:
        peak = max(candidate.memory.peak for candidate in self.backends)
        unit = "GB" if peak >= 10 * GB else "MB"
        rows = [[f"{unit} of a process", *CATEGORIES.values(), "peak", "load", "save", "host", "disk", ""]]
        for candidate in self.backends:
            memory = candidate.memory
            sizes = [*(getattr(memory, name) for name in CATEGORIES), memory.peak, memory.loading, memory.saving]
            sizes += [memory.host, memory.disk]
            problems = {"too large": not candidate.fits, "not installed": candidate.missing_package is not None}
            verdict = ", ".join(word for word, is_true in problems.items() if is_true) or "fits"
            advised = ", advised" if candidate is self.best else ""
            rows.append([candidate.name, *(_number(num_bytes, unit) for num_bytes in sizes), f"{verdict}{advised}"])
        used = [column for column in range(len(rows[0])) if {row[column] for row in rows[1:]} != {"-"}]
        return columns([[row[column] for column in used] for row in rows], "<" + ">" * (len(used) - 2) + "<")

    def _advice(self) -> list[str]:
        best = self.best
        lines = [(one.backend, f"needs {one.lacks}") for one in self.backends if not one.can_run]
        if refusals := self.estimator.refusals:
            lines.append(("left out", f"{', '.join(refusals)}: {next(iter(refusals.values()))}"))
        if best is not None:
            lines.append(("advice", f"{best.overrides()}: {_simplest(best)}"))
            for one in self.backends:
                if one.backend == self.estimator.recipe.parallel.backend != best.backend:
                    verdict = "fits too" if one.can_run else "cannot run here, for the reason above"
                    lines.append(("the recipe", f"requests {one.backend}, which {verdict}"))
            lines.append(("fits", f"in the table: even with {MARGIN:.0%} more than estimated"))
        return columns(lines)

    def facts(self) -> dict[str, Any]:
        """Return every figure as plain values, for JSON."""
        best = self.best
        return {
            "machine": asdict(self.estimator.machine),
            "dtype": self.estimator.dtype,
            "backends": [_candidate_facts(candidate) for candidate in self.backends],
            "advice": None if best is None else best.backend,
            "advised": None if best is None else _candidate_facts(best),
            "why": self.why,
            "change": None if self.change is None else _candidate_facts(self.change),
        }


def make_plan(recipe: Recipe, machine: Machine | None = None) -> Plan:
    """Plan a recipe for a machine, or this one. Raises LorakitError: the base, its memory or its axes do not work."""
    if (start := find_start(recipe)) is not None:
        recipe = start.apply(recipe)
    machine = machine or detect_machine(Path(recipe.output), recipe.parallel.nodes)
    folder = find_base(recipe.base.model, recipe.base.revision)
    num_processes = machine.gpus_per_node * machine.nodes if machine.described else recipe.parallel.processes
    _check_axes(recipe, folder, num_processes)
    estimator = Estimator(recipe, machine, folder, _dtype(recipe, machine), num_processes)
    backends = tuple(as_written(estimator, name) for name in estimator.backends)
    requested = tuple(one for one in backends if one.num_processes == num_processes)
    best = next((one for one in requested if one.can_run), None)
    changed = changed_candidates(estimator, requested) if best is None else ()
    change = next((one for one in changed if one.can_run), None)
    return Plan(estimator, backends, requested, best, change)


def resolve_auto(recipe: Recipe, machine: Machine | None = None, *, fresh: bool) -> tuple[Changes, str]:
    """Return the values chosen for a recipe's `auto` keys, and why: one clause for each, for the summary and run.json.

    A resumed run has the values of its start. Raises RunError: nothing fits.
    """
    auto_keys = recipe.auto_keys
    recorded = {} if fresh else flatten(recorded_run(Path(recipe.output)).get("recipe", {}))
    if recorded.get("parallel.processes") == recipe.parallel.processes and recorded.keys() >= set(auto_keys):
        values = {key: recorded[key] for key in auto_keys}
        return values, f"{', '.join(values.values())}, as this run was begun"
    plan = make_plan(recipe, machine)
    candidates = {candidate.backend: candidate for candidate in plan.backends}
    candidate = plan.best if BACKEND in auto_keys else candidates[recipe.parallel.backend]
    if candidate is None:
        raise RunError(f"parallel.backend: auto: {plan.refusal}")
    advice = {
        BACKEND: (candidate.backend, f"{candidate.name}: {plan.why}"),
        CHECKPOINTING: ("layers" if candidate.checkpointing else "none", _why_checkpointing(candidate)),
    }
    values = {key: advice[key][0] for key in auto_keys}
    return values, "; ".join(advice[key][1] for key in auto_keys)


def _check_axes(recipe: Recipe, folder: Path, num_processes: int) -> None:
    """Raise RunError unless so many processes can share the base along the axes of the recipe."""
    axes = {axis: ranks for axis, ranks in recipe.parallel.axes.items() if ranks > 1}
    if not axes:
        return
    if num_processes % math.prod(axes.values()):
        names = " x ".join(f"{axis}: {ranks}" for axis, ranks in axes.items())
        raise RunError(f"parallel: {names} does not divide {num_processes} planned processes; give --gpus and --nodes")
    skeleton = adapted_skeleton(folder, recipe)
    check_axes(skeleton.model, skeleton.spec, axes)


def _dtype(recipe: Recipe, machine: Machine) -> str:
    """Return the run's dtype. `auto` is measured on this machine, and is bfloat16 on a described GPU that has it."""
    if recipe.base.dtype == "auto" and machine.described:
        return "bfloat16" if machine.gpu is None or machine.gpu.has_bfloat16 else "float32"
    return choose_dtype(recipe.base.dtype, torch.device("cpu" if machine.gpu is None else "cuda")).name


def _candidate_facts(candidate: Candidate) -> Mapping[str, Any]:
    memory = candidate.memory
    return {
        "backend": candidate.backend,
        "processes": candidate.num_processes,
        "axes": dict(candidate.axes),
        "changes": dict(candidate.changes),
        "fits": candidate.can_run,
        "lacks": candidate.lacks,
        "missing_package": candidate.missing_package,
        "peak_bytes": memory.peak,
        "memory": asdict(memory),
        "micro_batch": asdict(candidate.work.training),
        "micro_batches": candidate.work.micro_batches,
    }


def _simplest(best: Candidate) -> str:
    return f"the simplest that fits, {_peak(best)}"


def _peak(candidate: Candidate) -> str:
    return f"{size(candidate.memory.peak)} at the peak of a process"


def _number(num_bytes: int, unit: str) -> str:
    if num_bytes == 0:
        return "-"
    text = f"{num_bytes / GB:,.2f}" if unit == "GB" else f"{num_bytes / 1e6:,.0f}"
    return {"0.00": "<0.01", "0": "<1"}.get(text, text)


def _why_checkpointing(candidate: Candidate) -> str:
    if candidate.checkpointing:
        return "layers are recomputed, without which it would not fit"
    if candidate.fits:
        return "memory suffices without recomputation"
    return f"nothing is recomputed, which would not make it fit either: {candidate.shortfall}"


# --- the candidates


def as_written(estimator: Estimator, backend: str) -> Candidate:
    """Estimate the recipe with this backend. `activation_checkpointing: auto` recomputes only if that makes it fit."""
    count = estimator.num_processes if BACKENDS[backend].is_distributed else 1
    if estimator.recipe.train.activation_checkpointing != "auto":
        return estimator.estimate(backend, count, {})
    saving_all = estimator.estimate(backend, count, {CHECKPOINTING: "none"})
    if saving_all.fits:
        return saving_all
    recomputing = estimator.estimate(backend, count, RECOMPUTE)
    return recomputing if recomputing.fits else saving_all


def changed_candidates(estimator: Estimator, requested: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the installed backends with each change, another dtype last, then with more processes."""
    can_halve = estimator.machine.gpu is not None and estimator.dtype == "float32"
    dtypes: list[Changes] = [{}, {"base.dtype": "bfloat16"}] if can_halve else [{}]
    installed = [candidate for candidate in requested if candidate.missing_package is None]
    for dtype, changes in itertools.product(dtypes, _changes(estimator)):
        merged = {**dtype, **changes}
        for candidate in installed if merged else ():
            if _can_offload(estimator, candidate.backend, merged.get("parallel.offload", "none")):
                yield estimator.estimate(candidate.backend, candidate.num_processes, merged)
    yield from _with_more_processes(estimator)


def _changes(estimator: Estimator) -> Iterator[Changes]:
    """Yield combinations of changes: smaller micro-batches first, then recomputation, then offloading."""
    train = estimator.recipe.train
    size = min(train.micro_batch_size or min(8, train.batch_size), -(-train.batch_size // estimator.num_processes))
    smaller: list[Changes] = [{}]
    while size > 1:
        size = -(-size // 2)
        smaller.append({"train.micro_batch_size": size})
    recomputed = [{}] if train.activation_checkpointing == "layers" else [{}, RECOMPUTE]
    can_offload = estimator.recipe.parallel.offload == "none"
    offloads: list[Changes] = [{}, *({"parallel.offload": where} for where in ("cpu", "stream") if can_offload)]
    for offload, recompute, small in itertools.product(offloads, recomputed, smaller):
        yield {**offload, **recompute, **small}


def _can_offload(estimator: Estimator, backend: str, offload: str) -> bool:
    if offload == "cpu":
        return estimator.machine.gpu is not None and offload in BACKENDS[backend].optimizer_memory
    return offload == "none" or offload in BACKENDS[backend].base_memory


def _with_more_processes(estimator: Estimator) -> Iterator[Candidate]:
    """Yield candidates with a sharded base and more processes, doubling."""
    count = 2 * estimator.num_processes
    while count <= MAX_PROCESSES:
        for recompute, name in itertools.product(({}, RECOMPUTE), estimator.backends):
            if BACKENDS[name].shards_base:
                yield estimator.estimate(name, count, {"parallel.processes": count, **recompute})
        count *= 2
