"""init: write a recipe for a base and a file of rows, or copy a shipped one."""

import argparse
import sys
from pathlib import Path

from lorakit.cli.arguments import AddCommand, add_columns_option, parse_columns, print_line
from lorakit.errors import LorakitError, check_absent, did_you_mean


def add_init_commands(add_command: AddCommand) -> None:
    init = add_command("init", _init, "write a recipe for a base and a file of rows")
    init.add_argument("--base", help="model folder, hub id or builtin:tiny (in a terminal, you are asked)")
    init.add_argument("--data", nargs="+", metavar="FILE", help="training rows (in a terminal, you are asked)")
    add_columns_option(init)
    init.add_argument("--eval", metavar="FILE", help="held-out rows (default: a share of many rows, none of few)")
    init.add_argument("--out", default="recipe.yaml", help="file to write, which must not exist (default: recipe.yaml)")
    init.add_argument("--output", metavar="DIR", help="folder of the run (default: adapters/, named after the rows)")
    init.add_argument("--yes", action="store_true", help="ask nothing")
    shipped = "copy a shipped recipe instead, such as quickstart"
    init.add_argument("--from", dest="shipped", metavar="NAME", help=shipped)


def _init(options: argparse.Namespace) -> None:
    out = Path(options.out)
    check_absent(out)
    if not out.parent.is_dir():
        raise LorakitError(f"--out: no folder {out.parent.absolute()}; make it first")
    text, needs_mending = (_shipped(options.shipped), False) if options.shipped is not None else _written(options)
    from lorakit.files.atomic import write_file
    from lorakit.recipe import load_recipe

    write_file(out, text)
    load_recipe(out)
    first = "mend the rows of the notes, then " if needs_mending else ""
    print_line(f"wrote {out}; next: {first}lorakit check {out}, then lorakit train {out}")


def _written(options: argparse.Namespace) -> tuple[str, bool]:
    """Return a recipe's text for the base and rows that the options, or the user, name; True if rows need mending."""
    missing = [name for name in ("base", "data") if getattr(options, name) is None]
    if missing and (options.yes or not sys.stdin.isatty()):
        flags = " and ".join(f"--{name}" for name in missing)
        raise LorakitError(f"{flags} missing: lorakit init --base DIR_OR_ID --data FILE --out {options.out}")
    base = options.base or _ask("base (a model folder, a hub id, or builtin:tiny)", "builtin:tiny")
    data = tuple(options.data or [_ask("training rows (a file such as .jsonl, .csv or .parquet, or a folder)", "")])
    print_line("looking at base and rows")
    from lorakit.data.find_rows import check_training_files
    from lorakit.training.new_recipe import (
        add_named_template,
        find_columns,
        free_output,
        read_base,
        read_sample,
        recipe_text,
    )

    columns = tuple(parse_columns(options.columns).items())
    check_training_files(data, "train", [Path(options.eval).resolve()] if options.eval else ())
    facts, tokenizer = read_base(base)
    columns = columns or find_columns(data, tokenizer)
    template = add_named_template(tokenizer)
    rows = read_sample(data, tokenizer, columns)
    eval_rows = read_sample((options.eval,), tokenizer, columns, rows.objective) if options.eval else None
    text = recipe_text(facts, rows, eval_rows, options.output or free_output(data[0]), template)
    print_line(f"\n{text}")
    notes = [note for facts in (rows, eval_rows) if facts for note in facts.notes]
    for note in notes:
        print_line(f"note: {note}")
    return text, bool(notes)


def _ask(question: str, default: str) -> str:
    try:
        return input(f"{question}{f' [{default}]' if default else ''}: ").strip() or default
    except EOFError:
        raise LorakitError("the input ended; nothing was written") from None


def _shipped(name: str) -> str:
    """Return the text of a recipe that comes with lorakit: a file of the wheel, or of the checkout."""
    package = Path(__file__).parent.parent
    folder = next(path for path in (package / "assets" / "recipes", package.parent / "recipes") if path.is_dir())
    names = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))
    if name not in names:
        raise LorakitError(f"--from: {name!r} is none of {', '.join(names)}.{did_you_mean(name, names)}")
    print_line("its rows are paths of lorakit's repository: name your own in data.train")
    lines = (folder / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    # the schema is beside the recipes of a checkout alone
    return "\n".join(line for line in lines if not line.startswith("# yaml-language-server")) + "\n"
