"""Open experiment trackers through accelerate: TensorBoard, Weights & Biases, MLflow, Trackio."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lorakit.errors import RunError

PACKAGES: Final = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}


def check_trackers(names: Sequence[str]) -> None:
    """Raise RunError, with the command that installs them, unless the packages of these trackers are installed."""
    if not names:
        return  # without importing accelerate
    from accelerate.tracking import get_available_trackers

    installed = {tracker.value for tracker in get_available_trackers()}
    if missing := [name for name in names if name not in installed]:
        raise RunError(
            f"train.log_to: {', '.join(missing)} not installed: pip install "
            + " ".join(PACKAGES[name] for name in missing)
        )


class Trackers:
    """The experiment trackers of a run. Without any, accelerate is not imported."""

    def __init__(self, names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> None:
        self._trackers: list[Any] = []
        check_trackers(names)
        if not names:
            return
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        PartialState()  # accelerate's trackers read the rank from this singleton
        for name in names:
            kind = LOGGER_TYPE_TO_CLASS[name]
            # a tracker with files makes a folder of its run's name in the output folder
            local = kind.requires_logging_directory
            tracker = kind(name, logging_dir=str(folder)) if local else kind(folder.name or "lorakit")
            tracker.start()
            settings = {key: _plain(value) for key, value in config.items()}
            if name == "tensorboard":  # as a text, because accelerate would make a second run of them
                tracker.tracker.add_text("recipe", "\n".join(f"    {key}: {value}" for key, value in settings.items()))
            else:
                tracker.store_init_configuration(settings)
            self._trackers.append(tracker)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for tracker in self._trackers:
            tracker.log(dict(values), step=step)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.finish()


def _plain(value: Any) -> int | float | str | bool:
    return value if isinstance(value, int | float | str | bool) else str(value)
