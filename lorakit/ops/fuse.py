"""Replace the parts of a model that have a fused form: gated MLPs, RMS norms and rotary positions."""

from torch import nn

from lorakit.ops.gated_mlp import fuse_gated_mlps
from lorakit.ops.rms_norm import fuse_rms_norms
from lorakit.ops.rope import fuse_rope


def fuse_model(model: nn.Module) -> None:
    """Replace every part with a fused form, in place. Outputs keep their bits; unknown code stays as written."""
    fuse_gated_mlps(model)
    fuse_rms_norms(model)
    fuse_rope(model)
