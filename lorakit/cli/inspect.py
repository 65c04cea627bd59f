"""show, diff, cache, doctor: facts about files, runs and this machine."""

import argparse

from lorakit.cli.arguments import AddCommand, print_line
from lorakit.errors import LorakitError


def add_inspect_commands(add_command: AddCommand) -> None:
    show = add_command("show", _show, "show what a patch, a run or a base is")
    show.add_argument("path", help="patch folder, run folder, model folder, hub id or builtin:tiny")
    fits = "whether the patch fits this base, tensor by tensor"
    show.add_argument("--for", dest="for_base", metavar="BASE", help=fits)
    show.add_argument("--full", action="store_true", help="with --for: refuse a patch with mere samples of the weights")
    diff = add_command("diff", _diff, "show how two patches differ, most different first")
    diff.add_argument("one", help="patch folder")
    diff.add_argument("two", help="patch folder")
    cache = add_command("cache", _cache, "show the tokenised rows in the user's cache, or remove them")
    cache.add_argument("--clear", action="store_true", help="remove all that no process uses")
    add_command("doctor", _doctor, "show what this machine can do and what is broken")


def _show(options: argparse.Namespace) -> None:
    from lorakit.inspection.show import show

    if options.full and options.for_base is None:
        raise LorakitError("--full: compares with a base; name it with --for BASE")
    show(options.path, options.for_base, print_line, full=options.full)


def _diff(options: argparse.Namespace) -> None:
    from lorakit.inspection.diff import diff

    diff(options.one, options.two, print_line)


def _cache(options: argparse.Namespace) -> None:
    from lorakit.inspection.cache import clear_cache, show_cache

    clear_cache(print_line) if options.clear else show_cache(print_line)


def _doctor(options: argparse.Namespace) -> int:
    from lorakit.inspection.doctor import doctor

    return 0 if doctor(print_line) else 2
