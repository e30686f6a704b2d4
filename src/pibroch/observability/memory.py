"""Memory of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATM = Path("/proc/self/statm")


def rss_bytes() -> int:
    """Resident memory now; the peak where the system does not tell."""
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    return peak_rss_bytes()


def peak_rss_bytes() -> int:
    """The most resident memory so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
