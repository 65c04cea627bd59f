"""Check a recipe without loading weights: base, targets and coverage, rows and labels, requirements of the backend."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from lorakit.base.find import find_base
from lorakit.base.from_recipe import load_recipe_tokenizer
from lorakit.base.meta import check_stored_tensors
from lorakit.data.chat_template import switches_thinking
from lorakit.data.dataset import TokenDataset
from lorakit.data.encode import Encoder
from lorakit.data.load import files_left_out, load_datasets, row_sets, splits_read
from lorakit.data.pairs import ANSWERS, TEXTS
from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import UNTHINKING
from lorakit.data.row_settings import RowSettings
from lorakit.errors import BaseModelError, DataError, LorakitError, TemporaryFailure, translate_error
from lorakit.files.base_files import open_base_files
from lorakit.files.text import Say, columns, count_of, first_of
from lorakit.inference.prompts import end_token_ids
from lorakit.lora import adapter_tensors
from lorakit.lora.targets import embedding_and_head, tied_head
from lorakit.ops.stored_names import tensor_name
from lorakit.parallel.adapter_state import check_tensors
from lorakit.parallel.setup import check_prerequisites
from lorakit.planning.skeleton import AdaptedSkeleton, adapted_skeleton
from lorakit.recipe import Recipe
from lorakit.recipe.schema import count_steps
from lorakit.run.display import row_progress
from lorakit.run.record import check_writable, open_record, recorded_run
from lorakit.run.start_from import Start, choose_start, read_start
from lorakit.training.answers import open_answers
from lorakit.training.checkpoint import Checkpoints
from lorakit.training.output import check_length
from lorakit.training.refusals import Attempt, refuse_by_base, refuse_by_machine, refuse_by_rows
from lorakit.training.summary import Line, adapter_lines, as_text, row_lines
from lorakit.training.teacher import find_teacher, taught_digest

ROOM: Final = 2.0
"""label tokens for each trainable parameter, because one holds about 2 bits, and a token has about 1 to learn (Schulman
et al. 2025, LoRA Without Regret). A rule of thumb: rows repeat each other, and bases know much of them"""
LARGE_BATCH: Final = 256  # rows, with which adapters fell behind full fine-tuning there, the more the larger
FEW_STEPS: Final = 100
SHOWN_FILES: Final = 6
SHOWN_LETTERS: Final = 1200  # of each of the first rows; a row that is named is shown in full
SAMPLED_ROWS: Final = 256  # rows of the head whose norms are read
COMPARED_ROWS: Final = 64  # rows of other added tokens that are read
FAR: Final = 4.0  # ratio of a norm to the median from which a row is untrained; SmolLM2-135M: trained ones 0.57 to 2.4
SAME: Final = 0.999
"""Cosine from which two rows are the same. SmolLM2-135M: reserved tokens 0.99999, the trained ones at most 0.993."""


def check(recipe: Recipe, say: Say = print, *, num_rows: int = 1, named_rows: Sequence[str] = ()) -> None:
    """Print the first lines of the recipe's run, and what else is known of its base and rows.

    num_rows: first rows that are shown with their labels. named_rows: rows to show instead, as FILE:LINE.
    Raises LorakitError: with all problems at once.
    """
    problems: list[str] = []

    def attempt(part: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        try:
            return part(*arguments, **settings)
        except TemporaryFailure:  # a full disk or a killed process, which is no mistake of the recipe
            raise
        except LorakitError as problem:
            problems.append(str(problem))
            return None

    start = attempt(choose_start, recipe, fresh=False)
    recipe = start.apply(recipe) if start is not None else recipe
    attempt(find_teacher, recipe)
    folder = attempt(find_base, recipe.base.model, recipe.base.revision)
    if folder is not None:
        attempt(check_stored_tensors, folder)
        tokenizer = attempt(load_recipe_tokenizer, recipe, folder)
        lines = _base_and_rows(recipe, folder, start, tokenizer, num_rows, attempt)
        named = (attempt(list, named_row(recipe, one, tokenizer)) or () for one in named_rows if tokenizer is not None)
        for text in chain(lines, chain.from_iterable(named)):
            say(text)
    attempt(check_prerequisites, recipe.parallel)
    refuse_by_machine(recipe, attempt)
    attempt(check_writable, Path(recipe.output))
    if Path(recipe.output).is_dir():
        attempt(open_record, Path(recipe.output), recipe.model_dump(mode="json"), fresh=False)
    if problems:
        raise LorakitError("\n".join(dict.fromkeys(problems)))
    say("\nnothing is wrong with this recipe")


def _base_and_rows(
    recipe: Recipe, folder: Path, start: Start | None, tokenizer: Any, num_rows: int, attempt: Attempt
) -> Iterator[str]:
    if start is not None:
        yield as_text(("start from", str(start)))
        if Checkpoints(Path(recipe.output) / "checkpoints").newest() is None:  # else it has the adapter
            attempt(read_start, start, recipe)
    skeleton = attempt(adapted_skeleton, folder, recipe)
    if skeleton is not None:
        yield from map(as_text, adapter_lines(recipe, skeleton.facts, skeleton.fused))
        kinds = [(kind.name, f"{kind.adapted}", f"{kind.count}") for kind in skeleton.facts.coverage.kinds]
        yield from ("", *columns([("layer kind", "adapted", "of"), *kinds], "<>>"), "")
        refuse_by_base(recipe, skeleton, attempt)
    datasets = None if tokenizer is None else attempt(load_datasets, recipe, tokenizer, row_progress)
    if datasets is None:
        return
    rows = datasets["train"]
    if recipe.objective.is_taught_by_rows:
        attempt(taught_digest, recipe, datasets)
    yield from map(as_text, row_lines(recipe, datasets))
    yield from (as_text(("note", note)) for note in _row_notes(recipe, datasets, tokenizer))
    if skeleton is not None:
        counts = rows.counts
        if (note := untrained_end_note(folder, skeleton, tokenizer, raw=0 < counts.plain == counts.rows)) is not None:
            yield as_text(("note", note))
        yield from map(as_text, _both(recipe, folder, skeleton, datasets, attempt))
    yield from first_rows(rows, num_rows, tokenizer, RowSettings(**recipe.objective.row_settings))


def _both(
    recipe: Recipe, folder: Path, skeleton: AdaptedSkeleton, datasets: dict[str, TokenDataset], attempt: Attempt
) -> Iterator[Line]:
    """Check what depends on both base and rows, and yield the line of the answers if the run generates any."""
    num_rows = datasets["train"].rows_per_epoch
    share = datasets["train"].counts.label_tokens / skeleton.facts.num_trainable
    larger = math.ceil(recipe.adapter.rank * share / ROOM)
    verdict = f"may be too small for these rows (rank {larger} has room)" if share > ROOM else "is large enough"
    measured = f"{share:.2g} label tokens for each trainable parameter, and about {ROOM:g} have room"
    yield "capacity", f"rank {recipe.adapter.rank} {verdict}: {measured}"
    size = recipe.train.batch_size
    steps = math.ceil(num_rows / size)
    if size >= LARGE_BATCH and steps < FEW_STEPS:
        yield "note", f"train.batch_size: an epoch has {count_of(steps, 'step')} of {size}; small ones teach more"
    if (answers := attempt(open_answers, recipe, folder, skeleton.model)) is not None:
        yield "answers", str(answers)
    attempt(check_tensors, recipe.train.optimizer, adapter_tensors(skeleton.model))
    refuse_by_rows(recipe, skeleton.model, skeleton.spec, datasets, attempt)
    attempt(check_length, recorded_run(Path(recipe.output)).get("total_steps"), count_steps(recipe, num_rows))


def _row_notes(recipe: Recipe, datasets: dict[str, TokenDataset], tokenizer: Any) -> Iterator[str]:
    counted = Counter[str]()
    for c in (rows.counts for rows in datasets.values()):
        counted.update(c.notes | {f"{key}: not read": number for key, number in c.unread.items()})
    num_used = sum(rows.counts.file_rows - rows.counts.bad for rows in datasets.values())
    is_unthinking = counted.pop(UNTHINKING, 0) == num_used
    yield from (f"{what}, in {count_of(number, 'row')}" for what, number in counted.items())
    if is_unthinking and switches_thinking(tokenizer) and "enable_thinking" not in recipe.data.chat_template_kwargs:
        yield (
            "no row thinks: data.chat_template_kwargs: {enable_thinking: false} trains and asks without thinking, and"
            " without the empty thought of some chat templates (docs/qwen3.md)"
        )
    for name, rows in datasets.items():
        c = rows.counts
        yield from _weight_notes(name, rows.weights)
        if c.token_weighted:
            yield f"{name}: weights: of label tokens, other than 1 in {c.token_weighted:,} of {c.rows:,} rows"
        if 0 < c.plain < c.rows:
            chats, plain = ((number // rows.group_size) for number in (c.rows - c.plain, c.plain))
            yield f"{name}: formats: {chats:,} of conversations, {plain:,} of plain text (no template)"
    if any(each.counts.today and each.counts.plain < each.counts.rows for each in datasets.values()):
        yield "the chat template writes today's date (strftime_now), so a run of another day has other tokens"
    if folders := splits_read(datasets):
        yield f"read of a DatasetDict: {', '.join(folders)} (data.hub_split and data.hub_eval_split name the split)"
    if files := files_left_out(recipe):
        yield f"left out, as files without rows: {first_of(files, SHOWN_FILES)}"


def _weight_notes(name: str, signed: np.ndarray) -> Iterator[str]:
    """Yield what weights of rows say, (rows,); they are below 0 where an answer is undesirable."""
    if undesirable := int((signed < 0).sum()):
        yield f"{name}: label: {undesirable:,} of {len(signed):,} answers are undesirable, which is a weight below 0"
    w = abs(signed)
    if number := int((w != 1).sum()):
        yield f"{name}: weight: other than 1 in {number:,} of {len(w):,} rows, from {w.min():g} to {w.max():g}"


def first_rows(rows: TokenDataset, number: int, tokenizer: Any, settings: RowSettings) -> Iterator[str]:
    """Yield the first rows of a run; of a pair both answers, or all texts. settings: how they are read."""
    for row in range(min(number * rows.group_size, len(rows))):
        weights = rows.token_weights(row) * rows.label_mask(row)
        text = mark_labels(rows.ids(row).tolist(), weights.tolist(), tokenizer, settings)
        text = text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]} ... (--row {rows.location(row)})"
        number, part = divmod(row, rows.group_size)
        which = f"row {number + 1}" if number else "first row"
        names = (*TEXTS[:2], *[TEXTS[2]] * part) if settings.texts else ANSWERS
        which += f", {names[part]}" if rows.counts.pairs else ""
        yield f"\n{which} ({rows.location(row)}), label tokens between [[ and ]]:\n{text}"


def named_row(recipe: Recipe, name: str, tokenizer: Any) -> Iterator[str]:
    """Yield the row ``FILE:LINE`` as every row that it becomes, in full. Raises DataError: no such or usable row."""
    sets = row_sets(recipe)
    matching = ((row, one) for one in sets for location, row in one.rows() if location == name)
    row, rows = next(matching, (None, None))
    if rows is None:
        every = chain.from_iterable(one.rows() for one in sets)
        examples = ", ".join(location for location, _ in islice(every, 2))
        raise DataError(f"--row {name}: no row of data.train or data.eval; they are named as in {examples}")
    with translate_error(BadRow, DataError, name):
        encoded = Encoder(tokenizer, rows.settings)(row)
    limit = rows.settings.max_tokens
    kind = "held out" if rows.side == "eval" else rows.side
    for number, one in enumerate(encoded, 1):
        several = f", {number} of {len(encoded)} rows" if len(encoded) > 1 else ""
        long = f", longer than data.max_tokens {limit} (on_long_rows: {rows.settings.on_long_rows})"
        size = f"{len(one.ids):,} tokens{long if len(one.ids) > limit else ''}"
        yield f"\nrow {name} ({kind}{several}, {size}), label tokens between [[ and ]]:"
        own = one.token_weights or [1.0] * len(one.ids)
        weights = [one.weight * weight * is_label for weight, is_label in zip(own, one.label_mask, strict=True)]
        yield mark_labels(one.ids, weights, tokenizer, rows.settings)


def mark_labels(ids: Sequence[int], weights: Sequence[float], tokenizer: Any, settings: RowSettings) -> str:
    """Return a row as text, with its label tokens between [[ and ]], and after them a weight that is not 1.

    weights: of each token's loss; 0 for a token without loss. settings: how the row was read.
    """
    if settings.labels is not None:
        label = settings.labels[0] if settings.head_labels is None else settings.head_labels.label(ids[-1])
        weight = f"*{weights[-1]:g}" if weights[-1] != 1 else ""
        shown = ", ".join(label) if isinstance(label, tuple) else label
        return f"{tokenizer.decode(ids[:-1])}[[{shown}]]{weight}"
    marks = [0.0, *weights[1:]]  # because no token predicts the first one
    text = ""
    for weight, pairs in groupby(zip(marks, ids, strict=True), itemgetter(0)):
        part = tokenizer.decode([token for _, token in pairs])
        text += part if not weight else f"[[{part}]]" if weight == 1 else f"[[{part}]]*{weight:g}"
    return text


def untrained_end_note(folder: Path, skeleton: AdaptedSkeleton, tokenizer: Any, *, raw: bool) -> str | None:
    """Return a note if answers end with a token whose row in the head neither base nor run trains; else None.

    A base has rows for reserved tokens that its own training never showed. Such a row is short or long beside the
    others, or it equals the row of another reserved token, because all of them got the same gradient.

    ``raw``: the rows are plain text, without the chat template. Some hundred rows of the head are read.
    """
    token = next(iter(reversed(end_token_ids(tokenizer, None, raw=raw))), None)
    embedding, head = embedding_and_head(skeleton.model)
    tied = tied_head(skeleton.model) is not None
    stored_in = embedding if tied else head
    trained = {*skeleton.spec.new_tokens.values(), *(skeleton.spec.trainable_tokens if tied else ())}
    changed = [name.rpartition(".")[::2] for name in adapter_tensors(skeleton.model)]
    # by more than single rows
    is_adapted = any(module in (stored_in, head) and key != "trainable_tokens_delta" for module, key in changed)
    if token is None or token in trained or stored_in is None or is_adapted:
        return None
    added = sorted(tokenizer.added_tokens_decoder, key=lambda other: abs(other - token))
    reason = _untrained(folder, stored_in, token, [other for other in added if other != token], len(tokenizer))
    if reason is None:
        return None
    name = tokenizer.convert_ids_to_tokens(token)
    key, trainable = ("trainable_tokens", repr(name)) if tied else ("modules_to_save", head)
    return (
        f"answers end with {name!r} ({token}), whose row of the output head the base never trained: {reason}. An"
        f" adapter of the layers hardly learns to write it, so that answers run on. adapter.{key}: [{trainable}]"
        " trains it. Or end answers with a token that the base knows, or one of adapter.new_tokens, by a"
        " data.chat_template"
    )


def _untrained(folder: Path, module: str, token: int, others: Sequence[int], num_tokens: int) -> str | None:
    """Return why the row of a token is one that was never trained; None if it looks like the others."""
    try:
        files = open_base_files(folder)
        stored = tensor_name(files, module)
    except BaseModelError:  # a base whose names differ, or that is refused anyway
        return None
    entry = files.entry(stored)
    if not entry.dtype.is_floating_point or len(entry.shape) != 2:
        return None
    num_rows, width = entry.shape
    if token >= num_rows:
        return None

    def read(row: int) -> Tensor:
        return files.shard_of[stored].read_elements(stored, row * width, (row + 1) * width).float()

    own = read(token)
    norms = torch.stack([read(row).norm() for row in range(0, num_rows, max(1, num_rows // SAMPLED_ROWS))])
    ratio = float(own.norm() / norms.median())
    if not 1 / FAR <= ratio <= FAR:
        return f"its norm is {ratio:.2g} times the median of the others"
    spare = [num_rows - 1] if num_rows > max(num_tokens, token + 1) else []  # has no token at all
    for other in [*spare, *(row for row in others[:COMPARED_ROWS] if row < num_rows)]:
        if float(torch.cosine_similarity(own, read(other), dim=0)) > SAME:
            return f"it equals the row of token {other}"
    return None
