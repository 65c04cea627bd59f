"""Measure the held-out loss of a base, a merged model, or adapters over files of rows: ``score --measure loss``.

Law: the numbers are those of a run's own evaluation of the same rows at the same step, to float rounding. Labels, loss
and sums are the run's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from lorakit.data import BatchSampler, TokenDataset
from lorakit.data.find_rows import find_sources
from lorakit.data.load import OpenProgress
from lorakit.data.row_settings import RowSettings
from lorakit.data.token_cache import tokenize_sources
from lorakit.errors import DataError
from lorakit.files.text import columns, say_lines
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.lora.targets import embedding_and_head
from lorakit.objectives.cross_entropy import LossModel, token_scores
from lorakit.objectives.objective import SFT
from lorakit.parallel import Group, LossReport
from lorakit.parallel.mesh import Mesh
from lorakit.parallel.sums import EvaluationSums
from lorakit.patch import read_patch
from lorakit.recipe.schema import default_values
from lorakit.run.report import perplexity
from lorakit.training.model_checks import verify_chunked_loss

MICRO_BATCH_SIZE: Final = 8
LABEL_KEYS: Final = ("max_tokens", "on_long_rows", "loss_on", "turns")
"""keys of `data` that decide the labels of a file's rows, besides those of its columns"""
EvalLoss = tuple[LossReport, TokenDataset]
"""the held-out loss of an adapter, or of the base, and the rows that it is of"""


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
    settings_of = {path: replace(settings, **_label_settings(model, names, own)) for path, names in data.items()}
    losses = {}
    for path, names in data.items():
        for name in names:
            codec = model.codec(model.adapter(name))
            own_settings = replace(settings_of[path], template_kwargs=codec.template_kwargs)
            try:
                with progress() as show:
                    rows = tokenize_sources(find_sources(path, "test"), codec.tokenizer, own_settings, show)
            except DataError as problem:
                raise DataError(
                    f"{problem}\nHere data.max_tokens is --max-tokens, and data.on_bad_rows, data.columns and"
                    " data.ignore_keys are --on-bad-rows, --columns and --ignore-keys"
                ) from None
            with progress() as show:
                losses[path, name] = _evaluate(model, name, rows, show), rows
    return losses


def _label_settings(model: AdaptedModel, names: Sequence[str | None], own: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that decide labels: ``own``, else those of the training of a file's adapters.

    Patches of other programs have none, and a base has none: those of a recipe's defaults.
    Raises DataError: the adapters had different ones.
    """
    all_defaults = default_values()["data"]
    defaults = {key: all_defaults[key] for key in LABEL_KEYS}
    settings: dict[str, Any] = {}
    first = ""
    for name in filter(None, names):
        recorded = read_patch(model.sources()[name].folder).metadata.get("recipe", {}).get("data")
        if recorded is None:
            continue
        # a patch of an older lorakit has no keys that are newer: it was trained as their defaults say
        trained = {key: recorded.get(key, defaults[key]) for key in LABEL_KEYS} | own
        for key in LABEL_KEYS if settings else ():
            if settings[key] != trained[key]:
                raise DataError(
                    f"--measure loss: {first} was trained with data.{key}: {settings[key]}, {name} with {trained[key]},"
                    f" so their losses are of other labels; give each its own file (--data {first}=FILE), or call score"
                    " for each"
                )
        settings = trained
        first = first or name
    return settings or defaults | own


def _evaluate(
    model: AdaptedModel, name: str | None, rows: TokenDataset, show: Callable[[int | None, int | None], None]
) -> LossReport:
    adapter = model.adapter(name)
    loss_model = LossModel(model.model).eval()
    # the chunked loss reads the head's weight, and calls no hook of an adapter there
    loss_model.chunked &= adapter is None or set(embedding_and_head(model.model)).isdisjoint(adapter.slots)
    batches = BatchSampler(rows, MICRO_BATCH_SIZE, MICRO_BATCH_SIZE, packing=False, seed=0)
    device = next(model.model.parameters()).device
    sums = EvaluationSums(SFT)
    done = 0
    with model.using(name), torch.no_grad():
        verify_chunked_loss(loss_model, batches, device, Group())
        for batch in batches.eval_micro_batches():
            sums.add(batch, token_scores(loss_model, batch.to(device)))
            done += len(batch.row_indices)
            show(done, len(rows))
    return sums.report(Mesh(Group(), Group()))


def print_losses(losses: Mapping[tuple[str, str | None], EvalLoss], say: Callable[[str], None]) -> None:
    """Print a table of the losses, and what was left out or cut of the rows."""
    table = [["held-out loss", "answered by", "loss", "perplexity", "accuracy", "rows", "label tokens"]]
    for (path, name), (report, rows) in losses.items():
        counts = rows.counts
        numbers = f"{report.loss:.4f}", f"{perplexity(report.loss):.3f}", f"{report.metrics['accuracy']:.3f}"
        table.append([path, name or "base", *numbers, f"{counts.rows:,}", f"{counts.label_tokens:,}"])
    say_lines(say, columns(table, "<<>>>>>"))
    changes = {(path, change): None for (path, _), (_, rows) in losses.items() for change in rows.counts.changes()}
    for path, change in changes:
        say(f"{path}: {change}")
