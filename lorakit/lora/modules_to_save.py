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
from lorakit.lora.module import AdapterModule
from lorakit.ops._internals import is_persistent_buffer


class FunctionalWrapper(AdapterModule):
    """Runs a module's own forward on the parameters and buffers of this wrapper."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__(base)
        for name, buffer in base._buffers.items():
            self.register_buffer(name, buffer, persistent=is_persistent_buffer(base, name))
        self._parameter_names = tuple(name for name, tensor in base._parameters.items() if tensor is not None)
        self._shell = (base,)  # in a tuple, so that it is not registered as a child

    def release_original(self) -> None:
        """Replace the shell's parameters by empty ones on the meta device, once their values were read."""
        shell = self._shell[0]
        for name in self._parameter_names:
            shell.register_parameter(name, nn.Parameter(torch.empty(0, device="meta"), requires_grad=False))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_shell" not in self.__dict__:  # in __init__, and in a deepcopy's empty object
                raise
            # code of the model reads attributes of its modules (num_experts, hidden_size)
            return getattr(self.__dict__["_shell"][0], name)

    def effective_tensor(self, name: str) -> Tensor:
        """Return the tensor that the module's forward gets as the parameter `name` in this pass."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = {name: self.effective_tensor(name) for name in self._parameter_names}
        return functional_call(self._shell[0], tensors | dict(self.named_buffers()), args, kwargs)


@final
class TrainableModule(FunctionalWrapper):
    """A module with some or all of its tensors trained in full (PEFT's ``modules_to_save``, and its ``bias``).

    `tied_name`: the adapter's name of a tensor that this module shares with another one; None if it shares none.
    """

    def __init__(self, base: nn.Module, trainable: tuple[str, ...]) -> None:
        super().__init__(base)
        self.tied_name: str | None = None
        for name in trainable:
            self.make_trainable(name)
        self.release_original()

    def share(self, name: str, tensor: nn.Parameter, source_name: str) -> None:
        """Use a tensor of another module as the parameter `name`; the adapter calls that tensor `source_name`."""
        self.register_parameter(name, tensor)
        self.tied_name = source_name

    def effective_tensor(self, name: str) -> Tensor:
        return self.get_parameter(name).to(self._dtypes[name])


@final
class TrainableTokens(AdapterModule):
    """An embedding with some trainable rows, such as those of new tokens (PEFT's ``trainable_tokens``).

    Tokens from the base's number of rows on have these rows alone. ``new_tokens``: text -> id, for those of the tokens
    that are not the base's.
    """

    def __init__(self, base: nn.Embedding, tokens: tuple[int, ...], new_tokens: Mapping[str, int]) -> None:
        super().__init__(base)
        self.num_base_rows, self.embedding_dim = base.num_embeddings, base.embedding_dim
        self.num_embeddings = max(base.num_embeddings, max(tokens) + 1)
        self.padding_idx, self.tokens, self.new_tokens = base.padding_idx, tokens, dict(new_tokens)
        self.embed_scale = getattr(base, "embed_scale", None)
        positions = torch.full((self.num_embeddings,), -1)  # token id -> row of the trainable tensor; -1: none
        positions[list(tokens)] = torch.arange(len(tokens))
        self.register_buffer("positions", _beside(base.weight, positions), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        is_grown = self.num_embeddings > self.num_base_rows
        known = ids.clamp(max=self.num_base_rows - 1) if is_grown else ids  # a new token has no row of the base's
        rows = nn.functional.embedding(known, self.get_parameter("weight"))
        positions = self.get_buffer("positions")[ids]
        trainable = self.get_parameter("trainable_tokens_delta").to(rows.dtype)  # rows, in spite of PEFT's name
        new_rows = nn.functional.embedding(positions.clamp(min=0), trainable)
        rows = torch.where((positions >= 0)[..., None], new_rows, rows)
        return scale_embedding(self, rows)


@final
class TiedTokenHead(AdapterModule):
    """A head that is tied to an embedding with trainable rows: its logits use the same rows."""

    def __init__(self, head: nn.Module, embedding: TrainableTokens) -> None:
        super().__init__(head)
        self.out_features, self.in_features = embedding.num_embeddings, embedding.embedding_dim
        self.register_parameter("trainable_tokens_delta", embedding.get_parameter("trainable_tokens_delta"))
        _register_tokens(self, embedding.tokens, embedding.get_parameter("weight"), embedding.num_base_rows)

    def forward(self, x: Tensor) -> Tensor:
        return _token_logits(self, x)


@final
class TokenHead(AdapterModule):
    """A head with rows of its own for new tokens, where it shares no weight with the embedding."""

    def __init__(self, head: nn.Linear, tokens: tuple[int, ...]) -> None:
        super().__init__(head)
        self.out_features, self.in_features = max(head.out_features, max(tokens) + 1), head.in_features
        self.embedding_dim, self.tokens = head.in_features, tokens
        _register_tokens(self, tokens, head.weight, head.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return _token_logits(self, x)


def _register_tokens(head: nn.Module, tokens: tuple[int, ...], weight: Tensor, num_base_rows: int) -> None:
    """Register the base's tokens among those with trainable rows, and the rows of these and of the others."""
    inside = [row for row, token in enumerate(tokens) if token < num_base_rows]
    added = [row for token, row in sorted(zip(tokens, range(len(tokens)), strict=True)) if token >= num_base_rows]
    base_tokens = [tokens[row] for row in inside]
    for name, indices in (("base_tokens", base_tokens), ("base_rows", inside), ("added_rows", added)):
        head.register_buffer(name, _beside(weight, torch.tensor(indices, dtype=torch.int64)), persistent=False)


def _token_logits(head: AdapterModule, x: Tensor) -> Tensor:
    """Return a head's logits, with its own rows for some of the base's tokens and behind these those of new ones."""
    weight, trainable = head.get_parameter("weight"), head.get_parameter("trainable_tokens_delta")
    base_tokens, base_rows, added_rows = (head.get_buffer(name) for name in ("base_tokens", "base_rows", "added_rows"))
    y = nn.functional.linear(x, weight, head._parameters.get("bias"))
    if len(base_tokens):
        y = replace_logit_rows(y, x, weight, base_tokens, trainable[base_rows])
    return torch.cat([y, nn.functional.linear(x, trainable[added_rows].to(x.dtype))], -1) if len(added_rows) else y


def _beside(weight: Tensor, indices: Tensor) -> Tensor:
    """Return indices on a weight's device; on the CPU beside one on meta, because no file has their values to read."""
    return indices if weight.is_meta else indices.to(weight.device)


def replace_logit_rows(y: Tensor, x: Tensor, weight: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """Return logits y = x W^T + b with rows `tokens` (n,) of W replaced by `rows` (n, in).

    Adds x (rows - W[tokens])^T instead of writing x rows^T: untrained rows have a difference of exactly 0, so their
    logits keep their bits. A product of n rows alone may be rounded otherwise than the product of all rows.
    """
    return y.index_add(-1, tokens, nn.functional.linear(x, (rows - weight[tokens]).to(x.dtype)))
