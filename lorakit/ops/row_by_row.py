"""Call parts of a model once for each row of a packed line: parts in which rows would see each other, as in a state.

Invariant: such a part gives each row what it gives the row alone, and computes no padding.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lorakit.ops.dropout import current_keys, use_token_keys

LEAK: Final = 1e-5  # of a part's largest output: a row's change by another row's tokens that is more than rounding


@torch.compiler.disable  # type: ignore[untyped-decorator] # a compiler would compile it anew for all row lengths
def _forward_by_rows(forward: Callable[..., Any], lengths: Sequence[int], /, *args: Any, **inputs: Any) -> Any:
    """Return the output of a part of a model, from its own forward for each row of the line."""
    if len(lengths) < 2:
        return forward(*args, **inputs)
    total = sum(lengths)
    keys = current_keys(total)
    outputs = []
    stop = 0
    for length in lengths:
        row = slice(stop, stop := stop + length)
        own_args, own_inputs = tree_map(partial(_part, row, total), (args, inputs))
        with use_token_keys(keys and keys.of(row)):
            outputs.append(forward(*own_args, **own_inputs))
    return tree_map(partial(_joined, lengths), *outputs)


def call_row_by_row(parts: Iterable[nn.Module], run: Callable[[], Any], lengths: list[int]) -> list[nn.Module]:
    """Have those of ``parts`` called row by row whose rows see each other, and return them. Collective if the model is.

    run: computes the model on a packed line of two rows. lengths: the tokens of each row of the line that the model
    computes, changed in place for each line; empty: rows are lines of their own.
    """
    leaking = []

    def probe(part: nn.Module, args: Any, inputs: dict[str, Any], output: Any) -> None:
        """Compute the part again with other values in the first row: the second one's output should be the same."""
        first, total = lengths[0], sum(lengths)

        def changed(value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.is_floating_point() and value.shape[:2] == (1, total)):
                return value
            return torch.cat([value[:, :first].flip(-1), value[:, first:]], 1)

        changed_output = part.forward(*map(changed, args), **{name: changed(value) for name, value in inputs.items()})
        before, after = (one[0] if isinstance(one, tuple) else one for one in (output, changed_output))
        if isinstance(before, Tensor) and before.shape[:2] == (1, total):
            apart = (before[:, first:] - after[:, first:]).abs().max()
            if not apart <= LEAK * before.abs().max():  # `not <=`, so that NaN is a leak
                leaking.append(part)

    with ExitStack() as hooks:
        for part in parts:
            # before an engine's own hooks, which take the weights away
            hooks.enter_context(part.register_forward_hook(probe, with_kwargs=True, prepend=True))
        run()
    for part in leaking:
        part.__dict__["forward"] = partial(_forward_by_rows, part.forward, lengths)
    return leaking


def _part(row: slice, total: int, value: Any) -> Any:
    """Return a row's part of a module's input: of tensors (1, tokens, ...), and of masks (1, any, tokens, tokens)."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 4 and value.shape[1] != total and value.shape[2:] == (total, total):  # not of a line as wide
        return value[..., row, row]
    return value[:, row] if value.dim() > 1 and value.shape[1] == total else value


def _joined(lengths: Sequence[int], first: Any, *others: Any) -> Any:
    """Return an output of all rows, from that of each."""
    is_line = isinstance(first, Tensor) and first.dim() > 1 and first.shape[1] == lengths[0]
    return torch.cat([first, *others], 1) if is_line else first
