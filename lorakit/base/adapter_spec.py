"""A recipe's adapter section as plain values: tokens become the ids that the base's tokenizer gives them."""

from pathlib import Path

from lorakit.base.load import load_tokenizer
from lorakit.errors import TargetError, did_you_mean
from lorakit.lora import AdapterSpec
from lorakit.recipe import AdapterSection


def adapter_spec(section: AdapterSection, folder: Path) -> AdapterSpec:
    """The recipe's adapter section as plain values; tokens by the ids that the base in ``folder`` gives them.

    Raises:
        TargetError: a token that its tokenizer does not know.
    """
    return AdapterSpec(**section.model_dump() | {"trainable_tokens": _token_ids(section.trainable_tokens, folder)})


def _token_ids(tokens: tuple[str | int, ...], folder: Path) -> tuple[int, ...]:
    named = [token for token in tokens if isinstance(token, str)]
    if not named:
        return tuple(token for token in tokens if isinstance(token, int))
    known = load_tokenizer(folder).get_vocab()
    if unknown := [token for token in named if token not in known]:
        raise TargetError(
            f"adapter.trainable_tokens: {unknown[0]!r} is no token of this base.{did_you_mean(unknown[0], known)} Add it to"
            " its tokenizer and a row to its embedding first (add_tokens, resize_token_embeddings, save_pretrained)"
        )
    return tuple(known[token] if isinstance(token, str) else token for token in tokens)
