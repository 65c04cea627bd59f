"""The log p of each row under the model as the run starts, with which objectives of pairs compare.

Invariant: they are computed once, before the first step, and stored beside the checkpoints: a run that goes on has
another adapter. An untrained adapter changes nothing, so without `adapter.start_from` they are the base's.
"""

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch

from lorakit.data.dataset import MismatchedRows
from lorakit.data.sampler import BatchSampler
from lorakit.errors import RunError
from lorakit.files.atomic import write_file
from lorakit.files.safetensors import file_parts, open_tensors
from lorakit.files.text import Say
from lorakit.run.record import START_OVER
from lorakit.training.run import Run

FILE: Final = "references.safetensors"
References = dict[str, np.ndarray]
"""`train` or `eval`, with `/mismatched` of others' answers -> log p of each row's labels, (rows,) float32"""


def add_references(run: Run, say: Say) -> None:
    """Give the run's batches the references of their rows, computed now or read. Collective.

    Raises RunError: one is not finite, or those of an interrupted run are gone.
    """
    objective = run.loss_model.objective
    has_mismatched = objective.first_pass is not None and objective.first_pass.mismatched
    if not (objective.reads_references or has_mismatched):
        return
    group = run.engine.group
    path = run.checkpoints.folder / FILE
    start = run.inputs.start
    samplers = dict(run.batches)
    if has_mismatched:
        others = {name: replace(each, rows=MismatchedRows(each.rows)) for name, each in run.batches.items()}
        samplers |= {f"{name}/mismatched": each for name, each in others.items()}
    of = {name: batches.rows.digest for name, batches in samplers.items()} | (start.facts() if start else {})
    facts = {name: str(value) for name, value in of.items()}
    references = group.run_on_rank_0(lambda: _read(path, facts))
    if references is None:
        if run.progress.step:
            raise RunError(f"{path}: is gone, and the model is no longer that of the run's start; {START_OVER}")
        num_rows = sum(len(batches.rows) for batches in samplers.values())
        say(f"computing log p of {num_rows:,} answers once, with which the objective compares")
        run.engine.set_phase("computing log p of the rows at the run's start")
        references = {name: _compute(run, batches) for name, batches in samplers.items()}
        computed = references
        group.run_on_rank_0(lambda: _write(path, computed, facts))
    referring = {name: replace(batches, references=references[name]) for name, batches in samplers.items()}
    for name in run.batches:
        run.batches[name] = replace(referring[name], mismatched=referring.get(f"{name}/mismatched"))


def _compute(run: Run, batches: BatchSampler) -> np.ndarray:
    values = run.engine.score(batches.eval_micro_batches(), len(batches.rows))
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values))[0])
        raise RunError(f"{batches.rows.location(row)}: log p of the answer is {values[row]} before training")
    return values


def _write(path: Path, references: References, facts: dict[str, str]) -> None:
    tensors = {name: torch.from_numpy(values) for name, values in references.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, b"".join(file_parts(tensors, facts)))


def _read(path: Path, facts: dict[str, str]) -> References | None:
    """Return stored references; None if there are none, or those of other rows or of another start."""
    if not path.is_file():
        return None
    file = open_tensors(path)
    return {name: file.read(name).numpy() for name in file.entries} if file.metadata == facts else None
