"""The plan of a recipe, and its words."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lorakit.base.dtype import choose_dtype
from lorakit.base.load import find_base
from lorakit.planning.advise import Advice, advise
from lorakit.planning.estimate import Candidate, Estimator
from lorakit.planning.machine import Machine, detect_machine
from lorakit.planning.report import cheapest_words, text_of
from lorakit.recipe import Recipe


@dataclass(frozen=True)
class Plan:
    """What a recipe takes on a machine, and the advice."""

    machine: Machine
    dtype: str
    advice: Advice
    text: str

    @property
    def refusal(self) -> str | None:
        """When nothing fits as the recipe stands: that, and the cheapest change."""
        if self.advice.best is not None:
            return None
        return f"nothing fits as the recipe stands; {cheapest_words(self.advice)}"

    def facts(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        rows = [
            {**_way(row.way), "cheapest_change": None if row.change is None else _way(row.change)}
            for row in self.advice.rows
        ]
        best, cheapest = self.advice.best, self.advice.cheapest
        return {
            "machine": asdict(self.machine), "dtype": self.dtype, "backends": rows,
            "advice": None if best is None else best.backend, "why": self.advice.why,
            "cheapest_change": None if cheapest is None else _way(cheapest),
        }  # fmt: skip


def run(recipe: Recipe, machine: Machine | None = None) -> Plan:
    """The plan of a recipe for ``machine``, or for the one this runs on. No weight is read.

    Raises:
        LorakitError: the base is not found or its memory cannot be known, or the adapter does not go onto it.
    """
    machine = machine or detect_machine(Path(recipe.output), recipe.parallel.nodes)
    weigher = _weigher(recipe, machine)
    advice = advise(weigher)
    return Plan(machine, weigher.dtype, advice, text_of(weigher, advice))


def _weigher(recipe: Recipe, machine: Machine) -> Estimator:
    folder = find_base(recipe.base.model, recipe.base.revision)
    num_processes = machine.gpus_per_node * machine.nodes if machine.described else recipe.parallel.processes
    return Estimator(recipe, machine, folder, _dtype(recipe, machine), num_processes)


def _dtype(recipe: Recipe, machine: Machine) -> str:
    """The run's dtype; `auto` is bfloat16 on a described GPU, and measured here."""
    if recipe.base.dtype == "auto" and machine.described:
        return "bfloat16"
    return choose_dtype(recipe.base.dtype, torch.device("cpu" if machine.gpu is None else "cuda")).name


def _way(way: Candidate) -> Mapping[str, Any]:
    memory = way.memory
    return {
        "backend": way.backend, "processes": way.num_processes, "changes": dict(way.changes), "fits": way.fits,
        "lacks": way.shortfall, "peak_bytes": memory.peak, "memory": asdict(memory), "seconds_per_step": way.step.total,
        "micro_batch": asdict(way.work.training), "micro_batches": way.work.micro_batches,
    }  # fmt: skip
