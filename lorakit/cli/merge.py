"""merge, extract, convert, export, push: a model or a patch computed from others, or written for other programs."""

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
    add_allow_option,
    add_repeated,
    add_revision_option,
    given,
    parse_named,
    picked,
    port_number,
    positive_int,
    print_line,
    refuse,
    write_or_print,
)
from lorakit.errors import LorakitError, check_absent
from lorakit.files.text import full_dtype_name
from lorakit.version import VERSION

# written out because the modules that define them import torch; a test compares
DTYPES = ("float32", "bfloat16", "float16")
COMBINE_METHODS = ("sum", "ties", "dare")
OF_MODEL = ("dtype", "untie", "verify", "revision", "onto", "tokenizer")
OF_PATCH = ("how", "rank", "density", "seed")
OF_VLLM = ("name", "port", "dtype")


def add_merge_commands(add_command: AddCommand) -> None:
    text = "write base + adapters as a normal model folder; with --as-patch, several patches as one patch"
    merge = add_command("merge", _merge, text)
    merge.add_argument("base", metavar="BASE", help="model folder, hub id or builtin:tiny; with --as-patch a patch")
    adapters = "patch folder, may be weighted; none: a quantised base in plain floats"
    merge.add_argument("adapters", nargs="*", metavar="ADAPTER[:WEIGHT]", help=adapters)
    add_repeated(merge, "--adapter", "DIR[:WEIGHT]", "the same as ADAPTER", dest="more")
    merge.add_argument("--out", required=True, help="folder to write; must not exist")
    add_revision_option(merge)
    add_allow_option(merge)
    model = merge.add_argument_group("a model")
    dtype = "convert on the way (default: each tensor as it is stored)"
    model.add_argument("--dtype", type=full_dtype_name, choices=DTYPES, help=dtype)
    model.add_argument("--untie", action="store_true", help="give an output head that is tied a tensor of its own")
    model.add_argument("--verify", action="store_true", help="run base + adapters, and compare each merged layer")
    onto = (
        "for a patch trained on a quantised base: add it to the weights training computed with (dequantized,"
        " the default), or to the weights before quantisation"
    )
    model.add_argument("--onto", choices=("original", "dequantized"), help=onto)
    model.add_argument("--tokenizer", metavar="DIR", help="tokenizer and chat template, if not the base's own")
    patch = merge.add_argument_group("a patch")
    patch.add_argument("--as-patch", action="store_true", help="combine patches into one; every argument is a patch")
    patch.add_argument("--how", choices=COMBINE_METHODS, help="sum (default), ties or dare")
    patch.add_argument("--rank", type=positive_int, help="recompress to this rank, and report the error")
    patch.add_argument("--density", type=float, help="share of each update's entries that ties or dare keeps")
    patch.add_argument("--seed", type=int, help="of the entries that dare drops")

    extract = add_command("extract", _extract, "recover a patch from a base and a model tuned from it")
    extract.add_argument("base", help="model folder, hub id or builtin:tiny")
    extract.add_argument("tuned", help="model folder, hub id")
    extract.add_argument("--rank", type=positive_int, required=True)
    extract.add_argument("--out", required=True, help="patch folder to write; must not hold one")
    rest = "tensors that differ and are not linear layers: refuse (default), or save in full in the patch"
    extract.add_argument("--rest", choices=("refuse", "save"), default="refuse", help=rest)
    add_revision_option(extract)

    convert = add_command("convert", _convert, "rewrite an adapter for mlx-lm, or one of mlx-lm, exactly or not at all")
    convert.add_argument("source", help="patch folder or mlx-lm folder")
    convert.add_argument("--to", default="peft", metavar="FORMAT", help="peft (default) or mlx")
    convert.add_argument("--out", required=True, help="folder to write; must not exist")
    convert.add_argument("--base", help="model folder, hub id or builtin:tiny, to check the adapter against it")
    add_revision_option(convert)
    _add_export_commands(add_command)


def _add_export_commands(add_command: AddCommand) -> None:
    export = add_command("export", _export, "write what vLLM or llama.cpp need to serve adapters")
    add_adapted_base(export)
    kind = export.add_mutually_exclusive_group(required=True)
    kind.add_argument("--vllm", action="store_true", help="a script that starts vLLM")
    kind.add_argument("--gguf", action="store_true", help="GGUF files of base and adapters, for llama.cpp and Ollama")
    export.add_argument("--out", help="file or folder to write, which must not exist (default: standard output)")
    export.add_argument("--name", help="vllm: the base's name in requests (default: BASE)")
    export.add_argument("--port", type=port_number, help="vllm: port of the server (default: 8000)")
    export.add_argument("--dtype", help="vllm: dtype of the base (default: auto, as it is stored)")

    push = add_command("push", _push, "push a patch to the hub, without the paths of this machine")
    push.add_argument("patch", metavar="PATCH", help="patch folder")
    push.add_argument("repository", metavar="ORGANISATION/NAME", help="repository; it is made if there is none")
    push.add_argument("--base", metavar="NAME", help="name of the base in the pushed patch (default: as in the patch)")
    push.add_argument("--private", action="store_true", help="make the repository private; refuse one that is public")
    push.add_argument("--message", help="message of the commit")


def _merge(options: argparse.Namespace) -> None:
    adapters = [_weighted(text) for text in [*options.adapters, *options.more]]
    if options.as_patch:
        refuse(options, OF_MODEL, "is for merging into a base")
        from lorakit.derive.combine import combine

        settings = picked(options, "out", "allow") | given(options, *OF_PATCH)
        out = combine(_weighted(options.base), *adapters, **settings, say=print_line)
        print(f"combined into {out}")
        return
    refuse(options, OF_PATCH, "needs --as-patch")
    from lorakit.merging.merge import merge

    out = merge(options.base, *adapters, **picked(options, "out", "allow", *OF_MODEL), say=print_line)
    print(f"merged into {out}; merge.json there says what went where")


def _weighted(text: str) -> tuple[str, float]:
    """Parse DIR or DIR:WEIGHT; the weight defaults to 1."""
    if text.startswith("builtin:"):
        raise LorakitError(f"{text!r} is a base; write the base first, then the patches (with --as-patch patches only)")
    path, colon, weight = text.rpartition(":")
    if not colon or Path(text).is_dir():
        return text, 1.0
    try:
        return path, float(weight)
    except ValueError:
        raise LorakitError(f"{text!r}: write it as DIR or DIR:WEIGHT, with a number") from None


def _extract(options: argparse.Namespace) -> None:
    from lorakit.derive.extract import extract

    settings = picked(options, "rank", "out", "revision", "rest")
    print(f"extracted into {extract(options.base, options.tuned, **settings, say=print_line)}")


def _convert(options: argparse.Namespace) -> None:
    from lorakit.formats.convert import convert

    settings = picked(options, "to", "base", "revision")
    print(f"converted into {convert(options.source, options.out, **settings, say=print_line)}")


if TYPE_CHECKING:
    from lorakit.merging.folder import EndTokens
    from lorakit.patch import Patch


def _export(options: argparse.Namespace) -> None:
    if options.gguf:
        refuse(options, OF_VLLM, "is for --vllm")
        if options.out is None:
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
    settings = {"name": options.base} | given(options, *OF_VLLM)
    words = vllm_command(base, patches, revision=options.revision, **settings)
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
