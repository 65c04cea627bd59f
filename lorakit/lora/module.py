"""A module that carries tensors of an adapter, all of them its own parameters: sharding engines gather a module's own
parameters before its forward. The base's tensors keep their names, so ``q_proj.weight`` is still ``q_proj.weight``.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class AdapterModule(nn.Module):
    """Tensors that learn are float32 masters, cast to what the base computes in. Subclasses are final."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self._learnt: dict[str, str] = {}
        self._fixed: dict[str, str] = {}
        for name, tensor in base._parameters.items():
            self.register_parameter(name, tensor)
        self.train(base.training)

    def add_tensors(
        self, tensors: Mapping[str, Tensor], *, fixed: tuple[str, ...] = (), derived: tuple[str, ...] = ()
    ) -> None:
        """Hold tensors of the adapter: those that learn, those that do not, and those that no file needs to hold."""
        for name, tensor in tensors.items():
            attribute = name.replace(".", "_")
            still = name in fixed or name in derived
            self.register_parameter(attribute, nn.Parameter(tensor, requires_grad=not still))
            if name not in derived:
                (self._fixed if still else self._learnt)[name] = attribute

    def make_trainable(self, name: str) -> None:
        """Let a tensor of the base learn: a float32 copy of it takes its place here, the base's own is left alone."""
        tensor = self.get_parameter(name)
        self.register_parameter(name, nn.Parameter(tensor.detach().to(torch.float32, copy=True)))
        self._learnt[name] = name

    def adapter_tensors(self) -> dict[str, nn.Parameter]:
        """The trainable tensors by name, looked up now: engines replace parameter objects."""
        return {name: self.get_parameter(attribute) for name, attribute in self._learnt.items()}

    def fixed_tensors(self) -> dict[str, nn.Parameter]:
        """Tensors that belong to the adapter and do not learn."""
        return {name: self.get_parameter(attribute) for name, attribute in self._fixed.items()}
