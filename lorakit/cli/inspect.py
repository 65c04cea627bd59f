"""show, diff, cache, doctor: facts about files and about this machine. Only `cache --clear` removes something."""

import argparse

from lorakit.cli.arguments import AddCommand, print_line
from lorakit.errors import LorakitError


def add_inspect_commands(add_command: AddCommand) -> None:
    """Add `show`, `diff`, `cache` and `doctor`."""
    show = add_command("show", _show, "show what a patch, a run or a base is")
    show.add_argument("path", help="patch folder, run folder, model folder, hub id or builtin:tiny")
    show.add_argument(
        "--for", dest="for_base", metavar="BASE", help="whether the patch fits this base, tensor by tensor"
    )
    show.add_argument("--full", action="store_true", help="with --for: compare every value of the adapted weights")
    diff = add_command("diff", _diff, "show how two patches or two models differ, most different first")
    diff.add_argument("one", help="patch folder or model folder")
    diff.add_argument("two", help="of the same kind")
    cache = add_command("cache", _cache, "show the tokenised rows in the user's cache, or remove them")
    cache.add_argument("--clear", nargs="*", metavar="NAME", help="remove all, or those with these names")
    add_command("doctor", _doctor, "show what this machine can do and what is broken")


def _show(options: argparse.Namespace) -> int:
    from lorakit.inspection.show import show

    if options.full and options.for_base is None:
        raise LorakitError("--full: compares with a base; name it with --for BASE")
    show(options.path, options.for_base, full=options.full)
    return 0


def _diff(options: argparse.Namespace) -> int:
    from lorakit.inspection.diff import diff

    diff(options.one, options.two, print_line)
    return 0


def _cache(options: argparse.Namespace) -> int:
    from lorakit.inspection.cache import clear_cache, show_cache

    show_cache(print_line) if options.clear is None else clear_cache(options.clear, print_line)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from lorakit.inspection.doctor import doctor

    return 0 if doctor() else 2
