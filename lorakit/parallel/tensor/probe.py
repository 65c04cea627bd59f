"""Compare layers of a cut model with the full layers, before a run takes its first step.

A layer's output and the gradient of its input must be those of the full layer. A model whose tokens cannot be in parts
between the blocks is compared a second time, with all tokens on every rank.

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
from lorakit.launch.heartbeat_store import is_collective_error
from lorakit.lora import adapter_modules
from lorakit.lora.experts import expert_parameters
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.group import Group
from lorakit.parallel.setup import is_out_of_memory
from lorakit.parallel.tensor.megatron_sp import SequenceRegion, TokenShard, changed, hidden_states
from lorakit.parallel.tensor.plan import REMEDY

NUM_TOKENS: Final = 16
TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 1e-2}  # relative; other dtypes 3e-2


@final
class Probe:
    """A copy of one layer of each kind, made before the model is cut, to compare the cut layers with."""

    def __init__(self, model: nn.Module, weights: LazyBase, device: torch.device) -> None:
        """Copy the layers; weights on meta stay there. weights: of the full model."""
        layers = {id(layer) for layer in repeated_layers(model)}
        by_kind: dict[Any, str] = {}
        for name, module in model.named_modules():
            if id(module) in layers:
                kind = type(module), getattr(module, "attention_type", None), tuple(map(str, module.state_dict()))
                by_kind.setdefault(kind, name)
        # a config is not copied, because a run sets the attention function there, also of the copies
        memo = {id(config): config for config in (getattr(m, "config", None) for m in model.modules()) if config}
        self.layers = {name: copy.deepcopy(model.get_submodule(name), dict(memo)) for name in by_kind.values()}
        self._weights = weights
        self._device = device

    def check(self, loss_model: LossModel, region: SequenceRegion, world: Group, *, is_stage: bool = False) -> set[str]:
        """Compare the cut layers with the full ones on some tokens. Collective.

        is_stage: True if other stages of a pipeline wait for this one's forward. Disables the region where every rank
        needs all tokens between the blocks. Returns the names of adapted modules that get some of the tokens.

        Raises RunError: they differ, so tokens or columns of this model are combined in other layers than its plan
        names.
        """
        was_training = loss_model.training
        loss_model.eval()
        problem, in_parts = self._problem(loss_model, region, world, is_stage)
        if problem is not None and region.is_cut:
            region.disabled_because = f"with parts of them this base {problem}"
            problem, in_parts = self._problem(loss_model, region, world, is_stage)
        loss_model.train(was_training)
        if problem is not None:
            raise RunError(f"parallel.tensor: {type(loss_model.model).__name__} {problem}; {REMEDY}")
        return in_parts

    def _problem(
        self, loss_model: LossModel, region: SequenceRegion, world: Group, is_stage: bool
    ) -> tuple[str | None, set[str]]:
        """Return what differs from the full layers, on any rank, and the adapted modules that get some tokens."""
        worst = 0.0
        text = ""
        in_parts: set[str] = set()
        try:
            with _same_experts({"": loss_model.model} | self.layers):
                expected = None
                if region.is_cut:
                    with region.disabled("to compare with"):  # modules between the layers are compared too
                        expected = self._logits(loss_model)
                with self._compared(loss_model.model, region) as (differences, in_parts):
                    logits = self._logits(loss_model)
                worst = max(differences[name] for name in self.layers)
                if expected is not None:
                    worst = max(worst, _relative(logits, expected))
        except RuntimeError as problem:  # a view of heads that are not all here, for one
            if is_collective_error(problem) or is_out_of_memory(problem):
                raise
            text = str(problem).splitlines()[0]
            if is_stage:  # the others wait for this one
                what = f"parallel.tensor: {type(loss_model.model).__name__} does not run on parts ({text})"
                raise RunError(f"{what}; {REMEDY}") from None
        if world.any(bool(text)):
            return f"does not run on parts ({text or 'on another rank'})", set()
        if world.any(not worst <= 1):  # `not <=`, so that NaN is refused
            what = "gives other outputs where ranks share its weights"
            return f"{what}, off by {worst:.1f} times what rounding allows", set()
        return None, in_parts

    @torch.no_grad()
    def _logits(self, loss_model: LossModel) -> Tensor:
        """Return the logits of NUM_TOKENS tokens."""
        count = loss_model.model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
        ids = torch.arange(NUM_TOKENS, device=self._device)[None] * (count // NUM_TOKENS)
        logits: Tensor = loss_model(input_ids=ids)
        return logits

    @contextmanager
    def _compared(self, model: nn.Module, region: SequenceRegion) -> Iterator[tuple[dict[str, float], set[str]]]:
        """Compare layers that are called inside the block: name -> difference. Note modules that get some tokens."""
        differences: dict[str, float] = {}
        in_parts: set[str] = set()

        def compare(name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
            # before the layer's own forward, and not after, because FSDP has freed its weights then
            differences[name] = self._difference(name, layer, args, kwargs, region.shard)

        def watch(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            if x is not None and region.is_cut and _num_tokens(x) < NUM_TOKENS:
                in_parts.add(name)

        hooks = [(model.get_submodule(name), partial(compare, name)) for name in self.layers]
        hooks += [(module, partial(watch, name)) for name, module in adapter_modules(model)]
        with ExitStack() as handles:  # a base that does not run on parts may run with all tokens on every rank
            for module, hook in hooks:
                handles.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
            yield differences, in_parts

    def _difference(self, name: str, cut: nn.Module, args: Any, kwargs: Any, shard: TokenShard | None) -> float:
        """Return how far a call's output and gradient are from the full layer's, in units of the tolerance.

        shard: this rank's tokens; None: all.
        """
        actual = _WithGradient(cut).forward(args, kwargs, shard)
        layer = self.layers[name]
        tensors = {}
        for key, parameter in layer.named_parameters():
            value = parameter.detach()
            if value.is_meta:
                value = torch.empty(parameter.shape, dtype=parameter.dtype)
                self._weights.fill(f"{name}.{key}", 0, value)
            tensors[key] = nn.Parameter(value.to(self._device), requires_grad=False)
        buffers = {key: buffer.to(self._device) for key, buffer in layer.named_buffers()}
        inputs = changed(args, kwargs, (lambda own: own) if shard is None else shard.gather)
        named = {f"layer.{key}": tensor for key, tensor in (tensors | buffers).items()}
        # backward inside of the call too, because layers read their weights there
        expected = torch.func.functional_call(_WithGradient(layer.eval()), named, (*inputs, None))
        pairs = zip(actual, expected, strict=True)
        return max(_relative(own if shard is None else shard.gather(own), full) for own, full in pairs)


def _num_tokens(x: Tensor) -> int:
    """Return the tokens of a module's input: hidden states (..., width), or ids, which an embedding gets."""
    return x.shape[:-1].numel() if x.is_floating_point() else x.numel()


@contextmanager
def _same_experts(parts: Mapping[str, nn.Module]) -> Iterator[None]:
    """Let experts of one name compute with the choice of their first call inside the block. parts: by their names."""
    chosen: dict[str, Tensor] = {}

    def choose(name: str, experts: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        states, indices, *rest = args  # transformers' interface of experts
        return (states, chosen.setdefault(name, indices), *rest)

    with ExitStack() as handles:
        for name, part in parts.items():
            for inside in {inside for inside, _, _ in expert_parameters(part)}:
                hook = partial(choose, f"{name}.{inside}".lstrip("."))
                handles.enter_context(part.get_submodule(inside).register_forward_pre_hook(hook))
        yield


class _WithGradient(nn.Module):
    """Return a layer's output, and its input's gradient, without its own hooks, which change the number of tokens."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], shard: TokenShard | None) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = hidden_states(args, kwargs).detach().requires_grad_()
            args, kwargs = changed(args, kwargs, lambda _: x)
            output = self.layer.forward(*args, **kwargs)
            y: Tensor = output[0] if isinstance(output, tuple) else output
            full = y if shard is None else shard.gather(y.detach())
            # a gradient of the output, no two values of it the same
            direction = torch.arange(full.numel(), device=full.device).sin().to(full.dtype).view(full.shape)
            (gradient,) = torch.autograd.grad(y, x, direction if shard is None else shard.take(direction))
        return y.detach(), gradient


def _relative(actual: Tensor, expected: Tensor) -> float:
    """Return how far values are from the expected ones, in units of the tolerance."""
    difference = (actual - expected).abs().max() / expected.abs().max().clamp_min(1e-6)
    return float(difference) / TOLERANCE.get(expected.dtype, 3e-2)
