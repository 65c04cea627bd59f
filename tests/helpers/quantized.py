"""A base as transformers and bitsandbytes quantise it, to compare with."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

SCHEMES = {
    "nf4": {"quantize": "nf4", "double_quantize": False},
    "nf4-double": {"quantize": "nf4"},
    "fp4-double": {"quantize": "fp4"},
    "int8": {"quantize": "int8"},
}


def load_with_bitsandbytes(folder: Path, how: str, dtype: torch.dtype) -> Any:
    """The base as transformers and bitsandbytes quantise it."""
    settings = SCHEMES[how]
    if settings["quantize"] == "int8":
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=settings["quantize"], bnb_4bit_compute_dtype=dtype,
            bnb_4bit_use_double_quant=settings.get("double_quantize", True),
        )  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype, device_map="cpu")
