"""convert: an adapter rewritten in another program's form."""

import argparse

from lorakit.cli.arguments import AddCommand, add_revision_option, print_line


def add_convert_command(add_command: AddCommand) -> None:
    """Add `convert`."""
    convert = add_command("convert", _convert, "rewrite an adapter for mlx-lm, or one of mlx-lm, exactly or not at all")
    convert.add_argument("source", help="patch folder or mlx-lm folder")
    convert.add_argument("--to", default="peft", metavar="FORMAT", help="peft (default) or mlx")
    convert.add_argument("--out", required=True, help="folder to write; must not exist")
    convert.add_argument("--base", help="model folder, hub id or builtin:tiny, to check the adapter against it")
    add_revision_option(convert)


def _convert(options: argparse.Namespace) -> int:
    from lorakit.formats.convert import convert

    out = convert(
        options.source, options.out, to=options.to, base=options.base, revision=options.revision, say=print_line
    )
    print(f"converted into {out}")
    return 0
