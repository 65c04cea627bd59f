"""show, diff, cache, doctor: facts about files, runs and this machine."""

import argparse
import time

from lorakit.cli.arguments import AddCommand, print_line
from lorakit.errors import LorakitError
from lorakit.files.atomic import cache_folder
from lorakit.files.text import columns, say_lines, size


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
    from lorakit.data.token_cache import cache_entries, remove_entry

    entries = cache_entries()
    if options.clear:
        in_use = [entry for entry in entries if not remove_entry(entry)]
        num_bytes = sum(entry.num_bytes for entry in entries if entry not in in_use)
        print_line(f"removed {len(entries) - len(in_use)} of {len(entries)} data sets, {size(num_bytes)}")
        if in_use:
            names = ", ".join(entry.path.name[:12] for entry in in_use)
            print_line(f"in use by a running process, so left: {names}")
        return
    if not entries:
        print_line(f"{cache_folder('tokens')}: empty")
        return
    rows = [("name", "size", "rows", "last used", "of")]
    for entry in entries:
        num_rows = "damaged" if entry.num_rows is None else f"{entry.num_rows:,}"
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used))
        rows.append((entry.path.name[:12], size(entry.num_bytes), num_rows, used, ", ".join(entry.sources) or "?"))
    say_lines(print_line, columns(rows, "<>>"))
    print_line(f"\n{size(sum(entry.num_bytes for entry in entries))} in {cache_folder('tokens').parent}")
    print_line("lorakit cache --clear removes them; data.cache_gb of a recipe limits them")


def _doctor(options: argparse.Namespace) -> int:
    from lorakit.inspection.doctor import doctor

    return 0 if doctor(print_line) else 2
