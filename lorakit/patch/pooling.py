"""How a base or a patch pools the hidden states of an input to its embedding: sentence-transformers' files.

Invariant: a module, a setting or a mode that is not computed as sentence-transformers does it is refused by name.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch.nn.functional as F
from torch import Tensor

from lorakit.errors import BaseModelError, LorakitError, PatchError, translate_error
from lorakit.files.atomic import write_file, write_json
from lorakit.files.base_files import read_json
from lorakit.ops.encoder_head import CLS, LAST, MEAN

MODULES: Final = "modules.json"
FILES: Final = (
    MODULES, "sentence_bert_config.json", "config_sentence_transformers.json", "[0-9]*_*/config.json",
)  # fmt: skip
"""patterns of sentence-transformers' files in a folder"""
KINDS: Final = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
FLAGS: Final = {
    "pooling_mode_cls_token": CLS, "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": MEAN,
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
    """How an embedding is computed from the hidden states of an input's tokens after the last norm."""

    mode: str  # lasttoken, mean or cls
    normalize: bool  # to length 1
    max_tokens: int | None  # of an input; None: as many as the base has positions
    dimensions: Sequence[int]  # numbers of leading values that an embedding may be cut to (Matryoshka)
    separator: int | None = None  # the token before a second text, which the encoder of a head tells from the first

    def embedding(self, states: Tensor, dimensions: int | None = None) -> Tensor:
        """Return the embeddings (..., values) of pooled hidden states (..., width), cut to so many values.

        Raises LorakitError: this base or adapter allows no such cut.
        """
        allowed = self.dimensions
        if dimensions is not None and dimensions not in allowed:
            words = f"one of {', '.join(map(str, allowed))}"
            if not allowed:
                words = "this base's config.json, or this adapter's training, allows no cut (matryoshka); leave it out"
            elif isinstance(allowed, range):
                words = f"from 1 to {allowed[-1]}"
            raise LorakitError(f"dimensions: {words}, got {dimensions}")
        states = states[..., :dimensions]
        return F.normalize(states, dim=-1) if self.normalize else states


def patch_pooling(folder: Path, task_type: Any, metadata: Mapping[str, Any]) -> Pooling | None:
    """Return how a patch pools, by its recipe or the files beside it; None: no embeddings. Raises PatchError."""
    if objective := metadata.get("recipe", {}).get("objective"):
        dims = tuple(objective.get("matryoshka_dims") or ())
        return Pooling(objective.get("pooling") or LAST, True, None, dims) if objective["name"] == "embed" else None
    if task_type not in (None, "FEATURE_EXTRACTION") or not (folder / MODULES).is_file():
        return None
    with translate_error(BaseModelError, PatchError):
        return read_pooling(folder, {})


def write_pooling(folder: Path, mode: str, width: int, tokenizer: Iterable[Path]) -> None:
    """Write what sentence-transformers needs beside a patch: how it pools, to length 1, and the tokenizer's files.

    The keys are those that its versions before 6 read too. mode: as of ``Pooling``.
    """
    folder.mkdir(parents=True, exist_ok=True)  # a run's best patch comes after its files of pooling
    for path in tokenizer:
        write_file(folder / path.name, path.read_bytes())
    modules = [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(KINDS[1])
    ]
    settings = folder / str(modules[1]["path"]) / "config.json"
    settings.parent.mkdir(exist_ok=True)
    write_json(settings, {WIDTHS[1]: width, **{flag: name == mode for flag, name in FLAGS.items()}})
    write_file(folder / MODULES, json.dumps(modules, indent=2) + "\n")


def copy_pooling(source: Path, target: Path) -> None:
    """Copy sentence-transformers' files of a folder, if it has any, into another one."""
    for path in [path for pattern in FILES for path in source.glob(pattern)]:
        copy = target / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def read_pooling(folder: Path, config: Mapping[str, Any] | None = None) -> Pooling:
    """Return how the base of a folder pools. config: of the base, where the folder is a patch's.

    Raises BaseModelError: the folder does not say, or says something that is not computed here.
    """
    if not (folder / MODULES).is_file():
        raise BaseModelError(f"this base has no embeddings: {folder.name} has no {MODULES} of sentence-transformers")
    config = read_json(folder / "config.json") if config is None else config
    paths = _read_modules(folder / MODULES)
    transformer = _read(folder / "sentence_bert_config.json", TRANSFORMER)
    for path in paths[2:]:
        _read(folder / path / "config.json", NORMALIZE)
    _check_model(folder / "config_sentence_transformers.json")
    pooling = folder / paths[1] / "config.json"
    settings = _read(pooling, POOLING)
    dimensions = _dimensions(config, pooling, settings)
    return Pooling(_mode(pooling, settings), len(paths) == 3, transformer.get("max_seq_length"), dimensions)


def _read_modules(path: Path) -> list[str]:
    """Return the sub-folders of the modules: a Transformer, a Pooling, and perhaps a Normalize."""
    failures = (ValueError, RecursionError, TypeError, KeyError)
    with translate_error(failures, BaseModelError, f"{path}: not a list of modules, each with type and path"):
        modules = read_json(path, list)
        kinds = [str(one["type"]) for one in modules]
        paths = [str(one["path"]) for one in modules]
    # of another library, a name is the full one
    names = [kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else kind for kind in kinds]
    if names not in KINDS:
        raise BaseModelError(f"{path}: {' -> '.join(names)} is not computed here; {' -> '.join(KINDS[1])} is")
    if paths[0] != "":
        raise BaseModelError(f"{path}: the Transformer is in {paths[0]!r}; it must be in the folder of the base itself")
    if wrong := [one for one in paths[1:] if not re.fullmatch(r"\w[\w.-]{,63}", one)]:
        raise BaseModelError(f"{path}: path {wrong[0][:60]!r} is no sub-folder")
    return paths


def _mode(path: Path, settings: Mapping[str, Any]) -> str:
    """Return the one pooling mode of a module's settings; without any it is the mean, as in sentence-transformers."""
    given = settings.get("pooling_mode", [mode for flag, mode in FLAGS.items() if settings.get(flag)] or MEAN)
    modes = given if isinstance(given, list) else [given]
    if len(modes) != 1 or modes[0] not in (LAST, MEAN, CLS):
        given = " + ".join(map(str, modes))
        raise BaseModelError(f"{path}: pooling {given}: not computed here; {LAST}, {MEAN} or {CLS} is")
    if modes[0] == MEAN and settings.get("include_prompt") is False:
        raise BaseModelError(f"{path}: include_prompt: False: a prompt's tokens are in the mean here, as all others")
    return str(modes[0])


def _dimensions(config: Mapping[str, Any], path: Path, settings: Mapping[str, Any]) -> Sequence[int]:
    """Return the dimensions that a config allows in the keys that vLLM reads. path: of the settings."""
    width = next((settings[key] for key in WIDTHS if key in settings), None)
    text = config.get("text_config")
    hidden = (text if isinstance(text, dict) else config).get("hidden_size", width)
    if type(width) is not int or width != hidden:
        raise BaseModelError(f"{path}: {WIDTHS[0]}: {width!r}, and the base's hidden_size is {hidden!r}")
    allowed = config.get("matryoshka_dimensions")
    if allowed is None:
        return range(1, width + 1) if config.get("is_matryoshka") else ()
    if not isinstance(allowed, list) or not all(type(one) is int and 0 < one <= width for one in allowed):
        raise BaseModelError(f"config.json: matryoshka_dimensions: numbers from 1 to {width}")
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
    prompts, name = config.get("prompts"), config.get("default_prompt_name")
    if prompt := prompts.get(str(name)) if isinstance(prompts, Mapping) else None:
        problem = f"{name!r} would begin every input with {str(prompt)[:60]!r}; here inputs are embedded as they are"
        remedy = "Set it to null, and let clients write the prompt"
        raise BaseModelError(f"{path}: default_prompt_name: {problem}. {remedy}")
