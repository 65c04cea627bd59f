"""What a run is refused for before its first step: one list, for `train`, which stops at the first, and for `check`."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from lorakit.base.layers import num_positions, num_steady_positions
from lorakit.base.transformers_io import vocabulary_size
from lorakit.data.dataset import TokenDataset
from lorakit.errors import BaseModelError, RunError, TargetError
from lorakit.inference.measures import check_measures
from lorakit.lora import AdapterSpec
from lorakit.lora.own_head import check_head_unadapted
from lorakit.ops.encoder_head import CLS, LAST, MEAN, is_encoder
from lorakit.parallel.axis import check_axes
from lorakit.patch.pooling import MODULES, read_pooling
from lorakit.planning.skeleton import AdaptedSkeleton
from lorakit.quant.bnb import check_optimizer
from lorakit.recipe import Recipe
from lorakit.run.trackers import check_trackers

Attempt = Callable[..., Any]
"""Calls a check with its arguments: by itself, or as the command `check` does, which collects the errors of all."""


def refuse_by_machine(recipe: Recipe, attempt: Attempt = operator.call) -> None:
    """Check packages and devices that a recipe needs. The checks are cheap, so `train` runs them first."""
    attempt(check_trackers, recipe.train.log_to)
    attempt(check_measures, recipe.evaluation.measures)
    attempt(check_optimizer, recipe.train.optimizer, on_gpu=torch.cuda.is_available())


def refuse_by_base(recipe: Recipe, skeleton: AdaptedSkeleton, attempt: Attempt = operator.call) -> None:
    """Check a recipe against its base, before the rows are tokenised, which may take hours."""
    attempt(check_axes, skeleton.model, skeleton.spec, recipe.parallel.axes)
    attempt(check_positions, skeleton.model, recipe.data.max_tokens)
    if recipe.objective.name == "embed":
        attempt(check_head_unadapted, skeleton.model)
        attempt(check_dims, skeleton.model, recipe.objective.matryoshka_dims or ())
        attempt(check_pooling, skeleton, recipe.objective.pooling)
    elif not recipe.objective.has_head:
        attempt(check_predicts, skeleton.model, recipe.objective.name)


def refuse_by_rows(
    recipe: Recipe,
    model: nn.Module,
    spec: AdapterSpec,
    datasets: Mapping[str, TokenDataset],
    attempt: Attempt = operator.call,
) -> None:
    """Check tokenised rows against the base. model: adapted or not. datasets: with `train`."""
    for rows in datasets.values():
        attempt(check_vocabulary, model, rows, max(spec.new_tokens.values(), default=-1))
        attempt(check_row_lengths, model, rows)
        attempt(check_forms, recipe, rows, is_encoder(model))
    if recipe.adapter.start_from is None:  # else the rows of tokens that do not occur stay as they are in the patch
        attempt(check_tokens_occur, spec, datasets["train"])


def check_positions(model: nn.Module, max_tokens: int) -> None:
    """Raise RunError if rows of `data.max_tokens` would stretch the rotary positions of the rows beside them."""
    limit = num_steady_positions(model.config)
    if limit is not None and max_tokens > limit:
        raise RunError(
            f"data.max_tokens: the rotary positions of this base change for rows longer than {limit}, and then a row's"
            f" loss depends on its batch-mates; set it to {limit} or less, got {max_tokens}"
        )


def check_predicts(model: nn.Module, objective: str) -> None:
    """Raise RunError if a base is an encoder, which has no head that predicts tokens."""
    if is_encoder(model):
        others = "objective embed and classify train it"
        raise RunError(f"base: {type(model).__name__} has no head that predicts tokens; {others}, got {objective}")


def check_pooling(skeleton: AdaptedSkeleton, mode: str | None) -> None:
    """Raise RunError if a recipe pools in another way than its base was trained to, or does not say how. None: LAST."""
    own = read_pooling(skeleton.folder).mode if (skeleton.folder / MODULES).is_file() else None
    if own not in (None, mode or LAST):
        raise RunError(f"objective.pooling: {mode or LAST}, and this base was trained with {own}; set pooling: {own}")
    if own is None and mode is None and is_encoder(skeleton.model):
        raise RunError(f"objective.pooling: name that of this encoder, {MEAN} or {CLS}")


def check_dims(model: nn.Module, dims: Sequence[int]) -> None:
    """Raise RunError if an embedding shall have more values than the base's hidden states."""
    width = model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
    if dims and max(dims) > width:
        raise RunError(f"objective.matryoshka_dims: up to {width}, the base's width, got {max(dims)}")


def check_row_lengths(model: nn.Module, rows: TokenDataset) -> None:
    """Raise RunError unless the base has a position for every token of the rows."""
    limit = num_positions(model.config)
    longest = int(rows.lengths.max())
    if limit is not None and longest > limit:
        number = int((rows.lengths > limit).sum())
        raise RunError(
            f"data: {number} of {len(rows)} rows are longer than this base's {limit} positions"
            f" (max_position_embeddings); the longest, {rows.location(int(rows.lengths.argmax()))}, has {longest}."
            f" Set data.max_tokens to {limit} or less, with data.on_long_rows: truncate or drop"
        )


def check_vocabulary(model: nn.Module, rows: TokenDataset, last_new_token: int) -> None:
    """Raise BaseModelError unless every token has a row in the model's embedding, or will have one as a new token."""
    num_rows = max(vocabulary_size(model), last_new_token + 1)
    if rows.counts.largest_id >= num_rows:
        raise BaseModelError(
            f"the rows have the token id {rows.counts.largest_id}, by the tokenizer or as input_ids or labels, and the"
            f" base's embedding has {num_rows} rows: name the tokens that were added to the tokenizer in"
            " adapter.new_tokens, or take the tokenizer of this base"
        )


def check_forms(recipe: Recipe, rows: TokenDataset, of_encoder: bool) -> None:
    """Raise RunError if rows for a head are of two forms, of which one is asked later, or if kto has one row alone."""
    if of_encoder and rows.counts.plain < rows.counts.rows:
        raise RunError("data: some rows are conversations, and this encoder reads texts; give rows with text and label")
    if recipe.objective.name == "kto" and len(rows) == 1:
        raise RunError(f"{rows.location(0)}: is the only row, and objective kto compares it with others' answers")
    if recipe.objective.has_head and 0 < rows.counts.plain < rows.counts.rows:
        raise RunError("data: some rows are texts and others conversations; choose one form for a head")


def check_tokens_occur(spec: AdapterSpec, rows: TokenDataset) -> None:
    """Raise TargetError unless every trainable or new token occurs in the rows; others would never get a gradient."""
    missing = {*spec.trainable_tokens, *spec.new_tokens.values()}
    for row in range(len(rows)):
        if not missing:
            return
        missing -= set(np.intersect1d(rows.ids(row), list(missing)).tolist())
    if missing:
        key = "trainable_tokens" if missing & set(spec.trainable_tokens) else "new_tokens"
        texts = {token: text for text, token in spec.new_tokens.items()}
        named = ", ".join(repr(texts.get(token, token)) for token in sorted(missing))
        raise TargetError(f"adapter.{key}: of {len(rows)} training rows none has {named} to train it; leave it out")
