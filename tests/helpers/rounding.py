"""Rounding of float64, computed in another way than lorakit does."""

import torch


def nearest(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float64 once: through numpy for float16, on the bits for bfloat16."""
    if dtype is torch.float16:
        return torch.from_numpy(exact.numpy().astype("float16"))
    if dtype is torch.bfloat16:  # drop 45 bits, ties to even
        bits = exact.view(torch.int64)
        bits = bits + (1 << 44) - 1 + ((bits >> 45) & 1)
        return (bits & ~((1 << 45) - 1)).view(torch.float64).to(dtype)
    return exact.to(dtype)
