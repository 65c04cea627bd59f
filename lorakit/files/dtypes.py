"""Names of dtypes: torch's, and the codes of safetensors headers. The package has no other table of dtypes."""

from typing import Any, Final

import torch

MODEL_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""name -> dtype in which a base is loaded, computed or merged"""
DTYPE_OF_CODE: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
"""code in a safetensors header -> dtype"""
CODE_OF_DTYPE: Final = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return the name of a dtype as recipes and files write it: ``bfloat16``, not ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: Any) -> torch.dtype | None:
    """Return the torch dtype with this name; None if ``name`` is not the name of one."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    return dtype if isinstance(dtype, torch.dtype) else None
