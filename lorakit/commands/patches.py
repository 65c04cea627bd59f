"""show, merge and what else is done with patches that are there already."""

import argparse

from lorakit.commands.options import Add, mismatch_argument, revision_argument, weighted
from lorakit.errors import LorakitError

DTYPES = ("float32", "bfloat16", "float16")


def add_to(command: Add) -> None:
    """The commands and their options."""
    _add_merge(command)
    show = command("show", _show, "say what a patch, a run or a base is")
    show.add_argument("path", help="patch folder, run folder, model folder, hub id or builtin:tiny")
    show.add_argument(
        "--for", dest="for_base", metavar="BASE", help="whether the patch fits this base, tensor by tensor"
    )
    show.add_argument("--full", action="store_true", help="with --for: compare every value of the base's weights")


def _add_merge(command: Add) -> None:
    merge = command(
        "merge", _merge, "write base + adapters as a normal model folder; with --as-patch, several patches as one patch"
    )
    merge.add_argument("base", metavar="BASE", help="model folder, hub id or builtin:tiny; with --as-patch a patch")
    merge.add_argument("adapters", nargs="*", metavar="ADAPTER[:WEIGHT]", help="patch folder, may be weighted")
    merge.add_argument("--adapter", dest="more", action="append", default=[], metavar="DIR[:WEIGHT]",
                       help="the same as ADAPTER")  # fmt: skip
    merge.add_argument("--out", required=True, help="folder to write; must not exist")
    merge.add_argument("--dtype", choices=DTYPES, help="convert the model on the way (default: as it is stored)")
    merge.add_argument("--untie", action="store_true", help="give a head that shares its values a tensor of its own")
    merge.add_argument(
        "--verify", action="store_true", help="run prompts through base + adapters and through the result"
    )
    revision_argument(merge)
    mismatch_argument(merge)


def _merge(options: argparse.Namespace) -> int:
    from lorakit.merge import merge

    adapters = [weighted(text) for text in [*options.adapters, *options.more]]
    out = merge(
        options.base, *adapters, out=options.out, revision=options.revision, dtype=options.dtype, untie=options.untie,
        verify=options.verify, allow_base_mismatch=options.allow_base_mismatch, say=_say,
    )  # fmt: skip
    print(f"merged into {out}; merge.json there says what went where")
    return 0


def _show(options: argparse.Namespace) -> int:
    from lorakit.show import show

    if options.full and options.for_base is None:
        raise LorakitError("--full: compares with a base; name it with --for BASE")
    show(options.path, options.for_base, full=options.full)
    return 0


def _say(text: str) -> None:
    print(text, flush=True)
