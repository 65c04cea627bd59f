"""Parts of quantised weights have the bits of the full ones."""

import pytest
import torch

from lorakit.errors import RunError
from lorakit.quant.linear import QuantizationInfo, cut_quantized, part_of_quantized
from lorakit.quant.schemes import QuantScheme, quant_scheme

SHAPE = (192, 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "scheme",
    [quant_scheme("nf4", double_quant=False), quant_scheme("nf4"), quant_scheme("fp4"), quant_scheme("int8")],
    ids=lambda scheme: f"{scheme.name}{' double' * scheme.double_quant}",
)
def test_a_part_is_that_part_of_the_full_weight_to_the_bit(scheme: QuantScheme, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = scheme.quantize(torch.randn(SHAPE))
    full, info = scheme.dequantize(tensors, SHAPE, dtype), QuantizationInfo(scheme, SHAPE, dtype)
    for dim, part in ((0, range(7)), (0, range(7, 192)), (1, range(64)), (1, range(128, 256))):
        one, cut = part_of_quantized("q_proj", info, dim, part), cut_quantized(tensors, info, dim, part)
        expected = full.narrow(dim, part.start, len(part))
        assert torch.equal(one.scheme.dequantize(cut, one.shape, dtype), expected)
        assert {key: (tuple(t.shape), t.dtype) for key, t in cut.items()} == one.scheme.shapes(*one.shape)


@pytest.mark.parametrize(("shape", "dim", "part"), [((8, 128), 1, range(32)), ((8, 96), 0, range(4))])
def test_parts_without_full_blocks_are_refused(shape: tuple[int, int], dim: int, part: range) -> None:
    with pytest.raises(RunError, match="nf4 has blocks of 64 values"):
        part_of_quantized("q_proj", QuantizationInfo(quant_scheme("nf4"), shape, torch.float32), dim, part)
    part_of_quantized("q_proj", QuantizationInfo(quant_scheme("int8"), shape, torch.float32), dim, part)
