"""Memory of this process that is in RAM: now, and at most."""

import os
import resource
import sys
from pathlib import Path
from typing import Final

STATUS: Final = Path("/proc/self/status")


def rss_bytes() -> int:
    """What this process holds now; outside Linux the most it has held."""
    if not STATUS.exists():
        return peak_resident_bytes()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The most this process has held. On Linux not ``ru_maxrss``, which begins with what the parent process held."""
    if STATUS.exists():
        lines = STATUS.read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
