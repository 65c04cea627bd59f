"""Convert sections of a recipe: to a tokenizer, and to the adapter's settings, in which tokens are ids."""

import json
from pathlib import Path
from typing import Any

from lorakit.base.find import find_tokenizer
from lorakit.base.transformers_io import add_new_tokens, load_tokenizer
from lorakit.errors import DataError, TargetError, did_you_mean
from lorakit.files.base_files import read_json
from lorakit.lora import AdapterSpec
from lorakit.patch.prompting import NAMED_TEMPLATES, read_chat_template
from lorakit.recipe import Recipe


def load_recipe_tokenizer(recipe: Recipe, folder: Path) -> Any:
    """Load the tokenizer of a recipe for the base in ``folder``, with template and new tokens. Raises LorakitError."""
    tokenizer = load_tokenizer(find_tokenizer(recipe.base.tokenizer, folder))
    add_new_tokens(tokenizer, recipe.adapter.new_tokens, _num_rows(folder))
    if (template := recipe_template(recipe)) is not None:
        tokenizer.chat_template = template
    name = recipe.data.chat_template or ""
    wanted = NAMED_TEMPLATES.get(name, ())
    vocabulary = tokenizer.get_vocab() if wanted else {}
    # split like any text, they would teach an end of answers that no program stops at
    if missing := [token for token in wanted if token not in vocabulary]:
        remedy = f"add adapter.new_tokens: {json.dumps(missing)}, or choose a template of plain text, such as alpaca"
        raise DataError(f"data.chat_template: {name}: the tokenizer lacks {', '.join(missing)}; {remedy}")
    return tokenizer


def recipe_template(recipe: Recipe) -> str | None:
    """Return the text of `data.chat_template`; None: the template is the tokenizer's own."""
    file = recipe.data.chat_template
    return None if file is None else read_chat_template(file)


def adapter_spec(recipe: Recipe, folder: Path) -> AdapterSpec:
    """Return the settings of a recipe's adapter on the base in ``folder``, tokens as ids. Raises TargetError."""
    section = recipe.adapter
    settings = section.model_dump(exclude={"start_from"})  # whose settings are the section's (`patch_settings`)
    new: dict[str, int] = {}
    trainable = section.trainable_tokens
    if section.new_tokens or any(isinstance(token, str) for token in trainable):  # loading a tokenizer takes time
        words = load_tokenizer(find_tokenizer(recipe.base.tokenizer, folder))
        vocabulary = words.get_vocab()
        if unknown := [token for token in trainable if isinstance(token, str) and token not in vocabulary]:
            remedy = f"{did_you_mean(unknown[0], vocabulary)} A new token goes into adapter.new_tokens"
            raise TargetError(f"adapter.trainable_tokens: {unknown[0]!r} is no token of this base.{remedy}")
        trainable = tuple(vocabulary[token] if isinstance(token, str) else token for token in trainable)
        new = add_new_tokens(words, section.new_tokens, _num_rows(folder))
    head = {"num_values": recipe.objective.num_values}
    return AdapterSpec(**settings | head | {"trainable_tokens": trainable, "new_tokens": new})


def _num_rows(folder: Path) -> int | None:
    """Return the number of rows of a base's embedding; None if its config.json does not say."""
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size", config.get("vocab_size"))
    return size if isinstance(size, int) else None
