"""The memory of a recipe before it is run: per process, by category, for every backend, with advice."""

from lorakit.planning.auto import Choice, resolve_auto
from lorakit.planning.machine import Machine, detect_machine, machine_with_gpu
from lorakit.planning.plan import Plan, make_plan

__all__ = ["Choice", "Machine", "Plan", "detect_machine", "machine_with_gpu", "make_plan", "resolve_auto"]
