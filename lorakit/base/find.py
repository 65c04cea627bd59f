"""Find the folder of a base: a folder, a hub id or ``builtin:tiny``.

Imports no torch, because the process that only starts others looks for the base too.
"""

import json
import re
from functools import partial
from pathlib import Path
from typing import Final

from lorakit.errors import BaseModelError, HubError, did_you_mean, translate_error
from lorakit.files.atomic import MERGE_LEDGER, fast_digest, file_signature, measured_once
from lorakit.files.hub import download

BUILTIN: Final = {"builtin:tiny": "tiny"}
HUB_FILES: Final = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def find_base(name: str, revision: str | None = None) -> Path:
    """Return the folder of a base, downloaded if need be. Raises BaseModelError: where it was searched."""
    if name.startswith("builtin:"):
        if name not in BUILTIN:
            raise BaseModelError(f"base: {name!r} is not built in.{did_you_mean(name, BUILTIN)}")
        return Path(__file__).parent.parent / "assets" / BUILTIN[name]
    path = Path(name)
    if path.exists() and revision is not None:
        raise BaseModelError(f"base.revision: {name} is a path, which has no revisions; remove the key")
    if path.is_dir():
        _check_folder(path)
        return path
    if path.is_file() and path.suffix == ".gguf":
        from lorakit.base.gguf import open_gguf  # here, because it imports torch

        return open_gguf(path)
    if path.exists():
        raise BaseModelError(f"base: {name} is a file; a base is a folder, a .gguf file, a hub id or builtin:tiny")
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        close = did_you_mean(name, BUILTIN)
        raise BaseModelError(f"base: no folder {path.absolute()}, and {name!r} is no hub id.{close}")
    try:
        return download(name, revision, HUB_FILES)
    except HubError as problem:
        beside = path.parent.glob("*") if path.parent.is_dir() else []
        near = did_you_mean(path.name, (each.name for each in beside if each.is_dir()))
        missing = f"no folder {path.absolute()}.{near} And the hub gave no {name!r} (revision {revision or 'main'})"
        raise BaseModelError(f"base: {missing}: {problem}") from None


def _check_folder(folder: Path) -> None:
    """Raise BaseModelError unless this is a model folder, and the weight files of a merged one are those written."""
    has_config = (folder / "config.json").is_file()
    has_adapter = (folder / "adapter_config.json").exists()
    if has_adapter and not has_config:
        remedy = f"name its base here, and the patch as --adapter NAME={folder}"
        raise BaseModelError(f"base: {folder} is a patch, not a model; {remedy}")
    if has_adapter:  # which transformers would apply unasked
        raise BaseModelError(f"base: {folder} holds an adapter beside the model; move adapter_config.json elsewhere")
    if not has_config:
        raise BaseModelError(f"base: {folder.absolute()} has no config.json; not a model folder")
    if pipe := next((path for path in folder.iterdir() if path.exists() and not path.is_file() | path.is_dir()), None):
        raise BaseModelError(f"base: {pipe}: not a regular file, and reading it may never end; remove it")
    ledger = folder / MERGE_LEDGER
    failures = (OSError, ValueError, AttributeError)
    with translate_error(failures, BaseModelError, f"{ledger}: cannot be read, or a file that it names"):
        written = json.loads(ledger.read_text(encoding="utf-8")).get("files", {}) if ledger.is_file() else {}
        for name, digest in written.items():
            path = folder / name
            if measured_once(f"xxh3 of {path.resolve()} {file_signature(path)}", partial(fast_digest, path)) != digest:
                remedy = f"merge again, or if you changed it, delete {ledger}"
                raise BaseModelError(f"{path}: is not the file that the merge wrote, by its digest; {remedy}")


def find_tokenizer(name: str | None, base: Path) -> Path:
    """Return the folder of a tokenizer: ``name``, or the base's own. Raises BaseModelError: no such folder."""
    if name is None:
        return base
    if name.startswith("builtin:"):
        return find_base(name)
    if not Path(name).is_dir():
        raise BaseModelError(f"tokenizer: no folder {Path(name).absolute()}; name one with a tokenizer.json")
    return Path(name)
