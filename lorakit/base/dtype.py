"""What this machine computes fastest and correctly: float32 or bfloat16, measured rather than assumed."""

import time
from dataclasses import dataclass
from typing import Final

import torch

from lorakit.errors import LorakitError

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROBED: Final = ("float32", "bfloat16")  # float16 needs its loss scaled: it is taken when asked for only
SIZE: Final = 512
ROUNDS: Final = 12
MUST_GAIN: Final = 1.2  # a tie goes to float32: a noisy probe must not decide


@dataclass(frozen=True)
class DtypeChoice:
    """A dtype and the reason for it."""

    dtype: torch.dtype
    why: str

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def choose_dtype(asked: str, device: torch.device) -> DtypeChoice:
    """The dtype asked for, or for ``auto`` the faster of float32 and bfloat16 whose products are right.

    Raises:
        LorakitError: an unknown name.
    """
    if asked in DTYPES:
        return DtypeChoice(DTYPES[asked], "asked for")
    if asked != "auto":
        raise LorakitError(f"dtype {asked!r} is none of auto, {', '.join(DTYPES)}")
    rates = measure_all(device)
    full, half = rates["float32"], rates["bfloat16"]
    told = f"float32 {full:.0f}, bfloat16 {half:.0f} GFLOP/s measured"
    if not _is_right(torch.bfloat16, device):
        return DtypeChoice(torch.float32, f"bfloat16 products are wrong here; {told}")
    return DtypeChoice(torch.bfloat16 if half > MUST_GAIN * full else torch.float32, told)


def measure_all(device: torch.device) -> dict[str, float]:
    """GFLOP/s of a square matrix product by dtype: the best of some rounds, taken in turns on a busy machine."""
    squares = {name: torch.ones(SIZE, SIZE, dtype=DTYPES[name], device=device) for name in PROBED}
    best = dict.fromkeys(squares, float("inf"))
    for _ in range(ROUNDS):
        for name, x in squares.items():
            start = time.perf_counter()
            x @ x
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best[name] = min(best[name], time.perf_counter() - start)
    return {name: 2 * SIZE**3 / seconds / 1e9 for name, seconds in best.items()}


def _is_right(dtype: torch.dtype, device: torch.device) -> bool:
    numbers = torch.Generator().manual_seed(0)
    x, y = (torch.randn(64, 64, generator=numbers).to(device, dtype) for _ in range(2))
    exact = x.double() @ y.double()
    return bool(((x @ y).double() - exact).abs().max() <= 2**-7 * exact.abs().max())
