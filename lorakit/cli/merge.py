"""merge, extract, convert: a model or a patch computed from others."""

import argparse
from pathlib import Path

from lorakit.cli.arguments import (
    AddCommand,
    add_allow_option,
    add_repeated,
    add_revision_option,
    picked,
    positive_int,
    print_line,
)
from lorakit.errors import LorakitError
from lorakit.files.text import full_dtype_name

# written out because the modules that define them import torch; a test compares
DTYPES = ("float32", "bfloat16", "float16")
COMBINE_METHODS = ("sum", "ties", "dare")
OF_MODEL = ("dtype", "untie", "verify", "revision", "onto", "tokenizer")
OF_PATCH = ("how", "rank", "density", "seed")


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


def _merge(options: argparse.Namespace) -> None:
    adapters = [_weighted(text) for text in [*options.adapters, *options.more]]
    given = picked(options, *(OF_MODEL if options.as_patch else OF_PATCH))
    if wrong := [f"--{name}" for name, value in given.items() if value is not None and value is not False]:
        reason = "is for merging into a base" if options.as_patch else "needs --as-patch"
        raise LorakitError(f"{', '.join(wrong)}: {reason}")
    if options.as_patch:
        from lorakit.derive.combine import combine

        chosen = {name: value for name, value in picked(options, *OF_PATCH).items() if value is not None}
        out = combine(_weighted(options.base), *adapters, **picked(options, "out", "allow"), **chosen, say=print_line)
        print(f"combined into {out}")
        return
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
