"""Experiment trackers, through accelerate's own: TensorBoard, Weights & Biases, MLflow, Trackio."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lorakit.errors import RunError

PACKAGES: Final = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}


class Trackers:
    """The trackers a recipe asks for; without any, accelerate is not imported."""

    def __init__(self, names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> None:
        self._accelerator: Any = None
        if not names:
            return
        from accelerate import Accelerator

        self._accelerator = Accelerator(cpu=True, log_with=list(names), project_dir=str(folder))
        running = {tracker.value for tracker in self._accelerator.log_with}
        missing = [name for name in names if name not in running]  # accelerate leaves out what is not installed
        if missing:
            raise RunError(
                f"train.log_to: {', '.join(missing)} not installed: pip install "
                + " ".join(PACKAGES[name] for name in missing)
            )
        self._accelerator.init_trackers(folder.name or "lorakit", config={k: _plain(v) for k, v in config.items()})

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self._accelerator is not None:
            self._accelerator.log(dict(values), step=step)

    def close(self) -> None:
        if self._accelerator is not None:
            self._accelerator.end_training()


def _plain(value: Any) -> int | float | str | bool:
    return value if isinstance(value, int | float | str | bool) else str(value)
