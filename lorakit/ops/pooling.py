"""Pool the hidden states of a row to one, as embeddings and the heads of encoders read them; mark its second text."""

from typing import Final

from torch import Tensor

CLS: Final = "cls"  # mode of pooling: the state of a row's first token
MEAN: Final = "mean"  # that of all its tokens
LAST: Final = "lasttoken"  # the state of its last one


def pooled_rows(states: Tensor, mask: Tensor, mode: str) -> Tensor:
    """Return the pooled state of each row, (rows, width), by CLS or MEAN.

    states: of all tokens, (rows, tokens, width). mask: (rows, tokens), 1 for those that count.
    """
    if mode == CLS:
        return states[:, 0]
    return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def token_types(ids: Tensor, separators: Tensor | int) -> Tensor:
    """Return transformers' `token_type_ids`: 1 behind the first separator of a row, whose second text is there.

    ids: (rows, tokens). separators: the token, or that of each row, (rows, 1); -1: none.
    """
    ends = (ids == separators).long()
    return (ends.cumsum(1) > ends).long()
