"""Checkpoints: the adapter, its optimizer state and where the run is; by tensor name, never the base.

The newest checkpoint is the highest step whose manifest verifies; there is no pointer file.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from lorakit.files.atomic import MANIFEST, atomic_folder, manifest_matches, remove_folder, write_json, write_manifest
from lorakit.files.safetensors import open_tensors, write_tensors
from lorakit.parallel import Engine


@dataclass
class Progress:
    """Where a run is. Everything else follows from the recipe and ``step``."""

    step: int = 0
    tokens: int = 0
    label_tokens: int = 0
    evaluated_step: int | None = None
    first_eval_loss: float | None = None
    last_eval_loss: float | None = None
    best_eval_loss: float | None = None
    best_step: int | None = None
    evals_without_gain: int = 0


class Checkpoints:
    """The checkpoints of one run, in ``folder``."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep

    def save(self, engine: Engine, progress: Progress) -> None:
        """Commit a checkpoint of this step, then drop the oldest ones; the best step's stays."""
        target = self._path(progress.step)
        if not engine.group.run_on_rank_0(lambda: target.exists() and manifest_matches(target)):
            adapter, optimizer = engine.gather(), engine.gather_optimizer()
            engine.group.run_on_rank_0(lambda: self._commit(target, adapter, optimizer, progress))

    def _commit(
        self, target: Path, adapter: dict[str, Tensor], optimizer: dict[str, Tensor], progress: Progress
    ) -> None:
        remove_folder(target)
        with atomic_folder(target) as staging:
            _write(staging / "adapter.safetensors", adapter)
            _write(staging / "optimizer.safetensors", optimizer)
            write_json(staging / "progress.json", asdict(progress))
            write_manifest(staging)
        steps = sorted(step for step in self._steps() if step != progress.best_step)
        for step in steps[: -self._keep]:
            remove_folder(self._path(step))

    def newest(self) -> tuple[Progress, Path] | None:
        """The newest checkpoint that verifies, or None."""
        for step in sorted(self._steps(), reverse=True):
            folder = self._path(step)
            if manifest_matches(folder):
                return Progress(**json.loads((folder / "progress.json").read_text())), folder
        return None

    def restore(self, engine: Engine) -> Progress | None:
        """Put the newest checkpoint that verifies back into the engine; None when there is none.

        Only the first process reads it: other machines need not see the folder.
        """
        found = engine.group.run_on_rank_0(self._newest_whole)
        if found is None:
            return None
        progress, adapter, optimizer = found
        engine.restore(adapter, optimizer)
        return progress

    def _newest_whole(self) -> tuple[Progress, dict[str, Tensor], dict[str, Tensor]] | None:
        newest = self.newest()
        if newest is None:
            return None
        progress, folder = newest
        return progress, _read(folder / "adapter.safetensors"), _read(folder / "optimizer.safetensors")

    def adapter_of(self, step: int) -> dict[str, Tensor]:
        """The adapter tensors of a kept step."""
        return _read(self._path(step) / "adapter.safetensors")

    def remove(self) -> None:
        """Drop all checkpoints."""
        remove_folder(self._folder)

    def _steps(self) -> Iterator[int]:
        for path in self._folder.glob("step-*"):
            if re.fullmatch(r"step-\d{8}", path.name) and (path / MANIFEST).is_file():
                yield int(path.name.removeprefix("step-"))

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    with open(path, "wb") as file:
        write_tensors(file, tensors, {"format": "pt"})


def _read(path: Path) -> dict[str, Tensor]:
    file = open_tensors(path)
    return {name: file.read(name) for name in file.entries}
