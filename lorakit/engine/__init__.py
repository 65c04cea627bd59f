"""Where training runs. Backends are looked up in one literal table."""

from collections.abc import Callable, Mapping
from typing import Final

from lorakit.engine.base import Engine, NonFiniteStep, StepReport, StepSettings
from lorakit.engine.single import SingleEngine
from lorakit.errors import RunError, nearest

BACKENDS: Final[Mapping[str, Callable[[], Engine]]] = {"single": SingleEngine}


def open_engine(backend: str) -> Engine:
    """The engine of a backend.

    Raises:
        RunError: no such backend.
    """
    if backend not in BACKENDS:
        raise RunError(f"parallel.backend: {backend!r} is unknown.{nearest(backend, BACKENDS)}")
    return BACKENDS[backend]()


__all__ = ["BACKENDS", "Engine", "NonFiniteStep", "StepReport", "StepSettings", "open_engine"]
