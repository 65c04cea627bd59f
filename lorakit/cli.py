"""The lorakit command: parse, call one workflow, print. Each command imports what it needs, when it runs."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lorakit.errors import LorakitError
from lorakit.version import VERSION


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 2 the user can fix it, 75 try again later."""
    parser = build_parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help()
        return 2
    options, rest = parser.parse_known_args(arguments)
    more = [item for item in rest if "=" in item and not item.startswith("-") and "overrides" in options]
    if len(more) < len(rest):
        parser.error(f"unrecognized arguments: {' '.join(item for item in rest if item not in more)}")
    if more:  # overrides after a flag
        options.overrides = [*options.overrides, *more]
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except LorakitError as problem:
        gap = "\n" if "\n" in str(problem) else " "
        print(f"lorakit {options.command}:{gap}{problem}", file=sys.stderr)
        return problem.exit_code
    except OSError as problem:
        if isinstance(problem, BrokenPipeError):  # the reader of our output has gone, as in `lorakit show X | head`
            sys.stderr.close()
            return 0
        print(f"lorakit {options.command}: {problem.filename or ''}: {problem.strerror or problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"lorakit {options.command}: interrupted", file=sys.stderr)
        return 75


def _train(options: argparse.Namespace) -> int:
    from lorakit.recipe import load_recipe

    recipe = load_recipe(options.recipe, tuple(options.overrides))
    from lorakit.train import run

    run(recipe, fresh=options.fresh)
    return 0


def _check(options: argparse.Namespace) -> int:
    from lorakit.recipe import load_recipe

    recipe = load_recipe(options.recipe, tuple(options.overrides))
    from lorakit.check import check

    check(recipe)
    return 0


def _schema(options: argparse.Namespace) -> int:
    from lorakit.recipe.schema import schema_text

    if options.out is None:
        print(schema_text(), end="")
        return 0
    from lorakit.durable import write_file

    write_file(Path(options.out), schema_text())
    return 0


def _merge(options: argparse.Namespace) -> int:
    from lorakit.merge import merge

    adapters = [options.adapter] if options.adapter else []
    adapters += [_weighted(text) for text in options.more]
    out = merge(
        options.base, *adapters, out=options.out, revision=options.revision,
        allow_base_mismatch=options.allow_base_mismatch,
    )  # fmt: skip
    print(f"merged into {out}; merge.json there says what went where")
    return 0


def _generate(options: argparse.Namespace) -> int:
    from lorakit.adapted import load

    named = _named(options.adapter, "--adapter")
    model = load(
        options.base, named, dtype=options.dtype, revision=options.revision,
        allow_base_mismatch=options.allow_base_mismatch,
    )  # fmt: skip
    if not options.prompt and sys.stdin.isatty():
        print("the prompt, ended with Ctrl-D:", file=sys.stderr)
    prompts = options.prompt or [sys.stdin.read().strip()]
    if options.each:
        uses: list[str | None] = [None, *named]
    else:
        use = options.use if options.use is not None else next(iter(named), "none")
        uses = [None if use == "none" else use]
    answers = model.generate(
        [prompt for prompt in prompts for _ in uses], uses * len(prompts), max_new_tokens=options.max_new_tokens,
        temperature=options.temperature, seed=options.seed, raw=options.raw,
    )  # fmt: skip
    width = max(len(use or "base") for use in uses)
    for number, (answer, use) in enumerate(zip(answers, uses * len(prompts), strict=True)):
        if len(prompts) > 1 and options.each and number % len(uses) == 0:
            print(f"{'' if number == 0 else chr(10)}{prompts[number // len(uses)]}")
        print(f"{use or 'base':<{width}}  {answer}" if options.each else answer)
    return 0


def _score(options: argparse.Namespace) -> int:
    from lorakit.adapted import load
    from lorakit.data import find_sources
    from lorakit.score import score

    data = _named(options.data, "--data")
    for path in data.values():
        find_sources(path, "test")  # a missing file is said before the base is loaded
    model = load(
        options.base, _named(options.adapter, "--adapter"), dtype=options.dtype, revision=options.revision,
        allow_base_mismatch=options.allow_base_mismatch,
    )  # fmt: skip
    score(model, data, max_new_tokens=options.max_new_tokens, limit=options.limit, say=print)
    return 0


def _show(options: argparse.Namespace) -> int:
    from lorakit.show import show

    show(options.path, options.for_base)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from lorakit.doctor import doctor

    return 0 if doctor() else 2


def _named(items: Sequence[str], flag: str) -> dict[str, str]:
    """NAME=VALUE options as a mapping."""
    named: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not (name and equals and value):
            raise LorakitError(f"{flag} {item!r}: write it as NAME=PATH")
        if name in ("none", "base"):
            raise LorakitError(f"{flag} {item!r}: {name!r} means the plain base; choose another name")
        if name in named:
            raise LorakitError(f"{flag} {item!r}: the name {name!r} is given twice")
        named[name] = value
    return named


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 expected, got {text!r}")
    return int(text)


def _weighted(text: str) -> tuple[str, float]:
    path, colon, weight = text.rpartition(":")
    if not colon or Path(text).is_dir():
        return text, 1.0
    try:
        return path, float(weight)
    except ValueError:
        raise LorakitError(f"--adapter {text!r}: write it as DIR or DIR:WEIGHT, with a number") from None


def build_parser() -> argparse.ArgumentParser:
    """The command line. Imports no torch, so that --help is instant."""
    parser = argparse.ArgumentParser(
        prog="lorakit", description="Train, merge and swap LoRA adapters, never silently wrong.",
        epilog="`lorakit COMMAND --help` explains a command. Exit codes: 0 done, 2 you can fix it, 75 try again later.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"lorakit {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    train = command("train", _train, "train an adapter from a recipe; goes on by itself after an interruption")
    _recipe_arguments(train)
    train.add_argument("--fresh", action="store_true", help="discard what the output folder holds and start over")
    _recipe_arguments(command("check", _check, "say everything about a recipe that needs no weights"))
    schema = command("schema", _schema, "write the JSON schema of recipes, for editors")
    schema.add_argument("--out", help="file to write (default: standard output)")

    merge = command("merge", _merge, "write base + adapter as a normal model folder")
    merge.add_argument("base", help="model folder, hub id or builtin:tiny")
    merge.add_argument("adapter", nargs="?", help="patch folder")
    merge.add_argument(
        "--adapter", dest="more", action="append", default=[], metavar="DIR[:WEIGHT]", help="another patch"
    )
    merge.add_argument("--out", required=True, help="folder to write; must not exist")
    _base_arguments(merge, dtype=False)

    generate = command("generate", _generate, "answer prompts with the base or an adapter")
    generate.add_argument("base", help="model folder, hub id or builtin:tiny")
    _adapter_argument(generate)
    generate.add_argument(
        "--use", metavar="NAME", help="adapter to use (default: the first; `none` for the plain base)"
    )
    generate.add_argument(
        "--each", action="store_true", help="answer with the base and with every adapter, in one batch"
    )
    generate.add_argument("--raw", action="store_true", help="give prompts as they are, without the chat template")
    generate.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated (default: standard input)")
    generate.add_argument("--max-new-tokens", type=_positive, default=128)
    generate.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    generate.add_argument("--seed", type=int, default=0)
    _base_arguments(generate, dtype=True)

    score = command("score", _score, "exact match on held-out rows, base against adapter")
    score.add_argument("base", help="model folder, hub id or builtin:tiny")
    _adapter_argument(score)
    score.add_argument(
        "--data", action="append", default=[], required=True, metavar="NAME=FILE", help="rows for adapter NAME"
    )
    score.add_argument("--max-new-tokens", type=_positive, default=128)
    score.add_argument("--limit", type=_positive, help="only the first rows of each file")
    _base_arguments(score, dtype=True)

    show = command("show", _show, "say what a patch, a run or a base is")
    show.add_argument("path", help="patch folder, run folder, model folder, hub id or builtin:tiny")
    show.add_argument("--for", dest="for_base", metavar="BASE", help="also say whether the patch belongs to this base")
    command("doctor", _doctor, "say what this machine can do and what is broken")
    return parser


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override recipe keys")


def _adapter_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=DIR", help="patch to load; may be repeated"
    )


def _base_arguments(parser: argparse.ArgumentParser, *, dtype: bool) -> None:
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--allow-base-mismatch", action="store_true", help="accept a patch trained on another base")
    if dtype:
        options: dict[str, Any] = {"choices": ("auto", "float32", "bfloat16"), "default": "auto"}
        parser.add_argument("--dtype", **options)


if __name__ == "__main__":
    raise SystemExit(main())
