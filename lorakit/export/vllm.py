"""Write how vLLM serves a base and its adapters, and refuse the adapters that it would compute otherwise.

Flags as vLLM's documentation has them (features/lora.md).
"""

import json
from collections.abc import Mapping
from typing import Final

from lorakit.patch import Patch
from lorakit.patch.compatibility import check_compatible, vllm_rank
from lorakit.patch.prompting import trained_form

MAX_RESIDENT: Final = 16
"""Adapters that vLLM gets GPU memory for; it allocates the largest rank for each of them. More wait on the host."""


def vllm_command(
    base: str,
    adapters: Mapping[str, Patch],
    paths: Mapping[str, str],
    *,
    name: str,
    revision: str | None,
    dtype: str,
    port: int,
) -> list[str]:
    """Return the words of the command that serves ``base`` as ``name``, and each adapter as a model of its own.

    paths: of the adapters, where vLLM runs.

    Raises:
        PatchError: vLLM would compute another adapter than lorakit; names every such adapter with the reasons.
    """
    remedy = "merge them into the base (lorakit merge), or serve them with lorakit serve"
    check_compatible(adapters, "vLLM", remedy)
    at = ["--revision", revision] if revision else []
    words = ["vllm", "serve", base, *at, "--served-model-name", name, "--dtype", dtype, "--port", str(port)]
    if not adapters:
        return words
    largest = max(layer.rank for patch in adapters.values() for layer in patch.layers.values())
    modules = [json.dumps({"name": adapter, "path": paths[adapter], "base_model_name": name}) for adapter in adapters]
    return [
        *words, "--enable-lora", "--max-lora-rank", str(vllm_rank(largest)),
        "--max-loras", str(min(len(adapters), MAX_RESIDENT)), "--max-cpu-loras", str(len(adapters)),
        "--lora-modules", *modules,
    ]  # fmt: skip


def prompting_notes(adapters: Mapping[str, Patch]) -> list[str]:
    """Return what another program does not do by itself: how to prompt adapters, and the quantisation in training."""
    notes = []
    for name, patch in adapters.items():
        form = trained_form(patch.metadata)
        if form.raw:
            notes.append(f"{name}: its rows were plain text; use /v1/completions, which leaves the chat template out")
        elif form.system is not None:
            notes.append(f"{name}: its rows began with a system prompt; send it with every request: {form.system!r}")
        if quantization := (patch.metadata.get("base") or {}).get("quantized"):
            notes.append(
                f"{name}: trained on a base in {quantization['name']}; answers of another base differ a little"
            )
    return notes
