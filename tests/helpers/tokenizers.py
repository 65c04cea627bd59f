"""Small tokenizers of several kinds."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def fast(made: Tokenizer) -> Any:
    made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def sentencepiece(*, has_bytes: bool = True) -> Any:
    """As of Llama 2: the decoder drops the first space, and characters that are no token are bytes."""
    words = ["\u2581", "a", "b", "\u2581a", "\u2581b", "\u2581\u2581", "<unk>"]
    bytes_ = [f"<0x{one:02X}>" for one in range(256)] if has_bytes else []
    vocabulary = {token: number for number, token in enumerate([*bytes_, *words])}
    merges = [("\u2581", "a"), ("\u2581", "b"), ("\u2581", "\u2581")]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=has_bytes))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(made)


def single_bytes() -> Any:
    """Byte-level without a merge: every character but ASCII is cut."""
    vocabulary = {token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return fast(made)
