"""The axis `pipeline`: ranks with other layers, which send hidden states forward and their gradients back."""

from lorakit.parallel.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    StageForward,
    StageSteps,
    one_forward_one_backward,
)

__all__ = ["BACKWARD", "FORWARD", "StageForward", "StageSteps", "one_forward_one_backward"]
