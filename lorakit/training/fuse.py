"""What adapters bring along for training: parts of a model that take less, or all as it is written, for a compiler."""

from torch import nn

from lorakit.lora.linear import LoraLinear
from lorakit.ops.gated_mlp import keep_gates_alone
from lorakit.ops.rms_norm import keep_what_norms_read
from lorakit.ops.rope import turn_with_less


def take_less(model: nn.Module) -> None:
    """Let the parts that are known take less memory and fewer passes over it; the outputs are the same bits."""
    keep_gates_alone(model)
    keep_what_norms_read(model)
    turn_with_less(model)


def leave_as_written(model: nn.Module) -> None:
    """Let adapted layers compute in plain operations, which a compiler can see through and join."""
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.in_one = False
