"""Choose the device that models compute on, and the dtype: float32 or bfloat16, measured rather than assumed."""

import time
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from lorakit.errors import LorakitError
from lorakit.files.dtype_names import full_dtype_name
from lorakit.files.dtypes import MODEL_DTYPES, dtype_name

UNTESTED: Final = ("mps", "xpu")
"""Apple's and Intel's GPUs: used where torch has them, in one process; no test has run on one"""
CANDIDATES: Final = ("float32", "bfloat16")  # not float16, because its loss must be scaled; it is used on request only
SIZES: Final = {"cpu": 512, "cuda": 4096}
"""device type -> rows and columns of the measured matrices; a GPU's small products take as long as starting them"""
ROUNDS: Final = 12
MIN_ROUNDS: Final = 2  # the first prepares kernels
HOPELESS: Final = 4.0  # times as long as the other dtype: without units for bfloat16, CPUs take 100 times as long
MIN_SPEEDUP: Final = 1.2  # above 1, because a noisy measurement of equal speeds must not decide


def device_type() -> str:
    """Return the kind of this machine's GPUs as torch names it: cuda (ROCm's too), mps or xpu; without any, cpu."""
    if torch.cuda.is_available():
        return "cuda"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None and accelerator.type in UNTESTED else "cpu"


def find_gpus() -> list[torch.device]:
    """Return the GPUs of this machine."""
    kind = device_type()
    return [torch.device(kind, index) for index in range(torch.accelerator.device_count())] if kind != "cpu" else []


@dataclass(frozen=True)
class DtypeChoice:
    """A dtype and the reason for its choice."""

    dtype: torch.dtype
    why: str

    @property
    def name(self) -> str:
        return dtype_name(self.dtype)


def choose_dtype(requested: str, device: torch.device) -> DtypeChoice:
    """Return the requested dtype; ``auto``: the faster that computes correctly. Raises LorakitError."""
    requested = full_dtype_name(requested)
    if requested in MODEL_DTYPES:
        return DtypeChoice(MODEL_DTYPES[requested], "asked for")
    if requested != "auto":
        raise LorakitError(f"dtype {requested!r} is none of auto, {', '.join(MODEL_DTYPES)}")
    rates = measure_all(device)
    full = rates["float32"]
    half = rates["bfloat16"]
    measured = f"float32 {full:.0f}, bfloat16 {half:.0f} GFLOP/s measured"
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(64, 64, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    exact = x.cpu().double() @ y.cpu().double()  # on the CPU, because not every GPU has float64
    if not ((x @ y).cpu().double() - exact).abs().max() <= 2**-7 * exact.abs().max():  # the dtype's rounding
        return DtypeChoice(torch.float32, f"bfloat16 products are wrong here; {measured}")
    return DtypeChoice(torch.bfloat16 if half > MIN_SPEEDUP * full else torch.float32, measured)


@cache
def measure_all(device: torch.device) -> dict[str, float]:
    """Return GFLOP/s of a square matrix product by dtype: the best of ``ROUNDS``, or of fewer of a much slower one."""
    size = SIZES["cpu" if device.type == "cpu" else "cuda"]
    squares = {name: torch.ones(size, size, dtype=MODEL_DTYPES[name], device=device) for name in CANDIDATES}
    best = dict.fromkeys(squares, float("inf"))
    for number in range(ROUNDS):
        for name, x in squares.items():  # in turns, because other programs may slow the machine for a while
            if number >= MIN_ROUNDS and best[name] > HOPELESS * min(best.values()):
                continue
            start = time.perf_counter()
            x @ x
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            best[name] = min(best[name], time.perf_counter() - start)
    return {name: 2 * size**3 / seconds / 1e9 for name, seconds in best.items()}
