"""One step of an objective over all rows, in this process."""

from dataclasses import replace
from functools import partial
from typing import Any

from lorakit.data.dataset import TeacherTable, TokenDataset
from lorakit.data.sampler import BatchSampler
from lorakit.objectives.cross_entropy import LossModel
from lorakit.objectives.objective import Objective
from lorakit.parallel import Engine, StepSettings, open_engine
from lorakit.parallel.adapter_state import build_optimizer
from lorakit.recipe import ParallelSection, TrainSection
from lorakit.training.model_checks import can_share_prompts, enable_packing, probe_rows
from tests.helpers.ranks import with_references


def prepare_step(
    model: Any,
    rows: TokenDataset,
    objective: Objective,
    *,
    size: int,
    packing: bool,
    teacher: TeacherTable | None = None,
    shares: bool = False,
) -> tuple[Engine, BatchSampler]:
    """An engine that has an adapted model, and the batches of a step of all rows, in micro-batches of so many."""
    engine: Engine = open_engine(ParallelSection(backend="single"))
    loss_model = LossModel(model, objective)
    batches = BatchSampler(rows, len(rows), size, packing, 0, group_size=objective.group_size, teacher=teacher)
    engine.prepare(loss_model, partial(build_optimizer, TrainSection()), StepSettings(0, None, lambda step: 0.0))
    probe = loss_model, probe_rows(batches, engine.device)
    if packing:
        assert enable_packing(*probe) is None
    if shares:
        assert can_share_prompts(*probe)
        batches = replace(batches, shares_prompts=True)
    return engine, with_references(engine, batches)
