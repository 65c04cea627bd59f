"""How prompts are written: the base's chat template and tokenizer settings, and the form of the rows in training.

The same weights with another template or begin token read another text than the adapter was trained on.
"""

import hashlib
import json
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lorakit.errors import BaseModelError, DataError, did_you_mean, translate_error
from lorakit.files.atomic import MERGE_LEDGER
from lorakit.files.base_files import PROCESSOR_TEMPLATE, read_json

SETTINGS: Final = (
    "bos_token", "eos_token", "pad_token", "unk_token", "add_bos_token", "add_eos_token", "add_prefix_space",
    "split_special_tokens",
)  # fmt: skip
"""keys of ``tokenizer_config.json`` that change the tokens of a text, or where an answer ends"""
MAX_TEMPLATE_BYTES: Final = 1_000_000
ASSETS: Final = Path(__file__).parent.parent / "assets"
NAMED_TEMPLATES: Final[Mapping[str, tuple[str, ...]]] = {
    "alpaca": (),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": (),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "vicuna": (),
    "zephyr": (),
}
"""name of a chat template of `assets/chat_templates` -> the tokens that it writes besides the tokenizer's own"""


@dataclass(frozen=True)
class PromptForm:
    """The form of the rows that a patch was trained on, in which it is to be prompted."""

    raw: bool = False  # prompts were plain text, without the chat template
    system: str | None = None  # system prompt of every row
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """variables of the chat template: `data.chat_template_kwargs`"""

    def notes(self) -> list[str]:
        """Return how prompts are to be written, where a user's message alone is not the form of the rows."""
        notes = []
        if self.raw:
            notes.append("its rows were plain text: prompts go alone, without chat template (/v1/completions)")
        if self.system is not None:
            system = json.dumps(self.system, ensure_ascii=False)
            notes.append(f"its rows began with the system prompt {system}, which every request needs")
        if self.template_kwargs:
            kwargs = json.dumps(self.template_kwargs)
            notes.append(f"its chat template had variables, which every chat needs (chat_template_kwargs): {kwargs}")
        return notes


CHAT: Final = PromptForm()  # through the chat template, where the base has one


def trained_form(metadata: Mapping[str, Any]) -> PromptForm:
    """Return the form of a patch's training rows; chat without a system prompt if it is not recorded, or was mixed."""
    rows = metadata.get("data", {}).get("train", {})
    raw = rows.get("plain") is not None and 0 < rows["plain"] == rows.get("rows")
    return PromptForm(raw, rows.get("system"), metadata.get("chat_template_kwargs") or {})


def merged_form(folder: Path) -> PromptForm:
    """Return the form of prompts of a base; in a merged model that of the rows of its patches."""
    recorded = _read(folder / MERGE_LEDGER).get("prompting")
    return PromptForm(**recorded) if isinstance(recorded, dict) else CHAT


def common_template(metadata: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the chat template that all patches bring with them (`data.chat_template`); None: the base's is used."""
    templates = {one.get("chat_template") for one in metadata}
    return templates.pop() if len(templates) == 1 else None


def read_chat_template(path: str, key: str = "data.chat_template") -> str:
    """Return the chat template of a name of NAMED_TEMPLATES, or in a file. Raises DataError: unreadable or blank."""
    if path in NAMED_TEMPLATES:
        return (ASSETS / "chat_templates" / f"{path}.jinja").read_text(encoding="utf-8")
    try:
        if (status := Path(path).stat()).st_size > MAX_TEMPLATE_BYTES or not stat.S_ISREG(status.st_mode):
            raise DataError(f"{key}: {path}: not a regular file of up to {MAX_TEMPLATE_BYTES:,} bytes")
        text = Path(path).read_text(encoding="utf-8")
    except OSError as problem:
        named = f"; without it the base's own is used; by name there are {', '.join(NAMED_TEMPLATES)}."
        named += did_you_mean(path, NAMED_TEMPLATES)
        raise DataError(f"{key}: {Path(path).absolute()}: {problem.strerror}{named}") from None
    except UnicodeDecodeError as problem:
        raise DataError(f"{key}: {path}: not UTF-8: {problem}") from None
    if not text.strip():
        raise DataError(f"{key}: {path}: is empty")
    from jinja2 import Environment, TemplateSyntaxError

    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except TemplateSyntaxError as problem:
        if "generation" not in str(problem.message):  # a tag of transformers' own
            raise DataError(f"{key}: {path}:{problem.lineno}: {problem.message}") from None
    return text


def chat_template_digest(folder: Path) -> str | None:
    """Return a digest of a base's chat template; None if it has none."""
    file = folder / "chat_template.jinja"  # which transformers prefers to the template in the config
    if file.is_file():
        with translate_error(UnicodeDecodeError, BaseModelError, f"{file}: not UTF-8"):
            template: Any = file.read_text(encoding="utf-8")
    else:
        template = _read(folder / "tokenizer_config.json").get("chat_template")
        template = template or _read(folder / PROCESSOR_TEMPLATE).get("chat_template")
    return None if template is None else prompt_digest(template)


def tokenizer_settings_digest(folder: Path) -> str | None:
    """Return a digest of the settings of a base's tokenizer; None without a ``tokenizer_config.json``."""
    config = _read(folder / "tokenizer_config.json")
    settings = {key: config[key] for key in SETTINGS if config.get(key) not in (None, False)}
    # of a token its text alone, because some versions write it with its settings
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in settings.items()}
    return prompt_digest(texts) if config else None


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def prompt_digest(value: Any) -> str:
    """Return the digest of a chat template or of settings, as fingerprints have it."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
