"""Choose what models compute with: device, dtype, and library of products; measured once, rather than assumed.

A choice is remembered in the user's cache, because two runs of a recipe on one machine must not differ in a bit.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorakit.errors import LorakitError
from lorakit.files.atomic import measured_once
from lorakit.files.safetensors import MODEL_DTYPES, dtype_name
from lorakit.files.text import full_dtype_name
from lorakit.ops._internals import onednn_linear
from lorakit.ops.products import PackedWeight, Products, can_prepack, has_onednn

UNTESTED: Final = ("mps", "xpu")
"""Apple's and Intel's GPUs: used where torch has them, in one process; no test has run on one"""
CANDIDATES: Final = ("float32", "bfloat16")  # not float16, because its loss must be scaled; it is used on request only
SIZES: Final = {"cpu": 512, "cuda": 4096}
"""device type -> rows and columns of the measured matrices; a GPU's small products take as long as starting them"""
ROUNDS: Final = 12
MIN_ROUNDS: Final = 2  # the first prepares kernels
HOPELESS: Final = 4.0  # times as long as the other dtype: without units for bfloat16, CPUs take 100 times as long
MIN_SPEEDUP: Final = 1.2  # above 1, because a noisy measurement of equal speeds must not decide
GAIN: Final = 0.9  # oneDNN's time by BLAS's, at most; so that products that are equally fast stay torch's own
PRODUCTS: Final[tuple[Products, ...]] = ("torch", "onednn", "prepacked")  # by what they cost
PRODUCT_ROUNDS: Final = 6
DECODING_ROWS: Final = 8  # of a trial: few, as when a server decodes
TRAINING_ROWS: Final = 512
TRAINING_SIZE: Final = 1024  # (out, in) of the trial's weight
TRIAL_BYTES: Final = 1 << 28
"""of weights in a trial with few rows: more than caches hold, because a weight that is in a cache is packed soon"""


def device_type() -> str:
    """Return the kind of this machine's GPUs as torch names it: cuda (ROCm's too), mps or xpu; without any, cpu."""
    if torch.cuda.is_available():
        return "cuda"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None and accelerator.type in UNTESTED else "cpu"


def find_gpus() -> list[torch.device]:
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
    rates = product_rates(device)
    full, half = (rates[name] for name in CANDIDATES)
    measured = f"float32 {full:.0f}, bfloat16 {half:.0f} GFLOP/s measured"
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(64, 64, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    exact = x.cpu().double() @ y.cpu().double()  # on the CPU, because not every GPU has float64
    if not ((x @ y).cpu().double() - exact).abs().max() <= 2**-7 * exact.abs().max():  # the dtype's rounding
        return DtypeChoice(torch.float32, f"bfloat16 products are wrong here; {measured}")
    return DtypeChoice(torch.bfloat16 if half > MIN_SPEEDUP * full else torch.float32, measured)


def product_rates(device: torch.device) -> dict[str, float]:
    """Return GFLOP/s of a square matrix product by dtype."""
    return dict(_measured_once(f"rates of dtypes on {device}", partial(_measure_rates, device)))


def decoding_products(model: nn.Module, *, prepack: bool = False) -> Products:
    """Return which products of few rows with a model's own weights are faster. prepack: weights may be copied."""
    weights = (module.weight for module in model.modules() if type(module) is nn.Linear)
    return _faster(weights, DECODING_ROWS, prepack=prepack)


def training_products(dtype: torch.dtype, device: torch.device) -> Products:
    """Return which products of many rows are faster, by a weight of its own: those of a sharded base are elsewhere."""
    return _faster([torch.ones(TRAINING_SIZE, TRAINING_SIZE, dtype=dtype, device=device)], TRAINING_ROWS)


def _measured_once(question: str, measure: Any) -> Any:
    return measured_once(f"{question}, {torch.get_num_threads()} threads, torch {torch.__version__}", measure)


def _faster(weights: Iterable[Tensor], num_rows: int, *, prepack: bool = False) -> Products:
    chosen: list[Tensor] = []
    for weight in weights:
        is_known = has_onednn(weight) or (prepack and can_prepack(weight))
        if is_known and sum(one.nbytes for one in chosen) < TRIAL_BYTES:
            chosen.append(weight)
    if not chosen:
        return "torch"
    shapes = sorted(tuple(weight.shape) for weight in chosen)
    names = PRODUCTS if prepack else PRODUCTS[:-1]
    kind = f"prepacked {chosen[0].dtype} " if prepack else ""
    measure = partial(_measure_products, chosen, num_rows, names)
    answer = _measured_once(f"{kind}products of {num_rows} rows by {shapes}", measure)
    return next((name for name in names if name == answer), "torch")


@torch.no_grad()
def _measure_products(weights: Sequence[Tensor], num_rows: int, names: Iterable[Products]) -> Products:
    inputs = [weight.new_ones(num_rows, weight.shape[1]) for weight in weights]
    best = dict.fromkeys(names, math.inf)
    factors = {name: [PackedWeight(one).packed for one in weights] if name == "prepacked" else weights for name in best}
    for _ in range(PRODUCT_ROUNDS):
        for name, own in factors.items():  # in turns, because other programs may slow the machine for a while
            product = F.linear if name == "torch" else onednn_linear
            began = time.perf_counter()
            for x, factor in zip(inputs, own, strict=True):
                product(x, factor, None)
            best[name] = min(best[name], time.perf_counter() - began)
    choice: Products = "torch"
    for name, seconds in best.items():
        choice = name if seconds < GAIN * best[choice] else choice
    return choice


def _measure_rates(device: torch.device) -> dict[str, float]:
    """Return the best of ``ROUNDS`` by dtype, or of fewer of a much slower one."""
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
