"""export, push: what other programs need to serve a base and its adapters, and patches on the hub."""

import argparse
import re
import shlex
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lorakit.cli.arguments import (
    AddCommand,
    add_adapted_base,
    parse_named,
    picked,
    positive_int,
    print_line,
    write_or_print,
)
from lorakit.errors import LorakitError, check_absent
from lorakit.version import VERSION

if TYPE_CHECKING:
    from lorakit.merging.folder import EndTokens
    from lorakit.patch import Patch


def add_export_commands(add_command: AddCommand) -> None:
    export = add_command("export", _export, "write what vLLM or llama.cpp need to serve adapters")
    add_adapted_base(export)
    kind = export.add_mutually_exclusive_group(required=True)
    kind.add_argument("--vllm", action="store_true", help="a script that starts vLLM")
    kind.add_argument("--gguf", action="store_true", help="GGUF files of base and adapters, for llama.cpp and Ollama")
    export.add_argument("--out", help="file or folder to write, which must not exist (default: standard output)")
    export.add_argument("--name", help="the base's name in requests (default: BASE)")
    export.add_argument("--port", type=positive_int, default=8000, help="of the server (default: 8000)")
    export.add_argument("--dtype", default="auto", help="vllm: dtype of the base (default: auto, as it is stored)")

    push = add_command("push", _push, "push a patch to the hub, without the paths of this machine")
    push.add_argument("patch", metavar="PATCH", help="patch folder")
    push.add_argument("repository", metavar="ORGANISATION/NAME", help="repository; it is made if there is none")
    push.add_argument("--base", metavar="NAME", help="name of the base in the pushed patch (default: as in the patch)")
    push.add_argument("--private", action="store_true", help="make the repository private; refuse one that is public")
    push.add_argument("--message", help="message of the commit")


def _export(options: argparse.Namespace) -> None:
    if options.gguf and options.out is None:
        raise LorakitError("--gguf: writes a folder; name it with --out")
    check_absent(options.out)
    from lorakit.base.find import find_base
    from lorakit.files.base_files import open_base_files
    from lorakit.merging.folder import missing_end_tokens
    from lorakit.patch import BaseIdentity, check_base, read_patch, unverified_note
    from lorakit.patch.find import find_patch
    from lorakit.patch.prompting import common_template

    folder = find_base(options.base, options.revision)
    patches = {name: read_patch(find_patch(path)) for name, path in parse_named(options.adapter, "--adapter").items()}
    template = common_template(patch.metadata for patch in patches.values())
    identity = BaseIdentity(open_base_files(folder))
    for patch in patches.values():
        check_base(patch, identity, allow=options.allow)
        if note := unverified_note(patch, options.base):
            print(note, file=sys.stderr)
    ends = missing_end_tokens(folder, folder, template, patches.values(), partial(print, file=sys.stderr))
    if options.gguf:
        _export_gguf(options, folder, patches, ends)
    else:
        write_or_print(_vllm_script(options, folder, patches, ends), options.out)


def _vllm_script(
    options: argparse.Namespace, folder: Path, patches: "Mapping[str, Patch]", ends: "EndTokens | None"
) -> str:
    from lorakit.export.servers import prompting_notes, script, vllm_command
    from lorakit.patch.compatibility import VLLM_VERSION

    is_local = Path(options.base).exists() or options.base.startswith("builtin:")
    base = str(folder.resolve()) if is_local else options.base  # vLLM downloads a hub id itself
    settings = picked(options, "revision", "dtype", "port")
    words = vllm_command(base, patches, name=options.name or options.base, **settings)
    lines = [f"written by lorakit {VERSION}", f"for vLLM {VLLM_VERSION} or newer"]
    notes = "".join(f"# {line}\n" for line in [*lines, *prompting_notes(folder, patches, ends)])
    return f"#!/bin/sh\n{notes}{script(words, None if ends is None else ends.generation_config)}"


def _export_gguf(
    options: argparse.Namespace, folder: Path, patches: "Mapping[str, Patch]", ends: "EndTokens | None"
) -> None:
    from lorakit.base.transformers_io import read_generation_config
    from lorakit.export.gguf import BASE_FILE, export_gguf
    from lorakit.export.servers import prompting_notes
    from lorakit.inference.prompts import end_token_ids

    for name in patches:
        if not re.fullmatch(r"\w[\w.-]*", name) or f"{name}.gguf" == BASE_FILE:
            raise LorakitError(f"--adapter {name}: becomes the name of a file; letters, digits, '.', '_' and '-'")
    out = Path(options.out)
    ids = end_token_ids(None, read_generation_config(folder).get("eos_token_id")) if ends is None else ends.ids
    base = export_gguf(Path(options.base), folder, patches, out, ids)
    adapters = ",".join(str(out / f"{name}.gguf") for name in patches)
    files = ["-m", str(base), *(["--lora", adapters] if adapters else [])]
    end = ["--override-kv", f"tokenizer.ggml.eot_token_id=int:{ids[-1]}"] if ends and base.parent != out else []
    print_line(f"written    {out}")
    for note in prompting_notes(folder, patches, ends):
        print_line(f"note       {note}")
    if adapters:
        print_line('note       a request without "lora" gets the sum of all; "lora": [{"id": 0, "scale": 1}] names one')
    print_line(f"then       {shlex.join(['llama-server', '--jinja', *files, *end])}")


def _push(options: argparse.Namespace) -> None:
    from lorakit.export.hub import push_patch

    settings = picked(options, "base", "private", "message")
    print_line(f"pushed: {push_patch(options.patch, options.repository, **settings)}")
    print_line(f"use it     --adapter NAME={options.repository} in place of a folder")
