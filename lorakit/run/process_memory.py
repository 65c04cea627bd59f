"""Measure the resident memory of this process: now, and its peak."""

import os
import resource
import sys
from pathlib import Path
from typing import Final

STATUS: Final = Path("/proc/self/status")


def rss_bytes() -> int:
    """Return the resident bytes of this process; outside Linux, where only the peak is known, the peak."""
    if not STATUS.exists():
        return peak_resident_bytes()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Return the peak resident bytes. On Linux not ``ru_maxrss``, because that starts at the parent process's peak."""
    if STATUS.exists():
        lines = STATUS.read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
