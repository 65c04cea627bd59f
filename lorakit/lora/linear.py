"""The training layer: a frozen layer of the base and one adapter, all of them parameters of one module.

Sharding engines gather a module's own parameters before its forward, so the adapter's tensors must not be in a child.
The base's tensors keep their names: ``q_proj.weight`` is still ``q_proj.weight`` (decision 0001).
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lorakit.lora.methods import METHODS, STARTS, LayerCall
from lorakit.lora.targets import Target
from lorakit.ops.dropout import dropout_mask


class AdapterModule(nn.Module):
    """Holds the base's tensors and the adapter's. Trainable ones are float32 masters, cast to the base's dtype."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self._trainable: dict[str, str] = {}  # name in the adapter -> name of the parameter here
        self._fixed: dict[str, str] = {}
        # without its parameters, because engines shard and free those that are here; in a tuple, so that it is no child
        shell = copy.copy(base)
        shell.__dict__["_parameters"] = dict.fromkeys(base._parameters)
        self._original = (shell,)
        self._dtypes = {name: tensor.dtype for name, tensor in base._parameters.items() if tensor is not None}
        for name, tensor in base._parameters.items():  # with the entries that are None, such as `bias`
            self.register_parameter(name, tensor)
        self.train(base.training)

    def add_tensor(self, name: str, tensor: Tensor, *, trainable: bool = True, stored: bool = True) -> None:
        """Register a tensor of the adapter as a parameter beside the base's. stored: False: it belongs to no file."""
        attribute = name.replace(".", "_")  # parameter names must not have dots
        value = beside(next(self.parameters()), tensor)
        self.register_parameter(attribute, nn.Parameter(value, requires_grad=trainable))
        if stored:
            (self._trainable if trainable else self._fixed)[name] = attribute

    def make_trainable(self, name: str, value: Tensor) -> None:
        """Replace a tensor of the base by a trainable float32 copy of its value."""
        self.register_parameter(name, nn.Parameter(value.detach().to(torch.float32, copy=True)))
        self._trainable[name] = name

    def full_tensors(self) -> tuple[str, ...]:
        """Return the names of the base's tensors that are trained in full here."""
        return tuple(name for name in self._trainable if name in self._dtypes)

    def original(self) -> nn.Module:
        """Return the base's own layer, with its tensors that are here; those trained in full in the base's dtype."""
        layer = copy.copy(self._original[0])
        parameters = {name: self._parameters.get(name) for name in layer._parameters}
        for name in self.full_tensors():
            trained = self.get_parameter(name).detach().to(self._dtypes[name])
            parameters[name] = nn.Parameter(trained, requires_grad=False)
        layer.__dict__["_parameters"] = parameters
        layer.__dict__["_buffers"] = {name: self._buffers.get(name, b) for name, b in layer._buffers.items()}
        return layer.train(self.training)

    def adapter_tensors(self) -> dict[str, nn.Parameter]:
        """Return the trainable tensors by name, looked up in each call, because engines replace parameter objects."""
        return {name: self.get_parameter(attribute) for name, attribute in self._trainable.items()}

    def name_in_adapter(self, attribute: str) -> str:
        """Return the adapter's name of a parameter; a tensor of the base has its own."""
        names = self._trainable | self._fixed
        return next((name for name, parameter in names.items() if parameter == attribute), attribute)

    def fixed_tensors(self) -> dict[str, nn.Parameter]:
        """Return the adapter's tensors that are not trainable, by name."""
        return {name: self.get_parameter(attribute) for name, attribute in self._fixed.items()}


def beside(weight: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor on a weight's device; on the CPU beside one on meta, because no file has its values to read."""
    return tensor if weight.is_meta else tensor.to(weight.device)


class LoraLinear(AdapterModule):
    """y = x W^T + b + s (dropout(x) A^T) B^T, or another method's formula. W is the base's own parameter."""

    bias: nn.Parameter | None
    by_onednn = False  # multiplies by W with oneDNN where it can (`ops.products`)

    def __init__(
        self, base: nn.Module, target: Target, *, method: str, dropout: float, tensors: Mapping[str, Tensor]
    ) -> None:
        super().__init__(base)
        self.out_features = target.out_features
        self.in_features = target.in_features
        self.kind = target.kind
        self.method = method
        self.rank = target.rank
        self.alpha = target.alpha
        self.scale = METHODS[method].scale(target.alpha, target.rank)
        self.dropout = dropout
        self.name = target.name
        for name in target.kind.copied_attributes:
            if hasattr(base, name):
                setattr(self, name, getattr(base, name))
        self._tensor_names = tuple(tensors)
        kinds = {**METHODS[method].tensors, **STARTS}
        for name, tensor in tensors.items():
            self.add_tensor(name, tensor, trainable=kinds[name].trainable, stored=kinds[name].stored)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that the method reads, by name."""
        return {name: self.get_parameter(name) for name in self._tensor_names}

    def forward(self, x: Tensor) -> Tensor:
        method = METHODS[self.method]
        call = self.inputs(x)
        tensors = self.tensors()
        y = method.fused(call, tensors, self.scale) if method.fused is not None else None
        return method.apply(call, tensors, self.scale) if y is None else y

    def inputs(self, x: Tensor) -> LayerCall:
        """Return this call of the layer, as the method reads it."""
        own = self._parameters.get("bias")
        bias = None if own is None else own.to(self._dtypes["bias"])  # a trainable bias is a float32 master
        has_dropout = self.dropout > 0 and self.training and x.is_floating_point()  # an embedding's x is token ids
        mask = dropout_mask(x, self.dropout, self.name) if has_dropout else None
        return LayerCall(self, self.kind, x, bias, mask)
