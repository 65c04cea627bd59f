"""Write the files of a merged model beside its weights: config, tokenizer, index, and the tokens that end an answer.

lorakit stops at the end token of the chat template. Others stop at ``eos_token_id`` of generation_config.json alone.
"""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lorakit.base.transformers_io import (
    GENERATION_CONFIG,
    TOKENIZER_FILES,
    check_recorded,
    has_tokenizer,
    load_tokenizer,
    read_generation_config,
)
from lorakit.errors import LorakitError, MergeError, translate_error
from lorakit.files.atomic import json_text
from lorakit.files.base_files import INDEX, BaseFiles, read_json
from lorakit.files.safetensors import dtype_name
from lorakit.files.text import Say
from lorakit.inference.prompts import end_token_ids
from lorakit.merging.plan import MergePlan
from lorakit.patch import Patch
from lorakit.patch.find import WeightedPatch
from lorakit.patch.pooling import copy_pooling
from lorakit.patch.prompting import trained_form
from lorakit.quant.files import quantization_config

NOT_COPIED: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""suffixes of weight files"""
FOLDERS: Final = ("additional_chat_templates", "[0-9]*_*")
"""sub-folders that belong to a model: chat templates, and modules of sentence-transformers such as 1_Pooling"""


def write_config_and_tokenizer(
    files: BaseFiles, plan: MergePlan, model: Path, tokenizer: Path, template: str | None, architecture: str
) -> None:
    """Copy the base's small files to ``model``, with the merge's changes. architecture: the class of the merged model.

    ``tokenizer``: the folder with the merged model's. ``template``: the patches' own, or None.
    """
    _copy_files(files, plan, model, tokenizer)
    if plan.embedding is not None:
        copy_pooling(plan.embedding.folder, model)
    if template is not None:
        (model / "chat_template.jinja").write_text(template, encoding="utf-8")
    if changed := _changed_config(files, plan, architecture):
        (model / "config.json").write_text(json_text(changed))
    if (files.folder / INDEX).is_file():
        weight_map = {tensor.name: name for name, tensors in plan.shards.items() for tensor in tensors}
        index = read_json(files.folder / INDEX)
        metadata = index["metadata"] if isinstance(index.get("metadata"), dict) else {}
        if weight_map != index["weight_map"] or plan.dtype or plan.vocabulary:
            metadata = {**metadata, "total_size": plan.num_bytes}
            metadata.pop("total_parameters", None)
            (model / INDEX).write_text(json_text({"metadata": metadata, "weight_map": weight_map}))


def write_end_tokens(base: Path, model: Path, weighted: Sequence[WeightedPatch], say: Say) -> list[int] | None:
    """Write the tokens that end an answer into a merged model, and return them; None if the base stops at all."""
    ends = missing_end_tokens(base, model, None, [one.patch for one in weighted], say) if weighted else None
    if ends is None:
        return None
    (model / GENERATION_CONFIG).write_text(ends.generation_config)
    files = GENERATION_CONFIG
    if not (base / GENERATION_CONFIG).is_file():  # such a base has them in its config
        config = read_json(model / "config.json")
        (model / "config.json").write_text(json_text({**config, "eos_token_id": ends.ids}))
        files = f"{GENERATION_CONFIG} and config.json"
    say(f"ends with  {ends.names}, as in training; added to eos_token_id in {files}")
    return ends.ids


def _changed_config(files: BaseFiles, plan: MergePlan, architecture: str) -> dict[str, Any] | None:
    """Return the merged model's config; None if the base's stays as it is."""
    config = files.config()
    is_dequantized = quantization_config(files.folder) is not None
    changes: dict[str, Any] = {}
    if plan.untied:
        changes["tie_word_embeddings"] = False
    if plan.vocabulary is not None and plan.vocabulary.parameters:
        changes["vocab_size"] = plan.vocabulary.vocabulary_size
    if plan.head is not None:
        names = dict(enumerate(plan.head.labels or ("LABEL_0",)))  # transformers' name of a single value
        changes |= {"architectures": [architecture], "id2label": {str(number): name for number, name in names.items()}}
        changes["label2id"] = {name: number for number, name in names.items()}
        changes |= {"problem_type": plan.head.problem_type} if plan.head.problem_type else {}
    pooling = None if plan.embedding is None else plan.embedding.pooling
    changes |= {} if pooling is None else {"matryoshka_dimensions": [*pooling.dimensions]}
    if plan.dtype is not None:
        changes["dtype"] = dtype_name(plan.dtype)
    if is_dequantized:
        config.pop("quantization_config", None)
    if not changes:
        return config if is_dequantized else None
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.update({key: value for key, value in changes.items() if part is config or key in part})
            if "dtype" in changes:
                part.pop("torch_dtype", None)
    return config


def _copy_files(files: BaseFiles, plan: MergePlan, model: Path, tokenizer: Path) -> None:
    for path in sorted(files.folder.iterdir()):
        if path.is_file() and not path.name.endswith(NOT_COPIED) and not path.name.startswith("."):
            shutil.copyfile(path, model / path.name)
    for path in [path for pattern in FOLDERS for path in files.folder.glob(pattern) if path.is_dir()]:
        shutil.copytree(path, model / path.name, dirs_exist_ok=True)
    if tokenizer != files.folder:
        for name in TOKENIZER_FILES:
            (model / name).unlink(missing_ok=True)
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, model / name)
    if plan.vocabulary is not None and plan.vocabulary.new_tokens:
        with translate_error(LorakitError, MergeError, "new tokens"):
            grown = load_tokenizer(tokenizer)
            check_recorded(grown, plan.vocabulary.new_tokens)  # which must keep their ids
        grown.backend_tokenizer.save(str(model / "tokenizer.json"))  # its other files are copied


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
