"""The tokenizer of a GGUF file, as transformers loads it; and its settings for a GGUF file.

Invariant: texts become llama.cpp's own tokens; Qwen's are normalised first, as by its own tokenizer. A GGUF names how
text is split before merges in one word, ``tokenizer.ggml.pre``; a word that is not in the table below is refused.
Source: llama.cpp's src/llama-vocab.cpp.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from transformers.tokenization_utils_base import generate_merges

from lorakit.errors import BaseModelError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # of tokenizer.ggml.token_type
SPECIAL: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""token, as transformers names it -> its name in tokenizer.ggml.NAME_token_id"""
PIECES: Final = ("continuing_subword_prefix", "end_of_word_suffix", "dropout", "byte_fallback", "unk_token")
SPACE: Final = "\u2581"  # how sentencepiece writes a space
LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
    r"|\s+"
)
TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Splitter:
    """How text is split into words of byte-level BPE."""

    pattern: str = ""  # empty: GPT-2's
    digits: bool = False  # each digit is a word
    ignores_merges: bool = False  # True: a word that is a token becomes it, whatever its merges give
    nfc: bool = False  # text is normalised first

    def as_json(self) -> tuple[dict[str, Any], bool, str | None]:
        """Return pre-tokenizer, `ignore_merges` and the kind of normalizer, as tokenizer.json has them."""
        bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not self.pattern}
        digits = {"type": "Digits", "individual_digits": True}
        split = {"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": False}
        parts = [*([digits] if self.digits else []), *([split] if self.pattern else []), bytes_]
        pre_tokenizer = bytes_ if len(parts) == 1 else {"type": "Sequence", "pretokenizers": parts}
        return pre_tokenizer, self.ignores_merges, "NFC" if self.nfc else None


QWEN2: Final = Splitter(LLAMA3.replace("{1,3}", ""), nfc=True)
SPLITTERS: Final[Mapping[str, Splitter]] = {
    "gpt-2": Splitter(),
    "smollm": Splitter(digits=True),
    "llama-bpe": Splitter(LLAMA3, ignores_merges=True),
    "tekken": Splitter(TEKKEN, ignores_merges=True),
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
}
"""tokenizer.ggml.pre -> how text is split"""


def read_tokenizer(settings: Mapping[str, Any]) -> Any:
    """Return the tokenizer that a GGUF's settings describe; a str: why there is none. KeyError: damaged settings."""
    from transformers import PreTrainedTokenizerFast

    own = {key.removeprefix("tokenizer.ggml."): value for key, value in settings.items()}
    tokens = own["tokens"]
    kinds = own.get("token_type") or [NORMAL] * len(tokens)
    ids = {name: own[f"{key}_token_id"] for name, key in SPECIAL.items() if f"{key}_token_id" in own}
    used = [number for number, kind in enumerate(kinds) if kind != UNUSED or number in ids.values()]
    vocabulary = {tokens[number]: number for number in used}
    scores = [own["scores"][number] for number in used if kinds[number] == NORMAL] if own["model"] == "llama" else []
    if own["model"] == "gpt2" and own.get("pre") in SPLITTERS:
        tokenizer = _byte_level(vocabulary, own["merges"], SPLITTERS[own["pre"]])
    elif own["model"] == "llama" and own.get("add_space_prefix", True) and len(set(scores)) == len(scores):
        merges = generate_merges(vocabulary, dict(zip(tokens, own["scores"], strict=True)))
        tokenizer = _sentencepiece(vocabulary, merges, tokens[own.get("unknown_token_id", 0)])
    else:
        return f"tokenizer {own['model']} with pre-tokenizer {own.get('pre')}; known are {', '.join(SPLITTERS)}"
    for kind, is_special in ((CONTROL, True), (USER_DEFINED, False)):
        words = [token for token, own_kind in zip(tokens, kinds, strict=True) if own_kind == kind]
        tokenizer.add_tokens([AddedToken(word, special=is_special, normalized=False) for word in words])
    special = {name: tokens[number] for name, number in ids.items()}
    if own.get("add_bos_token", own["model"] == "llama" or own.get("pre") in ("llama-bpe", "tekken")):
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, own["bos_token_id"])]
        )
    read = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    read.chat_template = settings.get("tokenizer.chat_template")
    return read


def write_tokenizer(tokenizer: Any, num_rows: int) -> dict[str, Any]:
    """Return a GGUF's settings of a tokenizer. num_rows: of the embedding. Raises BaseModelError: it has none."""
    text = tokenizer.backend_tokenizer.to_str().replace('"trim_offsets":false', '"trim_offsets":true')
    backend = json.loads(text)  # without what changes no token
    model, normalizer = backend["model"], (backend["normalizer"] or {}).get("type")
    own_form = backend["pre_tokenizer"], bool(model.get("ignore_merges")), normalizer
    names = [name for name, splitter in SPLITTERS.items() if splitter.as_json() == own_form and model["type"] == "BPE"]
    if not names:
        raise BaseModelError(f"its tokenizer splits text in another way than {', '.join(SPLITTERS)}")
    of_no_text = tokenizer("").input_ids
    faults = {
        "tokens take the spaces beside them": any(
            one["lstrip"] or one["rstrip"] or one["single_word"] for one in backend["added_tokens"]
        ),
        "pieces of words have marks": any(model.get(key) for key in PIECES),
        "it has no merges": not model["merges"],
        "texts get an end": of_no_text not in ([], [tokenizer.bos_token_id]),
        "it has more tokens than the embedding has rows": len(tokenizer) > num_rows,
        "it has several chat templates": not isinstance(tokenizer.chat_template, str | None),
    }
    if own_faults := [text for text, is_so in faults.items() if is_so]:
        raise BaseModelError(f"no GGUF file says what its tokenizer does: {', '.join(own_faults)}")
    tokens = [f"[PAD{number}]" for number in range(num_rows)]
    kinds = [UNUSED] * num_rows
    for token, number in model["vocab"].items():
        tokens[number], kinds[number] = token, NORMAL
    for token in backend["added_tokens"]:
        tokens[token["id"]], kinds[token["id"]] = token["content"], CONTROL if token["special"] else USER_DEFINED
    ids = {f"{key}_token_id": getattr(tokenizer, f"{name}_id") for name, key in SPECIAL.items()}
    own = {
        "model": "gpt2", "pre": names[0], "tokens": tokens, "token_type": kinds,
        "merges": [" ".join(pair) for pair in model["merges"]],
        "add_bos_token": of_no_text == [tokenizer.bos_token_id],
        **{key: number for key, number in ids.items() if number is not None},
    }  # fmt: skip
    settings = {f"tokenizer.ggml.{key}": value for key, value in own.items()}
    return settings | ({"tokenizer.chat_template": tokenizer.chat_template} if tokenizer.chat_template else {})


def _byte_level(vocabulary: dict[str, int], merges: list[str], splitter: Splitter) -> Tokenizer:
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(BPE(vocabulary, pairs, ignore_merges=splitter.ignores_merges))
    text = json.loads(tokenizer.to_str()) | {"pre_tokenizer": splitter.as_json()[0]}
    tokenizer = Tokenizer.from_str(json.dumps(text))
    tokenizer.decoder = decoders.ByteLevel()
    if splitter.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(vocabulary: dict[str, int], merges: list[tuple[str, str]], unknown: str) -> Tokenizer:
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer
