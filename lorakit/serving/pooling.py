"""Read how a base's folder pools the hidden states of an input to its embedding: sentence-transformers' files.

Invariant: a module, a setting or a mode that serving does not compute as sentence-transformers does is refused by name.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lorakit.decoding.embedding import LAST
from lorakit.errors import BaseModelError
from lorakit.files.base_files import read_json

MODULES: Final = "modules.json"
MEAN = "mean"
KINDS: Final = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
FLAGS: Final = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": LAST,
}  # fmt: skip
"""key of a pooling's config before sentence-transformers 6 -> mode"""
WIDTHS: Final = ("embedding_dimension", "word_embedding_dimension")
Known = Mapping[str, Sequence[Any] | None]
"""key of a file -> values that are computed here; None: any, or checked elsewhere"""
TRANSFORMER: Final[Known] = {
    "do_lower_case": (False,), "transformer_task": ("feature-extraction",), "module_output_name": ("token_embeddings",),
    "max_seq_length": None, "unpad_inputs": None,
    # with `message`, sentence-transformers 6 renders texts by the chat template
    "modality_config": ({"text": {"method": "forward", "method_output_name": "last_hidden_state"}}, {"text": {}}, {}),
}  # fmt: skip
POOLING: Final[Known] = dict.fromkeys([*FLAGS, *WIDTHS, "pooling_mode", "include_prompt"])
NORMALIZE: Final[Known] = {
    "module_input_name": ("sentence_embedding",), "module_output_name": ("sentence_embedding",),
}  # fmt: skip


@dataclass(frozen=True)
class Pooling:
    """How an embedding is computed from the hidden states of an input's tokens after the last norm.

    mode: ``lasttoken`` or ``mean``. normalize: to length 1. max_tokens: of an input; None: as many as the base has
    positions. dimensions: numbers of leading values that an embedding may be cut to (Matryoshka).
    """

    mode: str
    normalize: bool
    max_tokens: int | None
    dimensions: Sequence[int]


def read_pooling(folder: Path) -> Pooling:
    """Return how the base of a folder pools.

    Raises BaseModelError: the folder does not say, or says something that is not computed here.
    """
    if not (folder / MODULES).is_file():
        raise BaseModelError(
            f"this base has no embeddings: {folder.name} has no {MODULES} of sentence-transformers, which says how they"
            " are pooled"
        )
    paths = _read_modules(folder / MODULES)
    transformer = _read(folder / "sentence_bert_config.json", TRANSFORMER)
    for path in paths[2:]:
        _read(folder / path / "config.json", NORMALIZE)
    _check_model(folder / "config_sentence_transformers.json")
    pooling = folder / paths[1] / "config.json"
    settings = _read(pooling, POOLING)
    dimensions = _dimensions(folder, pooling, settings)
    return Pooling(_mode(pooling, settings), len(paths) == 3, transformer.get("max_seq_length"), dimensions)


def _read_modules(path: Path) -> list[str]:
    """Return the sub-folders of the modules: a Transformer, a Pooling, and perhaps a Normalize."""
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        kinds = [str(one["type"]) for one in modules]
        paths = [str(one["path"]) for one in modules]
    except (ValueError, RecursionError, TypeError, KeyError) as problem:
        raise BaseModelError(f"{path}: not a list of modules, each with type and path: {problem}") from None
    # of another library, a name is the full one
    names = [kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else kind for kind in kinds]
    if names not in KINDS:
        raise BaseModelError(f"{path}: {' -> '.join(names)} is not computed here; {' -> '.join(KINDS[1])} is")
    if paths[0] != "":
        raise BaseModelError(f"{path}: the Transformer is in {paths[0]!r}; it must be in the folder of the base itself")
    return paths


def _mode(path: Path, settings: Mapping[str, Any]) -> str:
    """Return the one pooling mode of a module's settings; without any it is the mean, as in sentence-transformers."""
    given = settings.get("pooling_mode", [mode for flag, mode in FLAGS.items() if settings.get(flag)] or MEAN)
    modes = given if isinstance(given, list) else [given]
    if len(modes) != 1 or modes[0] not in (LAST, MEAN):
        raise BaseModelError(f"{path}: pooling {' + '.join(map(str, modes))}: not computed here; {LAST} or {MEAN} is")
    if modes[0] == MEAN and settings.get("include_prompt") is False:
        raise BaseModelError(
            f"{path}: include_prompt: False: a prompt's tokens are in the mean here, as all of an input"
        )
    return str(modes[0])


def _dimensions(folder: Path, path: Path, settings: Mapping[str, Any]) -> Sequence[int]:
    """Return the dimensions that config.json allows in the keys that vLLM reads."""
    config = read_json(folder / "config.json")
    width = next((settings[key] for key in WIDTHS if key in settings), None)
    hidden = (config.get("text_config") or config).get("hidden_size", width)
    if type(width) is not int or width != hidden:
        raise BaseModelError(f"{path}: {WIDTHS[0]}: {width!r}, and the base's hidden_size is {hidden!r}")
    allowed = config.get("matryoshka_dimensions")
    if allowed is None:
        return range(1, width + 1) if config.get("is_matryoshka") else ()
    if not isinstance(allowed, list) or not all(type(one) is int and 0 < one <= width for one in allowed):
        raise BaseModelError(f"{folder / 'config.json'}: matryoshka_dimensions: numbers from 1 to {width}")
    return tuple(allowed)


def _read(path: Path, known: Known) -> dict[str, Any]:
    """Return the settings of a file, of which all keys and values are known; none if there is no such file."""
    settings = read_json(path) if path.is_file() else {}
    for key, value in settings.items():
        if key not in known and value not in (None, False, {}):
            raise BaseModelError(f"{path}: {key}: not known here, and it may change the embeddings")
        accepted = known.get(key)
        if value is not None and accepted is not None and value not in accepted:
            raise BaseModelError(f"{path}: {key}: {value!r} is not computed here; {accepted[0]!r} is")
    return settings


def _check_model(path: Path) -> None:
    config = read_json(path) if path.is_file() else {}
    if config.get("model_type", "SentenceTransformer") != "SentenceTransformer":
        raise BaseModelError(f"{path}: model_type: {config['model_type']!r} is not computed here")
    name = config.get("default_prompt_name")
    if prompt := (config.get("prompts") or {}).get(name):
        raise BaseModelError(
            f"{path}: default_prompt_name: {name!r} would begin every input with {prompt[:60]!r}; here inputs are"
            " embedded as they are. Set it to null, and let clients write the prompt"
        )
