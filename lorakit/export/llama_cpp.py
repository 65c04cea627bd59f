"""Lay out a merged model, or a base and its adapters, for llama.cpp's converters, with Modelfiles for Ollama.

llama.cpp's own scripts write the GGUF files, because they know each architecture. Not everything of a patch survives
them (patch/compatibility.py); what does not is refused here, or merged first.
"""

import shlex
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from lorakit.errors import LorakitError
from lorakit.export.ollama import modelfile
from lorakit.files.atomic import atomic_folder, write_file
from lorakit.merging.merge import merge
from lorakit.patch import Patch
from lorakit.patch.adapter_config import CONFIG_FILE
from lorakit.patch.compatibility import check_compatible
from lorakit.patch.patch import TENSOR_FILE
from lorakit.patch.prompting import trained_form
from lorakit.patch.same_base import Allow

SCRIPT: Final = "convert.sh"
HEADER: Final = """\
#!/bin/sh
# Writes GGUF files with llama.cpp's converters: LLAMA_CPP=/path/to/llama.cpp sh convert.sh
set -eu
cd "$(dirname "$0")"
: "${LLAMA_CPP:?the folder of llama.cpp, with convert_hf_to_gguf.py in it}"
"""


def export_merged(
    base: str,
    patch: Patch,
    tokenizer: Any,
    out: Path,
    say: Callable[[str], None],
    *,
    revision: str | None,
    allow: Collection[Allow],
) -> None:
    """Write ``out``: the base with the patch merged in, the script that converts it, and a Modelfile.

    Raises:
        LorakitError: as ``merge``; or Ollama cannot run the base's chat template. Nothing is written.
    """
    text = modelfile("./model.gguf", None, tokenizer, trained_form(patch.metadata))
    script = HEADER + _convert_model("model", "model.gguf")
    with _new_folder(out) as staging:
        merge(base, patch.folder, out=staging / "model", revision=revision, allow=allow, say=say)
        write_file(staging / SCRIPT, script)
        write_file(staging / "Modelfile", text)


def export_adapters(folder: Path, patches: Mapping[str, Patch], tokenizer: Any, out: Path) -> None:
    """Write ``out``: a copy of each patch, the script that converts base and patches, and a Modelfile for each.

    folder: of the base. It is converted where it is, and not copied.

    Raises:
        PatchError: llama.cpp would compute another adapter; names every such patch with the reasons.
        LorakitError: a name is no file name, or Ollama cannot run the base's chat template. Nothing is written.
    """
    _check(patches)
    modelfiles = {
        f"Modelfile.{name}": modelfile("./base.gguf", f"./{name}.gguf", tokenizer, trained_form(patch.metadata))
        for name, patch in patches.items()
    }
    source = shlex.quote(str(folder.resolve()))
    script = HEADER + _convert_model(source, "base.gguf")
    for name in patches:
        files = f"{name} --base {source} --outfile {name}.gguf"
        script += f'python3 "$LLAMA_CPP/convert_lora_to_gguf.py" {files} --outtype auto\n'
    with _new_folder(out) as staging:
        for name, patch in patches.items():
            (staging / name).mkdir()
            for file in (CONFIG_FILE, TENSOR_FILE):
                shutil.copyfile(patch.folder / file, staging / name / file)
        for file, text in {SCRIPT: script, **modelfiles}.items():
            write_file(staging / file, text)


def _check(patches: Mapping[str, Patch]) -> None:
    for name in patches:
        if not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or name.startswith((".", "-")):
            raise LorakitError(f"--adapter {name}: becomes the name of files; letters, digits, '.', '_' and '-'")
    check_compatible(patches, "llama.cpp", "add --merged")


def _convert_model(source: str, target: str) -> str:
    return f'python3 "$LLAMA_CPP/convert_hf_to_gguf.py" {source} --outfile {target} --outtype auto\n'


def _new_folder(out: Path) -> Any:
    if out.exists():
        raise LorakitError(f"--out: {out} exists already; choose another name, or remove it")
    return atomic_folder(out)
