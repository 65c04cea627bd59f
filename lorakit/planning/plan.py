"""The plan of a recipe: the estimates of all backends on a machine, the advice, and both as text and as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lorakit.base.dtype import choose_dtype
from lorakit.base.find import find_base
from lorakit.base.load import load_skeleton
from lorakit.base.start_patch import with_start
from lorakit.parallel.sequence import check_sequence_fits
from lorakit.planning.advise import Advice, advise
from lorakit.planning.estimate import Candidate, Estimator
from lorakit.planning.machine import Machine, detect_machine
from lorakit.planning.report import describe_cheapest, describe_uninstalled, plan_text
from lorakit.recipe import Recipe


@dataclass(frozen=True)
class Plan:
    """The estimates of a recipe on a machine, and the advice."""

    machine: Machine
    dtype: str
    advice: Advice
    text: str
    """The plan for a person to read."""

    @property
    def refusal(self) -> str | None:
        """The cheapest change if nothing fits as the recipe is written; else None."""
        if self.advice.best is not None:
            return None
        return f"nothing fits as the recipe stands; {describe_cheapest(self.advice)}{describe_uninstalled(self.advice)}"

    def facts(self) -> dict[str, Any]:
        """Return every figure as plain values, for JSON."""
        backends = [
            {
                **_candidate_facts(estimate.candidate),
                "cheapest_change": (
                    None if estimate.cheapest_change is None else _candidate_facts(estimate.cheapest_change)
                ),
            }
            for estimate in self.advice.backends
        ]
        best, cheapest = self.advice.best, self.advice.cheapest
        return {
            "machine": asdict(self.machine),
            "dtype": self.dtype,
            "backends": backends,
            "layouts": [_candidate_facts(candidate) for candidate in self.advice.layouts],
            "advice": None if best is None else best.backend,
            "why": self.advice.why,
            "cheapest_change": None if cheapest is None else _candidate_facts(cheapest),
        }


def make_plan(recipe: Recipe, machine: Machine | None = None) -> Plan:
    """Plan a recipe for ``machine``, or for this machine. No weight is read.

    Raises:
        LorakitError: the base is missing, its memory cannot be computed, the adapter does not fit it, or processes
            cannot share it along an axis that the recipe names.
    """
    recipe = with_start(recipe)
    machine = machine or detect_machine(Path(recipe.output), recipe.parallel.nodes)
    estimator = _make_estimator(recipe, machine)
    advice = advise(estimator)
    return Plan(machine, estimator.dtype, advice, plan_text(estimator, advice))


def _make_estimator(recipe: Recipe, machine: Machine) -> Estimator:
    folder = find_base(recipe.base.model, recipe.base.revision)
    if recipe.parallel.sequence > 1:  # the shapes are refused where the other axes do not fit
        check_sequence_fits(load_skeleton(folder), recipe.parallel.sequence)
    num_processes = machine.gpus_per_node * machine.nodes if machine.described else recipe.parallel.processes
    return Estimator(recipe, machine, folder, _dtype(recipe, machine), num_processes)


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
        "seconds_per_step": candidate.step.total,
        "sent_in_a_step": {axis: asdict(traffic) for axis, traffic in candidate.traffic.items()},
        "idle_share": candidate.idle,
        "micro_batch": asdict(candidate.work.training),
        "micro_batches": candidate.work.micro_batches,
    }
