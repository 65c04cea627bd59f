"""What a recipe takes before it is run: memory of a process by category with every backend, what fits, what to do."""

from lorakit.planning.auto import Choice, choose
from lorakit.planning.machine import Machine, described, this_machine
from lorakit.planning.plan import Plan, run

__all__ = ["Choice", "Machine", "Plan", "choose", "described", "run", "this_machine"]
