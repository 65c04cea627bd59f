"""Run a model's linear layers by oneDNN's product instead of BLAS, where that is faster on this CPU.

Invariant: the layers' weights are neither written nor copied, and the results differ by rounding alone. With a gradient
a layer runs its own product.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorakit.ops._internals import has_onednn_linear, onednn_linear

NUM_ROWS: Final = 8  # of the trial: few, as when a server decodes, because there the products differ most
TRIAL_BYTES: Final = 1 << 28
"""of weights in the trial: more than caches hold, because a weight that is in a cache is packed soon"""
GAIN: Final = 0.9  # oneDNN's time by BLAS's, at most; so that products that are equally fast stay torch's own

Product = Callable[[Tensor, Tensor, None], Tensor]


def onednn_forward(layer: nn.Linear, input: Tensor) -> Tensor:
    """Return a linear layer's output, by oneDNN where that can compute it: its method ``forward``."""
    product = F.linear if torch.is_grad_enabled() or input.dtype != layer.weight.dtype else onednn_linear
    return product(input, layer.weight, layer.bias)


@torch.no_grad()
def use_onednn(model: nn.Module) -> int:
    """Have oneDNN compute float32 layers on the CPU where it is faster: MKL packs W again for every few rows."""
    layers = [module for module in model.modules() if type(module) is nn.Linear and _is_plain(module)]
    if not has_onednn_linear() or not _is_faster(layers):
        return 0
    for layer in layers:
        layer.__dict__["forward"] = MethodType(onednn_forward, layer)  # which a copied layer has of its own
    return len(layers)


def _is_plain(layer: nn.Linear) -> bool:
    weight = layer.weight
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and "forward" not in layer.__dict__


def _is_faster(layers: Sequence[nn.Linear]) -> bool:
    sizes = itertools.accumulate((layer.weight.nbytes for layer in layers), initial=0)
    weights = [layer.weight for layer, before in zip(layers, sizes, strict=False) if before < TRIAL_BYTES]
    inputs = [weight.new_ones(NUM_ROWS, weight.shape[1]) for weight in weights]
    products: tuple[Product, ...] = F.linear, onednn_linear
    times = [math.inf] * len(products)
    for _ in range(3):  # the best of some, in turn, because other processes disturb
        for index, product in enumerate(products):
            began = time.perf_counter()
            for x, weight in zip(inputs, weights, strict=True):
                product(x, weight, None)
            times[index] = min(times[index], time.perf_counter() - began)
    return times[1] < GAIN * times[0]
