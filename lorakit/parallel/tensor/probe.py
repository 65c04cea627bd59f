"""Compare layers of a cut model with the full layers, before a run takes its first step.

A layer's output and the gradient of its input must be those of the full layer.

Experts that are almost equally good for a token could be chosen otherwise where a sum was rounded otherwise. So every
call of a comparison has the experts of the first one, and only products are compared.

Invariant: at most one full layer is in memory, and it is freed before the run starts.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lorakit.base.layers import repeated_layers
from lorakit.base.lazy import LazyBase
from lorakit.errors import RunError
from lorakit.lora.layer_kinds import expert_parameters
from lorakit.lora.untrained import relative_difference, tolerance
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.group import Group
from lorakit.parallel.setup import is_collective_error, is_out_of_memory
from lorakit.parallel.tensor.partial_sums import hidden_states, with_hidden_states
from lorakit.parallel.tensor.plan import REMEDY

NUM_TOKENS: Final = 16


@final
class Probe:
    """A copy of one layer of each kind, made before the model is cut, to compare the cut layers with."""

    def __init__(self, model: nn.Module, weights: LazyBase, device: torch.device) -> None:
        """Copy the layers; weights on meta stay there. weights: of the full model."""
        names = {module: name for name, module in model.named_modules()}
        by_kind: dict[Any, str] = {}
        for layer in repeated_layers(model):
            kind = type(layer), getattr(layer, "attention_type", None), tuple(map(str, layer.state_dict()))
            by_kind.setdefault(kind, names[layer])
        # a config is not copied, because a run sets the attention function there, also of the copies
        memo = {id(config): config for config in (getattr(m, "config", None) for m in model.modules()) if config}
        self.layers = {name: copy.deepcopy(model.get_submodule(name), dict(memo)) for name in by_kind.values()}
        self._weights = weights
        self._device = device

    def check(self, loss_model: LossModel, world: Group) -> None:
        """Compare the cut layers with the full ones on some tokens, or raise RunError: they differ. Collective."""
        was_training = loss_model.training
        loss_model.eval()
        try:
            worst = self._largest_difference(loss_model)
        except RuntimeError as problem:  # a view of heads that are not all here, for one
            if is_collective_error(problem) or is_out_of_memory(problem):
                raise
            raise _refusal(loss_model, f"does not run on parts ({str(problem).splitlines()[0]})") from None
        loss_model.train(was_training)
        if world.any(worst > 1):
            off = f"off by {worst:.1f} times what rounding allows"
            raise _refusal(loss_model, f"gives other outputs where ranks share its weights, {off}")

    @torch.no_grad()
    def _largest_difference(self, loss_model: LossModel) -> float:
        """Compute the logits of NUM_TOKENS tokens, and return how far a layer is from the full one."""
        model = loss_model.model
        differences: dict[str, float] = {}

        def compare(name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
            # before the layer's own forward, and not after, because FSDP has freed its weights then
            differences[name] = self._difference(name, layer, args, kwargs)

        with ExitStack() as hooks:
            hooks.enter_context(_same_experts({"": model} | self.layers))
            for name in self.layers:
                hook = partial(compare, name)
                hooks.enter_context(model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True))
            count = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
            loss_model(input_ids=torch.arange(NUM_TOKENS, device=self._device)[None] * (count // NUM_TOKENS))
        return max(differences[name] for name in self.layers)

    def _difference(self, name: str, cut: nn.Module, args: Any, kwargs: Any) -> float:
        """Return how far a call's output and gradient are from the full layer's, in units of the tolerance."""
        actual = _WithGradient(cut).forward(args, kwargs)
        layer = self.layers[name]
        tensors = {}
        for key, parameter in layer.named_parameters():
            value = parameter.detach()
            if value.is_meta:
                value = torch.empty(parameter.shape, dtype=parameter.dtype)
                self._weights.fill(f"{name}.{key}", 0, value)
            tensors[key] = nn.Parameter(value.to(self._device), requires_grad=False)
        buffers = {key: buffer.to(self._device) for key, buffer in layer.named_buffers()}
        named = {f"layer.{key}": tensor for key, tensor in (tensors | buffers).items()}
        # backward inside of the call too, because layers read their weights there
        expected = torch.func.functional_call(_WithGradient(layer.eval()), named, (args, kwargs))
        pairs = zip(actual, expected, strict=True)
        return max(relative_difference(own, full) / tolerance(full) for own, full in pairs)


def _refusal(loss_model: LossModel, what: str) -> RunError:
    return RunError(f"parallel.tensor: {type(loss_model.model).__name__} {what}; {REMEDY}")


@contextmanager
def _same_experts(parts: Mapping[str, nn.Module]) -> Iterator[None]:
    """Let experts of one name compute with the choice of their first call inside the block. parts: by their names."""
    chosen: dict[str, Tensor] = {}

    def choose(name: str, experts: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        states, indices, *rest = args  # transformers' interface of experts
        return (states, chosen.setdefault(name, indices), *rest)

    with ExitStack() as handles:
        for name, part in parts.items():
            for inside in {name.rpartition(".")[0] for name, _ in expert_parameters(part)}:
                hook = partial(choose, f"{name}.{inside}".lstrip("."))
                handles.enter_context(part.get_submodule(inside).register_forward_pre_hook(hook))
        yield


class _WithGradient(nn.Module):
    """Return a layer's output, and its input's gradient, without the hooks of the layer itself."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = hidden_states(args, kwargs).detach().requires_grad_()
            args, kwargs = with_hidden_states(args, kwargs, x)
            output = self.layer.forward(*args, **kwargs)
            y: Tensor = output[0] if isinstance(output, tuple) else output
            # a gradient of the output, no two values of it the same
            direction = torch.arange(y.numel(), device=y.device).sin().to(y.dtype).view(y.shape)
            (gradient,) = torch.autograd.grad(y, x, direction)
        return y.detach(), gradient
