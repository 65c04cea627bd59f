"""merge, extract: a model or a patch computed from others."""

import argparse

from lorakit.cli.arguments import (
    AddCommand,
    add_allow_option,
    add_base_argument,
    add_revision_option,
    parse_weighted,
    positive_int,
    print_line,
)
from lorakit.errors import LorakitError
from lorakit.files.dtype_names import full_dtype_name

# written out because the modules that define them import torch; a test compares
DTYPES = ("float32", "bfloat16", "float16")
COMBINE_METHODS = ("sum", "ties", "dare")


def add_merge_commands(add_command: AddCommand) -> None:
    """Add `merge` and `extract`."""
    _add_merge(add_command)
    _add_extract(add_command)


def _add_merge(add_command: AddCommand) -> None:
    merge = add_command(
        "merge", _merge, "write base + adapters as a normal model folder; with --as-patch, several patches as one patch"
    )
    merge.add_argument("base", metavar="BASE", help="model folder, hub id or builtin:tiny; with --as-patch a patch")
    merge.add_argument("adapters", nargs="*", metavar="ADAPTER[:WEIGHT]", help="patch folder, may be weighted")
    merge.add_argument(
        "--adapter", dest="more", action="append", default=[], metavar="DIR[:WEIGHT]", help="the same as ADAPTER"
    )
    merge.add_argument("--out", required=True, help="folder to write; must not exist")
    add_revision_option(merge)
    add_allow_option(merge)
    _add_model_options(merge.add_argument_group("a model"))
    _add_patch_options(merge.add_argument_group("a patch"))


def _add_model_options(model: argparse._ArgumentGroup) -> None:
    model.add_argument(
        "--dtype",
        type=full_dtype_name,
        choices=DTYPES,
        help="convert on the way (default: each tensor as it is stored)",
    )
    model.add_argument("--untie", action="store_true", help="give an output head that is tied a tensor of its own")
    model.add_argument("--verify", action="store_true", help="compare base + adapters with the result on prompts")
    model.add_argument(
        "--onto",
        choices=("original", "dequantized"),
        help="for a patch trained on a quantised base: add it to the weights training computed with (dequantized,"
        " the default), or to the weights before quantisation",
    )


def _add_patch_options(patch: argparse._ArgumentGroup) -> None:
    patch.add_argument("--as-patch", action="store_true", help="combine patches into one; every argument is a patch")
    patch.add_argument("--how", choices=COMBINE_METHODS, help="sum (default), ties or dare")
    patch.add_argument("--rank", type=positive_int, help="recompress to this rank, and report the error")
    patch.add_argument("--density", type=float, help="share of each update's entries that ties or dare keeps")
    patch.add_argument("--seed", type=int, help="of the entries that dare drops")


def _add_extract(add_command: AddCommand) -> None:
    extract = add_command("extract", _extract, "recover a patch from a base and a model tuned from it")
    add_base_argument(extract)
    extract.add_argument("tuned", help="model folder, hub id")
    extract.add_argument("--rank", type=positive_int, required=True)
    extract.add_argument("--out", required=True, help="patch folder to write; must not hold one")
    extract.add_argument(
        "--rest",
        choices=("refuse", "save"),
        default="refuse",
        help="tensors that differ and are not linear layers: refuse them, or save them in full in the patch",
    )
    add_revision_option(extract)


def _merge(options: argparse.Namespace) -> int:
    adapters = [parse_weighted(text) for text in [*options.adapters, *options.more]]
    _refuse_mixed_options(options)
    if options.as_patch:
        return _combine(options, [parse_weighted(options.base), *adapters])
    from lorakit.merging.merge import merge

    out = merge(
        options.base,
        *adapters,
        out=options.out,
        revision=options.revision,
        dtype=options.dtype,
        untie=options.untie,
        verify=options.verify,
        onto=options.onto,
        allow=options.allow,
        say=print_line,
    )
    print(f"merged into {out}; merge.json there says what went where")
    return 0


def _refuse_mixed_options(options: argparse.Namespace) -> None:
    """Refuse options for a patch without --as-patch, and options for a model with it."""
    for_patch = {"--how": options.how, "--rank": options.rank, "--density": options.density, "--seed": options.seed}
    for_model = {
        "--dtype": options.dtype,
        "--untie": options.untie,
        "--verify": options.verify,
        "--revision": options.revision,
        "--onto": options.onto,
    }
    refused = for_model if options.as_patch else for_patch
    wrong = [flag for flag, value in refused.items() if value is not None and value is not False]
    if wrong:
        reason = "is for merging into a base" if options.as_patch else "needs --as-patch"
        raise LorakitError(f"{', '.join(wrong)}: {reason}")


def _combine(options: argparse.Namespace, adapters: list[tuple[str, float]]) -> int:
    from lorakit.derive.combine import combine

    out = combine(
        *adapters,
        out=options.out,
        how=options.how or "sum",
        rank=options.rank,
        density=options.density,
        seed=options.seed or 0,
        allow=options.allow,
        say=print_line,
    )
    print(f"combined into {out}")
    return 0


def _extract(options: argparse.Namespace) -> int:
    from lorakit.derive.extract import extract

    out = extract(
        options.base,
        options.tuned,
        rank=options.rank,
        out=options.out,
        revision=options.revision,
        rest=options.rest,
        say=print_line,
    )
    print(f"extracted into {out}")
    return 0
