"""Check a recipe without loading weights: base, targets and coverage, rows and labels, requirements of the backend."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lorakit.base.adapter_spec import adapter_spec
from lorakit.base.dropout import disable_dropout, dropout_notes
from lorakit.base.find import find_base, find_tokenizer
from lorakit.base.load import load_recipe_tokenizer, load_skeleton
from lorakit.base.meta import check_stored_tensors
from lorakit.base.quantized import count_parameters
from lorakit.base.skeleton import quantize_skeleton
from lorakit.base.start_patch import Start, read_start
from lorakit.data import TokenDataset
from lorakit.data.load import eval_sets, files_left_out, load_rows, resolve_shared_rows, training_sets
from lorakit.errors import DataError, LorakitError, TemporaryFailure
from lorakit.inference.measures import MEASURES, check_measures
from lorakit.launch.lighthouse import check_torchft
from lorakit.lora import adapter_tensors, attach, find_targets
from lorakit.lora.coverage import adapter_notes, coverage_of
from lorakit.lora.extra_targets import find_extra_targets
from lorakit.ops.fuse import fuse_model
from lorakit.parallel.axes import check_axes
from lorakit.parallel.backends import check_prerequisites
from lorakit.parallel.optimizer import check_tensors
from lorakit.quant.bnb import check_optimizer
from lorakit.recipe import Recipe
from lorakit.recipe.data import DataSection
from lorakit.recipe.schema import count_steps, count_warmup_steps
from lorakit.run.display import row_progress
from lorakit.run.record import open_record, recorded_run
from lorakit.run.trackers import check_trackers
from lorakit.training.answers import TrainedModel, answers_line, rows_to_answer
from lorakit.training.checkpoint import Checkpoints, check_disk
from lorakit.training.job import (
    NOT_FUSED,
    check_tokens_occur,
    check_vocabulary,
    choose_start,
    num_trainable,
    same_rows_note,
)
from lorakit.training.model_checks import check_positions, check_row_lengths
from lorakit.training.resume import check_length
from lorakit.training.updates import rate_note, step_notes

SHOWN_CHARACTERS = 1200
SHOWN_FILES = 6


def check(recipe: Recipe, say: Callable[[str], None] = print) -> None:
    """Print a preview of the recipe's run.

    Raises:
        LorakitError: with all problems at once.
    """
    problems: list[str] = []

    def attempt(part: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return part(*arguments)
        except TemporaryFailure:  # a full disk or a killed process, which is no mistake of the recipe
            raise
        except LorakitError as problem:
            problems.append(str(problem))
            return None

    start = attempt(partial(choose_start, fresh=False), recipe)
    recipe = start.apply(recipe) if start is not None else recipe
    folder = attempt(find_base, recipe.base.model, recipe.base.revision)
    if folder is not None:
        attempt(check_stored_tensors, folder)
        if start is not None:
            attempt(_check_start, start, recipe, say)
        _check_base_and_rows(recipe, folder, say, attempt)
    attempt(check_prerequisites, recipe.parallel)
    if recipe.parallel.elastic is not None:
        attempt(check_torchft)
    attempt(partial(check_optimizer, on_gpu=torch.cuda.is_available()), recipe.train.optimizer)
    attempt(check_trackers, recipe.train.log_to)
    attempt(check_measures, recipe.evaluation.measures)
    if Path(recipe.output).exists():
        attempt(partial(open_record, fresh=False), Path(recipe.output), recipe.model_dump(mode="json"))
    if problems:
        raise LorakitError("\n".join(dict.fromkeys(problems)))
    say("\nnothing is wrong with this recipe")


def _check_start(start: Start, recipe: Recipe, say: Callable[[str], None]) -> None:
    """Print which patch the run starts from. It is read only if no checkpoint has the adapter."""
    say(f"start from {start}")
    if Checkpoints(Path(recipe.output) / "checkpoints", 1).newest() is None:
        read_start(start, recipe)


def _check_base_and_rows(recipe: Recipe, folder: Path, say: Callable[[str], None], attempt: Callable[..., Any]) -> None:
    """Check the base in a folder and the rows, and what depends on both. attempt: calls, and collects the problem."""
    tokenizer = attempt(load_recipe_tokenizer, recipe, folder)
    model = attempt(_check_targets, recipe, folder, say)
    datasets = attempt(_check_rows, recipe, tokenizer, say) if tokenizer is not None else None
    if model is None or datasets is None:
        return
    attempt(check_positions, model, recipe.data.max_tokens)
    if recipe.train.eval_generate is not None:
        attempt(_check_answers, recipe, model, tokenizer, say)
    attempt(check_tensors, recipe.train.optimizer, adapter_tensors(model))
    for rows in datasets:
        attempt(check_vocabulary, model, rows)
        attempt(check_row_lengths, model, rows)
    if recipe.adapter.start_from is None:
        attempt(
            check_tokens_occur, adapter_spec(recipe.adapter, find_tokenizer(recipe.base.tokenizer, folder)), datasets[0]
        )
    num_rows = datasets[0].rows_per_epoch
    attempt(check_disk, recipe, num_rows, num_trainable(model))
    attempt(check_length, recorded_run(Path(recipe.output)).get("total_steps"), count_steps(recipe, num_rows))


def _check_answers(recipe: Recipe, model: nn.Module, tokenizer: Any, say: Callable[[str], None]) -> None:
    """Print how many held-out rows the run answers, when, and how they are measured."""
    names = recipe.evaluation.measures
    rows, _ = rows_to_answer(recipe, TrainedModel(model, tokenizer), {name: MEASURES[name] for name in names})
    say(f"\nanswers    {answers_line(recipe, rows, list(names))}")


def _check_targets(recipe: Recipe, folder: Path, say: Callable[[str], None]) -> nn.Module:
    """Print base, targets and number of trainable parameters. Returns the base on meta, with the adapter."""
    spec = adapter_spec(recipe.adapter, find_tokenizer(recipe.base.tokenizer, folder))
    model = quantize_skeleton(load_skeleton(folder), recipe.base, folder, torch.float32)
    dropout = disable_dropout(model)
    targets = find_targets(model, spec)
    experts = find_extra_targets(model, spec, targets).experts
    coverage = coverage_of(model, {target.name for target in targets} | {expert.name for expert in experts})
    total = count_parameters(model)
    num_targets = len(targets) + len(experts)
    with torch.device("meta"):
        attach(model, targets, spec, recipe.train.seed)
    check_axes(model, spec, recipe.parallel.axes)
    fused = NOT_FUSED if recipe.train.compile else str(fuse_model(model))
    trainable = num_trainable(model)
    say(f"base       {recipe.base.model}, {type(model).__name__}, {total:,} parameters, in {folder}")
    say(f"targets    {num_targets} layers, with {coverage.share:.0%} of the parameters in products")
    notes = [*dropout_notes(dropout), *adapter_notes(coverage, targets, spec), rate_note(recipe, total)]
    for note in filter(None, notes):
        say(f"note       {note}")
    say(f"trainable  {trainable:,} parameters, {trainable / total:.2%} of the base")
    say(f"fused      {fused}\n")
    say(f"{'layer kind':<20} {'adapted':>8} {'of':>6}")
    for kind in coverage.kinds:
        say(f"{kind.name:<20} {kind.adapted:>8} {kind.count:>6}")
    return model


def _check_rows(recipe: Recipe, tokenizer: Any, say: Callable[[str], None]) -> list[TokenDataset]:
    """Print the counts of rows and tokens, the steps, and the first row with its labels.

    Returns the rows: those for training, and those held out if there are any.
    """
    data = recipe.data
    sets = {"train": training_sets(data)} | ({"eval": eval_sets(data)} if data.has_eval else {})
    say(f"\n{'rows':<8} {'used':>8} {'bad':>6} {'cut':>6} {'too long':>9} {'tokens':>12} {'labels':>12}")
    datasets: list[TokenDataset] = []
    problems: list[str] = []
    for name, row_sets in sets.items():
        try:
            datasets.append(load_rows(data, row_sets, tokenizer, row_progress))
        except TemporaryFailure:
            raise
        except LorakitError as problem:
            problems.append(str(problem))
            continue
        _say_counts(name, datasets[-1], say)
        for source in _source_lines(datasets[-1]):
            say(f"{'':<8} {source}")
    if problems:
        raise DataError("\n".join(dict.fromkeys(problems)))
    datasets[0] = resolve_shared_rows(data, datasets[0], datasets[1] if data.has_eval else None)
    _say_notes(data, datasets, say)
    if not data.has_eval:
        say("eval     none (data.eval): no held-out loss will be measured")
    first = datasets[0]
    steps = count_steps(recipe, first.rows_per_epoch)
    warmup = count_warmup_steps(recipe, steps)
    say(f"\nsteps      {steps:,}, with up to {recipe.train.batch_size} rows each; {warmup:,} of the steps are warm-up")
    for note in step_notes(recipe, steps):
        say(f"note       {note}")
    say(f"\nfirst row ({first.location(0)}), label tokens between [[ and ]]:\n{mark_labels(first, 0, tokenizer)}")
    return datasets


def _say_notes(data: DataSection, datasets: list[TokenDataset], say: Callable[[str], None]) -> None:
    """Print which rows are on both sides, and which files are left out."""
    if shared := datasets[0].counts.shared:
        say(f"note     {shared:,} training rows are left out, because they are held-out rows too")
    if (note := same_rows_note(*datasets)) is not None:
        say(f"note     {note}")
    if files := files_left_out(data):
        more = f" and {len(files) - SHOWN_FILES} more" if len(files) > SHOWN_FILES else ""
        say(f"note     left out, as files without rows: {', '.join(files[:SHOWN_FILES])}{more}")


def _source_lines(rows: TokenDataset) -> list[str]:
    """Return a line for each source: its rows and its weight; none for a single source without a weight."""
    if len(rows.parts) == 1 and rows.parts[0].passes == 1:
        return []
    lines = []
    for part in rows.parts:
        name = f"{part.name}: " if part.name is not None else ""
        weight = f"; {part.passes:g} passes = {part.rows_per_epoch:,} of {rows.rows_per_epoch:,} rows of an epoch"
        weight = weight if part.passes != 1 else ""
        lines.append(f"{name}{len(part.table):,} rows, {part.table.counts.tokens:,} tokens{weight}")
    return lines


def _say_counts(name: str, rows: TokenDataset, say: Callable[[str], None]) -> None:
    """Print the line of a data set in the table of rows, and below it what is special about its rows."""
    c = rows.counts
    say(
        f"{name:<8} {c.rows:>8,} {c.bad:>6,} {c.truncated:>6,} {c.dropped_long:>9,} {c.tokens:>12,}"
        f" {c.label_tokens:>12,}"
    )
    for key, number in c.unread.items():
        say(f"{'':<8} {key}: not read, in {number:,} row{'s' if number > 1 else ''}")
    if c.split:
        say(f"{'':<8} split: {c.split:,} text{'s' if c.split > 1 else ''} longer than max_tokens, into several rows")
    if c.joined:
        say(f"{'':<8} fill: {c.joined:,} text{'s' if c.joined > 1 else ''} joined end to end")
    if c.zero_weight:
        say(f"{'':<8} weight 0: {c.zero_weight:,} row{'s' if c.zero_weight > 1 else ''} left out")
    if (weights := rows.weights) is not None:
        number, least, most = int((weights != 1).sum()), float(weights.min()), float(weights.max())
        say(f"{'':<8} weight: other than 1 in {number:,} of {c.rows:,} rows, from {least:g} to {most:g}")
    if 0 < c.plain < c.rows:
        say(f"{'':<8} formats: {c.rows - c.plain:,} of conversations, {c.plain:,} of plain text (no template)")


def mark_labels(rows: TokenDataset, row: int, tokenizer: Any) -> str:
    """Return a row as text, with its label tokens between [[ and ]]."""
    parts: list[tuple[bool, list[int]]] = []
    label_mask = [False, *rows.label_mask(row).tolist()[1:]]  # because no token predicts the first one
    for token, has_label in zip(rows.ids(row).tolist(), label_mask, strict=True):
        if parts and parts[-1][0] == has_label:
            parts[-1][1].append(token)
        else:
            parts.append((has_label, [token]))
    decoded = [(has_label, tokenizer.decode(tokens)) for has_label, tokens in parts]
    text = "".join(f"[[{part}]]" if has_label else part for has_label, part in decoded)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."
