"""Choose the weights that a patch is merged onto: the dequantised weights of its training, or the original weights.

Only quantised layers differ between the two. Embeddings, heads and norms are the stored ones in both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from lorakit.errors import MergeError
from lorakit.files.base_files import BaseFiles
from lorakit.files.dtypes import MODEL_DTYPES
from lorakit.patch import Patch
from lorakit.quant.files import quantized_entries
from lorakit.quant.schemes import QuantScheme, quant_scheme

CPU: Final = torch.device("cpu")
ORIGINAL = "original"
DEQUANTIZED = "dequantized"
REASONS: Final = {
    ORIGINAL: "the stored weights; training used quantised ones",
    DEQUANTIZED: "the weights used in training, dequantised; nothing but their rounding is lost",
}


@dataclass(frozen=True)
class TrainedQuantization:
    """The base's quantisation during training."""

    scheme: QuantScheme
    dtype: torch.dtype
    """dtype that the quantised layers computed in"""
    layers: tuple[str, ...]
    """names of the quantised layers"""


def trained_quantization(files: BaseFiles, patches: Sequence[Patch], onto: str | None) -> TrainedQuantization | None:
    """Return the base's quantisation during training of these patches; None if it was not quantised.

    With ``onto="original"`` the patches may disagree, and None is returned then.

    Raises:
        MergeError: the patches were trained on different quantisations.
    """
    records = [(patch.metadata.get("base") or {}).get("quantized") for patch in patches]
    first = records[0]
    if any(record != first for record in records):
        if onto == ORIGINAL:
            return None
        other = next(record for record in records if record != first)
        raise MergeError(
            f"{patches[0].folder} was trained on a base in {_describe(first)}, another patch on one in"
            f" {_describe(other)}; merge with --onto original, or one at a time"
        )
    if first is not None:
        scheme = quant_scheme(first["name"], double_quant=bool(first["double"]))
        return TrainedQuantization(scheme, MODEL_DTYPES[first["dtype"]], tuple(first["layers"]))
    stored = quantized_entries(files, CPU)
    if not stored:
        return None
    dtype = MODEL_DTYPES.get(str(files.config().get("dtype") or files.config().get("torch_dtype")), torch.bfloat16)
    layers = tuple(name.removesuffix(".weight") for name in stored)
    return TrainedQuantization(next(iter(stored.values())).scheme, dtype, layers)


def choose_target(files: BaseFiles, quantization: TrainedQuantization | None, onto: str | None) -> str | None:
    """Return ``onto``, or by default the weights of training; None if training did not quantise the base.

    Raises:
        MergeError: the requested weights do not exist.
    """
    if onto not in (None, ORIGINAL, DEQUANTIZED):
        raise MergeError(f"onto: one of {ORIGINAL}, {DEQUANTIZED}, got {onto!r}")
    stored_quantized = bool(quantized_entries(files, CPU))
    if onto == DEQUANTIZED and quantization is None:
        raise MergeError(
            f"onto: {DEQUANTIZED}: {files.folder} is not quantised, and no patch was trained on a quantised base"
        )
    if onto == ORIGINAL and stored_quantized:
        raise MergeError(
            f"onto: {ORIGINAL}: {files.folder} holds quantised weights only; name the base they were made from"
            " (and pass --allow base: the patch's digests are of the quantised one)"
        )
    return onto or (None if quantization is None else DEQUANTIZED)


def _describe(record: Any) -> str:
    return "floats" if record is None else f"{record['name']} in {record['dtype']}"
