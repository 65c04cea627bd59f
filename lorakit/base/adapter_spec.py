"""Convert a recipe's adapter section to the settings that lora/ reads: plain values, tokens as ids."""

from pathlib import Path

from lorakit.base.load import load_tokenizer
from lorakit.base.new_tokens import add_new_tokens
from lorakit.errors import TargetError, did_you_mean
from lorakit.lora import AdapterSpec
from lorakit.recipe import AdapterSection


def adapter_spec(section: AdapterSection, folder: Path) -> AdapterSpec:
    """Return the adapter's settings; tokens become the ids that the tokenizer in ``folder`` gives them.

    Raises:
        TargetError: a token that is not in the tokenizer's vocabulary, or a new one that is.
    """
    settings = section.model_dump(exclude={"start_from"})  # whose settings are the section's (start_patch.py)
    new = add_new_tokens(load_tokenizer(folder), section.new_tokens) if section.new_tokens else {}
    tokens = {"trainable_tokens": _token_ids(section.trainable_tokens, folder), "new_tokens": new}
    return AdapterSpec(**settings | tokens)


def _token_ids(tokens: tuple[str | int, ...], folder: Path) -> tuple[int, ...]:
    texts = [token for token in tokens if isinstance(token, str)]
    if not texts:  # ids alone need no tokenizer, and loading one takes time
        return tuple(token for token in tokens if isinstance(token, int))
    vocabulary = load_tokenizer(folder).get_vocab()
    if unknown := [token for token in texts if token not in vocabulary]:
        raise TargetError(
            f"adapter.trainable_tokens: {unknown[0]!r} is no token of this base."
            f"{did_you_mean(unknown[0], vocabulary)} A token that the base does not have goes into adapter.new_tokens"
        )
    return tuple(vocabulary[token] if isinstance(token, str) else token for token in tokens)
