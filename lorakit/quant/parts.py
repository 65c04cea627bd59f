"""A rank's part of a quantised weight: rows or columns of it, dequantised to the same bits as those of the full weight.

Two 4-bit values share a byte, and 64 of them share a scale. So a part is of full blocks. Scales that are quantised
themselves are stored as float32 in a part, because 256 of them share a scale of their own.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from lorakit.errors import RunError
from lorakit.quant.linear import QuantizationInfo
from lorakit.quant.schemes import FourBitBlocks


def part_of_quantized(name: str, weight: QuantizationInfo, dim: int, part: range) -> QuantizationInfo:
    """Return the facts of a part: ``part`` of the rows (dim 0) or columns (dim 1) of a layer's quantised weight.

    Raises:
        RunError: the part has no full blocks.
    """
    rows, columns = weight.shape
    shape = (len(part), columns) if dim == 0 else (rows, len(part))
    starts_and_ends = (columns,) if dim == 0 else (columns, part.start, part.stop)
    block = weight.scheme.block
    if block is not None and any(number % block for number in starts_and_ends):
        raise RunError(
            f"parallel.tensor: {name}: {weight.scheme.name} has blocks of {block} values, and"
            f" {part.start} to {part.stop} of {weight.shape[dim]} {('rows', 'columns')[dim]}, of {columns} values a"
            " row, are none; quantise to int8, or leave tensor out (fsdp2 divides such a base too)"
        )
    return replace(weight, scheme=replace(weight.scheme, double_quant=False), shape=shape)


def cut_quantized(tensors: Mapping[str, Tensor], weight: QuantizationInfo, dim: int, part: range) -> dict[str, Tensor]:
    """Return the tensors of a part, of which `part_of_quantized` has the facts, from those of a full weight."""
    rows, columns = weight.shape

    def cut(values: Tensor, per_value: int) -> Tensor:
        """Cut codes or scales, of which each is that of ``per_value`` values of a row."""
        grid = values.view(rows, columns // per_value)
        own = grid[part.start : part.stop] if dim == 0 else grid[:, part.start // per_value : part.stop // per_value]
        return own.contiguous()

    if not isinstance(weight.scheme, FourBitBlocks):
        scale = tensors["row_scale"]
        return {"weight": cut(tensors["weight"], 1), "row_scale": scale[part.start : part.stop] if dim == 0 else scale}
    scales = weight.scheme.block_scales(tensors)
    return {"weight": cut(tensors["weight"], 2).view(-1), "block_scale": cut(scales, weight.scheme.BLOCK).view(-1)}
