"""The memory of a recipe before it is run: per process, by category, for every backend, with advice."""

from lorakit.planning.estimate import apply_changes
from lorakit.planning.machine import Machine, machine_with_gpu
from lorakit.planning.plan import Plan, make_plan, resolve_auto

__all__ = ["Machine", "Plan", "apply_changes", "machine_with_gpu", "make_plan", "resolve_auto"]
