"""Tensors of the base that learn as they are: modules whose own forward runs on other tensors, and single rows.

The module itself becomes a shell without tensors; its forward is called with those that are carried here, so any
architecture's module works as it is.
"""

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lorakit.lora.layer_kinds import scale_embedding
from lorakit.lora.module import AdapterModule


class FunctionalWrapper(AdapterModule):
    """Runs a module's own forward on tensors that are held here."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__(base)
        for name, buffer in base._buffers.items():
            self.register_buffer(name, buffer, persistent=name not in base._non_persistent_buffers_set)
        self._own = tuple(name for name, tensor in base._parameters.items() if tensor is not None)
        self._shell = (base,)  # in a tuple, so that it is no child of this module

    def release_original(self) -> None:
        """Leave the shell without memory; once everything is read from it."""
        shell = self._shell[0]
        for name in self._own:
            shell._parameters[name] = nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_shell" not in self.__dict__:
                raise
            return getattr(self.__dict__["_shell"][0], name)

    def effective_tensor(self, name: str) -> Tensor:
        """The tensor that takes a name's place in this pass."""
        raise NotImplementedError

    def forward(self, *inputs: Any, **named: Any) -> Any:
        tensors = {name: self.effective_tensor(name) for name in self._own}
        return functional_call(self._shell[0], tensors | dict(self.named_buffers()), inputs, named)


@final
class TrainableModule(FunctionalWrapper):
    """A module of which some tensors, or all, learn as they are (PEFT's ``modules_to_save``, and its ``bias``)."""

    def __init__(self, base: nn.Module, learnt: tuple[str, ...]) -> None:
        super().__init__(base)
        self.shared: str | None = None
        self._dtypes = {name: self.get_parameter(name).dtype for name in self._own}
        for name in learnt:
            self.make_trainable(name)
        self.release_original()

    def share(self, name: str, tensor: nn.Parameter, known_as: str) -> None:
        """Read a tensor that another module carries, under a name that the adapter knows it by."""
        self.register_parameter(name, tensor)
        self.shared = known_as

    def effective_tensor(self, name: str) -> Tensor:
        return self.get_parameter(name).to(self._dtypes[name])


@final
class TrainableTokens(AdapterModule):
    """An embedding of which some rows learn: new tokens (PEFT's ``trainable_tokens``)."""

    def __init__(self, base: nn.Embedding, tokens: tuple[int, ...]) -> None:
        super().__init__(base)
        self.num_embeddings, self.embedding_dim = base.num_embeddings, base.embedding_dim
        self.padding_idx, self.tokens = base.padding_idx, tokens
        self.embed_scale = getattr(base, "embed_scale", None)
        places = torch.full((base.num_embeddings,), -1)
        places[list(tokens)] = torch.arange(len(tokens))
        self.register_buffer("places", places, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        rows = nn.functional.embedding(ids, self.get_parameter("weight"))
        places = self.get_buffer("places")[ids]
        own = self.get_parameter("trainable_tokens_delta").to(rows.dtype)
        rows = torch.where((places >= 0)[..., None], nn.functional.embedding(places.clamp(min=0), own), rows)
        return scale_embedding(self, rows)


@final
class TiedTokenHead(AdapterModule):
    """The head that is tied to an embedding of which some rows learn: the same rows here."""

    def __init__(self, head: nn.Module, embedding: TrainableTokens) -> None:
        super().__init__(head)
        self.out_features, self.in_features = embedding.num_embeddings, embedding.embedding_dim
        self.register_parameter("trainable_tokens_delta", embedding.get_parameter("trainable_tokens_delta"))
        self.register_buffer("tokens", torch.tensor(embedding.tokens), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        weight, tokens = self.get_parameter("weight"), self.get_buffer("tokens")
        y = nn.functional.linear(x, weight, self._parameters.get("bias"))
        return replace_logit_rows(y, x, weight, tokens, self.get_parameter("trainable_tokens_delta"))


def replace_logit_rows(y: Tensor, x: Tensor, weight: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """y = x W^T + b as if W had these rows (n, in) in the places of its own at ``tokens`` (n,).

    By what they differ: W's own rows change nothing, however a product of fewer rows is rounded.
    """
    return y.index_add(-1, tokens, nn.functional.linear(x, (rows - weight[tokens]).to(x.dtype)))
