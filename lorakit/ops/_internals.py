"""The private names of torch, transformers and DeepSpeed that `ops` and `lora` rely on, each behind a function.

Read in torch 2.13, transformers 5.23 and DeepSpeed 0.19; tests/ops/test_internals.py asserts that each still works.
`nn.Module._parameters`, `_buffers` and `_modules` are used directly elsewhere: torch, accelerate and DeepSpeed replace
entries of these dictionaries too, so they are public in all but name.
"""

import sys
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

Hook = Callable[[Any], Any]
DEEPSPEED_NODES: Final = ("PreBackwardFunctionForModuleBackward", "PostBackwardFunctionModuleBackward")
"""Autograd nodes of DeepSpeed's ZeRO-3 (parameter_offload.py) around modules' inputs and outputs, without effect.

With other names, `ops.recompute` would save every layer's input under zero3: more memory, the same result.
"""
GROUPED_MM: Final = torch._grouped_mm
"""The function that the public `grouped_mm` calls, and that `__torch_function__` gets.

With another one, `lora.experts` would form the weights of all experts: more memory, the same result.
"""


def storage_id(tensor: Tensor) -> int:
    """Return a number that tensors of one storage share. On meta too, where the public `data_ptr()` is always 0."""
    return int(tensor.untyped_storage()._cdata)  # torch.UntypedStorage._cdata: the address of the C++ storage


def saved_tensor_hooks() -> tuple[Hook, Hook] | None:
    """Return the innermost active (pack, unpack) of `saved_tensors_hooks`; None outside of any.

    torch has no public reader. `ops.recompute` needs it: activation checkpointing's unpack hook raises the second time.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def saved_factor(node: Any, name: Literal["self", "other"]) -> Tensor:
    """Return a (self) or b (other) of the autograd node of a * b; None where the other factor needs no gradient.

    Without these names of MulBackward0, `ops.recompute` would recompute the inputs of fused norms and gates only.
    """
    return getattr(node, f"_saved_{name}")


def attention_implementation(model: nn.Module) -> str:
    """Return the name of a model's attention function, such as ``sdpa``, or "". It has no public reader."""
    return getattr(model.config, "_attn_implementation", None) or ""


def attention_function(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return the attention function of a name, for a module that calls it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # here, because importing it takes seconds

    own: Callable[..., Any] | None = ALL_ATTENTION_FUNCTIONS.get(name)
    # "eager" is not registered, and each model has its own in the module of its attention class
    return own or sys.modules[type(module).__module__].eager_attention_forward


def can_set_attention(model: nn.Module) -> bool:
    """True if a transformers model calls its attention through the `ALL_ATTENTION_FUNCTIONS` interface.

    Without `_can_set_attn_implementation`, `set_attn_implementation` would have to be tried, which only logs a warning.
    """
    can_set: Callable[[], bool] | None = getattr(model, "_can_set_attn_implementation", None)
    return can_set is not None and can_set()


def is_persistent_buffer(module: nn.Module, name: str) -> bool:
    """True if a module's buffer belongs to its state_dict. torch keeps the others in `_non_persistent_buffers_set`."""
    return name not in module._non_persistent_buffers_set


def remove_forward_hooks(module: nn.Module, kind: type = object) -> None:
    """Remove a module's forward hooks and pre-hooks of one class, by default all. A copy lacks torch's handles."""
    hooks: dict[int, Any]
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for number in [number for number, hook in hooks.items() if isinstance(hook, kind)]:
            del hooks[number]


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None = None) -> Tensor:
    """Return x W^T + b, or with `added` x W^T + added, by oneDNN's product, on the CPU, without a graph.

    `mkldnn::_linear_pointwise`, which torch's compiler calls: torch has no public way to choose between BLAS and
    oneDNN. Without it, `ops.products` multiplies by BLAS: slower on some CPUs, the same result to rounding.
    """
    product = torch.ops.mkldnn._linear_pointwise
    bias = None if bias is None else bias.contiguous()  # whose strides it does not read
    return product(x, weight, bias, "none", [], "") if added is None else product(x, added, weight, bias, "add")


def onednn_packed(weight: Tensor, num_rows: int) -> Tensor:
    """Return a copy of a weight (out, in) for `onednn_linear` alone, in the order it reads fastest for such rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, num_rows)


def is_zero3_parameter(tensor: Tensor) -> bool:
    """True if DeepSpeed's ZeRO-3 shards this parameter, gathered or not. Without `ds_id`, patches lack its values."""
    return hasattr(tensor, "ds_id")


def has_bfloat16_products() -> bool:
    """True if this CPU multiplies bfloat16. Without torch's private readers, `ops.batch_invariance` would be slower."""
    readers = (getattr(torch.cpu, f"_is_{name}_supported", bool) for name in ("avx512_bf16", "amx_tile"))
    return any(is_supported() for is_supported in readers)


@cache
def has_onednn_linear() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@torch.no_grad()
def as_saved(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the named tensors of a transformers model as its ``save_pretrained`` writes them: renamed, and split."""
    from transformers.core_model_loading import revert_weight_conversion  # here, because importing it takes seconds

    return revert_weight_conversion(model, dict(tensors))


@lru_cache(4)
def renamed_tensors(kinds: tuple[str, ...], stored: tuple[str, ...], part: str = "") -> Mapping[str, str]:
    """Return name in the model -> stored name of tensors that transformers only renames.

    kinds: the model's class and type. part: type of a model in it, whose renamings follow.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, apply_renamings

    own: list[Any] = next(filter(None, map(get_checkpoint_conversion_mapping, kinds)), [])
    own_parts: list[Any] = get_checkpoint_conversion_mapping(part) or []
    steps = [*own, *own_parts, *get_checkpoint_conversion_mapping("legacy")]
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    others = [step for step in steps if not isinstance(step, WeightRenaming)]
    renamed = {apply_renamings(name, renamings): name for name in stored}
    # a tensor that is split, joined or permuted is no weight of the model under another name
    return {new: old for new, old in renamed.items() if all(step.rename_source_key(new)[1] is None for step in others)}


def conversion_pattern(model_type: str) -> str | None:
    """Return the architecture whose experts those of another are converted like; None for one with rules of its own."""
    from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN

    return _MODEL_TO_CONVERSION_PATTERN.get(model_type)


def gguf_formulas() -> Any:
    """Return transformers' module that dequantises GGUF blocks: ``dequantize`` and ``GGML_BLOCK`` (5.23)."""
    from transformers.integrations.gguf import dequant

    return dequant


def set_template_sandbox(sandbox: type[Any]) -> None:
    """Let transformers compile the chat templates of this process in another sandbox of jinja (read in 5.17 and 5.23).

    It has no option for that. Without these names, an AttributeError stops the first rendering.
    """
    from transformers.utils import chat_template_utils as compiler

    if compiler.ImmutableSandboxedEnvironment is not sandbox:
        compiler.ImmutableSandboxedEnvironment = sandbox
        compiler._compile_jinja_template.cache_clear()
