"""Train tensors of the base in full: all or some tensors of a module, or single rows of an embedding.

The base's module becomes a shell without memory. Its own forward is called with the tensors of its wrapper
(`torch.func.functional_call`), so that a module of any architecture works without knowledge of its code.
"""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lorakit.lora.layer_kinds import scale_embedding
from lorakit.lora.linear import AdapterModule, beside
from lorakit.ops._internals import is_persistent_buffer


class FunctionalWrapper(AdapterModule):
    """Runs a module's own forward on the parameters and buffers of this wrapper."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__(base)
        for name, buffer in base._buffers.items():
            self.register_buffer(name, buffer, persistent=is_persistent_buffer(base, name))
        self._parameter_names = tuple(name for name, tensor in base._parameters.items() if tensor is not None)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_parameter_names" not in self.__dict__:  # in __init__, and in a deepcopy's empty object
                raise
            # code of the model reads attributes of its modules (num_experts, hidden_size)
            return getattr(self.__dict__["_original"][0], name)

    def effective_tensor(self, name: str) -> Tensor:
        """Return the tensor that the module's forward gets as the parameter `name`, in the base's dtype."""
        return self.get_parameter(name).to(self._dtypes[name])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = {name: self.effective_tensor(name) for name in self._parameter_names}
        return functional_call(self._original[0], tensors | dict(self.named_buffers()), args, kwargs)


@final
class TrainableModule(FunctionalWrapper):
    """A module with some or all of its tensors trained in full (PEFT's ``modules_to_save``, and its ``bias``)."""


@final
class TrainableTokens(AdapterModule):
    """An embedding with trainable rows (PEFT's ``trainable_tokens``). ``new_tokens``: text -> id, if not the base's."""

    def __init__(self, base: nn.Embedding, tokens: tuple[int, ...], new_tokens: Mapping[str, int]) -> None:
        super().__init__(base)
        self.num_base_rows = base.num_embeddings
        self.embedding_dim = base.embedding_dim
        self.num_embeddings = max(base.num_embeddings, max(tokens) + 1)
        self.padding_idx = base.padding_idx
        self.tokens = tokens
        self.new_tokens = dict(new_tokens)
        self.embed_scale = getattr(base, "embed_scale", None)
        row_of_token = torch.full((self.num_embeddings,), -1)  # token id -> row of the trainable tensor; -1: none
        row_of_token[list(tokens)] = torch.arange(len(tokens))
        self.register_buffer("row_of_token", beside(base.weight, row_of_token), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        is_grown = self.num_embeddings > self.num_base_rows
        known = ids.clamp(max=self.num_base_rows - 1) if is_grown else ids  # a new token has no row of the base's
        rows = nn.functional.embedding(known, self.get_parameter("weight"))
        row_of_token = self.get_buffer("row_of_token")[ids]
        trainable = self.get_parameter("trainable_tokens_delta").to(rows.dtype)  # rows, in spite of PEFT's name
        new_rows = nn.functional.embedding(row_of_token.clamp(min=0), trainable)
        rows = torch.where((row_of_token >= 0)[..., None], new_rows, rows)
        return scale_embedding(self, rows)


@final
class TokenHead(AdapterModule):
    """A head with trainable rows for some tokens: its own, or the tied embedding's. num_base_rows: base's tokens."""

    def __init__(self, head: nn.Module, tokens: tuple[int, ...], num_base_rows: int) -> None:
        super().__init__(head)
        weight = self.get_parameter("weight")
        self.out_features = max(num_base_rows, max(tokens) + 1)
        self.in_features = self.embedding_dim = int(head.in_features)  # type: ignore[arg-type]
        self.tokens = tokens
        inside = [row for row, token in enumerate(tokens) if token < num_base_rows]
        added = sorted(set(range(len(tokens))) - set(inside), key=lambda row: tokens[row])
        base_tokens = [tokens[row] for row in inside]
        for name, indices in (("base_tokens", base_tokens), ("base_rows", inside), ("added_rows", added)):
            self.register_buffer(name, beside(weight, torch.tensor(indices, dtype=torch.int64)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the base's tokens, and behind them those of new ones."""
        weight = self.get_parameter("weight")
        trainable = self.get_parameter("trainable_tokens_delta")
        base_tokens, base_rows, added_rows = map(self.get_buffer, ("base_tokens", "base_rows", "added_rows"))
        y = nn.functional.linear(x, weight, self._parameters.get("bias"))
        if len(base_tokens):
            y = replace_logit_rows(y, x, weight, base_tokens, trainable[base_rows])
        if len(added_rows):
            y = torch.cat([y, nn.functional.linear(x, trainable[added_rows].to(x.dtype))], -1)
        return y


def replace_logit_rows(y: Tensor, x: Tensor, weight: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """Return logits y = x W^T + b with rows `tokens` (n,) of W replaced by `rows` (n, in)."""
    # a difference is added, because that of untrained rows is 0, while a product of n rows alone may round otherwise
    return y.index_add(-1, tokens, nn.functional.linear(x, (rows - weight[tokens]).to(x.dtype)))
