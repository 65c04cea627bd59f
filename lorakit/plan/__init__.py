"""What a recipe takes before it is run: memory of a process by category with every backend, what fits, what to do."""

from lorakit.plan.choice import Choice, choose
from lorakit.plan.machine import Machine, described, this_machine
from lorakit.plan.run import Plan, run

__all__ = ["Choice", "Machine", "Plan", "choose", "described", "run", "this_machine"]
