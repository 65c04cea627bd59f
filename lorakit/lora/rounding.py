"""Round float64 to a weight's dtype once, and measure what the rounding loses."""

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor

HALFWAY_BITS: Final = {torch.bfloat16: (0xFFFF, 0x8000), torch.float16: (0x1FFF, 0x1000)}
"""16-bit dtype -> the bits of a float32 that rounding removes, and their value halfway between two neighbours"""


class Rounding:
    """Rounds float64 to the nearest value of a dtype, ties to even. Its memory is reused from call to call.

    torch converts float64 to 16 bits through float32, so it rounds twice. That is wrong where the first rounding ends
    exactly halfway between two 16-bit neighbours: the second one cannot tell on which side the float64 value was. These
    few values are rounded to float32 "to odd" instead (Boldo and Melquiond 2008): towards zero, and then with the last
    bit set if that was inexact. The set bit keeps the side, and the second rounding is correct.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._float32, self._bits = torch.empty(0), torch.empty(0, dtype=torch.int32)
        self._is_halfway = np.empty(0, dtype=np.bool_)

    def __call__(self, values: Tensor) -> Tensor:
        """Return float64 values in the dtype, each rounded once; float64 itself is returned as it is."""
        if self._dtype not in HALFWAY_BITS:
            return values.to(self._dtype)
        if self._float32.numel() < values.numel() or self._float32.device != values.device:
            self._float32 = torch.empty(values.numel(), device=values.device)
            self._bits = torch.empty_like(self._float32, dtype=torch.int32)
            self._is_halfway = np.empty(values.numel(), dtype=np.bool_)
        flat = self._float32[: values.numel()]
        float32 = flat.view(values.shape).copy_(values)
        if (indices := self._halfway_indices(flat)).size:
            _round_to_odd(flat, values.reshape(-1), indices)
        return float32.to(self._dtype)

    def rounding_error(self, exact: Tensor, rounded: Tensor) -> float:
        """Return the sum of squares of (exact - rounded) for the values of the last call, both left as they are.

        For 16 bits computed from the last call's float32 values, whose own error is smaller by 2**-13 or more. In
        float64 for other dtypes, and where a square is too large or too small for float32.
        """
        if self._dtype in HALFWAY_BITS:
            wide = self._bits[: rounded.numel()].view(torch.float32).copy_(rounded.reshape(-1))
            error = squared_norm(wide.sub_(self._float32[: rounded.numel()]))
            if math.isfinite(error) and error > 0.0:
                return error
        # a copy, because `rounded` is `exact` itself in float64
        return squared_norm(rounded.to(torch.float64, copy=True).sub_(exact))

    def _halfway_indices(self, flat: Tensor) -> np.ndarray:
        """Return the indices of float32 values that lie halfway between two neighbours of the dtype."""
        mask, halfway = HALFWAY_BITS[self._dtype]
        bits = torch.bitwise_and(flat.view(torch.int32), mask, out=self._bits[: flat.numel()])
        is_halfway = self._is_halfway[: flat.numel()]
        if bits.device.type == "cpu":  # in numpy, because it compares integers eight times as fast as torch
            np.equal(bits.numpy(), halfway, out=is_halfway)
        else:
            is_halfway[:] = (bits == halfway).numpy(force=True)
        if self._dtype is torch.float16:
            # below 2**-14 float16 has fewer bits than the mask assumes, so that all such values are rounded to odd
            is_halfway |= (flat.abs() < 2.0**-14).numpy(force=True)
        return np.flatnonzero(is_halfway)


def _round_to_odd(flat: Tensor, exact: Tensor, indices: np.ndarray) -> None:
    """Replace float32 values at these indices by the float64 values `exact` rounded to odd."""
    if flat.device.type == "cpu":
        flat.numpy()[indices] = _to_odd(exact.numpy()[indices], flat.numpy()[indices])
        return
    where = torch.from_numpy(indices).to(flat.device)
    odd = _to_odd(exact[where].numpy(force=True), flat[where].numpy(force=True))
    flat[where] = torch.from_numpy(odd).to(flat.device)


def _to_odd(exact: np.ndarray, nearest: np.ndarray) -> np.ndarray:
    """Return float64 values rounded to float32 "to odd", from the float32 values nearest to them."""
    # one less in the bits of a float is one step towards zero, whatever its sign
    bits = nearest.view(np.int32) - (np.abs(nearest) > np.abs(exact)).astype(np.int32)
    odd: np.ndarray = (bits | (nearest != exact)).view(np.float32)
    return odd


def squared_norm(values: Tensor) -> float:
    """Return the sum of squares."""
    flat = values.reshape(-1)
    return float(torch.dot(flat, flat))
