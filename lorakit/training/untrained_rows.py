"""Find out if the base trained the row of its output head that belongs to the token at which answers end.

A base has rows for reserved tokens that its own training never showed. Such a row is short or long beside the others,
or it equals the row of another reserved token, because all of them got the same gradient.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lorakit.errors import BaseModelError
from lorakit.files.base_files import open_base_files
from lorakit.inference.prompts import end_token_ids
from lorakit.lora import adapter_tensors
from lorakit.lora.targets import embedding_and_head, tied_head
from lorakit.ops.stored_names import tensor_name
from lorakit.planning.skeleton import AdaptedSkeleton

SAMPLED_ROWS: Final = 256  # rows of the head whose norms are read
COMPARED_ROWS: Final = 64  # rows of other added tokens that are read
FAR: Final = 4.0
"""Ratio of a norm to the median from which a row is untrained. SmolLM2-135M: trained rows have 0.57 to 2.4."""
SAME: Final = 0.999
"""Cosine from which two rows are the same. SmolLM2-135M: reserved tokens 0.99999, the trained ones at most 0.993."""


def untrained_end_note(folder: Path, skeleton: AdaptedSkeleton, tokenizer: Any, *, raw: bool) -> str | None:
    """Return a note if answers end with a token whose row in the head neither base nor run trains; else None.

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
    remedy = (
        f"adapter.trainable_tokens: [{name!r}] trains it" if tied else f"adapter.modules_to_save: [{head}] trains it"
    )
    return (
        f"answers end with {name!r} ({token}), whose row of the output head the base never trained: {reason}. An"
        f" adapter of the layers hardly learns to write it, so that answers run on. {remedy}. Or end answers with a"
        " token that the base knows, or one of adapter.new_tokens, by a data.chat_template"
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
