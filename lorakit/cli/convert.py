"""convert: an adapter rewritten in another program's format."""

import argparse

from lorakit.cli.arguments import AddCommand, add_revision_option, print_line

# written out because lorakit.formats imports torch; a test compares
FORMATS = ("peft", "kohya", "diffusers", "loralib", "mlx")


def add_convert_command(add_command: AddCommand) -> None:
    """Add `convert`."""
    convert = add_command("convert", _convert, "rewrite an adapter in another program's format, exactly or not at all")
    convert.add_argument("source", help="patch folder, MLX folder, or .safetensors file; the format is recognised")
    convert.add_argument("--to", choices=FORMATS, default="peft")
    convert.add_argument("--out", required=True, help="folder or file to write; must not exist")
    convert.add_argument("--base", help="model folder, hub id or builtin:tiny: to find its layers by flattened names")
    convert.add_argument("--alpha", type=float, help="of a file that does not store it (loralib, diffusers)")
    convert.add_argument("--prefix", help="first part of names in the other format, such as lora_te or unet")
    add_revision_option(convert)


def _convert(options: argparse.Namespace) -> int:
    from lorakit.formats.convert import convert

    out = convert(
        options.source,
        options.out,
        to=options.to,
        base=options.base,
        alpha=options.alpha,
        prefix=options.prefix,
        revision=options.revision,
        say=print_line,
    )
    print(f"converted into {out}")
    return 0
