"""Where training runs: one engine per backend, all behind the same interface."""

from lorakit.parallel.backends import BACKENDS, open_engine
from lorakit.parallel.engine import Engine, EngineState, LossReport, NonFiniteStep, StepReport, StepSettings
from lorakit.parallel.group import Group

__all__ = [
    "BACKENDS", "Engine", "EngineState", "Group", "LossReport", "NonFiniteStep", "StepReport", "StepSettings",
    "open_engine",
]  # fmt: skip
