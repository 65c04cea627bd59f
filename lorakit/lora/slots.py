"""The inference layer: a frozen linear layer and any number of adapters, chosen per row of the batch.

Nothing is merged: the base's weight is read and never written, so a row without an adapter gets the plain base.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from lorakit.errors import TargetError
from lorakit.lora.kinds import Kind
from lorakit.lora.methods import METHODS


@dataclass(frozen=True)
class Slot:
    """One adapter's tensors in one layer, ready to use."""

    method: str
    scale: float
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter: its slots by layer name. Never changed, so a running call keeps what it began with."""

    name: str
    slots: Mapping[str, Slot]


@dataclass(frozen=True)
class Route:
    """Which adapter each row of a batch uses; None is the plain base. One entry serves a batch of any size."""

    rows: tuple[Adapter | None, ...]

    def groups(self) -> dict[Adapter, list[int]]:
        """adapter -> the rows that use it."""
        found: dict[Adapter, list[int]] = {}
        for row, adapter in enumerate(self.rows):
            if adapter is not None:
                found.setdefault(adapter, []).append(row)
        return found


@final
class SlotLinear(nn.Module):
    """y = x W^T + b, and for row i the update of its adapter: y_i += s (x_i A^T) B^T.

    ``route`` says who uses what; it belongs to the calling thread, so concurrent calls do not mix.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, name: str, base: nn.Module, kind: Kind, route: ContextVar[Route | None]) -> None:
        super().__init__()
        self.out_features, self.in_features = kind.sizes(base)
        self.kind, self._name, self._route = kind, name, route
        self.register_parameter("weight", base.weight)  # type: ignore[arg-type]
        self.register_parameter("bias", base.bias)  # type: ignore[arg-type]
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        y = self.kind.product(x, self.weight, self.bias)
        route = self._route.get()
        if route is None:
            return y
        if len(set(route.rows)) == 1:
            slot = route.rows[0].slots.get(self._name) if route.rows[0] is not None else None
            return y if slot is None else _apply(slot, x, y)
        if x.shape[0] != len(route.rows) or ".experts." in self._name:
            raise TargetError(
                f"{self._name} sees {x.shape[0]} rows of a batch of {len(route.rows)}: this model mixes rows before the"
                " layer, so adapters cannot be chosen per row; use one adapter for the whole batch"
            )
        for adapter, rows in route.groups().items():
            if self._name in adapter.slots:
                index = torch.tensor(rows, device=x.device)
                y = y.index_copy(0, index, _apply(adapter.slots[self._name], x[index], y[index]))
        return y


def _apply(slot: Slot, x: Tensor, y: Tensor) -> Tensor:
    return METHODS[slot.method].apply(x, y, slot.tensors, slot.scale)
