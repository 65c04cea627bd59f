"""Load a base's model and its tokenizer with transformers, and add new tokens to the tokenizer.

Invariant: no code of a base is executed, only safetensors are read, and no weight is left at random values.
"""

import contextlib
import logging as logs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from lorakit.base._internals import model_factory, without_length_warning
from lorakit.errors import BaseModelError, TargetError
from lorakit.files.base_files import INDEX, PROCESSOR_TEMPLATE, SINGLE, open_base_files, read_json
from lorakit.files.progress import library_call

TOKENIZER_FILES: Final = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", PROCESSOR_TEMPLATE,
)  # fmt: skip
MAX_LAYERS: Final = 10_000  # a config with more would fill the memory before its files are looked at
GENERATION_CONFIG: Final = "generation_config.json"
WHY_NO_TOKENIZER: Final = "no-tokenizer.txt"  # of a GGUF whose tokenizer is not known
OTHER_CLASSES: Final = "patches of another class come from lorakit.inject, and are shown and merged"


def load_base(folder: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Load a folder's causal language model, or encoder without a head. Raises BaseModelError: incomplete files."""
    with quiet_loading(), explain_load_errors(folder), library_call():
        factory, options = model_factory(load_config(folder))
        model, report = factory.from_pretrained(
            folder,
            **options,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    check_complete(folder, model, report)
    return model.to(device).eval()


def check_complete(folder: Path, model: nn.Module, report: Mapping[str, Any]) -> None:
    """Raise BaseModelError if a folder lacks tensors of a model, or has layers that the model lacks, by its report."""
    if layer := _left_out_layer(model, report["unexpected_keys"]):
        remedy = "put its number of layers right, or save the shorter model with save_pretrained"
        raise BaseModelError(f"{folder}: its files have {layer}, and by its config.json it has none; {remedy}")
    if "score.weight" in report["unexpected_keys"]:
        raise BaseModelError(f"{folder}: is a classifier or gives rewards (score.weight); load its base and adapter")
    if not report["missing_keys"] and not report["mismatched_keys"]:
        return
    shard_of = open_base_files(folder).shard_of
    problems = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    for name, stored, expected in sorted(report["mismatched_keys"]):
        where = f" in {shard_of[name].path.name}" if name in shard_of else ""
        problems.append(f"{name}{where} is {tuple(stored)} instead of {tuple(expected)}")
    file = folder / (INDEX if (folder / INDEX).is_file() else SINGLE)
    kind = type(model).__name__
    names = named_classes(folder)
    text = f"{len(problems)} tensors of {kind} are missing or of another shape: {'; '.join(problems[:5])}"
    if names and kind not in names:
        text += f". config.json says {', '.join(names)}: recipes need a causal language model; {OTHER_CLASSES}"
    raise BaseModelError(f"{file}: {text}")


def _left_out_layer(model: nn.Module, unused: Iterable[str]) -> str | None:
    """Return a layer among a base's unused tensors that is like the model's own; None if there is none."""
    # tensors of other kinds are unused on purpose, such as those of layers that predict further tokens
    own = [name for name, _ in model.named_parameters()]
    kinds = {re.sub(r"\d+", "#", name) for name in own}
    layers: dict[str, bool] = {}
    for name in unused:
        if match := re.match(r"(.*?\.\d+)\.", name):
            layers[match[1]] = layers.get(match[1], True) and re.sub(r"\d+", "#", name) in kinds
    alike = (layer for layer, is_alike in sorted(layers.items()) if is_alike)
    return next((layer for layer in alike if not any(name.startswith(f"{layer}.") for name in own)), None)


def named_classes(folder: Path) -> list[str]:
    """Return the names of model classes in a base's config.json: ``architectures``."""
    names = read_json(folder / "config.json").get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def load_skeleton(folder: Path, classes: Sequence[str] = (), *, num_labels: int = 0) -> nn.Module:
    """Build the model of a folder on meta from its config alone: names and shapes; weight files need not exist.

    classes: the first that transformers has is built, by default what `load_base` loads, or for `num_labels` labels.
    """
    with quiet_loading(), explain_load_errors(folder):
        import transformers

        config = load_config(folder)
        factory, options = model_factory(config)
        if num_labels:
            factory, options = transformers.AutoModelForSequenceClassification, {}
        build: Any = partial(factory.from_config, trust_remote_code=False, **options)
        config.num_labels = num_labels or config.num_labels
        for name in reversed(classes):
            known = getattr(transformers, name, None)
            base = transformers.PreTrainedModel  # itself no model
            if isinstance(known, type) and issubclass(known, base) and known is not base:
                build = known
        with torch.device("meta"):
            return build(config)


def vocabulary_size(model: nn.Module) -> int:
    """Return the number of rows of a model's input embedding."""
    return int(model.get_input_embeddings().num_embeddings)  # type: ignore[operator]


def generation_settings(**settings: Any) -> Any:
    """Return a generation config of these settings and transformers' defaults, without those of the base."""
    from transformers import GenerationConfig

    return GenerationConfig(**settings)


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the settings that a folder's model generates with: generation_config.json, or what config.json has."""
    if (folder / GENERATION_CONFIG).is_file():
        return read_json(folder / GENERATION_CONFIG)
    config = load_config(folder)
    from transformers import GenerationConfig

    return GenerationConfig.from_model_config(config).to_diff_dict()


def load_config(folder: Path) -> Any:
    """Return a base's config, completed by transformers. Raises BaseModelError: it cannot be read."""
    own = read_json(folder / "config.json")
    for part in (own, own.get("text_config")):
        layers = (part.get("num_hidden_layers") or 0) if isinstance(part, dict) else 0
        if type(layers) is not int or not 0 <= layers <= MAX_LAYERS:
            raise BaseModelError(f"{folder}: config.json: num_hidden_layers: from 0 to {MAX_LAYERS:,}, got {layers!r}")
    with quiet_loading(), explain_load_errors(folder):
        from transformers import AutoConfig  # here, because importing it prints too and takes seconds

        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a base's folder. Raises BaseModelError: there is none, or it cannot be loaded."""
    check_tokenizer(folder)
    with quiet_loading(), explain_load_errors(folder):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not tokenizer.chat_template and (folder / PROCESSOR_TEMPLATE).is_file():
        tokenizer.chat_template = read_json(folder / PROCESSOR_TEMPLATE).get("chat_template")
    return without_length_warning(tokenizer)


def check_tokenizer(folder: Path) -> None:
    """Raise BaseModelError unless a folder has a tokenizer; where there is none, transformers makes an empty one."""
    if not has_tokenizer(folder):
        note = folder / WHY_NO_TOKENIZER
        why = f" ({note.read_text(encoding='utf-8')} instead)" if note.is_file() else ""
        remedy = "name a folder that has one: base.tokenizer in a recipe, --tokenizer, or lorakit.load(tokenizer=...)"
        raise BaseModelError(f"{folder}: has no tokenizer{why}; {remedy}")


def has_tokenizer(folder: Path) -> bool:
    return bool(tokenizer_files(folder))


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a folder that belong to its tokenizer."""
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


@contextlib.contextmanager
def explain_load_errors(folder: Path) -> Iterator[None]:
    """Turn any error inside the block into a BaseModelError that names the folder."""
    try:
        yield
    except Exception as problem:  # because transformers' own code fails in many ways on a user's files
        if isinstance(problem, KeyError) and problem.args == ("metadata",):  # which transformers needs
            raise BaseModelError(f'{folder / INDEX}: has no "metadata"; add "metadata": {{}}') from None
        if "Unrecognized configuration class" in str(problem):  # and then the names of all that it has
            kind = ", ".join(named_classes(folder)) or "a model of this kind"
            text = f"{kind} is not a causal language model, which recipes and answers need; {OTHER_CLASSES}"
            raise BaseModelError(f"{folder}: {text}") from None
        raise BaseModelError(f"{folder}: transformers cannot load it: {type(problem).__name__}: {problem}") from None


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Hide log messages and transformers' progress bars; lorakit checks their subjects itself and raises.

    Not `quiet_libraries`, because other threads of a user's process may print and warn.
    """
    from transformers.utils import logging

    disabled = logs.root.manager.disable
    progress_bars = logging.is_progress_bar_enabled()
    # every logger, not transformers' alone, because it imports DeepSpeed where that is installed
    logs.disable(logs.WARNING)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logs.disable(disabled)
        if progress_bars:
            logging.enable_progress_bar()


def add_new_tokens(tokenizer: Any, names: Sequence[str], num_rows: int | None = None) -> dict[str, int]:
    """Add tokens to a tokenizer in place, each as one id that is never split, and return the ids in order.

    ``num_rows``: of the base's embedding. A token that the tokenizer has with an id from there on is new to the base.
    None: the base has all tokens of the tokenizer.
    Raises TargetError: the base has a token already, or a token is named twice, or would not be one id.
    """
    if not names:
        return {}
    from tokenizers import AddedToken

    vocabulary = tokenizer.get_vocab()
    in_base = {name: token for name, token in vocabulary.items() if num_rows is None or token < num_rows}
    problems = [f"{name!r} is named twice" for name in dict.fromkeys(names) if list(names).count(name) > 1]
    problems += [
        f"{name!r} is a token of this base already, id {in_base[name]}; name it in trainable_tokens to train its row"
        for name in dict.fromkeys(names)
        if name in in_base
    ]
    # not special, because decoding drops special tokens, and an answer shows these
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in names}
    last = max(ids.values())
    problems += [
        f"the tokenizer has {name!r} too, id {token}, and the base has no row for it; name it too"
        for name, token in vocabulary.items()
        if name not in in_base and name not in ids and token < last
    ]
    known = set(in_base.values())
    for name, token in ids.items():
        coded = list(tokenizer(f"a{name}b", add_special_tokens=False, verbose=False)["input_ids"])
        is_one = token not in known and coded.count(token) == 1 and tokenizer.decode([token]) == name
        if name not in in_base and not is_one:
            split = f"'a{name}b' is {tokenizer.convert_ids_to_tokens(coded)}"
            problems.append(f"{name!r} does not become one token: {split}; choose another text, such as <|tool|>")
    if problems:
        raise TargetError("\n".join(f"adapter.new_tokens: {problem}" for problem in problems))
    return ids


def check_recorded(tokenizer: Any, recorded: Mapping[str, int]) -> None:
    """Add the new tokens of a patch to a tokenizer. Raises TargetError: they get other ids than in training."""
    vocabulary = tokenizer.get_vocab()
    ids = add_new_tokens(tokenizer, [name for name, token in recorded.items() if vocabulary.get(name) != token])
    if wrong := [name for name, token in ids.items() if recorded[name] != token]:
        now = f"this tokenizer gives it {ids[wrong[0]]}; use the tokenizer of training"
        raise TargetError(f"the token {wrong[0]!r} had the id {recorded[wrong[0]]} in training, and {now}")
