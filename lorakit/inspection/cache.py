"""Show and clear the user's cache of tokenised rows, and of rows that were given in Python."""

import time

from lorakit.data.token_cache import cache_entries, remove_entry
from lorakit.files.atomic import cache_folder
from lorakit.files.text import Say, columns, say_lines, size


def show_cache(say: Say) -> None:
    entries = cache_entries()
    if not entries:
        say(f"{cache_folder('tokens')}: empty")
        return
    rows = [("name", "size", "rows", "last used", "of")]
    for entry in entries:
        num_rows = "damaged" if entry.num_rows is None else f"{entry.num_rows:,}"
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used))
        rows.append((entry.path.name[:12], size(entry.num_bytes), num_rows, used, ", ".join(entry.sources) or "?"))
    say_lines(say, columns(rows, "<>>"))
    say(f"\n{size(sum(entry.num_bytes for entry in entries))} in {cache_folder('tokens').parent}")
    say("lorakit cache --clear removes them; data.cache_gb of a recipe limits them")


def clear_cache(say: Say) -> None:
    """Remove all entries that no process uses; print what was removed."""
    entries = cache_entries()
    in_use = [entry for entry in entries if not remove_entry(entry)]
    removed = [entry for entry in entries if entry not in in_use]
    say(f"removed {len(removed)} of {len(entries)} data sets, {size(sum(entry.num_bytes for entry in removed))}")
    if in_use:
        say(f"in use by a running process, so left: {', '.join(entry.path.name[:12] for entry in in_use)}")
