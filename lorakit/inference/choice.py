"""Which adapters a call uses: one for all rows, one per row, or those of the surrounding block; checked before use."""

from collections.abc import Sequence
from types import EllipsisType

from lorakit.errors import LorakitError
from lorakit.slots.routing import Route

Adapters = str | None | Sequence[str | None]
"""The name of one adapter for all rows, or one name per row. None means the plain base.

A call may take `...` instead: the adapters of the surrounding `using` block, or the base outside of one."""


def chosen_names(adapters: Adapters, lengths: Sequence[int] | None) -> tuple[str | None, ...]:
    """Return the names of a choice: one, or one per row, or with ``lengths`` one per segment of a packed line.

    Raises:
        LorakitError: not of the type Adapters, empty, or ``lengths`` that do not go with it.
    """
    if not (adapters is None or isinstance(adapters, str | list | tuple)):
        raise LorakitError(f"adapters: a name, None, or a list of them with one per row; got {adapters!r}")
    names = (adapters,) if adapters is None or isinstance(adapters, str) else tuple(adapters)
    if not names:
        raise LorakitError("adapters: an empty list; give one name (or None) per row")
    for name in names:
        if name is not None and not isinstance(name, str):
            raise LorakitError(f"adapters: a name or None per row, got {name!r}")
    if lengths is not None and (
        len(lengths) != len(names) or not all(type(length) is int and length > 0 for length in lengths)
    ):
        raise LorakitError(f"lengths: {len(names)} numbers of tokens, one for each adapter; got {lengths!r}")
    return names


def check_size(route: Route, adapters: Adapters | EllipsisType, shape: Sequence[int], rows: str) -> None:
    """Raise LorakitError unless the route of a call with these ``adapters`` goes with inputs (rows, tokens).

    rows: their name in the error.
    """
    if route.lengths is not None and tuple(shape) != (1, sum(route.lengths)):
        expected = f"one row of {sum(route.lengths)} tokens, {' + '.join(map(str, route.lengths))}"
        raise LorakitError(f"lengths: {expected}; the inputs are {tuple(shape)}")
    count = len(route.adapters)
    one_for_all = count == 1 and not isinstance(adapters, list | tuple)  # a list of one is meant for one row
    if route.lengths is None and count != shape[0] and not one_for_all:
        raise LorakitError(f"adapters: {count} names for {rows.format(shape[0])}")
