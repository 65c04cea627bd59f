"""Lay out a base, such as a merged model, and its adapters for llama.cpp's converters.

llama.cpp's own scripts write the GGUF files, because they know each architecture. Not everything of a patch survives
them (patch/compatibility.py); a patch that does not is refused here, and can be merged first.
"""

import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lorakit.export.servers import prompting_notes
from lorakit.files.atomic import atomic_folder, write_file
from lorakit.merging.end_tokens import EndTokens
from lorakit.patch import Patch
from lorakit.patch.adapter_config import CONFIG_FILE
from lorakit.patch.compatibility import check_compatible
from lorakit.patch.patch import TENSOR_FILE

SCRIPT: Final = "convert.sh"
BASE_FILE: Final = "base.gguf"
HEADER: Final = """\
#!/bin/sh
# Writes GGUF files with llama.cpp's converters: LLAMA_CPP=/path/to/llama.cpp sh convert.sh
# llama-server --jinja writes prompts by the base's chat template.
"""
START: Final = """\
set -eu
cd "$(dirname "$0")"
: "${LLAMA_CPP:?the folder of llama.cpp, with convert_hf_to_gguf.py in it}"
"""


def export_adapters(folder: Path, patches: Mapping[str, Patch], out: Path, ends: EndTokens | None) -> None:
    """Write ``out``: a copy of each patch, and the script that converts them and the base, which stays in ``folder``.

    ends: the tokens that end an answer, where the base lacks one of them.
    Raises PatchError with the reasons if llama.cpp would compute another adapter.
    """
    check_compatible(patches, "llama.cpp", "merge them into the base (lorakit merge), and export the merged model")
    source = shlex.quote(str(folder.resolve()))
    notes = "".join(f"# {note}\n" for note in prompting_notes(folder, patches, ends))
    commands = f'python3 "$LLAMA_CPP/convert_hf_to_gguf.py" {source} --outfile {BASE_FILE} --outtype auto\n'
    for name in patches:
        files = f"{name} --base {source} --outfile {name}.gguf"
        # `auto` fails in llama.cpp's script for adapters
        commands += f'python3 "$LLAMA_CPP/convert_lora_to_gguf.py" {files} --outtype f32\n'
    with atomic_folder(out) as staging:
        for name, patch in patches.items():
            (staging / name).mkdir()
            for file in (CONFIG_FILE, TENSOR_FILE):
                shutil.copyfile(patch.folder / file, staging / name / file)
        write_file(staging / SCRIPT, HEADER + notes + START + commands)
