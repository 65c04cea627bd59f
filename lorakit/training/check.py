"""Check a recipe without loading weights: base, targets and coverage, rows and labels, requirements of the backend."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from lorakit.base.dropout import dropout_notes
from lorakit.base.find import find_base
from lorakit.base.load import load_recipe_tokenizer
from lorakit.base.meta import check_stored_tensors
from lorakit.base.skeleton import AdaptedSkeleton, adapted_skeleton
from lorakit.base.start_patch import Start, read_start
from lorakit.data import TokenDataset
from lorakit.data.load import eval_sets, files_left_out, load_rows, resolve_shared_rows, training_sets
from lorakit.errors import DataError, LorakitError, TemporaryFailure
from lorakit.files.text import columns
from lorakit.inference.measures import MEASURES, check_measures
from lorakit.lora import adapter_tensors
from lorakit.lora.coverage import adapter_notes
from lorakit.parallel.axes import check_axes
from lorakit.parallel.optimizer import check_tensors
from lorakit.parallel.setup import check_prerequisites
from lorakit.quant.bnb import check_optimizer
from lorakit.recipe import Recipe
from lorakit.recipe.schema import count_steps, count_warmup_steps
from lorakit.run.display import row_progress
from lorakit.run.record import open_record, recorded_run
from lorakit.run.report import check_trackers
from lorakit.training.answers import TrainedModel, answers_line, rows_to_answer
from lorakit.training.checkpoint import Checkpoints, check_disk
from lorakit.training.finish import check_length
from lorakit.training.job import (
    NOT_FUSED,
    check_tokens_occur,
    check_vocabulary,
    choose_start,
    num_trainable,
    same_rows_note,
)
from lorakit.training.model_checks import check_positions, check_row_lengths
from lorakit.training.updates import rate_note, step_notes

SHOWN_CHARACTERS: Final = 1200
SHOWN_FILES: Final = 6


@dataclass
class Preview:
    """What is known of a run before it starts; None or empty where a problem hides it."""

    recipe: Recipe
    start: Start | None = None
    """The patch that the run starts from."""
    folder: Path | None = None
    skeleton: AdaptedSkeleton | None = None
    datasets: dict[str, TokenDataset] = field(default_factory=dict)
    """`train`, and `eval` if rows are held out."""
    first_row: str = ""
    """The first training row as text, with marked labels."""
    answers: str = ""
    """How many held-out rows the run answers, when, and how they are measured."""
    problems: list[str] = field(default_factory=list)


def check(recipe: Recipe, say: Callable[[str], None] = print) -> None:
    """Print a preview of the recipe's run.

    Raises:
        LorakitError: with all problems at once.
    """
    preview = preview_run(recipe)
    for line in _lines(preview):
        say(line)
    if preview.problems:
        raise LorakitError("\n".join(dict.fromkeys(preview.problems)))
    say("\nnothing is wrong with this recipe")


def preview_run(recipe: Recipe) -> Preview:
    """Return what is known of the recipe's run, and all its problems."""
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
    preview = Preview(recipe, start, problems=problems)
    preview.folder = attempt(find_base, recipe.base.model, recipe.base.revision)
    if preview.folder is not None:
        attempt(check_stored_tensors, preview.folder)
        if start is not None:
            attempt(_check_start, start, recipe)
        _check_base_and_rows(preview, preview.folder, attempt)
    attempt(check_prerequisites, recipe.parallel)
    attempt(partial(check_optimizer, on_gpu=torch.cuda.is_available()), recipe.train.optimizer)
    attempt(check_trackers, recipe.train.log_to)
    attempt(check_measures, recipe.evaluation.measures)
    if Path(recipe.output).exists():
        attempt(partial(open_record, fresh=False), Path(recipe.output), recipe.model_dump(mode="json"))
    return preview


def _check_start(start: Start, recipe: Recipe) -> None:
    """Read the patch that the run starts from, unless a checkpoint has the adapter."""
    if Checkpoints(Path(recipe.output) / "checkpoints", 1).newest() is None:
        read_start(start, recipe)


def _check_base_and_rows(preview: Preview, folder: Path, attempt: Callable[..., Any]) -> None:
    """Check the base and the rows, and what depends on both. attempt: calls, and collects the problem."""
    recipe = preview.recipe
    tokenizer = attempt(load_recipe_tokenizer, recipe, folder)
    skeleton = preview.skeleton = attempt(adapted_skeleton, folder, recipe.base, recipe.adapter)
    if skeleton is not None:
        attempt(check_axes, skeleton.model, skeleton.spec, recipe.parallel.axes)
    if tokenizer is not None:
        preview.datasets = attempt(_load_rows, recipe, tokenizer) or {}
    if not preview.datasets:
        return
    rows = preview.datasets["train"]
    preview.first_row = mark_labels(rows, 0, tokenizer)
    if skeleton is None:
        return
    attempt(check_positions, skeleton.model, recipe.data.max_tokens)
    if recipe.train.eval_generate is not None:
        preview.answers = attempt(_answers, recipe, TrainedModel(skeleton.model, tokenizer)) or ""
    attempt(check_tensors, recipe.train.optimizer, adapter_tensors(skeleton.model))
    for dataset in preview.datasets.values():
        attempt(check_vocabulary, skeleton.model, dataset)
        attempt(check_row_lengths, skeleton.model, dataset)
    if recipe.adapter.start_from is None:
        attempt(check_tokens_occur, skeleton.spec, rows)
    num_rows = rows.rows_per_epoch
    attempt(check_disk, recipe, num_rows, num_trainable(skeleton.model))
    attempt(check_length, recorded_run(Path(recipe.output)).get("total_steps"), count_steps(recipe, num_rows))


def _load_rows(recipe: Recipe, tokenizer: Any) -> dict[str, TokenDataset]:
    """Tokenise the rows for training, and those held out if there are any.

    Raises:
        DataError: with the problems of both.
    """
    data = recipe.data
    sets = {"train": training_sets(data)} | ({"eval": eval_sets(data)} if data.has_eval else {})
    datasets: dict[str, TokenDataset] = {}
    problems: list[str] = []
    for name, row_sets in sets.items():
        try:
            datasets[name] = load_rows(data, row_sets, tokenizer, row_progress)
        except TemporaryFailure:
            raise
        except LorakitError as problem:
            problems.append(str(problem))
    if problems:
        raise DataError("\n".join(dict.fromkeys(problems)))
    return datasets | {"train": resolve_shared_rows(data, datasets["train"], datasets.get("eval"))}


def _answers(recipe: Recipe, model: TrainedModel) -> str:
    names = recipe.evaluation.measures
    rows, _ = rows_to_answer(recipe, model, {name: MEASURES[name] for name in names})
    return answers_line(recipe, rows, list(names))


def _lines(preview: Preview) -> Iterator[str]:
    """Yield the preview as text, line by line."""
    if preview.start is not None and preview.folder is not None:
        yield f"start from {preview.start}"
    if preview.skeleton is not None:
        yield from _base_lines(preview, preview.skeleton)
    if preview.datasets:
        yield from _row_lines(preview)
    if preview.answers:
        yield f"\nanswers    {preview.answers}"


def _base_lines(preview: Preview, skeleton: AdaptedSkeleton) -> Iterator[str]:
    recipe = preview.recipe
    total = skeleton.num_parameters
    coverage = skeleton.coverage
    trainable = num_trainable(skeleton.model)
    name = type(skeleton.model).__name__
    yield f"base       {recipe.base.model}, {name}, {total:,} parameters, in {preview.folder}"
    yield f"targets    {skeleton.num_targets} layers, with {coverage.share:.0%} of the parameters in products"
    notes = [*dropout_notes(skeleton.dropout), *adapter_notes(coverage, skeleton.targets, skeleton.spec)]
    for note in filter(None, [*notes, rate_note(recipe, total)]):
        yield f"note       {note}"
    yield f"trainable  {trainable:,} parameters, {trainable / total:.2%} of the base"
    yield f"fused      {NOT_FUSED if recipe.train.compile else skeleton.fused}\n"
    kinds = [(kind.name, f"{kind.adapted}", f"{kind.count}") for kind in coverage.kinds]
    yield from columns([("layer kind", "adapted", "of"), *kinds], "<>>")


def _row_lines(preview: Preview) -> Iterator[str]:
    """Yield the counts of rows and tokens, the steps, and the first row with its labels."""
    recipe = preview.recipe
    datasets = preview.datasets
    rows = datasets["train"]
    table: list[tuple[str, ...]] = [("rows", "used", "bad", "cut", "too long", "tokens", "labels")]
    for name, dataset in datasets.items():
        c = dataset.counts
        numbers = (c.rows, c.bad, c.truncated, c.dropped_long, c.tokens, c.label_tokens)
        table.append((name, *(f"{number:,}" for number in numbers)))
    head, *lines = columns(table, "<>>>>>>")
    yield f"\n{head}"
    for line, dataset in zip(lines, datasets.values(), strict=True):
        yield line
        yield from (f"       {remark}" for remark in (*_count_notes(dataset), *_source_lines(dataset)))
    if shared := rows.counts.shared:
        yield f"note       {shared:,} training rows are left out, because they are held-out rows too"
    if any(each.counts.today and each.counts.plain < each.counts.rows for each in datasets.values()):
        yield (
            "note       the chat template writes today's date (strftime_now): a run keeps the date on which it begins,"
            " and one that begins on another day has other tokens"
        )
    same_rows = same_rows_note(rows, datasets.get("eval"))
    if same_rows is not None:
        yield f"note       {same_rows}"
    if files := files_left_out(recipe.data):
        more = f" and {len(files) - SHOWN_FILES} more" if len(files) > SHOWN_FILES else ""
        yield f"note       left out, as files without rows: {', '.join(files[:SHOWN_FILES])}{more}"
    if "eval" not in datasets:
        yield "eval       none (data.eval): no held-out loss will be measured"
    steps = count_steps(recipe, rows.rows_per_epoch)
    warmup = count_warmup_steps(recipe, steps)
    yield f"\nsteps      {steps:,}, with up to {recipe.train.batch_size} rows each; {warmup:,} of the steps are warm-up"
    yield from (f"note       {note}" for note in step_notes(recipe, steps))
    yield f"\nfirst row ({rows.location(0)}), label tokens between [[ and ]]:\n{preview.first_row}"


def _count_notes(rows: TokenDataset) -> Iterator[str]:
    """Yield what is special about the rows of a data set."""
    c = rows.counts
    for key, number in c.unread.items():
        yield f"{key}: not read, in {number:,} row{'s' if number > 1 else ''}"
    if c.split:
        yield f"split: {c.split:,} text{'s' if c.split > 1 else ''} longer than max_tokens, into several rows"
    if c.joined:
        yield f"fill: {c.joined:,} text{'s' if c.joined > 1 else ''} joined end to end"
    if c.zero_weight:
        yield f"weight 0: {c.zero_weight:,} row{'s' if c.zero_weight > 1 else ''} left out"
    if (weights := rows.weights) is not None:
        number = int((weights != 1).sum())
        yield f"weight: other than 1 in {number:,} of {c.rows:,} rows, from {weights.min():g} to {weights.max():g}"
    if 0 < c.plain < c.rows:
        yield f"formats: {c.rows - c.plain:,} of conversations, {c.plain:,} of plain text (no template)"


def _source_lines(rows: TokenDataset) -> Iterator[str]:
    """Yield a line for each source: its rows and its weight; none for a single source without a weight."""
    if len(rows.parts) == 1 and rows.parts[0].passes == 1:
        return
    for part in rows.parts:
        name = f"{part.name}: " if part.name is not None else ""
        weight = f"; {part.passes:g} passes = {part.rows_per_epoch:,} of {rows.rows_per_epoch:,} rows of an epoch"
        weight = weight if part.passes != 1 else ""
        yield f"{name}{len(part.table):,} rows, {part.table.counts.tokens:,} tokens{weight}"


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
