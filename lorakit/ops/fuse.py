"""What adapters bring along for training: parts of a model that take less, or all as it is written, for a compiler."""

from torch import nn

from lorakit.ops.gated_mlp import fuse_gated_mlps
from lorakit.ops.rms_norm import fuse_rms_norms
from lorakit.ops.rope import fuse_rope


def fuse_model(model: nn.Module) -> None:
    """Let the parts that are known take less memory and fewer passes over it; the outputs are the same bits."""
    fuse_gated_mlps(model)
    fuse_rms_norms(model)
    fuse_rope(model)
