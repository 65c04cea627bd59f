"""From a scale s to an alpha, bit for bit, or not at all.

kohya and loralib divide: s = alpha / r. MLX stores s itself. A scale that a format would round is refused.
"""

import math
from collections.abc import Iterable
from typing import Final

from lorakit.lora.methods import METHODS
from lorakit.patch import PatchLayer

PLAIN: Final = ("lora", "rslora")
"""the methods that are s B A and nothing else, which is what every format can say"""


def exact_alpha(scale: float, rank: int, methods: Iterable[str] = PLAIN) -> tuple[str, float] | None:
    """(method, alpha) whose scale is this one, bit for bit in float64; None where no alpha gives it.

    For r = 3 the division skips some values of s. Of several that give it, the one that is shortest to write.
    """
    for method in methods:
        guess = scale / METHODS[method].scale(1.0, rank)
        for alpha in sorted(_around(guess), key=lambda number: len(repr(number))):
            if METHODS[method].scale(alpha, rank) == scale:
                return method, alpha
    return None


def divided_alpha(layer: PatchLayer) -> float | None:
    """The alpha with alpha / r equal to the layer's scale, whatever its method; None where there is none."""
    if layer.method == "lora":
        return float(layer.alpha)
    found = exact_alpha(layer.scale, layer.rank, ["lora"])
    return found and found[1]


def _around(number: float) -> list[float]:
    """The number and its two neighbours on either side: the guess has been rounded twice."""
    below, above = math.nextafter(number, 0.0), math.nextafter(number, math.inf)
    return [number, below, above, math.nextafter(below, 0.0), math.nextafter(above, math.inf)]
