"""Show and clear the user's cache of tokenised rows, and of rows that were given in Python."""

import time
from collections.abc import Callable, Sequence

from lorakit.data.token_cache import CacheEntry, cache_entries, remove_entry
from lorakit.errors import LorakitError
from lorakit.files.cache import cache_folder
from lorakit.files.text import columns, say_lines, size


def show_cache(say: Callable[[str], None]) -> None:
    entries = cache_entries()
    if not entries:
        say(f"{cache_folder('tokens')}: empty")
        return
    rows = [("name", "size", "rows", "last used", "of")]
    for entry in entries:
        num_rows = "damaged" if entry.num_rows is None else f"{entry.num_rows:,}"
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used))
        rows.append((_name(entry), size(entry.num_bytes), num_rows, used, ", ".join(entry.sources) or "?"))
    say_lines(say, columns(rows, "<>>"))
    say(f"\n{size(sum(entry.num_bytes for entry in entries))} in {cache_folder('tokens').parent}")
    say("lorakit cache --clear removes them all, --clear NAME one; data.cache_gb of a recipe limits them")


def clear_cache(names: Sequence[str], say: Callable[[str], None]) -> None:
    """Remove the entries with these names, or all without any; print what was removed.

    Raises LorakitError: no entry has a name, or a process uses an entry that was named.
    """
    entries = cache_entries()
    unknown = [name for name in names if not any(_name(entry) == name for entry in entries)]
    if unknown:
        known = ", ".join(map(_name, entries)) or "none"
        raise LorakitError(f"--clear: {', '.join(unknown)}: not in the cache; its names are {known}")
    chosen = [entry for entry in entries if not names or _name(entry) in names]
    removed = [entry for entry in chosen if remove_entry(entry)]
    say(f"removed {len(removed)} of {len(entries)} data sets, {size(sum(entry.num_bytes for entry in removed))}")
    if in_use := [_name(entry) for entry in chosen if entry not in removed]:
        text = f"in use by a running process, so left: {', '.join(in_use)}"
        if names:
            raise LorakitError(f"--clear: {text}; try again when it has ended")
        say(text)


def _name(entry: CacheEntry) -> str:
    return entry.path.name[:12]
