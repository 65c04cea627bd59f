"""Write how vLLM is started as the server of a base and its adapters.

vLLM's flags are as its documentation has them (features/lora.md). Adapters that it would compute otherwise are refused.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from lorakit.base.transformers_io import GENERATION_CONFIG
from lorakit.errors import PatchError
from lorakit.merging.folder import EndTokens
from lorakit.patch import Patch
from lorakit.patch.compatibility import check_compatible, vllm_rank
from lorakit.patch.own_head import has_own_head
from lorakit.patch.prompting import merged_form, trained_form

MAX_RESIDENT: Final = 16
"""Adapters that vLLM gets GPU memory for; it allocates the largest rank for each of them. More wait on the host."""


def vllm_command(
    base: str, adapters: Mapping[str, Patch], *, name: str, revision: str | None, dtype: str = "auto", port: int = 8000
) -> list[str]:
    """Return the command that serves ``base`` as ``name``, and each adapter. Raises PatchError: vLLM cannot."""
    remedy = "merge them into the base (lorakit merge), or serve them with lorakit serve"
    check_compatible(adapters, "vLLM", remedy)
    if heads := [name for name, patch in adapters.items() if has_own_head(patch)]:
        raise PatchError(f"{', '.join(heads)}: of labels or a reward, which this base answers nowhere else; {remedy}")
    at = ["--revision", revision] if revision else []
    words = ["vllm", "serve", base, *at, "--served-model-name", name, "--dtype", dtype, "--port", str(port)]
    if not adapters:
        return words
    paths = {adapter: str(patch.folder.resolve()) for adapter, patch in adapters.items()}
    modules = [json.dumps({"name": one, "path": path, "base_model_name": name}) for one, path in paths.items()]
    return [
        *words, "--enable-lora", "--max-lora-rank", str(vllm_rank(adapters.values())),
        "--max-loras", str(min(len(adapters), MAX_RESIDENT)), "--max-cpu-loras", str(len(adapters)),
        "--lora-modules", *modules,
    ]  # fmt: skip


def prompting_notes(base: Path, adapters: Mapping[str, Patch], ends: EndTokens | None) -> list[str]:
    """Return what another program does not do by itself: to prompt adapters, to stop, to quantise as in training."""
    notes = [] if ends is None else [f"answers end with {ends.names}, which the base's eos_token_id lacks"]
    notes += [f"the merged model: {note}" for note in merged_form(base).notes()]
    for name, patch in adapters.items():
        notes += [f"{name}: {note}" for note in trained_form(patch.metadata).notes()]
        if quantization := (patch.metadata.get("base") or {}).get("quantized"):
            notes.append(f"{name}: trained on a base in {quantization['name']}; answers of others differ a little")
    return notes


def script(command: Sequence[str], generation_config: str | None) -> str:
    """Return a shell script that runs ``command``, with the text of a generation_config; None: the base's own."""
    line = f"exec {shlex.join(command)}"
    if generation_config is None:
        return f"{line}\n"
    file = f"cat > \"$settings/{GENERATION_CONFIG}\" <<'END'\n{generation_config}END\n"
    return f'settings=$(mktemp -d)\n{file}{line} --generation-config "$settings"\n'
