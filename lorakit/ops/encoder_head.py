"""Pool the hidden states of a row to one, and compute the head of transformers' classifier of an encoder from it.

The head is BERT's pooler and classifier, RoBERTa's two layers, and so on. The class itself computes it, with one token
for each row: its encoder is replaced by what gives back the states that it is given. So no kind of head is written down
here, and a head whose pooling is not that of one token is refused.
"""

import copy
from collections.abc import Iterator
from typing import Any, Final, cast, final

import torch
from torch import Tensor, nn

from lorakit.errors import TargetError

CLS: Final = "cls"  # mode of pooling: the state of a row's first token
MEAN: Final = "mean"  # that of all its tokens
LAST: Final = "lasttoken"  # the state of its last one
PROBE: Final = (2, 3)  # rows and tokens


def pooled_rows(states: Tensor, mask: Tensor, mode: str) -> Tensor:
    """Return the pooled state of each row, (rows, width), by CLS or MEAN.

    states: of all tokens, (rows, tokens, width). mask: (rows, tokens), 1 for those that count.
    """
    if mode == CLS:
        return states[:, 0]
    return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def token_types(ids: Tensor, separators: Tensor | int) -> Tensor:
    """Return transformers' `token_type_ids`: 1 behind the first separator of a row, whose second text is there.

    ids: (rows, tokens). separators: the token, or that of each row, (rows, 1); -1: none.
    """
    ends = (ids == separators).long()
    return (ends.cumsum(1) > ends).long()


def is_encoder(model: nn.Module) -> bool:
    """True if a model of transformers has no head, so that its outputs are hidden states."""
    # Llama 4's class with a head names itself as its base model
    return getattr(model, "base_model", None) is model and model.get_output_embeddings() is None


@final
class EncoderHead(nn.Module):
    """Pooled hidden states of rows, (rows, width) -> their values, (rows, values). Without dropout, as a base."""

    def __init__(self, config: Any, num_values: int) -> None:
        """Build it on meta for an encoder's config. Raises TargetError: transformers has none, or one of another form.

        Its tensors have the names of the class, behind ``model.``; with what pools for it in the encoder.
        """
        from transformers import AutoModelForSequenceClassification

        super().__init__()
        config = copy.deepcopy(config)
        config.num_labels = num_values
        config._attn_implementation = "eager"  # of layers that are thrown away, whatever the encoder's own are now
        kind = type(config).__name__.removesuffix("Config")
        try:
            with torch.device("meta"):
                model = AutoModelForSequenceClassification.from_config(
                    config, dtype=torch.float32, trust_remote_code=False
                )
            self.encoder_name = str(model.base_model_prefix)
            setattr(model, self.encoder_name, _GivenStates(getattr(model.base_model, "pooler", None)))
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
            self.model = model
            self.has_types = getattr(config, "type_vocab_size", 0) > 1  # of BERT: a row's second text is marked
            self.separator: int | None = None  # the token before that text; None: rows are of one text
            self.mode = self._find_mode(config.get_text_config().hidden_size, num_values)
        except Exception as problem:  # of transformers' own code, given a token for each row
            raise TargetError(f"{kind}: no classifier of this encoder is known: {problem}") from None

    def _find_mode(self, width: int, num_values: int) -> str:
        """Return the pooling that gives the values of full rows from one state for each. Raises LookupError: none."""
        probe = copy.deepcopy(self).to_empty(device="cpu")
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in probe.parameters():
                parameter.normal_(0.0, 0.1, generator=generator)
            for buffer in probe.buffers():
                buffer.zero_()
            states = torch.randn(*PROBE, width, generator=generator, device="cpu")
            expected = probe._values(states)
            for mode in (CLS, MEAN):
                values = probe(pooled_rows(states, torch.ones(PROBE, device="cpu"), mode))
                if values.shape == (len(states), num_values) and torch.allclose(values, expected, atol=1e-5):
                    return mode
        raise LookupError("its values are neither of the first token nor of the mean")

    def forward(self, states: Tensor) -> Tensor:
        return self._values(states[:, None])

    def _values(self, states: Tensor) -> Tensor:
        """Return the values of rows, given the states of all of their tokens, (rows, tokens, width)."""
        mask = torch.ones(states.shape[:2], dtype=torch.int64, device=states.device)
        return cast(Tensor, self.model(inputs_embeds=states, attention_mask=mask).logits)

    def separate(self, tokenizer: Any) -> None:
        """Let the second text of a row be marked, where the encoder and its tokenizer tell it from the first.

        Raises TargetError: the tokenizer marks it in another way than behind its separator.
        """
        if not self.has_types or "token_type_ids" not in getattr(tokenizer, "model_input_names", ()):
            return
        coded = tokenizer("a", "b", return_tensors="pt")
        self.separator = tokenizer.sep_token_id
        if not torch.equal(token_types(coded["input_ids"], tokenizer.sep_token_id), coded["token_type_ids"]):
            raise TargetError(f"{type(tokenizer).__name__}: its token_type_ids do not begin behind its sep_token")

    def parts(self) -> tuple[str, ...]:
        """Return the names of the head's modules, such as `pooler` and `classifier`, as PEFT's `modules_to_save`."""
        names = (name.removeprefix(f"model.{self.encoder_name}.") for name, _ in self.own_modules())
        return tuple(dict.fromkeys(name.removeprefix("model.").partition(".")[0] for name in names))

    def own_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield name and module of each part with tensors."""
        return ((name, one) for name, one in self.named_modules() if any(True for _ in one.parameters(recurse=False)))


class _GivenStates(nn.Module):
    """Stands for an encoder: the embeddings that it is given are its last hidden states."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, *_: Any, inputs_embeds: Tensor, **others: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        pooler_output = None if self.pooler is None else self.pooler(inputs_embeds)
        return BaseModelOutputWithPooling(last_hidden_state=inputs_embeds, pooler_output=pooler_output)
