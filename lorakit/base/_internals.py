"""Private names of torch and transformers that base/ depends on, each behind one function.

tests/base/test_internals.py asserts that every one still exists and still means the same.
"""

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from lorakit.errors import BaseModelError


def was_written(tensor: Tensor) -> bool:
    """True if an in-place operation changed the tensor, by ``Tensor._version`` (torch 2.13), on meta too."""
    return tensor._version > 0


def without_length_warning(tokenizer: Any) -> Any:
    """Keep a tokenizer from warning of long texts, which lorakit checks itself (read in transformers 5.23)."""
    getattr(tokenizer, "deprecation_warnings", {})["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def backend_of(tokenizer: Any) -> Any:
    """Return the backend in Rust whose token ids a call of the tokenizer returns; None: the call does more.

    Read in transformers 5.23: ``_encode_plus``, which some classes override, calls the backend.
    """
    from transformers import PreTrainedTokenizerBase, TokenizersBackend

    kind = type(tokenizer)
    if not isinstance(tokenizer, TokenizersBackend):
        return None
    is_plain = (kind.__call__, kind._encode_plus) == (PreTrainedTokenizerBase.__call__, TokenizersBackend._encode_plus)
    backend = tokenizer.backend_tokenizer
    is_set = backend.truncation or backend.padding or backend.encode_special_tokens or tokenizer.split_special_tokens
    return None if is_set or not is_plain else backend


def model_factory(config: Any) -> tuple[Any, dict[str, Any]]:
    """Return transformers' factory of the model of a config, and the settings of its constructor.

    That of a causal language model, of texts or of texts and images; or of an encoder without a head, such as BERT, and
    without the layer on its first token, which embeddings do not read. No public function says which kind a config has:
    without ``_model_mapping`` (read in transformers 5.23) both would be refused.
    """
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMaskedLM

    kind = type(config)
    is_decoder = config.is_encoder_decoder or getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if kind in AutoModelForMaskedLM._model_mapping and kind in AutoModel._model_mapping and not is_decoder:
        takes = inspect.signature(AutoModel._model_mapping[kind].__init__).parameters
        return AutoModel, {"add_pooling_layer": False} if "add_pooling_layer" in takes else {}
    factories = AutoModelForCausalLM, AutoModelForImageTextToText
    return next((one for one in factories if kind in one._model_mapping), AutoModelForCausalLM), {}


@contextlib.contextmanager
def without_zero3() -> Iterator[None]:
    """Disable transformers' own ZeRO-3 partitioning in the block; lorakit's engine does it (read in 5.17 and 5.23)."""
    from transformers.integrations import deepspeed

    registered = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = registered


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a GGUF file, and name -> its tensors, which ``[:]`` reads (read in transformers 5.23)."""
    try:
        from transformers.integrations.gguf.reader import GgufHeader, load_gguf_state_dict, read_gguf_metadata
    except ImportError:
        raise BaseModelError("GGUF files need transformers 5.23 or newer: pip install -U transformers") from None
    settings, _ = read_gguf_metadata(str(file), ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"))
    return settings, load_gguf_state_dict(GgufHeader.from_file(str(file)))
