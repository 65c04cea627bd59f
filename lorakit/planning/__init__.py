"""The memory of a recipe before it is run: per process, by category, for every backend, with advice."""

from lorakit.planning.machine import Machine, detect_machine, machine_with_gpu
from lorakit.planning.plan import Choice, Plan, make_plan, resolve_auto

__all__ = ["Choice", "Machine", "Plan", "detect_machine", "machine_with_gpu", "make_plan", "resolve_auto"]
