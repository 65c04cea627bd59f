"""show, merge, extract, convert, diff: what is done with patches that are there already."""

import argparse

from lorakit.cli.arguments import Add, base_argument, mismatch_argument, positive, revision_argument, weighted
from lorakit.errors import LorakitError

DTYPES = ("float32", "bfloat16", "float16")
HOWS = ("sum", "ties", "dare")
FORMATS = ("peft", "kohya", "diffusers", "loralib", "mlx")


def add_to(command: Add) -> None:
    """The commands and their options."""
    _add_merge(command)
    _add_extract(command)
    _add_convert(command)
    diff = command("diff", _diff, "say how two patches or two models differ, most different first")
    diff.add_argument("one", help="patch folder or model folder")
    diff.add_argument("two", help="of the same kind")
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
    merge.add_argument(
        "--adapter", dest="more", action="append", default=[], metavar="DIR[:WEIGHT]", help="the same as ADAPTER"
    )
    merge.add_argument("--out", required=True, help="folder to write; must not exist")
    revision_argument(merge)
    mismatch_argument(merge)
    model = merge.add_argument_group("a model")
    model.add_argument("--dtype", choices=DTYPES, help="convert on the way (default: each tensor as it is stored)")
    model.add_argument("--untie", action="store_true", help="give a head that shares its values a tensor of its own")
    model.add_argument("--verify", action="store_true", help="compare base + adapters with the result on prompts")
    model.add_argument(
        "--onto", choices=("original", "dequantized"),
        help="for a patch trained on a packed base: add it to the weights training saw (dequantized, the default),"
        " or to those before they were packed",
    )  # fmt: skip
    model.add_argument("--requantize", action="store_true", help="pack the result again, as the base was in training")
    model.add_argument(
        "--no-measure", dest="measure", action="store_false",
        help="do not run the trained model beside the result to measure the error (it takes memory for both)",
    )  # fmt: skip
    patch = merge.add_argument_group("a patch")
    patch.add_argument("--as-patch", action="store_true", help="combine patches into one; every argument is a patch")
    patch.add_argument("--how", choices=HOWS, help="sum (default), ties or dare")
    patch.add_argument("--rank", type=positive, help="recompress to this rank, and say what it costs")
    patch.add_argument("--density", type=float, help="share of each update that ties or dare keeps")
    patch.add_argument("--seed", type=int, help="of what dare drops")


def _add_extract(command: Add) -> None:
    extract = command("extract", _extract, "recover a patch from a base and a model tuned from it")
    base_argument(extract)
    extract.add_argument("tuned", help="model folder, hub id")
    extract.add_argument("--rank", type=positive, required=True)
    extract.add_argument("--out", required=True, help="patch folder to write; must not hold one")
    extract.add_argument(
        "--rest", choices=("refuse", "save"), default="refuse",
        help="what differs and is no linear layer: refuse it, or save it whole in the patch",
    )  # fmt: skip
    revision_argument(extract)


def _add_convert(command: Add) -> None:
    convert = command("convert", _convert, "rewrite an adapter in another program's format, exactly or not at all")
    convert.add_argument("source", help="patch folder, MLX folder, or .safetensors file; the format is recognised")
    convert.add_argument("--to", choices=FORMATS, default="peft")
    convert.add_argument("--out", required=True, help="folder or file to write; must not exist")
    convert.add_argument("--base", help="model folder, hub id or builtin:tiny: to find its layers by flattened names")
    convert.add_argument("--alpha", type=float, help="of a file that does not hold it (loralib, diffusers)")
    convert.add_argument("--prefix", help="what names begin with in the other format, such as lora_te or unet")
    revision_argument(convert)


def _merge(options: argparse.Namespace) -> int:
    adapters = [weighted(text) for text in [*options.adapters, *options.more]]
    _refuse_other_half(options)
    if options.as_patch:
        return _combine(options, [weighted(options.base), *adapters])
    from lorakit.merging.merge import merge

    out = merge(
        options.base, *adapters, out=options.out, revision=options.revision, dtype=options.dtype, untie=options.untie,
        verify=options.verify, onto=options.onto, requantize=options.requantize, measure=options.measure,
        allow_base_mismatch=options.allow_base_mismatch, say=_say,
    )  # fmt: skip
    print(f"merged into {out}; merge.json there says what went where")
    return 0


def _refuse_other_half(options: argparse.Namespace) -> None:
    """Options of the one result with the other are a mistake, not a wish to be ignored."""
    for_patch = {"--how": options.how, "--rank": options.rank, "--density": options.density, "--seed": options.seed}
    for_model = {"--dtype": options.dtype, "--untie": options.untie, "--verify": options.verify,
                 "--revision": options.revision, "--onto": options.onto, "--requantize": options.requantize,
                 "--no-measure": not options.measure}  # fmt: skip
    wrong = [
        flag
        for flag, value in (for_model if options.as_patch else for_patch).items()
        if value is not None and value is not False
    ]
    if wrong:
        what = "is for merging into a base" if options.as_patch else "needs --as-patch"
        raise LorakitError(f"{', '.join(wrong)}: {what}")


def _combine(options: argparse.Namespace, adapters: list[tuple[str, float]]) -> int:
    from lorakit.derive.combine import combine

    out = combine(
        *adapters, out=options.out, how=options.how or "sum", rank=options.rank, density=options.density,
        seed=options.seed or 0, allow_base_mismatch=options.allow_base_mismatch, say=_say,
    )  # fmt: skip
    print(f"combined into {out}")
    return 0


def _extract(options: argparse.Namespace) -> int:
    from lorakit.derive.extract import extract

    out = extract(
        options.base, options.tuned, rank=options.rank, out=options.out, revision=options.revision, rest=options.rest,
        say=_say,
    )  # fmt: skip
    print(f"extracted into {out}")
    return 0


def _convert(options: argparse.Namespace) -> int:
    from lorakit.formats.convert import convert

    out = convert(
        options.source, options.out, to=options.to, base=options.base, alpha=options.alpha, prefix=options.prefix,
        revision=options.revision, say=_say,
    )  # fmt: skip
    print(f"converted into {out}")
    return 0


def _diff(options: argparse.Namespace) -> int:
    from lorakit.inspection.diff import diff

    diff(options.one, options.two, _say)
    return 0


def _show(options: argparse.Namespace) -> int:
    from lorakit.inspection.show import show

    if options.full and options.for_base is None:
        raise LorakitError("--full: compares with a base; name it with --for BASE")
    show(options.path, options.for_base, full=options.full)
    return 0


def _say(text: str) -> None:
    print(text, flush=True)
