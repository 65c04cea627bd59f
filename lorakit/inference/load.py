"""Load a base and its adapters for use in Python: ``lorakit.load``."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lorakit.base.device import choose_dtype, decoding_products, device_type
from lorakit.base.find import find_base, find_tokenizer
from lorakit.base.loading import load_full
from lorakit.base.quantized import quant_config
from lorakit.base.transformers_io import has_tokenizer, load_tokenizer
from lorakit.data.chat_template import NO_KWARGS
from lorakit.errors import LorakitError
from lorakit.files.base_files import open_base_files
from lorakit.files.safetensors import dtype_name
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.inference.prompts import PromptCodec
from lorakit.launch.libraries import limit_kernel_caches
from lorakit.ops.openmp import end_openmp_threads
from lorakit.ops.products import use_products
from lorakit.patch import BaseIdentity, open_patch
from lorakit.patch.find import find_patch
from lorakit.patch.prompting import NAMED_TEMPLATES, common_template, merged_form, read_chat_template, trained_form
from lorakit.patch.same_base import Allow


def load(
    base: str | Path,
    adapters: Mapping[str, str | Path] | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    quantize: str = "none",
    revision: str | None = None,
    tokenizer: str | Path | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] = NO_KWARGS,
    device: str | torch.device | None = None,
    allow: Collection[Allow] = (),
    prompted_as: Iterable[str | Path] = (),
) -> AdaptedModel:
    """Load a base (folder, hub id or ``builtin:tiny``) and the named patches (folders, or hub ids as text).

    ``tokenizer``: folder of the tokenizer, if it is not the base's own. A base without any takes and gives token ids.
    ``chat_template``: its text, or a name such as ``chatml``; None is the one that all adapters bring with them, else
    the tokenizer's.
    ``chat_template_kwargs``: variables for the template, such as ``{"enable_thinking": False}``, in place of those that
    an adapter was trained with.
    ``device``: such as ``cpu`` or ``cuda:1``; None is the GPU if there is one. A base is not spread over several.
    ``allow``: as in ``load_adapter``.
    ``prompted_as``: patches that are loaded later, and may bring a chat template with them too.
    ``quantize``: quantise the linear layers while they are read, as the recipe's `base.quantize`: nf4, fp4, int8, fp8.
    Raises BaseModelError: no such base. PatchError: a patch is damaged, or belongs to another base.
    """
    if not isinstance(base, str | Path):
        raise LorakitError(f"base: the folder or name of a model, got a {type(base).__name__}; lorakit loads it itself")
    if adapters is not None and not isinstance(adapters, Mapping):
        raise LorakitError(f"adapters: a mapping such as {{'sql': 'adapters/sql'}}, got {adapters!r}")
    brought = None
    if tokenizer is None and chat_template is None:
        chat_template = brought = brought_template([*(adapters or {}).values(), *prompted_as])
    if chat_template is not None and chat_template in NAMED_TEMPLATES:
        chat_template = read_chat_template(chat_template)
    folder = find_base(str(base), revision)
    limit_kernel_caches(dtype_name(dtype))  # prompts of other lengths are new shapes, as rows are in training
    on = _device(device)
    model = load_full(folder, choose_dtype(dtype_name(dtype), on).dtype, on, quant_config(quantize))
    use_products(model, decoding_products(model))
    words = find_tokenizer(None if tokenizer is None else str(tokenizer), folder)
    text = load_tokenizer(words) if tokenizer is not None or has_tokenizer(words) else None
    if text is not None and chat_template is not None:
        text.chat_template = chat_template
    identity = BaseIdentity(open_base_files(folder), words, chat_template, brought=brought is not None)
    prompts = PromptCodec(model, text, merged_form(folder), chat_template_kwargs)
    adapted = AdaptedModel(model, prompts, identity)
    adapted.expected_adapters = len(adapters or {})
    for name, path in (adapters or {}).items():
        adapted.load_adapter(name, path, allow=allow)
    end_openmp_threads()  # another thread may be the one that answers
    return adapted


def brought_template(folders: Iterable[str | Path]) -> str | None:
    """Return the chat template that all of these patches bring, but for those of plain text; None if one does not."""
    metadata = []
    for folder in folders:
        with suppress(LorakitError, OSError):  # which loading the patch names
            metadata.append(open_patch(find_patch(folder)).metadata)
    return common_template(one for one in metadata if not trained_form(one).raw)


def _device(device: str | torch.device | None) -> torch.device:
    try:
        chosen = torch.device(device_type() if device is None else device)
        if chosen.type == "meta":
            raise RuntimeError("a device without memory")
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, TypeError) as problem:  # a torch without CUDA asserts
        raise LorakitError(f"device: {device!r} cannot be used here: {str(problem).splitlines()[0]}") from None
    return chosen
