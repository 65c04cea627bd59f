"""Find the tokens that end an answer of patches and that other programs do not know from the base.

lorakit stops at the end token of the chat template. Others stop at ``eos_token_id`` of generation_config.json alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lorakit.base.transformers_io import has_tokenizer, load_tokenizer, read_generation_config
from lorakit.errors import LorakitError
from lorakit.files.atomic import json_text
from lorakit.files.text import Say
from lorakit.inference.prompts import end_token_ids
from lorakit.patch import Patch
from lorakit.patch.prompting import trained_form


@dataclass(frozen=True)
class EndTokens:
    """The tokens that end an answer, where the base lacks some of them."""

    ids: list[int]  # the base's own, and then those of training
    names: str  # text and id of those that the base lacks
    generation_config: str  # text of a generation_config.json: the base's, with all of the tokens


def missing_end_tokens(
    base: Path, tokenizer: Path, template: str | None, patches: Iterable[Patch], say: Say
) -> EndTokens | None:
    """Return the end tokens if ``base`` lacks one at which the patches were trained to stop; else None.

    ``tokenizer``: the folder of that of the patches. ``template``: their chat template; None: the tokenizer's. A
    tokenizer or template that cannot be read is said, and nothing is added.
    """
    if not has_tokenizer(tokenizer):
        return None
    raw = all(trained_form(patch.metadata).raw for patch in patches)
    try:
        settings = read_generation_config(base)
        own = settings.get("eos_token_id")
        words = load_tokenizer(tokenizer)
        words.chat_template = words.chat_template if template is None else template
        ids = end_token_ids(words, own, raw=raw)
    except LorakitError as problem:
        say(f"note: eos_token_id is the base's, which may not be where answers end: {problem}")
        return None
    if not (added := ids[len(end_token_ids(None, own)) :]):
        return None
    settings.pop("_from_model_config", None)
    names = ", ".join(f"{words.convert_ids_to_tokens(token)!r} ({token})" for token in added)
    return EndTokens(ids, names, json_text({**settings, "eos_token_id": ids}))
