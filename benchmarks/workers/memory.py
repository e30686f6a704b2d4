"""Resident memory of this process, now and at its peak, from ``/proc`` (Linux)."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

STATUS = Path("/proc/self/status")


def rss_bytes() -> int:
    """Resident bytes now."""
    return _field("VmRSS")


def peak_rss_bytes() -> int:
    """Most resident bytes since the process started or since ``reset_peak_rss``."""
    return max(_field("VmHWM"), _field("VmRSS"))  # the kernel counts the peak a moment later


def reset_peak_rss() -> None:
    """Start the peak anew from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def give_back_freed() -> None:
    """Give to the kernel what malloc keeps of freed memory; nothing where there is no glibc."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _field(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    assert match is not None, f"no {name} in {STATUS}"
    return int(match[1]) * 1024
