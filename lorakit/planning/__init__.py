"""What a recipe takes before it is run: memory of a process by category with every backend, what fits, what to do."""

from lorakit.planning.auto import Choice, resolve_auto
from lorakit.planning.machine import Machine, detect_machine, machine_with_gpu
from lorakit.planning.plan import Plan, run

__all__ = ["Choice", "Machine", "Plan", "detect_machine", "machine_with_gpu", "resolve_auto", "run"]
