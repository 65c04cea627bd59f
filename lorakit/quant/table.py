"""The schemes that a recipe's `base.quantize` names."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from lorakit.quant.published import ByteCodes
from lorakit.quant.schemes import FourBitBlocks, Int8Rows, QuantScheme

SCHEMES: Final[Mapping[str, Callable[..., QuantScheme]]] = {
    "nf4": FourBitBlocks,
    "fp4": FourBitBlocks,
    "int8": Int8Rows,
    "fp8": partial(ByteCodes, mark="weight_scale", codes="float8", rows=1),
}


def quant_scheme(name: str, *, double_quant: bool = True) -> QuantScheme:
    """Return a scheme of the table. double_quant: for schemes with blocks, whose scales can be quantised."""
    scheme = SCHEMES[name](name)
    return SCHEMES[name](name, double_quant and scheme.block is not None)
