"""Measure the held-out loss of a base, a merged model, or adapters over files of rows: ``score --measure loss``.

Law: the numbers are those of a run's own evaluation of the same rows at the same step, to float rounding. Labels, loss
and sums are the run's.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from lorakit.data.batch import Batch
from lorakit.data.dataset import MismatchedRows, TokenDataset
from lorakit.data.load import OpenProgress, tokenize_file
from lorakit.data.row_settings import RowSettings
from lorakit.data.sampler import BatchSampler
from lorakit.data.token_cache import Progress
from lorakit.errors import DataError, translate_error
from lorakit.files.text import Say, columns, say_lines
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.lora.targets import embedding_and_head
from lorakit.objectives.cross_entropy import LossModel, token_scores
from lorakit.objectives.objective import SFT, Objective, Scores, scores_of_rows
from lorakit.objectives.pairs import LOSSES, PAIR_MEASURES, build_objective
from lorakit.parallel import Group, LossReport
from lorakit.parallel.group import Mesh
from lorakit.parallel.sums import EvaluationSums
from lorakit.patch import read_patch
from lorakit.recipe.objective import HEAD_OBJECTIVES, ObjectiveSection
from lorakit.recipe.schema import default_values
from lorakit.run.display import perplexity
from lorakit.training.model_checks import probe_rows, verify_chunked_loss

MICRO_BATCH_SIZE: Final = 8
LABEL_KEYS: Final = ("max_tokens", "on_long_rows", "loss_on", "turns")
"""keys of `data` that decide the labels of a file's rows, besides those of its columns"""
SFT_MEASURES: Final = ("accuracy",)
MEASURES: Final = (*SFT_MEASURES, "mrr", *PAIR_MEASURES)  # of `LossReport.metrics`, those that are shown
OBJECTIVE: Final = "objective"  # beside LABEL_KEYS, the section of a recipe
Known = dict[str, np.ndarray]  # digest of rows -> log p of each under the base
EvalLoss = tuple[LossReport, TokenDataset]  # the held-out loss of an adapter or of the base, and the rows that it is of


def eval_losses(
    model: AdaptedModel,
    data: Mapping[str, Sequence[str | None]],
    progress: OpenProgress,
    settings: RowSettings,
    max_tokens: int | None = None,
) -> dict[tuple[str, str | None], EvalLoss]:
    """Return (file, adapter) -> its loss over the rows of the file; an adapter of None is the base.

    progress: opens a display of rows. settings: those of LABEL_KEYS are the adapters' own. max_tokens: longest row;
    None: as in the adapters' training.
    Raises DataError: bad or too long rows, or adapters whose labels differ.
    """
    own = {} if max_tokens is None else {"max_tokens": max_tokens}
    # of all files first, for the error before one is read
    labels_of = {path: _label_settings(model, names, own) for path, names in data.items()}
    losses = {}
    known: Known = {}
    for path, names in data.items():
        labels = labels_of[path]
        with translate_error(ValueError, DataError, f"--measure loss: {path}: an adapter's objective is not read here"):
            objective = ObjectiveSection.model_validate(labels.pop(OBJECTIVE), strict=False)  # JSON has no tuples
        for name in names:
            codec = model.codec(model.adapter(name))
            own_settings = replace(settings, **labels, template_kwargs=codec.template_kwargs, **objective.row_settings)
            also = "data.max_tokens is --max-tokens, and "
            rows = tokenize_file(path, codec.tokenizer, own_settings, progress, also)
            with progress() as show:
                losses[path, name] = _evaluate(model, name, rows, objective, show, known), rows
    return losses


def _label_settings(model: AdaptedModel, names: Sequence[str | None], own: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that decide labels: ``own``, else those of the training of a file's adapters.

    Patches of other programs have none, and a base has none: those of a recipe's defaults.
    Raises DataError: the adapters had different ones.
    """
    all_defaults = default_values()
    defaults = {key: all_defaults["data"][key] for key in LABEL_KEYS} | {OBJECTIVE: all_defaults[OBJECTIVE]}
    settings: dict[str, Any] = {}
    first = ""
    for name in filter(None, names):
        metadata = read_patch(model.sources()[name].folder).metadata
        recipe = metadata.get("recipe", {})
        pooling = model.codec(model.adapter(name)).pooling
        if (data := recipe.get("data", {} if pooling else None)) is None:
            continue
        # a patch of an older lorakit has no keys that are newer: it was trained as their defaults say
        trained = defaults | {key: data[key] for key in LABEL_KEYS if key in data} | own
        of_others = {"name": "embed", "pooling": pooling.mode} if pooling else defaults[OBJECTIVE]
        trained[OBJECTIVE] = recipe.get(OBJECTIVE, of_others)
        if trained[OBJECTIVE]["name"] in HEAD_OBJECTIVES:
            raise DataError(f"--measure loss: {name} has labels or rewards; score without --measure measures them")
        if (kind := trained[OBJECTIVE]["name"]) == "distill":
            raise DataError(f"--measure loss: {name} was trained with objective {kind}, whose loss reads a teacher too")
        if metadata.get("start") and (kind == "kto" or (kind in LOSSES and LOSSES[kind].reads_references)):
            raise DataError(f"--measure loss: {name} was trained from another patch, with which its loss compares")
        for key in trained if settings else ():
            if settings[key] != trained[key]:
                shown = key if key == OBJECTIVE else f"data.{key}"
                raise DataError(
                    f"--measure loss: {first} was trained with {shown}: {settings[key]}, {name} with {trained[key]},"
                    f" so their losses are others; give each its own file (--data {first}=FILE), or call score"
                    " for each"
                )
        settings = trained
        first = first or name
    return settings or defaults | own


def _evaluate(
    model: AdaptedModel, name: str | None, rows: TokenDataset, section: ObjectiveSection, show: Progress, known: Known
) -> LossReport:
    """Return the loss of an adapter. known: gets what the objective reads of these rows, unless it has it."""
    objective = build_objective(section.name, section.settings)
    size = MICRO_BATCH_SIZE * section.group_size

    def batches_of(rows: TokenDataset) -> BatchSampler:
        batches = BatchSampler(rows, size, size, packing=False, seed=0)
        if not objective.reads_references:
            return batches
        key = f"{type(rows).__name__} {rows.digest}"
        if key not in known:
            known[key] = np.empty(len(rows), np.float32)
            for batch, scores in _scored(model, None, batches, objective):
                known[key][list(batch.row_indices)] = -scores.losses.cpu().numpy()
        return replace(batches, references=known[key])

    batches = batches_of(rows)
    if (first := objective.first_pass) is not None:
        own = batches_of(MismatchedRows(rows)) if first.mismatched else batches
        collected = [first.collect(scores, batch) for batch, scores in _scored(model, name, own, objective)]
        objective = first.given(collected)
    sums = EvaluationSums(objective)
    done = 0
    for batch, scores in _scored(model, name, batches, objective):
        sums.add(batch, scores)
        done += len(batch.row_indices)
        show(done, len(rows))
    return sums.report(Mesh(Group(), Group()))


def _scored(
    model: AdaptedModel, name: str | None, batches: BatchSampler, objective: Objective
) -> Iterator[tuple[Batch, Scores]]:
    """Yield all micro-batches with their scores, as the objective reads them."""
    with evaluated(model, name, batches, objective) as (loss_model, device):
        for batch in batches.eval_micro_batches():
            tokens = batch.to(device)
            scores = token_scores(loss_model, tokens)
            yield batch, scores_of_rows(scores, tokens, lambda sums: sums) if objective.per == "row" else scores


@contextmanager
def evaluated(
    model: AdaptedModel, name: str | None, batches: BatchSampler, objective: Objective = SFT
) -> Iterator[tuple[LossModel, torch.device]]:
    """Yield a model with an adapter as training calls it, without gradient, and its device."""
    adapter = model.adapter(name)
    loss_model = LossModel(model.model, objective).eval()
    # the chunked loss reads the head's weight, and calls no hook of an adapter there
    loss_model.chunked &= adapter is None or set(embedding_and_head(model.model)).isdisjoint(adapter.slots)
    device = next(model.model.parameters()).device
    with model.using(name), torch.no_grad():
        verify_chunked_loss(loss_model, probe_rows(batches, device), Group())
        yield loss_model, device


def print_losses(losses: Mapping[tuple[str, str | None], EvalLoss], say: Say) -> None:
    """Print a table of the losses for each kind of measures, and what was left out or cut of the rows."""
    tables: dict[tuple[str, ...], list[list[str]]] = {}
    for (path, name), (report, rows) in losses.items():
        counts = rows.counts
        shown = tuple(measure for measure in MEASURES if measure in report.metrics)
        numbers = [f"{report.metrics[measure]:.3f}" for measure in shown]
        if shown == SFT_MEASURES:
            numbers, shown = [f"{perplexity(report.loss):.3f}", *numbers], ("perplexity", *shown)
        head = ["held-out loss", "answered by", "loss", *shown, "pairs" if counts.pairs else "rows", "label tokens"]
        sizes = f"{counts.pairs or counts.rows:,}", f"{counts.label_tokens:,}"
        tables.setdefault(shown, [head]).append([path, name or "base", f"{report.loss:.4f}", *numbers, *sizes])
    for table in tables.values():
        say_lines(say, columns(table, "<<" + ">" * (len(table[0]) - 2)))
    changes = {(path, change): None for (path, _), (_, rows) in losses.items() for change in rows.counts.changes()}
    for path, change in changes:
        say(f"{path}: {change}")
