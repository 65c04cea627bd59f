"""Push a patch to the hub: its files alone, without the paths of this machine.

A patch on disk names its base as its recipe did, because lorakit and PEFT load the base by that name. What is pushed
names it as others find it (decision 0045).
"""

import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lorakit.base.transformers_io import tokenizer_files
from lorakit.files.hub import check_push, is_path, is_repository_name, upload
from lorakit.patch import read_patch, write_patch
from lorakit.patch.pooling import copy_pooling


def push_patch(
    folder: str | Path, name: str, *, base: str | None = None, private: bool = False, message: str | None = None
) -> str:
    """Push a patch, read and checked first, into a repository of the hub in one commit; return the commit's address.

    ``base``: the name that the pushed patch gives its base; None is its own. Of other paths the last part stays, in the
    card too. Raises PatchError: damaged; HubError: its base is named by a path, or the hub refuses; TemporaryFailure.
    """
    folder = Path(folder)
    patch = read_patch(folder)
    recorded = patch.config.base_model
    check_push(name, str(folder), recorded, base)
    names = {} if recorded is None else {recorded: base or recorded}
    config = replace(patch.config, raw=_renamed(patch.config.raw, names))
    pushed = replace(patch, config=config, metadata=_renamed(patch.metadata, names))
    card = patch.folder / "README.md"
    text = _card(card.read_text(encoding="utf-8"), names, base or recorded) if card.is_file() else None
    message = message or f"Push {folder.resolve().name} with lorakit"
    with tempfile.TemporaryDirectory() as staging:
        ready = write_patch(Path(staging) / name.rpartition("/")[2], pushed, card=text)
        if patch.pooling is not None:
            copy_pooling(folder, ready)
            for file in tokenizer_files(folder):
                shutil.copyfile(file, ready / file.name)
        return upload(ready, name, private=private, message=message)


def _card(text: str, names: Mapping[str, str], base: str | None) -> str:
    """Return a card with other names; without the field `base_model` if no repository's name, which the hub refuses."""
    if names:
        longest_first = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        text = re.sub(rf"(?<![\w/.~-])(?:{longest_first})(?![\w/-]|\.\w)", lambda match: names[match[0]], text)
    # a recipe in the card has keys that the patch's own facts leave out
    text = re.sub(r'"([^"\n]+)"', lambda match: f'"{Path(match[1]).name}"' if is_path(match[1]) else match[0], text)
    if base is None or not is_repository_name(base):
        head, line, rest = text.partition("\n---\n")
        text = re.sub(r"(?m)^base_model:.*\n?", "", head) + line + rest
    return text


def _renamed(value: Any, names: dict[str, str]) -> Any:
    """Return nested values with other texts for those in ``names``, to which paths of this machine are added."""
    if isinstance(value, str):
        if is_path(value):
            names.setdefault(value, Path(value).name)
        return names.get(value, value)
    if isinstance(value, Mapping):
        return {key: _renamed(each, names) for key, each in value.items()}
    return [_renamed(each, names) for each in value] if isinstance(value, list | tuple) else value
