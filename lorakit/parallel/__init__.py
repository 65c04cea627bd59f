"""Where training runs: one engine per backend, all behind the same interface."""

from lorakit.parallel.adapter_state import AdapterState, EngineState, StepSettings
from lorakit.parallel.engine import Engine, NonFiniteStep, StepReport
from lorakit.parallel.group import Group
from lorakit.parallel.setup import open_engine
from lorakit.parallel.sums import LossReport

__all__ = [
    "AdapterState", "Engine", "EngineState", "Group", "LossReport", "NonFiniteStep", "StepReport", "StepSettings",
    "open_engine",
]  # fmt: skip
